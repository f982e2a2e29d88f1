/* libcudart: one device, whose figures come from the environment and whose memory is address space without bytes.

   Device memory is reserved and never backed: nothing can be stored in it, what is copied out of it is zeros, and a
   host access faults as it would beside a real GPU. So a model larger than this machine's memory costs nothing, and
   everything that comes back from the device is the same in every run. Kernels are accepted and do nothing.

   While a stream is being captured into a graph, calls that CUDA forbids then are refused, so that the check whether a
   model can be captured means something. It is not complete: what CUDA decides by the kind of host memory is accepted.
   Sources: CUDA Runtime API reference, and the chapter on CUDA graphs of the CUDA C++ Programming Guide, 13.0. */

#include <pthread.h>
#include <sys/mman.h>

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_UNMATCHED = 903,
    CAPTURE_IMPLICIT = 906,
};

/* ---- errors ---- */

static _Thread_local int last_error;

static int report(int error) {
    if (error) last_error = error;
    return error;
}

API int cudaPeekAtLastError(void) { return last_error; }

API int cudaGetLastError(void) {
    int error = last_error;
    last_error = SUCCESS;
    return error;
}

API const char *cudaGetErrorName(int error) {
    switch (error) {
        case SUCCESS: return "cudaSuccess";
        case INVALID_VALUE: return "cudaErrorInvalidValue";
        case OUT_OF_MEMORY: return "cudaErrorMemoryAllocation";
        case NO_DEVICE: return "cudaErrorNoDevice";
        case INVALID_DEVICE: return "cudaErrorInvalidDevice";
        case CAPTURE_UNSUPPORTED: return "cudaErrorStreamCaptureUnsupported";
        case CAPTURE_INVALIDATED: return "cudaErrorStreamCaptureInvalidated";
        case CAPTURE_UNMATCHED: return "cudaErrorStreamCaptureUnmatched";
        case CAPTURE_IMPLICIT: return "cudaErrorStreamCaptureImplicit";
        default: return "cudaErrorUnknown";
    }
}

API const char *cudaGetErrorString(int error) {
    switch (error) {
        case SUCCESS: return "no error";
        case INVALID_VALUE: return "invalid argument (dry run)";
        case OUT_OF_MEMORY: return "out of memory (dry run: more than the device of the profile has)";
        case NO_DEVICE: return "no CUDA-capable device is detected (dry run: the environment names no device profile)";
        case INVALID_DEVICE: return "invalid device ordinal (dry run: there is one device, number 0)";
        case CAPTURE_UNSUPPORTED: return "operation not permitted when stream is capturing (dry run)";
        case CAPTURE_INVALIDATED: return "operation failed due to a previous error during capture (dry run)";
        case CAPTURE_UNMATCHED: return "capture was not initiated in this stream (dry run)";
        case CAPTURE_IMPLICIT: return "operation would make the legacy stream depend on a capturing stream (dry run)";
        default: return "unknown error (dry run)";
    }
}

/* ---- the device ---- */

static long long memory_bytes(void) { return profile("PARTITA_STANDIN_MEMORY_BYTES"); }

API int cudaGetDeviceCount(int *count) {
    *count = memory_bytes() > 0;
    return report(*count ? SUCCESS : NO_DEVICE);
}

API int cudaGetDevice(int *device) {
    *device = 0;
    return report(memory_bytes() > 0 ? SUCCESS : NO_DEVICE);
}

API int cudaSetDevice(int device) {
    if (memory_bytes() <= 0) return report(NO_DEVICE);
    return report(device == 0 ? SUCCESS : INVALID_DEVICE);
}

API int cudaRuntimeGetVersion(int *version) { *version = PARTITA_CUDA_VERSION; return SUCCESS; }
API int cudaDriverGetVersion(int *version) { *version = PARTITA_CUDA_VERSION; return SUCCESS; }

/* enum cudaDeviceAttr, as far as a library may ask for it. An attribute that is not here is refused: a made-up answer
   would be worse than an error. */
