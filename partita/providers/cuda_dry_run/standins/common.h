/* Shared by all stand-in CUDA libraries: how a function is exported, and the device profile in the environment.

   A definition that begins with API is found by symbols.py, which reads these files: it is the table of functions that
   are implemented. Functions that may do nothing are listed in symbols.py, with the reason, and defined by HARMLESS.
   Signatures were written from the public documentation; types of CUDA are replaced by the C types they stand for. */

#define _GNU_SOURCE
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#define HARMLESS(name) API long name(void) { return 0; }

/* One figure of the device profile, or -1 when the environment does not have it. */
__attribute__((unused)) static long long profile(const char *variable) {
    const char *text = getenv(variable);
    return text && *text ? strtoll(text, NULL, 10) : -1;
}

/* A handle that the caller only passes back. Never dereferenced; distinct, so that maps keyed by handle work. */
__attribute__((unused)) static int give_handle(void **handle) {
    static atomic_uintptr_t next = 0x1000;
    *handle = (void *)atomic_fetch_add(&next, 16);
    return 0;
}

/* Proof for the process that loaded this library that it is a stand-in, and of which build; stub_build.py names it. */
API const char *partita_standin_version(void) { return PARTITA_BUILD; }
