// The device's properties, and what torch's libraries need of cuBLAS, cuDNN and NVML beyond a stub.
#include "sim.h"

static const char device_name[] = "NVIDIA H100 80GB HBM3 (simulated)";

API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  if (d < 0 || d >= settings.devices) return ret(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  strcpy(p->name, device_name);
  memcpy(p->uuid.bytes, "simulated-devic", 15);
  p->uuid.bytes[15] = 'a' + d;
  p->totalGlobalMem = settings.total;
  p->major = settings.cc / 10;
  p->minor = settings.cc % 10;
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->reservedSharedMemPerBlock = 1024;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = p->memPitch = INT32_MAX;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->textureAlignment = 512;
  p->l2CacheSize = 50 << 20;
  p->totalConstMem = 65536;
  p->memoryBusWidth = 5120;
  p->asyncEngineCount = 3;
  p->unifiedAddressing = p->managedMemory = p->concurrentKernels = p->canMapHostMemory = 1;
  p->cooperativeLaunch = p->hostRegisterSupported = 1;
  p->pciBusID = 1 + d;
  return 0;
}
API cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  switch ((int)attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = INT32_MAX; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrClockRate: *value = 1980000; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMemoryClockRate: *value = 2619000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = 5120; break;
    case cudaDevAttrL2CacheSize: *value = 50 << 20; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrAsyncEngineCount: *value = 3; break;
    case cudaDevAttrComputeCapabilityMajor: *value = settings.cc / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = settings.cc % 10; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 32; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = 1024; break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrHostRegisterSupported:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: *value = 1; break;
    default: *value = 0;
  }
  return 0;
}
API cudaError_t cudaGetDeviceCount(int *n) { return *n = settings.devices, 0; }
API cudaError_t cudaGetDevice(int *d) { return *d = device, 0; }
API cudaError_t cudaSetDevice(int d) {
  if (d < 0 || d >= settings.devices) return ret(cudaErrorInvalidDevice);
  device = d;
  ENTER;
  return 0;
}
API cudaError_t cudaDriverGetVersion(int *v) { return *v = 13000, 0; }
API cudaError_t cudaRuntimeGetVersion(int *v) { return *v = 13000, 0; }
API cudaError_t cudaDeviceCanAccessPeer(int *yes, int a, int b) { return *yes = 0, 0; }
API cudaError_t cudaDeviceEnablePeerAccess(int device, unsigned flags) { return ret(cudaErrorInvalidDevice); }
API cudaError_t cudaDeviceGetPCIBusId(char *s, int n, int d) { return snprintf(s, n, "0000:%02x:00.0", 1 + d), 0; }
API cudaError_t cudaProfilerStart(void) { return 0; }
API cudaError_t cudaProfilerStop(void) { return 0; }

#undef cuCtxPushCurrent
#undef cuCtxPopCurrent
#undef cuDeviceTotalMem
API CUresult cuInit(unsigned flags) { return 0; }
API CUresult cuDriverGetVersion(int *v) { return *v = 13000, 0; }
API CUresult cuDeviceGetCount(int *n) { return *n = settings.devices, 0; }
API CUresult cuDeviceGet(CUdevice *d, int i) { return *d = i, 0; }
API CUresult cuDeviceGetName(char *s, int n, CUdevice d) { return snprintf(s, n, "%s", device_name), 0; }
API CUresult cuDeviceTotalMem(size_t *n, CUdevice d) { return *n = settings.total, 0; }
API CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) { return (CUresult)cudaDeviceGetAttribute(v, (enum cudaDeviceAttr)a, d); }
API CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned *flags, int *active) { return *flags = 0, *active = contexts >> d & 1, 0; }
API CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { return contexts |= 1l << d, *c = (CUcontext)(intptr_t)(1 + d), 0; }
API CUresult cuCtxGetCurrent(CUcontext *c) { return *c = (CUcontext)(intptr_t)(contexts >> device & 1 ? 1 + device : 0), 0; }
API CUresult cuCtxSetCurrent(CUcontext c) { return 0; }
API CUresult cuCtxPushCurrent(CUcontext c) { return 0; }
API CUresult cuCtxPopCurrent(CUcontext *c) { return c ? (*c = (CUcontext)1, 0) : 0; }
API CUresult cuCtxGetDevice(CUdevice *d) { return *d = device, 0; }
API CUresult cuCtxSetLimit(CUlimit l, size_t v) { return 0; }
API CUresult cuCtxGetLimit(size_t *v, CUlimit l) { return *v = 1 << 20, 0; }