API int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    if (device != 0) return report(INVALID_DEVICE);
    long long figure;
    switch (attribute) {
        case 1: case 2: case 3: figure = 1024; break;               /* threads per block; block size in x and y */
        case 4: figure = 64; break;                                 /* block size in z */
        case 5: figure = 2147483647; break;                         /* grid size in x */
        case 6: case 7: figure = 65535; break;                      /* grid size in y and z */
        case 8: figure = 49152; break;                              /* shared memory per block without opting in */
        case 9: figure = 65536; break;                              /* constant memory */
        case 10: figure = 32; break;                                /* warp */
        case 11: figure = 2147483647; break;                        /* pitch */
        case 12: case 82: figure = 65536; break;                    /* registers per block and per multiprocessor */
        case 14: figure = 512; break;                               /* texture alignment */
        case 16: figure = profile("PARTITA_STANDIN_MULTIPROCESSORS"); break;
        case 17: case 18: case 20: case 84: case 88: figure = 0; break; /* timeout, integrated, compute mode, multi-GPU
                                                                           board, pageable memory access */
        case 19: case 31: case 41: case 78: case 79: case 80: case 83: case 89: case 90: case 95: case 115:
            figure = 1; break; /* host mapping, concurrent kernels, unified addressing, priorities, L1 caches, managed
                                  memory, concurrent access to it, preemption, cooperative launch, memory pools */
        case 33: case 34: case 50: figure = 0; break;               /* PCI numbers */
        case 38: figure = profile("PARTITA_STANDIN_L2_BYTES"); break;
        case 39: figure = profile("PARTITA_STANDIN_THREADS_PER_MULTIPROCESSOR"); break;
        case 40: figure = 2; break;                                 /* copy engines */
        case 75: figure = profile("PARTITA_STANDIN_MAJOR"); break;
        case 76: figure = profile("PARTITA_STANDIN_MINOR"); break;
        case 81: figure = profile("PARTITA_STANDIN_SHARED_PER_MULTIPROCESSOR"); break;
        case 97: figure = profile("PARTITA_STANDIN_SHARED_PER_BLOCK_OPTIN"); break;
        case 106: figure = profile("PARTITA_STANDIN_BLOCKS_PER_MULTIPROCESSOR"); break;
        case 111: figure = profile("PARTITA_STANDIN_MAJOR") >= 8 ? 1024 : 0; break; /* shared memory that CUDA keeps */
        case 120: figure = profile("PARTITA_STANDIN_MAJOR") >= 9; break; /* thread block clusters */
        default: return report(INVALID_VALUE);
    }
    if (figure < 0) return report(NO_DEVICE);
    *value = (int)figure;
    return SUCCESS;
}

/* struct cudaDeviceProp of CUDA 13: 1008 bytes, of which these are filled. The offsets are written out because
   NVIDIA's headers are needed for nothing else; tests/providers/test_cuda_dry_run.py compares them with the header. */
enum {
    PROP_BYTES = 1008,
    PROP_NAME = 0,
    PROP_TOTAL_GLOBAL_MEM = 288,
    PROP_SHARED_MEM_PER_BLOCK = 296,
    PROP_REGS_PER_BLOCK = 304,
    PROP_WARP_SIZE = 308,
    PROP_MAX_THREADS_PER_BLOCK = 320,
    PROP_MAX_THREADS_DIM = 324,
    PROP_MAX_GRID_SIZE = 336,
    PROP_TOTAL_CONST_MEM = 352,
    PROP_MAJOR = 360,
    PROP_MINOR = 364,
    PROP_MULTI_PROCESSOR_COUNT = 384,
    PROP_CAN_MAP_HOST_MEMORY = 392,
    PROP_CONCURRENT_KERNELS = 560,
    PROP_ASYNC_ENGINE_COUNT = 584,
    PROP_UNIFIED_ADDRESSING = 588,
    PROP_L2_CACHE_SIZE = 596,
    PROP_MAX_THREADS_PER_MULTI_PROCESSOR = 604,
    PROP_STREAM_PRIORITIES_SUPPORTED = 608,
    PROP_SHARED_MEM_PER_MULTIPROCESSOR = 624,
    PROP_REGS_PER_MULTIPROCESSOR = 632,
    PROP_MANAGED_MEMORY = 636,
    PROP_COOPERATIVE_LAUNCH = 668,
    PROP_SHARED_MEM_PER_BLOCK_OPTIN = 672,
    PROP_MAX_BLOCKS_PER_MULTI_PROCESSOR = 688,
    PROP_RESERVED_SHARED_MEM_PER_BLOCK = 696,
    PROP_MEMORY_POOLS_SUPPORTED = 720,
    POINTER_BYTES = 88, /* struct cudaPointerAttributes: int type, int device, two pointers, reserved */
    FUNCTION_BYTES = 144, /* struct cudaFuncAttributes: three sizes, then ints */
};

