/* A provider library for ONNX Runtime that loads, asks for version WANTED of its interface, and gives an error.
   The first entry of the interface makes a status of a code and a text; that has been so since version 1. */
#include <stddef.h>
#include <stdint.h>

typedef struct {
  const void *(*get_api)(uint32_t version);
  const char *(*version)(void);
} Base;
typedef void *(*MakeStatus)(int code, const char *text);

void *CreateEpFactories(const char *name, const Base *base, const void *log, void **found, size_t most, size_t *count) {
  (void)name, (void)log, (void)found, (void)most;
  *count = 0;
  const char *text = base->get_api(WANTED) ? "the firmware of the device did not answer" : "this library needs a newer one";
  return ((const MakeStatus *)base->get_api(1))[0](1, text);
}

void *ReleaseEpFactory(void *factory) {
  (void)factory;
  return NULL;
}