static int new_handle(void **h) { return *h = calloc(1, 4096), 0; }
API int cublasCreate_v2(void **h) { return new_handle(h); }
API int cublasLtCreate(void **h) { return new_handle(h); }
API int cudnnCreate(void **h) { return new_handle(h); }
API int cusolverDnCreate(void **h) { return new_handle(h); }
API size_t cudnnGetVersion(void) { return 91900; }
API size_t cudnnGetCudartVersion(void) { return 13000; }
API int cublasGetVersion_v2(void *h, int *v) { return *v = 130100, 0; }
API size_t cublasLtGetVersion(void) { return 130100; }
API int cublasGetMathMode(void *h, int *mode) { return *mode = 0, 0; }
API int cublasGetPointerMode_v2(void *h, int *mode) { return *mode = 0, 0; }
API int cublasGetStream_v2(void *h, void **s) { return *s = 0, 0; }
API const char *cublasGetStatusString(int s) { return "simulated"; }
API const char *cudnnGetErrorString(int s) { return "simulated cuDNN"; }
API void cudnnGetLastErrorString(char *s, size_t n) { snprintf(s, n, "simulated"); }
// one algorithm without a workspace: cublasLtMatmulHeuristicResult_t has 96 bytes
API int cublasLtMatmulAlgoGetHeuristic(void *h, void *d, void *a, void *b, void *c, void *e, void *preference, int want,
                                       void *results, int *found) {
  memset(results, 0, 96);
  return *found = 1, 0;
}
API int cublasLtMatmulPreferenceCreate(void **h) { return new_handle(h); }
API int cublasLtMatmulDescCreate(void **h, int a, int b) { return new_handle(h); }
API int cublasLtMatrixLayoutCreate(void **h, int type, uint64_t rows, uint64_t columns, int64_t stride) { return new_handle(h); }
// cuDNN's graphs: every descriptor is built, one engine is found, executing it does nothing
enum { HANDLE_INT64 = 3, HANDLE_DESCRIPTOR = 15, HANDLE_INT32 = 23, KNOBS = 302 };
API int cudnnBackendCreateDescriptor(int type, void **d) { return new_handle(d); }
API int cudnnBackendDestroyDescriptor(void *d) { return free(d), 0; }
API int cudnnBackendSetAttribute(void *d, int name, int type, int64_t n, const void *a) { return 0; }
API int cudnnBackendFinalize(void *d) { return 0; }
API int cudnnBackendGetAttribute(void *d, int name, int type, int64_t want, int64_t *got, void *a) {
  int one = type == HANDLE_DESCRIPTOR || type == HANDLE_INT64 || type == HANDLE_INT32;
  if (got) *got = name != KNOBS && one;
  if (a && want > 0 && type == HANDLE_INT32) *(int *)a = 0;
  if (a && want > 0 && type == HANDLE_INT64) *(int64_t *)a = 0;
  return 0;
}
API int cudnnBackendExecute(void *h, void *plan, void *pack) { return launches++, 0; }
API int cudnnSetStream(void *h, void *s) { return 0; }
API int cudnnGetStream(void *h, void **s) { return *s = 0, 0; }
API int nvmlInit_v2(void) { return 0; }
API int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **d) { return *d = (void *)1, 0; }
API int nvmlDeviceGetGpuFabricInfoV(void *d, void *info) { return 0; } /* no fabric */
API int nvmlDeviceGetComputeRunningProcesses(void *d, unsigned *count, void *processes) { return *count = 0, 0; }