static void put_int(char *record, int offset, long long value) {
    int narrow = (int)value;
    memcpy(record + offset, &narrow, sizeof narrow);
}

static void put_size(char *record, int offset, long long value) {
    size_t wide = (size_t)value;
    memcpy(record + offset, &wide, sizeof wide);
}

API int cudaGetDeviceProperties(void *properties, int device) {
    char *record = properties;
    const char *name = getenv("PARTITA_STANDIN_NAME");
    if (memory_bytes() <= 0) return report(NO_DEVICE);
    if (device != 0) return report(INVALID_DEVICE);
    memset(record, 0, PROP_BYTES);
    strncpy(record + PROP_NAME, name ? name : "dry run", 255);
    put_size(record, PROP_TOTAL_GLOBAL_MEM, memory_bytes());
    put_size(record, PROP_SHARED_MEM_PER_BLOCK, 49152);
    put_int(record, PROP_REGS_PER_BLOCK, 65536);
    put_int(record, PROP_WARP_SIZE, 32);
    put_int(record, PROP_MAX_THREADS_PER_BLOCK, 1024);
    put_int(record, PROP_MAX_THREADS_DIM, 1024);
    put_int(record, PROP_MAX_THREADS_DIM + 4, 1024);
    put_int(record, PROP_MAX_THREADS_DIM + 8, 64);
    put_int(record, PROP_MAX_GRID_SIZE, 2147483647);
    put_int(record, PROP_MAX_GRID_SIZE + 4, 65535);
    put_int(record, PROP_MAX_GRID_SIZE + 8, 65535);
    put_size(record, PROP_TOTAL_CONST_MEM, 65536);
    put_int(record, PROP_MAJOR, profile("PARTITA_STANDIN_MAJOR"));
    put_int(record, PROP_MINOR, profile("PARTITA_STANDIN_MINOR"));
    put_int(record, PROP_MULTI_PROCESSOR_COUNT, profile("PARTITA_STANDIN_MULTIPROCESSORS"));
    put_int(record, PROP_CAN_MAP_HOST_MEMORY, 1);
    put_int(record, PROP_CONCURRENT_KERNELS, 1);
    put_int(record, PROP_ASYNC_ENGINE_COUNT, 2);
    put_int(record, PROP_UNIFIED_ADDRESSING, 1);
    put_int(record, PROP_L2_CACHE_SIZE, profile("PARTITA_STANDIN_L2_BYTES"));
    put_int(record, PROP_MAX_THREADS_PER_MULTI_PROCESSOR, profile("PARTITA_STANDIN_THREADS_PER_MULTIPROCESSOR"));
    put_int(record, PROP_STREAM_PRIORITIES_SUPPORTED, 1);
    put_size(record, PROP_SHARED_MEM_PER_MULTIPROCESSOR, profile("PARTITA_STANDIN_SHARED_PER_MULTIPROCESSOR"));
    put_int(record, PROP_REGS_PER_MULTIPROCESSOR, 65536);
    put_int(record, PROP_MANAGED_MEMORY, 1);
    put_int(record, PROP_COOPERATIVE_LAUNCH, 1);
    put_size(record, PROP_SHARED_MEM_PER_BLOCK_OPTIN, profile("PARTITA_STANDIN_SHARED_PER_BLOCK_OPTIN"));
    put_int(record, PROP_MAX_BLOCKS_PER_MULTI_PROCESSOR, profile("PARTITA_STANDIN_BLOCKS_PER_MULTIPROCESSOR"));
    put_size(record, PROP_RESERVED_SHARED_MEM_PER_BLOCK, profile("PARTITA_STANDIN_MAJOR") >= 8 ? 1024 : 0);
    put_int(record, PROP_MEMORY_POOLS_SUPPORTED, 1);
    return SUCCESS;
}

/* ---- streams and their capture into graphs ---- */

enum { IDLE, CAPTURING, SPOILED };
static atomic_int captures; /* streams that are capturing now */

