// Device memory (malloc and the driver's virtual memory), and page-locked host memory.
#include "sim.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct Range {  // mapped device memory; handle is null where cudaMalloc gave it
  uint64_t start, bytes, offset;
  struct Handle *handle;
  struct Range *next;
} Range;
typedef struct Handle {  // physical memory of the driver's virtual memory management
  uint64_t offset;
  size_t bytes;
  int references;
} Handle;
typedef struct Lock {  // page-locked host memory; ours where cudaHostAlloc gave it
  uint64_t start, bytes;
  int ours;
  struct Lock *next;
} Lock;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Range *ranges;
static Lock *locks;
static size_t used, locked;
static int file = -1;  // the device's bytes; a fork before their first use has its own
static uint64_t next_address = BASE + (1ull << 30), next_offset;

__attribute__((constructor)) static void reserve(void) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
  if (mmap((void *)BASE, 2 * SPAN, PROT_NONE, flags, -1, 0) == MAP_FAILED) perror("cudasim: reserve");
}
size_t device_bytes_used(void) { return used; }
int is_device(const void *p) { return (uint64_t)p >= BASE && (uint64_t)p < BASE + SPAN; }
void *bytes_at(void *p) { return is_device(p) ? (char *)p + SHIFT : p; }

static int mapped(uint64_t p, uint64_t bytes) {
  while (bytes) {
    Range *r = ranges;
    while (r && !(r->start <= p && p < r->start + r->bytes)) r = r->next;
    if (!r) return 0;
    uint64_t here = r->start + r->bytes - p;
    if (here > bytes) here = bytes;
    p += here;
    bytes -= here;
  }
  return 1;
}
int reachable(void *p, size_t bytes, const char *what) {
  if (!is_device(p)) return 1;
  pthread_mutex_lock(&lock);
  int ok = mapped((uint64_t)p, bytes);
  pthread_mutex_unlock(&lock);
  if (!ok) {
    violation("%s touches device memory that is not mapped: %p + %zu", what, p, bytes);
    sticky = cudaErrorIllegalAddress;
  }
  return ok;
}

static int back(uint64_t address, size_t bytes, uint64_t offset) {
  if (file < 0) {
    file = memfd_create("cudasim", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, 1ll << 42)) perror("cudasim: memfd");
  }
  void *there = mmap((void *)(address + SHIFT), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, offset);
  if (there == MAP_FAILED) return 0;
  if (settings.poison) memset(there, 0xFF, bytes);
  return 1;
}
static void unback(uint64_t address, size_t bytes) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  mmap((void *)(address + SHIFT), bytes, PROT_NONE, flags, -1, 0);
}
static int take(size_t bytes) {
  if (refused() || used + bytes + settings.context > (size_t)settings.total) return 0;
  used += bytes;
  return 1;
}
static void give_back(uint64_t offset, size_t bytes) {
  used -= bytes;
  fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes);
}
static void add_range(uint64_t start, uint64_t bytes, uint64_t offset, Handle *handle) {
  Range *r = calloc(1, sizeof *r);
  *r = (Range){start, bytes, offset, handle, ranges};
  ranges = r;
}

API cudaError_t cudaMalloc(void **p, size_t bytes) {
  ENTER;
  *p = 0;
  if (!bytes) return 0;
  size_t taken = ROUND_UP(bytes, GRANULE);
  pthread_mutex_lock(&lock);
  int ok = take(taken) && back(next_address, taken, next_offset);
  if (ok) {
    add_range(next_address, taken, next_offset, 0);
    *p = (void *)next_address;
    next_address += taken + GRANULE;
    next_offset += taken;
  }
  pthread_mutex_unlock(&lock);
  return ret(ok ? 0 : cudaErrorMemoryAllocation);
}
API cudaError_t cudaFree(void *p) {
  ENTER;
  if (!p) return 0;
  wait_all();
  pthread_mutex_lock(&lock);
  Range **at = &ranges;
  while (*at && !((*at)->start == (uint64_t)p && !(*at)->handle)) at = &(*at)->next;
  Range *r = *at;
  if (r) {
    *at = r->next;
    unback(r->start, r->bytes);
    give_back(r->offset, r->bytes);
    free(r);
  }
  pthread_mutex_unlock(&lock);
  return ret(r ? 0 : cudaErrorInvalidValue);
}
API cudaError_t cudaMallocAsync(void **p, size_t bytes, cudaStream_t s) { return cudaMalloc(p, bytes); }
API cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { return cudaFree(p); }
API cudaError_t cudaMemGetInfo(size_t *available, size_t *all) {
  ENTER;
  *available = settings.total - settings.context - used;
  *all = settings.total;
  return 0;
}

API CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *properties,
                                           CUmemAllocationGranularity_flags flags) {
  *granularity = GRANULE;
  return 0;
}
typedef struct Free { uint64_t start, bytes; struct Free *next; } Free;
static Free *freed;  // reserved once, to be had again: torch reserves more than the device holds for every segment
API CUresult cuMemAddressReserve(CUdeviceptr *p, size_t bytes, size_t alignment, CUdeviceptr wish, unsigned long long flags) {
  bytes = ROUND_UP(bytes, GRANULE);
  pthread_mutex_lock(&lock);
  Free **at = &freed;
  while (*at && (*at)->bytes != bytes) at = &(*at)->next;
  Free *again = *at;
  int ok = again || next_address + bytes + GRANULE < BASE + SPAN;
  if (again) {
    *at = again->next;
    *p = again->start;
    free(again);
  } else if (ok) {
    *p = next_address;
    next_address += bytes + GRANULE;
  }
  pthread_mutex_unlock(&lock);
  return ok ? 0 : CUDA_ERROR_OUT_OF_MEMORY;
}
API CUresult cuMemAddressFree(CUdeviceptr p, size_t bytes) {
  Free *f = malloc(sizeof *f);
  pthread_mutex_lock(&lock);
  *f = (Free){p, ROUND_UP(bytes, GRANULE), freed};
  freed = f;
  pthread_mutex_unlock(&lock);
  return 0;
}
API CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                         unsigned long long flags) {
  if (!settings.growing) return CUDA_ERROR_NOT_SUPPORTED;
  pthread_mutex_lock(&lock);
  int ok = take(bytes);
  if (ok) {
    Handle *h = calloc(1, sizeof *h);
    *h = (Handle){next_offset, bytes, 1};
    next_offset += bytes;
    *handle = (CUmemGenericAllocationHandle)h;
  }
  pthread_mutex_unlock(&lock);
  return ok ? 0 : CUDA_ERROR_OUT_OF_MEMORY;
}
static void drop(Handle *h) {
  if (--h->references) return;
  give_back(h->offset, h->bytes);
  free(h);
}
API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  pthread_mutex_lock(&lock);
  drop((Handle *)handle);
  pthread_mutex_unlock(&lock);
  return 0;
}
API CUresult cuMemMap(CUdeviceptr p, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
  Handle *h = (Handle *)handle;
  pthread_mutex_lock(&lock);
  int ok = bytes == h->bytes && back(p, bytes, h->offset + offset);
  if (ok) {
    add_range(p, bytes, h->offset, h);
    h->references++;
  }
  pthread_mutex_unlock(&lock);
  return ok ? 0 : CUDA_ERROR_INVALID_VALUE;
}
API CUresult cuMemSetAccess(CUdeviceptr p, size_t bytes, const CUmemAccessDesc *access, size_t count) { return 0; }
API CUresult cuMemUnmap(CUdeviceptr p, size_t bytes) {
  pthread_mutex_lock(&lock);
  for (Range **at = &ranges; *at;) {
    Range *r = *at;
    if (!r->handle || r->start < p || r->start + r->bytes > p + bytes) {
      at = &r->next;
      continue;
    }
    *at = r->next;
    unback(r->start, r->bytes);
    drop(r->handle);
    free(r);
  }
  pthread_mutex_unlock(&lock);
  return 0;
}

