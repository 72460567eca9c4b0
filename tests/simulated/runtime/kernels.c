// Kernels register and launch in stream order, and compute nothing; what tests ask of the simulation.
#include "sim.h"
#include <dlfcn.h>
#include <stdarg.h>

struct Settings settings = {.total = 8l << 30, .context = 512l << 20, .lock_limit = INT64_MAX, .poison = 1, .cc = 90,
                            .devices = 1, .growing = 1, .nccl = 64l << 20, .refusals = 1};
_Atomic int sticky;
atomic_long launches, copies, stubs, contexts, calls, requests;
__thread int device;
static __thread cudaError_t last_error;

static struct { const char *name; long *value; } names[] = {
    {"total", &settings.total},     {"context", &settings.context}, {"lock_limit", &settings.lock_limit},
    {"lag_us", &settings.lag_us},   {"copy_us", &settings.copy_us}, {"poison", &settings.poison},
    {"exchange_us", &settings.exchange_us},
    {"trace", &settings.trace},     {"cc", &settings.cc},           {"seed", &settings.seed},
    {"fail_after", &settings.fail_after}, {"fail_call", &settings.fail_call}, {"refuse_at", &settings.refuse_at},
    {"refusals", &settings.refusals}, {"devices", &settings.devices}, {"growing", &settings.growing}, {"nccl", &settings.nccl},
};
API void cudasim_set(const char *name, long value) {
  if (!strcmp(name, "sticky")) sticky = value;
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (!strcmp(names[i].name, name)) *names[i].value = value;
}
__attribute__((constructor(101))) static void read_environment(void) {
  char variable[64] = "CUDASIM_";
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    char *end = variable + 8;
    for (const char *c = names[i].name; *c; c++) *end++ = *c == '_' ? '_' : *c - 32;
    *end = 0;
    const char *value = getenv(variable);
    if (value) *names[i].value = strtol(value, 0, 0);
  }
}

static char violations[1 << 16];
static pthread_mutex_t say = PTHREAD_MUTEX_INITIALIZER;
void violation(const char *format, ...) {
  char line[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  pthread_mutex_lock(&say);
  if (strlen(violations) + strlen(line) + 2 < sizeof violations) strcat(strcat(violations, line), "\n");
  if (settings.trace) fprintf(stderr, "cudasim: %s\n", line);
  pthread_mutex_unlock(&say);
}
API const char *cudasim_violations(void) { return violations; }
API void cudasim_forget(void) {
  violations[0] = 0;
  sticky = 0;
}
API uint64_t cudasim_shift(void) { return SHIFT; }
API long cudasim_used(void) { return (long)device_bytes_used(); }
API long cudasim_copies(void) { return copies; }
API long cudasim_launches(void) { return launches; }
API long cudasim_contexts(void) { return contexts; }
API long cudasim_calls(void) { return calls; }
API long cudasim_requests(void) { return requests; }
API long cudasim_stub(const char *name, long code) {
  stubs++;
  if (strstr(name, "gemm") || !strcmp(name, "cublasGemmEx") || !strcmp(name, "cublasGemmStridedBatchedEx") ||
      !strcmp(name, "cublasLtMatmul"))
    launches++;  // a product is a kernel of cuBLAS
  if (settings.trace) fprintf(stderr, "cudasim: stub %s -> %ld\n", name, code);
  return code;
}

static pthread_mutex_t faults = PTHREAD_MUTEX_INITIALIZER;
void count_call(void) {
  calls++;
  if (!settings.fail_call) return;
  pthread_mutex_lock(&faults);
  if (settings.fail_call && !--settings.fail_call) sticky = cudaErrorECCUncorrectable;
  pthread_mutex_unlock(&faults);
}
int refused(void) {
  requests++;
  pthread_mutex_lock(&faults);
  int now = settings.refuse_at == 1 && settings.refusals > 0;
  if (settings.refuse_at > 1) settings.refuse_at--;
  if (now) settings.refusals--;
  pthread_mutex_unlock(&faults);
  return now;
}

cudaError_t ret(cudaError_t error) {
  if (error) last_error = error;
  return error;
}
API cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = 0;
  return sticky ? (cudaError_t)sticky : error;
}
API cudaError_t cudaPeekAtLastError(void) { return sticky ? (cudaError_t)sticky : last_error; }
API const char *cudaGetErrorName(cudaError_t e) {
  switch ((int)e) {
    case 0: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorECCUncorrectable: return "cudaErrorECCUncorrectable";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    case cudaErrorHostMemoryAlreadyRegistered: return "cudaErrorHostMemoryAlreadyRegistered";
    case cudaErrorHostMemoryNotRegistered: return "cudaErrorHostMemoryNotRegistered";
  }
  return "cudaError (simulated)";
}
API const char *cudaGetErrorString(cudaError_t e) {
  switch ((int)e) {
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorECCUncorrectable: return "uncorrectable ECC error encountered";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorNotSupported: return "operation not supported";
  }
  return cudaGetErrorName(e);
}
API CUresult cuGetErrorString(CUresult e, const char **s) { return *s = cudaGetErrorString((cudaError_t)e), 0; }
API CUresult cuGetErrorName(CUresult e, const char **s) { return *s = cudaGetErrorName((cudaError_t)e), 0; }

