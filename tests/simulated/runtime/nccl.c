// NCCL between processes of this machine: each pair of ranks has a socket, and an operation of a stream moves the
// bytes. As on a device, what a rank that is gone owes is waited for until the communicator is aborted.
#include "sim.h"
#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };
enum { POLL_MS = 20, CONNECT_SECONDS = 60 };
typedef struct { char name[128]; } Id;
typedef struct Comm {
  int rank, size, *sockets;
  atomic_int aborted, under_way;
  uint64_t issued;  // operations so far: ranks issue the same ones
  void *buffers;
} Comm;
typedef struct { uint64_t number, bytes; } Head;
typedef struct Part {  // what goes to one rank, or comes from it
  int sends, peer;
  void *at;
  size_t bytes, done;  // done counts the head too
  Head head;
} Part;
typedef struct Exchange {
  Comm *comm;
  int count;
  Part parts[];
} Exchange;

static struct sockaddr_un address_of(const Id *id, int rank, socklen_t *size) {
  struct sockaddr_un a = {.sun_family = AF_UNIX};
  int n = snprintf(a.sun_path + 1, sizeof a.sun_path - 1, "%s-%d", id->name, rank);  // abstract: no file
  *size = offsetof(struct sockaddr_un, sun_path) + 1 + n;
  return a;
}
static int connected(const Id *id, int to, int rank) {
  socklen_t size;
  struct sockaddr_un a = address_of(id, to, &size);
  for (int tries = CONNECT_SECONDS * 1000 / POLL_MS; tries; tries--) {
    int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (!connect(s, (struct sockaddr *)&a, size) && write(s, &rank, sizeof rank) == sizeof rank) return s;
    close(s);
    usleep(POLL_MS * 1000);
  }
  return -1;
}
static int accepted(int door, int *from) {
  struct pollfd waits = {door, POLLIN};
  if (poll(&waits, 1, CONNECT_SECONDS * 1000) != 1) return -1;
  int s = accept4(door, 0, 0, SOCK_CLOEXEC);
  return read(s, from, sizeof *from) == sizeof *from ? s : -1;
}
static int meet(Comm *c, const Id *id) {
  socklen_t size;
  struct sockaddr_un a = address_of(id, c->rank, &size);
  int door = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), ok = !bind(door, (struct sockaddr *)&a, size) && !listen(door, c->size);
  for (int r = 0; ok && r < c->rank; r++) ok = (c->sockets[r] = connected(id, r, c->rank)) >= 0;
  for (int r = c->rank + 1, from; ok && r < c->size; r++) {
    int s = accepted(door, &from);
    if ((ok = s >= 0)) c->sockets[from] = s;
  }
  close(door);
  return ok;
}
API int ncclGetVersion(int *v) { return *v = 22809, SUCCESS; }
API int ncclGetUniqueId(Id *id) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  memset(id, 0, sizeof *id);
  snprintf(id->name, sizeof id->name, "cudasim-nccl-%d-%ld-%ld", getpid(), t.tv_sec, t.tv_nsec);
  return SUCCESS;
}
API int ncclCommInitRankConfig(Comm **out, int size, Id id, int rank, void *config) {
  Comm *c = calloc(1, sizeof *c);
  c->rank = rank;
  c->size = size;
  c->sockets = malloc(size * sizeof *c->sockets);
  for (int r = 0; r < size; r++) c->sockets[r] = -1;
  if (!meet(c, &id) || (settings.nccl && cudaMalloc(&c->buffers, settings.nccl))) return SYSTEM_ERROR;
  *out = c;
  return SUCCESS;
}
API int ncclCommInitRank(Comm **out, int size, Id id, int rank) { return ncclCommInitRankConfig(out, size, id, rank, 0); }
static void wait_for_end(Comm *c) {
  while (c->under_way) usleep(1000);
}
API int ncclCommFinalize(Comm *c) { return wait_for_end(c), SUCCESS; }
API int ncclCommDestroy(Comm *c) {
  wait_for_end(c);
  for (int r = 0; r < c->size; r++)
    if (c->sockets[r] >= 0) close(c->sockets[r]);
  cudaFree(c->buffers);
  return SUCCESS;  // whoever still holds c may ask it for its errors
}
API int ncclCommAbort(Comm *c) {
  c->aborted = 1;
  return ncclCommDestroy(c);
}
API int ncclCommGetAsyncError(Comm *c, int *error) { return *error = SUCCESS, SUCCESS; }
API int ncclCommCount(Comm *c, int *n) { return *n = c->size, SUCCESS; }
API int ncclCommUserRank(Comm *c, int *n) { return *n = c->rank, SUCCESS; }
API const char *ncclGetErrorString(int error) { return error ? "simulated NCCL: an error" : "no error"; }
API const char *ncclGetLastError(Comm *c) { return "simulated NCCL"; }