struct stream {
    atomic_int state;
};

/* NULL, 1 and 2 are the default streams; they have no record and cannot be captured. */
static struct stream *own_stream(void *handle) { return (uintptr_t)handle > 2 ? handle : NULL; }

static int is_capturing(void *handle) {
    struct stream *stream = own_stream(handle);
    return stream && stream->state != IDLE;
}

static struct stream *captured_now; /* the last one begun; ONNX Runtime captures one stream at a time */

/* For calls that are unsafe while any stream is captured in global mode. */
static int refused_in_capture(int error) {
    if (!captures) return SUCCESS;
    struct stream *stream = captured_now;
    if (stream) stream->state = SPOILED;
    return report(error);
}

API int cudaStreamCreate(void **handle) {
    *handle = calloc(1, sizeof(struct stream));
    return report(*handle ? SUCCESS : OUT_OF_MEMORY);
}
API int cudaStreamCreateWithFlags(void **handle, unsigned flags) { (void)flags; return cudaStreamCreate(handle); }
API int cudaStreamDestroy(void *handle) {
    if (is_capturing(handle)) {
        captures--;
        captured_now = NULL;
    }
    free(own_stream(handle));
    return SUCCESS;
}

API int cudaStreamBeginCapture(void *handle, int mode) {
    struct stream *stream = own_stream(handle);
    (void)mode;
    if (!stream || stream->state != IDLE) return report(CAPTURE_UNSUPPORTED);
    stream->state = CAPTURING;
    captured_now = stream;
    captures++;
    return SUCCESS;
}

API int cudaStreamEndCapture(void *handle, void **graph) {
    struct stream *stream = own_stream(handle);
    *graph = NULL;
    if (!stream || stream->state == IDLE) return report(CAPTURE_UNMATCHED);
    int spoiled = stream->state == SPOILED;
    stream->state = IDLE;
    captured_now = NULL;
    captures--;
    return spoiled ? report(CAPTURE_INVALIDATED) : give_handle(graph);
}

API int cudaStreamIsCapturing(void *handle, int *status) {
    struct stream *stream = own_stream(handle);
    *status = stream ? stream->state : IDLE; /* none 0, active 1, invalidated 2 */
    return SUCCESS;
}

API int cudaStreamSynchronize(void *handle) {
    return is_capturing(handle) ? refused_in_capture(CAPTURE_UNSUPPORTED) : SUCCESS;
}
API int cudaDeviceSynchronize(void) { return refused_in_capture(CAPTURE_UNSUPPORTED); }
API int cudaGraphInstantiate(void **executable, void *graph, unsigned long long flags) {
    (void)graph, (void)flags;
    return give_handle(executable);
}

/* ONNX Runtime frees host buffers in such callbacks. Work on these streams is done when it is queued. */
API int cudaLaunchHostFunc(void *handle, void (*callback)(void *), void *argument) {
    if (!is_capturing(handle)) callback(argument);
    return SUCCESS;
}

API int cudaEventCreate(void **event) { return give_handle(event); }
API int cudaEventCreateWithFlags(void **event, unsigned flags) { (void)flags; return give_handle(event); }
API int cudaEventElapsedTime(float *milliseconds, void *start, void *end) {
    (void)start, (void)end;
    *milliseconds = 0;
    return SUCCESS;
}

/* ---- memory ---- */

struct block {
    char *start;
    size_t size;
    struct block *next;
};
static struct block *device_blocks, *pinned_blocks;
static size_t device_bytes; /* in use */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static size_t whole_pages(size_t size) { return size ? (size + 4095) / 4096 * 4096 : 4096; }

static int take(struct block **list, void **result, size_t size, int protection) {
    *result = NULL;
    struct block *block = malloc(sizeof *block);
    char *start = mmap(NULL, whole_pages(size), protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!block || start == MAP_FAILED) {
        free(block);
        return OUT_OF_MEMORY;
    }
    *block = (struct block){start, whole_pages(size), *list};
    *list = block;
    *result = start;
    return SUCCESS;
}

static struct block **find(struct block **list, const void *address) {
    for (struct block **at = list; *at; at = &(*at)->next)
        if ((const char *)address >= (*at)->start && (const char *)address < (*at)->start + (*at)->size) return at;
    return NULL;
}