typedef struct { const void *host; const char *name; } Kernel;
static Kernel *kernels;
static long kernel_count, kernel_room;
static __thread struct { dim3 grid, block; size_t shared; cudaStream_t stream; } configuration;

API void **__cudaRegisterFatBinary(void *binary) { return malloc(8); }
API void __cudaRegisterFatBinaryEnd(void **handle) {}
API void __cudaUnregisterFatBinary(void **handle) {}
API char __cudaInitModule(void **handle) { return 1; }
API void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, uint3 *a,
                                uint3 *b, dim3 *c, dim3 *d, int *w) {
  if (kernel_count == kernel_room) {
    kernel_room = kernel_room ? 2 * kernel_room : 4096;
    kernels = realloc(kernels, kernel_room * sizeof *kernels);
  }
  kernels[kernel_count++] = (Kernel){host, name};
}
API void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int ext, size_t bytes, int c, int g) {}
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
  configuration.grid = grid;
  configuration.block = block;
  configuration.shared = shared;
  configuration.stream = stream;
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *(cudaStream_t *)stream = configuration.stream;
  return 0;
}
static void run_nothing(Op *op) {}
cudaError_t launch(const void *kernel, cudaStream_t stream) {
  ENTER;
  launches++;
  enqueue(stream_of(stream), new_op(run_nothing));
  if (settings.trace > 1)
    for (long i = 0; i < kernel_count; i++)
      if (kernels[i].host == kernel) fprintf(stderr, "cudasim: launch %.180s\n", kernels[i].name);
  return 0;
}
API cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t s) {
  if (!grid.x || !grid.y || !grid.z || !block.x || block.x * block.y * block.z > 1024) return ret(cudaErrorInvalidConfiguration);
  return launch(kernel, s);
}
API cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host) { return *kernel = (cudaKernel_t)host, 0; }
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t s) {
  return cudaLaunchKernel((void *)kernel, grid, block, arguments, shared, s);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *kernel, void **arguments) { return launch(kernel, c->stream); }
API cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t s) {
  return launch(kernel, s);
}
API cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *kernel) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->ptxVersion = a->binaryVersion = settings.cc;
  a->maxDynamicSharedSizeBytes = 232448;
  return 0;
}
API cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute a, int value) { return 0; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *kernel, int block, size_t shared) { return *n = 2, 0; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *kernel, int block, size_t shared, unsigned flags) {
  return *n = 2, 0;
}

// Kernels of the driver: Triton's.
API CUresult cuModuleLoad(CUmodule *m, const char *file) { return *m = malloc(8), 0; }
API CUresult cuModuleLoadData(CUmodule *m, const void *image) { return *m = malloc(8), 0; }
API CUresult cuModuleLoadDataEx(CUmodule *m, const void *image, unsigned n, CUjit_option *o, void **v) { return *m = malloc(8), 0; }
API CUresult cuModuleUnload(CUmodule m) { return 0; }
API CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name) { return *f = (CUfunction)strdup(name), 0; }
API CUresult cuFuncGetAttribute(int *value, CUfunction_attribute a, CUfunction f) {
  *value = a == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return 0;
}
API CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int value) { return 0; }
API CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { return 0; }
API CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                            unsigned shared, CUstream s, void **p, void **extra) {
  return (CUresult)launch(f, s);
}
API CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **p, void **extra) { return (CUresult)launch(f, c->hStream); }
API CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                       unsigned bz, unsigned shared, CUstream s, void **p) {
  return (CUresult)launch(f, s);
}
API CUresult cuTensorMapEncodeTiled(CUtensorMap *m, CUtensorMapDataType t, cuuint32_t rank, void *address,
                                    const cuuint64_t *size, const cuuint64_t *strides, const cuuint32_t *box,
                                    const cuuint32_t *steps, CUtensorMapInterleave i, CUtensorMapSwizzle s,
                                    CUtensorMapL2promotion p, CUtensorMapFloatOOBfill fill) {
  return memset(m, 0, sizeof *m), 0;
}
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction f, int block, size_t shared) { return *n = 2, 0; }
API CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c) { return *n = 66, 0; }

API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **p, unsigned version, unsigned long long flags,
                                                 enum cudaDriverEntryPointQueryResult *status) {
  static void *self;
  char second[128];
  Dl_info info;
  if (!self && dladdr((void *)cudaMalloc, &info)) self = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  snprintf(second, sizeof second, "%s_v2", name);
  *p = dlsym(self, name);
  if (!*p) *p = dlsym(self, second);
  if (!*p && settings.trace) fprintf(stderr, "cudasim: no driver symbol %s\n", name);
  if (status) *status = *p ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *p ? 0 : cudaErrorInvalidValue;
}
