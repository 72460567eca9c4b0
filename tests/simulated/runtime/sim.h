// A simulated CUDA runtime and driver: a device in host memory, streams as threads that may lag. It may be one of
// several, of which a process uses one.
//
// Device addresses are reserved without access, so that host code which touches one faults, as on hardware.
// The bytes lie SHIFT further up. See ../README.md for what is simulated and what is assumed.
#pragma once
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#undef cudaGetDeviceProperties

#define API __attribute__((visibility("default")))
#define BASE 0x600000000000ull
#define SPAN 0x80000000000ull  // 8 TiB of device addresses
#define SHIFT SPAN
#define GRANULE (2ull << 20)
#define PAGE 4096ull
#define ROUND_UP(x, unit) (((x) + (unit) - 1) / (unit) * (unit))

// What tests set, by environment (CUDASIM_TOTAL, ...) or by cudasim_set("total", ...).
struct Settings {
  long total;        // bytes of the device
  long context;      // bytes that the context takes
  long lock_limit;   // bytes of host memory that may be page-locked
  long lag_us;       // at most so long, at random, before each operation of a stream
  long copy_us;      // before each copy
  long exchange_us;  // before each collective
  long poison;       // fill fresh memory with NaNs
  long trace;        // say on stderr what was not understood
  long cc;           // compute capability, 90 for 9.0
  long seed;         // of lags
  long fail_after;   // the device is lost after so many more operations; 0: never
  long fail_call;    // or at the so manieth call from now
  long refuse_at;    // the so manieth request for memory from now is refused, device or page-locked; 0: none
  long refusals;     // and those after it, so many in all
  long devices;      // how many the machine has
  long growing;      // whether the driver's virtual memory gives any
  long nccl;         // bytes of the device that a communicator takes
};
extern struct Settings settings;
extern _Atomic int sticky;  // an error of the device: every later call says it
extern atomic_long launches, copies, stubs;

cudaError_t ret(cudaError_t error);            // remember as this thread's last error
void violation(const char *format, ...);       // something that a real device forbids or leaves undefined
#define ENTER                                  \
  do {                                         \
    contexts |= 1l << device;                  \
    count_call();                              \
    if (sticky) return ret((cudaError_t)sticky); \
  } while (0)
void count_call(void);        // and lose the device there, where that is asked for
int refused(void);            // whether this request for memory shall be refused
extern __thread int device;   // of the calling thread
extern atomic_long contexts;  // a bit for each device that this process has a context on

typedef struct Record Record;
typedef struct Op {
  void (*run)(struct Op *);
  struct Op *next;
  void *target, *source, *staging;
  size_t bytes, rows, target_pitch, source_pitch;
  int value, is_copy, is_exchange;
  Record *record;
  void (*function)(void *);
} Op;
typedef struct CUstream_st Stream;
Stream *stream_of(cudaStream_t handle);
Op *new_op(void (*run)(Op *));
void enqueue(Stream *stream, Op *op);
void wait_idle(Stream *stream);
void wait_all(void);

int is_device(const void *p);
void *bytes_at(void *p);                                   // where the bytes of any pointer are
int reachable(void *p, size_t bytes, const char *what);    // mapped device memory, or the host's
int page_locked(const void *p, size_t bytes);              // 1 yes, 0 no, -1 in part or over several
size_t device_bytes_used(void);

int copy_under_way(uint64_t address, size_t bytes);
cudaError_t launch(const void *kernel, cudaStream_t stream);
extern __thread int dry;  // copies and memsets on the device do nothing while this thread computes numbers itself