static uint64_t first_page(uint64_t p) { return p / PAGE * PAGE; }
static Lock *lock_at(uint64_t p) {
  Lock *l = locks;
  while (l && !(l->start <= p && p < l->start + l->bytes)) l = l->next;
  return l;
}
static cudaError_t add_lock(uint64_t p, size_t bytes, int ours) {
  cudaError_t error = 0;
  pthread_mutex_lock(&lock);
  for (Lock *l = locks; l; l = l->next)
    if (first_page(l->start) < ROUND_UP(p + bytes, PAGE) && first_page(p) < ROUND_UP(l->start + l->bytes, PAGE))
      error = cudaErrorHostMemoryAlreadyRegistered;
  if (!error && !ours && locked + bytes > (size_t)settings.lock_limit) error = cudaErrorMemoryAllocation;
  if (!error) {
    Lock *l = calloc(1, sizeof *l);
    *l = (Lock){p, bytes, ours, locks};
    locks = l;
    locked += bytes;
  }
  pthread_mutex_unlock(&lock);
  return error;
}
static cudaError_t remove_lock(uint64_t p, int ours) {
  pthread_mutex_lock(&lock);
  Lock **at = &locks;
  while (*at && !((*at)->start == p && (*at)->ours == ours)) at = &(*at)->next;
  Lock *l = *at;
  if (l) {
    *at = l->next;
    locked -= l->bytes;
    if (ours) munmap((void *)l->start, ROUND_UP(l->bytes, PAGE));
    free(l);
  }
  pthread_mutex_unlock(&lock);
  return l ? 0 : ours ? cudaErrorInvalidValue : cudaErrorHostMemoryNotRegistered;
}
int page_locked(const void *p, size_t bytes) {
  pthread_mutex_lock(&lock);
  Lock *first = lock_at((uint64_t)p), *last = lock_at((uint64_t)p + bytes - 1);
  pthread_mutex_unlock(&lock);
  return first != last ? -1 : first != 0;
}
API cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags) {
  ENTER;
  if (refused()) return ret(cudaErrorMemoryAllocation);
  *p = mmap(0, ROUND_UP(bytes, PAGE), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return ret(*p == MAP_FAILED ? cudaErrorMemoryAllocation : add_lock((uint64_t)*p, bytes, 1));
}
API cudaError_t cudaMallocHost(void **p, size_t bytes) { return cudaHostAlloc(p, bytes, 0); }
API cudaError_t cudaFreeHost(void *p) {
  ENTER;
  wait_all();
  return ret(remove_lock((uint64_t)p, 1));
}
API cudaError_t cudaHostRegister(void *p, size_t bytes, unsigned flags) {
  ENTER;
  if (!p || !bytes) return ret(cudaErrorInvalidValue);
  if (refused()) return ret(cudaErrorMemoryAllocation);
  unsigned char resident;
  for (uint64_t page = first_page((uint64_t)p); page < (uint64_t)p + bytes; page += PAGE)
    if (mincore((void *)page, 1, &resident)) return ret(cudaErrorInvalidValue);
  return ret(add_lock((uint64_t)p, bytes, 0));
}
API cudaError_t cudaHostUnregister(void *p) {
  ENTER;
  pthread_mutex_lock(&lock);
  Lock *l = lock_at((uint64_t)p);
  size_t bytes = l ? l->bytes : 0;
  pthread_mutex_unlock(&lock);
  if (bytes && copy_under_way((uint64_t)p, bytes)) violation("cudaHostUnregister(%p) while a copy of it is under way", p);
  return ret(remove_lock((uint64_t)p, 0));
}
API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *p) {
  ENTER;
  memset(attributes, 0, sizeof *attributes);
  int pinned = !is_device(p) && page_locked(p, 1) == 1;
  attributes->type = is_device(p) ? cudaMemoryTypeDevice : pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  attributes->device = device;
  if (is_device(p) || pinned) attributes->devicePointer = (void *)p;
  else attributes->device = -2;
  if (!is_device(p)) attributes->hostPointer = (void *)p;
  return 0;
}
API CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr p) {
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) {
    *(CUdeviceptr *)data = p;
    return is_device((void *)p) || page_locked((void *)p, 1) == 1 ? 0 : CUDA_ERROR_INVALID_VALUE;
  }
  if (attribute != CU_POINTER_ATTRIBUTE_CONTEXT) return CUDA_ERROR_NOT_SUPPORTED;
  *(void **)data = (void *)1;
  return 0;
}
API long cudasim_page_locked(void) { return (long)locked; }
