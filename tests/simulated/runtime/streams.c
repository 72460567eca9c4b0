// Streams are threads that run operations in order; an event's record is one of them.
#include "sim.h"
#include <time.h>
#include <unistd.h>

struct Record {
  atomic_int references;
  int done;
  double seconds;
  pthread_mutex_t lock;
  pthread_cond_t reached;
};
struct CUevent_st {
  unsigned flags;
  Record *record;
  pthread_mutex_t lock;
};
struct CUstream_st {
  pthread_mutex_t lock;
  pthread_cond_t filled, idle;
  Op *head, *tail;
  long pending;
  unsigned flags, seed;
  int id, priority;
  struct CUstream_st *next;
};
static Stream *streams;
static int stream_count;
static pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

Op *new_op(void (*run)(Op *)) {
  Op *op = calloc(1, sizeof *op);
  op->run = run;
  return op;
}
static void lag(Stream *s, Op *op) {
  if (settings.copy_us && op->is_copy) usleep(settings.copy_us);
  if (settings.exchange_us && op->is_exchange) usleep(settings.exchange_us);
  if (!settings.lag_us) return;
  unsigned k = rand_r(&s->seed) % 4;
  if (k > 1) usleep(k == 2 ? settings.lag_us / 5 : settings.lag_us);
}
static void lose_device_when_due(void) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&lock);
  if (settings.fail_after && !--settings.fail_after) sticky = cudaErrorECCUncorrectable;
  pthread_mutex_unlock(&lock);
}
static void *work(void *argument) {
  Stream *s = argument;
  pthread_setname_np(pthread_self(), "cudasim");
  for (;;) {
    pthread_mutex_lock(&s->lock);
    while (!s->head) pthread_cond_wait(&s->filled, &s->lock);
    Op *op = s->head;
    s->head = op->next;
    if (!s->head) s->tail = 0;
    pthread_mutex_unlock(&s->lock);
    lag(s, op);
    lose_device_when_due();
    op->run(op);
    free(op->staging);
    free(op);
    pthread_mutex_lock(&s->lock);
    if (!--s->pending) pthread_cond_broadcast(&s->idle);
    pthread_mutex_unlock(&s->lock);
  }
  return 0;
}
void enqueue(Stream *s, Op *op) {
  pthread_mutex_lock(&s->lock);
  op->next = 0;
  if (s->tail) s->tail->next = op;
  else s->head = op;
  s->tail = op;
  s->pending++;
  pthread_cond_signal(&s->filled);
  pthread_mutex_unlock(&s->lock);
}

static Stream *new_stream(unsigned flags, int priority) {
  Stream *s = calloc(1, sizeof *s);
  pthread_mutex_init(&s->lock, 0);
  pthread_cond_init(&s->filled, 0);
  pthread_cond_init(&s->idle, 0);
  s->flags = flags;
  s->priority = priority;
  pthread_mutex_lock(&streams_lock);
  s->id = stream_count++;
  s->next = streams;
  streams = s;
  pthread_mutex_unlock(&streams_lock);
  s->seed = s->id + settings.seed * 1000;
  pthread_t thread;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, 8 << 20);
  pthread_create(&thread, &attributes, work, s);
  pthread_detach(thread);
  return s;
}
Stream *stream_of(cudaStream_t handle) {
  static Stream *standard;
  static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
  if ((uint64_t)handle > 2) return handle;
  pthread_mutex_lock(&once);
  if (!standard) standard = new_stream(0, 0);
  pthread_mutex_unlock(&once);
  return standard;
}
void wait_idle(Stream *s) {
  pthread_mutex_lock(&s->lock);
  while (s->pending) pthread_cond_wait(&s->idle, &s->lock);
  pthread_mutex_unlock(&s->lock);
}
void wait_all(void) {
  for (Stream *s = streams; s; s = s->next) wait_idle(s);
}
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) {
  ENTER;
  *s = new_stream(flags, priority);
  return 0;
}
API cudaError_t cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithPriority(s, 0, 0); }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) { return cudaStreamCreateWithPriority(s, flags, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t s) { return 0; }
API cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  ENTER;
  wait_idle(stream_of(s));
  return ret(sticky);
}
API cudaError_t cudaStreamQuery(cudaStream_t s) {
  ENTER;
  return ret(stream_of(s)->pending ? cudaErrorNotReady : 0);
}
API cudaError_t cudaDeviceSynchronize(void) {
  ENTER;
  wait_all();
  return ret(sticky);
}
API cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) {
  *priority = stream_of(s)->priority;
  return 0;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return 0;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return 0;
}
API CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus *status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return 0;
}
#undef cudaStreamGetCaptureInfo
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                         cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                         const cudaGraphEdgeData **edges, size_t *count) {
  *status = cudaStreamCaptureStatusNone;
  return 0;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return 0; }