static int release(struct block **list, void *address) {
    if (!address) return SUCCESS;
    struct block **at = find(list, address);
    if (!at || (*at)->start != address) return INVALID_VALUE;
    struct block *block = *at;
    if (list == &device_blocks) device_bytes -= block->size;
    *at = block->next;
    munmap(block->start, block->size);
    free(block);
    return SUCCESS;
}

static int take_device(void **result, size_t size) {
    pthread_mutex_lock(&lock);
    *result = NULL;
    long long total = memory_bytes();
    int fits = total > 0 && whole_pages(size) >= size && whole_pages(size) <= (size_t)total - device_bytes;
    int error = fits ? take(&device_blocks, result, size, PROT_NONE) : OUT_OF_MEMORY;
    if (!error) device_bytes += whole_pages(size);
    pthread_mutex_unlock(&lock);
    return report(error);
}

static int take_pinned(void **result, size_t size) {
    pthread_mutex_lock(&lock);
    int error = take(&pinned_blocks, result, size, PROT_READ | PROT_WRITE);
    pthread_mutex_unlock(&lock);
    return report(error);
}

static int give_back(struct block **list, void *address) {
    pthread_mutex_lock(&lock);
    int error = release(list, address);
    pthread_mutex_unlock(&lock);
    return report(error);
}

static int on_device(const void *address) {
    pthread_mutex_lock(&lock);
    int found = find(&device_blocks, address) != NULL;
    pthread_mutex_unlock(&lock);
    return found;
}

API int cudaMalloc(void **result, size_t size) {
    int refused = refused_in_capture(CAPTURE_UNSUPPORTED);
    if (!size) *result = NULL;
    return refused || !size ? refused : take_device(result, size);
}
API int cudaFree(void *address) {
    int refused = address ? refused_in_capture(CAPTURE_UNSUPPORTED) : SUCCESS;
    return refused ? refused : give_back(&device_blocks, address);
}
API int cudaMallocHost(void **result, size_t size) {
    int refused = refused_in_capture(CAPTURE_UNSUPPORTED);
    return refused ? refused : take_pinned(result, size);
}
API int cudaHostAlloc(void **result, size_t size, unsigned flags) { (void)flags; return cudaMallocHost(result, size); }
API int cudaFreeHost(void *address) { return give_back(&pinned_blocks, address); }

/* Allocation in the order of a stream may be captured, so these are never refused. */
API int cudaMallocFromPoolAsync(void **result, size_t size, void *pool, void *stream) {
    (void)pool, (void)stream;
    return take_device(result, size);
}
API int cudaFreeAsync(void *address, void *stream) { (void)stream; return give_back(&device_blocks, address); }
API int cudaMemPoolCreate(void **pool, const void *properties) { (void)properties; return give_handle(pool); }
API int cudaMemPoolGetAttribute(void *pool, int attribute, void *value) {
    (void)pool;
    memset(value, 0, attribute <= 3 ? sizeof(int) : sizeof(uint64_t)); /* 1 to 3 are switches, the others bytes */
    return SUCCESS;
}

