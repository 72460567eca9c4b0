// Copies and memsets, in the order of their stream. Pageable memory is staged, as CUDA documents.
#include "sim.h"

__thread int dry;
API void cudasim_dry(int on) { dry = on; }

// Host memory that a copy is on its way to or from.
typedef struct Flight {
  uint64_t address;
  size_t bytes;
  struct Flight *next;
} Flight;
static Flight *flights;
static pthread_mutex_t flights_lock = PTHREAD_MUTEX_INITIALIZER;

static void take_off(const void *p, size_t bytes) {
  Flight *f = malloc(sizeof *f);
  f->address = (uint64_t)p;
  f->bytes = bytes;
  pthread_mutex_lock(&flights_lock);
  f->next = flights;
  flights = f;
  pthread_mutex_unlock(&flights_lock);
}
static void touch_down(const void *p, size_t bytes) {
  pthread_mutex_lock(&flights_lock);
  Flight **at = &flights;
  while (*at && !((*at)->address == (uint64_t)p && (*at)->bytes == bytes)) at = &(*at)->next;
  Flight *f = *at;
  if (f) *at = f->next;
  pthread_mutex_unlock(&flights_lock);
  free(f);
}
int copy_under_way(uint64_t address, size_t bytes) {
  int found = 0;
  pthread_mutex_lock(&flights_lock);
  for (Flight *f = flights; f; f = f->next) found |= f->address < address + bytes && address < f->address + f->bytes;
  pthread_mutex_unlock(&flights_lock);
  return found;
}

static void run_copy(Op *op) {
  void *source = op->staging ? op->staging : op->source;
  if (reachable(op->target, op->bytes, "a copy") && reachable(source, op->bytes, "a copy"))
    memmove(bytes_at(op->target), bytes_at(source), op->bytes);
  if (!is_device(op->target)) touch_down(op->target, op->bytes);
  if (!op->staging && !is_device(op->source)) touch_down(op->source, op->bytes);
}
static int direction_is_right(const void *target, const void *source, enum cudaMemcpyKind kind) {
  int to_host = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyHostToHost;
  int from_host = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyHostToHost;
  return kind == cudaMemcpyDefault || (to_host == !is_device(target) && from_host == !is_device(source));
}
static int may_be_copied(const void *p, size_t bytes) {
  if (is_device(p) || page_locked(p, bytes) >= 0) return 1;
  violation("a copy of %zu bytes at %p is page-locked in part, or over several registrations", bytes, p);
  return 0;
}
API cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t s) {
  ENTER;
  if (!bytes) return 0;
  copies++;
  if (!direction_is_right(target, source, kind)) return ret(cudaErrorInvalidValue);
  if (dry && is_device(target) && is_device(source)) return launch(0, s);
  if (!may_be_copied(target, bytes) || !may_be_copied(source, bytes)) return ret(cudaErrorInvalidValue);
  Op *op = new_op(run_copy);
  op->target = target;
  op->source = (void *)source;
  op->bytes = bytes;
  op->is_copy = 1;
  int blocks = !is_device(target) && !page_locked(target, bytes);
  if (!is_device(source) && !page_locked(source, bytes)) op->staging = memcpy(malloc(bytes), source, bytes);
  if (!is_device(target)) take_off(target, bytes);
  if (!is_device(source) && !op->staging) take_off(source, bytes);
  enqueue(stream_of(s), op);
  if (!blocks) return 0;
  wait_idle(stream_of(s));
  return ret(sticky);
}
API cudaError_t cudaMemcpy(void *target, const void *source, size_t bytes, enum cudaMemcpyKind kind) {
  cudaError_t error = cudaMemcpyAsync(target, source, bytes, kind, 0);
  wait_idle(stream_of(0));
  return error;
}
API cudaError_t cudaMemcpyPeerAsync(void *target, int target_device, const void *source, int source_device, size_t bytes, cudaStream_t s) {
  return cudaMemcpyAsync(target, source, bytes, cudaMemcpyDefault, s);
}
static void run_copy_2d(Op *op) {
  char *target = bytes_at(op->target), *source = bytes_at(op->source);
  for (size_t row = 0; row < op->rows; row++) memcpy(target + row * op->target_pitch, source + row * op->source_pitch, op->bytes);
}
API cudaError_t cudaMemcpy2DAsync(void *target, size_t target_pitch, const void *source, size_t source_pitch,
                                  size_t width, size_t height, enum cudaMemcpyKind kind, cudaStream_t s) {
  ENTER;
  Op *op = new_op(run_copy_2d);
  op->target = target;
  op->source = (void *)source;
  op->bytes = width;
  op->rows = height;
  op->target_pitch = target_pitch;
  op->source_pitch = source_pitch;
  enqueue(stream_of(s), op);
  int pageable = (!is_device(target) && page_locked(target, 1) != 1) || (!is_device(source) && page_locked(source, 1) != 1);
  if (pageable) wait_idle(stream_of(s));
  return 0;
}

static void run_set(Op *op) {
  if (reachable(op->target, op->bytes, "a memset")) memset(bytes_at(op->target), op->value, op->bytes);
}
API cudaError_t cudaMemsetAsync(void *target, int value, size_t bytes, cudaStream_t s) {
  ENTER;
  if (dry) return launch(0, s);
  Op *op = new_op(run_set);
  op->target = target;
  op->value = value;
  op->bytes = bytes;
  enqueue(stream_of(s), op);
  return 0;
}
API cudaError_t cudaMemset(void *target, int value, size_t bytes) { return cudaMemsetAsync(target, value, bytes, 0); }
static void run_set_words(Op *op) {
  if (!reachable(op->target, op->bytes * 4, "a memset")) return;
  for (size_t i = 0; i < op->bytes; i++) ((int *)bytes_at(op->target))[i] = op->value;
}
API CUresult cuMemsetD32Async(CUdeviceptr target, unsigned value, size_t words, CUstream s) {
  Op *op = new_op(run_set_words);
  op->target = (void *)target;
  op->value = value;
  op->bytes = words;
  enqueue(stream_of(s), op);
  return 0;
}
API cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *source, size_t bytes, size_t offset, enum cudaMemcpyKind kind) { return 0; }
API cudaError_t cudaGetSymbolAddress(void **p, const void *symbol) {
  static void *scratch;
  if (!scratch) cudaMalloc(&scratch, 1 << 20);
  *p = scratch;
  return 0;
}