static void run_function(Op *op) { op->function(op->target); }
API cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t function, void *data) {
  ENTER;
  Op *op = new_op(run_function);
  op->function = function;
  op->target = data;
  enqueue(stream_of(s), op);
  return 0;
}
static void run_callback(Op *op) { ((cudaStreamCallback_t)op->function)(op->source, sticky, op->target); }
API cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t function, void *data, unsigned flags) {
  ENTER;
  Op *op = new_op(run_callback);
  op->function = (void (*)(void *))function;
  op->target = data;
  op->source = s;
  enqueue(stream_of(s), op);
  return 0;
}

// Events: a wait takes the record that the event has when the wait is issued.
static Record *new_record(int references) {
  Record *r = calloc(1, sizeof *r);
  r->references = references;
  pthread_mutex_init(&r->lock, 0);
  pthread_cond_init(&r->reached, 0);
  return r;
}
static void drop(Record *r) {
  if (r && --r->references == 0) free(r);
}
static void wait_for(Record *r) {
  pthread_mutex_lock(&r->lock);
  while (!r->done) pthread_cond_wait(&r->reached, &r->lock);
  pthread_mutex_unlock(&r->lock);
}
static Record *record_of(cudaEvent_t e) {
  pthread_mutex_lock(&e->lock);
  Record *r = e->record;
  if (r) r->references++;
  pthread_mutex_unlock(&e->lock);
  return r;
}
static void run_record(Op *op) {
  Record *r = op->record;
  pthread_mutex_lock(&r->lock);
  r->seconds = now();
  r->done = 1;
  pthread_cond_broadcast(&r->reached);
  pthread_mutex_unlock(&r->lock);
  drop(r);
}
static void run_wait(Op *op) {
  wait_for(op->record);
  drop(op->record);
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) {
  ENTER;
  *e = calloc(1, sizeof **e);
  (*e)->flags = flags;
  pthread_mutex_init(&(*e)->lock, 0);
  return 0;
}
API cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t e) {
  drop(e->record);
  free(e);
  return 0;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) {
  ENTER;
  Record *r = new_record(2);
  pthread_mutex_lock(&e->lock);
  Record *old = e->record;
  e->record = r;
  pthread_mutex_unlock(&e->lock);
  drop(old);
  Op *op = new_op(run_record);
  op->record = r;
  enqueue(stream_of(s), op);
  return 0;
}
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
API cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) {
  ENTER;
  Record *r = record_of(e);
  if (!r) return 0;  // an event that was never recorded holds nobody up
  Op *op = new_op(run_wait);
  op->record = r;
  enqueue(stream_of(s), op);
  return 0;
}
API cudaError_t cudaEventQuery(cudaEvent_t e) {
  ENTER;
  Record *r = record_of(e);
  int done = !r || r->done;
  drop(r);
  return ret(done ? 0 : cudaErrorNotReady);
}
API cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  ENTER;
  Record *r = record_of(e);
  if (r) wait_for(r);
  drop(r);
  return ret(sticky);
}
#undef cudaEventElapsedTime
API cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t first, cudaEvent_t second) {
  ENTER;
  Record *a = record_of(first), *b = record_of(second);
  cudaError_t error = 0;
  if (!a || !b || ((first->flags | second->flags) & cudaEventDisableTiming)) error = cudaErrorInvalidResourceHandle;
  else if (!a->done || !b->done) error = cudaErrorNotReady;
  else *milliseconds = (float)((b->seconds - a->seconds) * 1e3);
  drop(a);
  drop(b);
  return ret(error);
}