static ssize_t move(int s, Part *p) {  // a bit more of it, as much as goes without waiting
  int flags = MSG_DONTWAIT | MSG_NOSIGNAL, in_head = p->done < sizeof p->head;
  char *at = in_head ? (char *)&p->head + p->done : (char *)bytes_at(p->at) + p->done - sizeof p->head;
  size_t left = in_head ? sizeof p->head - p->done : p->bytes + sizeof p->head - p->done;
  ssize_t n = p->sends ? send(s, at, left, flags) : recv(s, at, left, flags);
  if (n > 0) p->done += n;
  return n;
}
static int alike(Comm *c, Part *p, uint64_t number) {
  if (p->sends || p->done != sizeof p->head || (p->head.number == number && p->head.bytes == p->bytes)) return 1;
  violation("rank %d's operation %lu takes %zu bytes of rank %d, which sends %lu in its operation %lu", c->rank, number,
            p->bytes, p->peer, p->head.bytes, p->head.number);
  return 0;
}
static int over(const Part *p) { return p->done == p->bytes + sizeof p->head; }
static int is_first(const Exchange *e, int i) {  // of the parts with that rank in that direction, in their order
  for (int j = 0; j < i; j++)
    if (!over(&e->parts[j]) && e->parts[j].peer == e->parts[i].peer && e->parts[j].sends == e->parts[i].sends) return 0;
  return 1;
}
static int progress(Exchange *e, uint64_t number, int *stuck) {  // 1 when nothing is left
  struct pollfd waits[e->count];
  int count = 0, moved = 0, left = 0;
  for (int i = 0; i < e->count; i++) {
    Part *p = &e->parts[i];
    if (over(p)) continue;
    left = 1;
    if (*stuck || !is_first(e, i)) continue;
    ssize_t n = move(e->comm->sockets[p->peer], p);
    if (n > 0) moved = 1;
    else if (n < 0 && errno == EAGAIN) waits[count++] = (struct pollfd){e->comm->sockets[p->peer], p->sends ? POLLOUT : POLLIN};
    else *stuck = 1;  // it is gone
    if (!alike(e->comm, p, number)) *stuck = 1;
  }
  if (left && !moved) poll(waits, *stuck ? 0 : count, POLL_MS);
  return !left;
}
static void copy_to_itself(Exchange *e) {  // the n-th part that this rank sends itself into the n-th that it takes
  for (int i = 0, j = 0; i < e->count; i++) {
    Part *sent = &e->parts[i];
    if (!sent->sends || sent->peer != e->comm->rank) continue;
    while (e->parts[j].sends || e->parts[j].peer != e->comm->rank) j++;
    Part *taken = &e->parts[j++];
    memmove(bytes_at(taken->at), bytes_at(sent->at), sent->bytes);
    sent->done = taken->done = sent->bytes + sizeof sent->head;
  }
}
static void run_exchange(Op *op) {
  Exchange *e = op->staging;
  uint64_t number = e->parts[0].head.number;
  int stuck = 0;
  for (int i = 0; i < e->count; i++) stuck |= !reachable(e->parts[i].at, e->parts[i].bytes, "NCCL");
  if (!stuck) copy_to_itself(e);
  while (!e->comm->aborted && !progress(e, number, &stuck)) continue;
  e->comm->under_way--;
}

// Groups: what a thread adds between start and end is one operation.
static __thread int depth, part_count;
static __thread Part *collected;
static __thread Comm *collected_by;
static __thread cudaStream_t collected_on;

API int ncclGroupStart(void) { return depth++, SUCCESS; }
API int ncclGroupEnd(void) {
  if (--depth || !part_count) return SUCCESS;
  Comm *c = collected_by;
  Exchange *e = malloc(sizeof *e + part_count * sizeof(Part));
  e->comm = c;
  e->count = part_count;
  memcpy(e->parts, collected, part_count * sizeof(Part));
  for (int i = 0; i < part_count; i++) e->parts[i].head = (Head){c->issued, e->parts[i].bytes};
  c->issued++;
  c->under_way++;
  part_count = 0;
  Op *op = new_op(run_exchange);
  op->staging = e;
  op->is_exchange = 1;
  launches++;
  enqueue(stream_of(collected_on), op);
  return SUCCESS;
}
static int add(int sends, const void *at, size_t bytes, int peer, Comm *c, cudaStream_t s) {
  if (!c || c->aborted || peer < 0 || peer >= c->size) return INVALID_ARGUMENT;
  if (part_count && (c != collected_by || s != collected_on)) return INVALID_USAGE;  // torch does neither
  collected = realloc(collected, (part_count + 1) * sizeof *collected);
  collected[part_count++] = (Part){sends, peer, (void *)at, bytes};
  collected_by = c;
  collected_on = s;
  return SUCCESS;
}
static size_t bytes_of(size_t count, int type) {
  static const int sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};  // by ncclDataType_t
  return count * sizes[type];
}
API int ncclSend(const void *at, size_t count, int type, int peer, Comm *c, cudaStream_t s) {
  ncclGroupStart();
  int error = add(1, at, bytes_of(count, type), peer, c, s);
  return ncclGroupEnd(), error;
}
API int ncclRecv(void *at, size_t count, int type, int peer, Comm *c, cudaStream_t s) {
  ncclGroupStart();
  int error = add(0, at, bytes_of(count, type), peer, c, s);
  return ncclGroupEnd(), error;
}
static int to_and_from_all(const char *sent, size_t step, char *taken, size_t bytes, Comm *c, cudaStream_t s) {
  int error = SUCCESS;
  ncclGroupStart();
  for (int r = 0; r < c->size && !error; r++) {
    error = add(1, sent + r * step, bytes, r, c, s);
    if (!error) error = add(0, taken + r * bytes, bytes, r, c, s);
  }
  return ncclGroupEnd(), error;
}
API int ncclAllGather(const void *sent, void *taken, size_t count, int type, Comm *c, cudaStream_t s) {
  return to_and_from_all(sent, 0, taken, bytes_of(count, type), c, s);
}
API int ncclAlltoAll(const void *sent, void *taken, size_t count, int type, Comm *c, cudaStream_t s) {
  return to_and_from_all(sent, bytes_of(count, type), taken, bytes_of(count, type), c, s);
}