API int cudaMemGetInfo(size_t *available, size_t *total) {
    long long bytes = memory_bytes();
    if (bytes <= 0) return report(NO_DEVICE);
    pthread_mutex_lock(&lock);
    *total = (size_t)bytes;
    *available = (size_t)bytes - device_bytes;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

API int cudaPointerGetAttributes(void *attributes, const void *address) {
    enum { UNREGISTERED, HOST, DEVICE };
    pthread_mutex_lock(&lock);
    int type = find(&device_blocks, address) ? DEVICE : find(&pinned_blocks, address) ? HOST : UNREGISTERED;
    pthread_mutex_unlock(&lock);
    memset(attributes, 0, POINTER_BYTES);
    put_int(attributes, 0, type);
    put_int(attributes, 4, type == UNREGISTERED ? -2 : 0); /* cudaInvalidDeviceId */
    put_size(attributes, 8, type == UNREGISTERED ? 0 : (long long)(uintptr_t)address);
    put_size(attributes, 16, type == DEVICE ? 0 : (long long)(uintptr_t)address);
    return SUCCESS;
}

/* The addresses decide, not the caller's word for the direction: device memory is never read or written. Copies queued
   while a graph is captured are carried out, too: a host variable left unset would be read as a size next. */
static int copy(void *to, const void *from, size_t size) {
    if (!size || on_device(to)) return SUCCESS;
    if (!to || !from) return report(INVALID_VALUE);
    if (on_device(from)) memset(to, 0, size);
    else memmove(to, from, size);
    return SUCCESS;
}

API int cudaMemcpy(void *to, const void *from, size_t size, int kind) {
    (void)kind;
    int refused = refused_in_capture(CAPTURE_IMPLICIT);
    return refused ? refused : copy(to, from, size);
}
API int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    (void)kind, (void)stream;
    return copy(to, from, size);
}
API int cudaMemcpy2DAsync(
    void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, int kind, void *stream
) {
    int error = SUCCESS;
    (void)kind, (void)stream;
    for (size_t row = 0; row < height && !error; row++)
        error = copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return error;
}
API int cudaMemcpyFromSymbol(void *to, const void *symbol, size_t size, size_t offset, int kind) {
    (void)symbol, (void)offset, (void)kind;
    int refused = refused_in_capture(CAPTURE_IMPLICIT);
    if (!refused && !on_device(to)) memset(to, 0, size); /* a variable of the device: its bytes are zeros, too */
    return refused;
}
API int cudaMemset(void *to, int value, size_t size) {
    if (!on_device(to)) memset(to, value, size);
    return SUCCESS;
}
API int cudaMemsetAsync(void *to, int value, size_t size, void *stream) {
    (void)stream;
    return cudaMemset(to, value, size);
}

/* ---- kernels ---- */

API void **__cudaRegisterFatBinary(void *binary) {
    static void *slots[4];
    (void)binary;
    return slots;
}
API int __cudaGetKernel(void **kernel, const void *function) { (void)function; return give_handle(kernel); }

/* dim3 is three unsigned ints. What was pushed is of no use here: nothing is launched. */
API int __cudaPopCallConfiguration(unsigned *grid, unsigned *block, size_t *shared_bytes, void **stream) {
    for (int axis = 0; axis < 3; axis++) grid[axis] = block[axis] = 1;
    *shared_bytes = 0;
    *stream = NULL;
    return SUCCESS;
}
API int cudaLibraryLoadData(void **library) { return give_handle(library); } /* of eight arguments, one is a result */
API int cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
    (void)library, (void)name;
    return give_handle(kernel);
}
API int cudaFuncGetAttributes(void *attributes, const void *function) {
    (void)function;
    long long capability = profile("PARTITA_STANDIN_MAJOR") * 10 + profile("PARTITA_STANDIN_MINOR");
    memset(attributes, 0, FUNCTION_BYTES);
    put_int(attributes, 24, 1024);       /* maxThreadsPerBlock */
    put_int(attributes, 28, 32);         /* numRegs */
    put_int(attributes, 32, capability); /* ptxVersion */
    put_int(attributes, 36, capability); /* binaryVersion */
    put_int(attributes, 44, profile("PARTITA_STANDIN_SHARED_PER_BLOCK_OPTIN")); /* maxDynamicSharedSizeBytes */
    return SUCCESS;
}
API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *blocks, const void *function, int threads, size_t shared_bytes, unsigned flags
) {
    (void)function, (void)flags;
    long long by_threads = profile("PARTITA_STANDIN_THREADS_PER_MULTIPROCESSOR") / (threads > 0 ? threads : 1);
    long long shared = profile("PARTITA_STANDIN_SHARED_PER_MULTIPROCESSOR");
    long long by_shared = shared_bytes ? shared / (long long)shared_bytes : by_threads;
    long long most = profile("PARTITA_STANDIN_BLOCKS_PER_MULTIPROCESSOR");
    long long least = by_threads < by_shared ? by_threads : by_shared;
    *blocks = (int)(least < most ? least : most);
    return SUCCESS;
}

/* A driver function by name. All of them are the same here: they succeed and do nothing. */
static int driver_function(void) { return 0; }
API int cudaGetDriverEntryPointByVersion(
    const char *name, void **function, unsigned version, unsigned long long flags, int *found
) {
    (void)name, (void)version, (void)flags;
    *function = (void *)driver_function;
    if (found) *found = 0;
    return SUCCESS;
}
