/* Host AdamW: one pass over flat arrays, in place. Built and called by adam.py.
 *
 * In:  weights as fp32, or as two 16-bit halves; fp32 moments; fp32 or bf16 gradient; constants.
 * Out: weights and moments overwritten. Nothing else is touched, nothing is allocated.
 * Invariant: every element is computed by the same IEEE operations whatever its position, so the
 * result depends neither on the thread count nor on how a caller cuts its buffers. They are the
 * operations of torch's fused kernel, in its order and with its fused multiply-adds; the build
 * therefore forbids the compiler to contract others (-ffp-contract=off).
 *
 * Plain loops, because memory is the bound: on a 2-core Zen 4 a pass over the same bytes without
 * the arithmetic takes as long (within 2 %), streaming stores make it 17-25 % slower (the lines are
 * in cache anyway, they were just read) and software prefetch 0-27 % slower. */
#include "adam.h"

typedef struct {
    void *weight;   /* float, or the high halves */
    int16_t *low;   /* the low halves, or NULL */
    float *exp_avg, *exp_avg_sq;
    const void *grad;
    Constants c;
} Job;

/* Halves pass through 1 KB of cache, 6-14 % faster than one loop over all six arrays. */
static void update(const Job *job, int64_t begin, int64_t end) {
    enum { BLOCK = 256 };
    float joined[BLOCK];
    const int split = job->low != NULL;
    const int64_t size = split ? BLOCK : end - begin;
    for (int64_t i = begin; i < end; i += size) {
        const int64_t n = MIN(size, end - i);
        float *weight = split ? joined : (float *)job->weight + i;
        uint16_t *high = (uint16_t *)job->weight + i;
        if (split) join_range(n, high, job->low + i, weight);
        step_kind(weight, job->exp_avg + i, job->exp_avg_sq + i, job->grad, i, n, &job->c);
        if (split) split_range(n, weight, high, job->low + i);
    }
}

/* Denormals and rounding as IEEE says, on this thread; returns what `restore` takes. */
INLINE unsigned ieee_mode(void) {
#if defined(__x86_64__)
    unsigned mode = _mm_getcsr();
    _mm_setcsr(0x1f80);
    return mode;
#else
    return 0;
#endif
}

INLINE void restore(unsigned mode) {
#if defined(__x86_64__)
    _mm_setcsr(mode);
#endif
}

/* `low` is NULL where the weight is whole. */
void mc_adam(int64_t n, void *weight, int16_t *low, float *exp_avg, float *exp_avg_sq,
             const void *grad, const Hyper *h, int64_t bf16, int64_t adamw, int64_t maximize,
             int64_t threads) {
    const Constants constants = constants_of(h, (int)bf16, (int)adamw, (int)maximize);
    const Job job = {weight, low, exp_avg, exp_avg_sq, grad, constants};
    const int64_t unit = unit_size(n, threads), units = (n + unit - 1) / unit;
#pragma omp parallel for schedule(dynamic) num_threads((int)MAX(1, MIN(threads, units)))
    for (int64_t u = 0; u < units; u++) {
        const unsigned mode = ieee_mode();
        update(&job, u * unit, MIN(n, (u + 1) * unit));
        restore(mode);
    }
}

/* The same for some rows of a table, each of `width` elements: row rows[r] by row r of `grad`, or by a
 * gradient of zeros where that is NULL. */
void mc_adam_rows(int64_t count, const int64_t *rows, int64_t width, void *weight, int16_t *low,
                  float *exp_avg, float *exp_avg_sq, const void *grad, const Hyper *h, int64_t bf16,
                  int64_t adamw, int64_t maximize, int64_t threads) {
    static const float zeros[1024]; /* stays in cache: rows without a gradient read none from memory */
    const int64_t most = grad ? width : 1024, weight_size = low ? 2 : 4, grad_size = bf16 ? 2 : 4;
    const Constants constants = constants_of(h, (int)bf16, (int)adamw, (int)maximize);
#pragma omp parallel for schedule(dynamic, 16) num_threads((int)MAX(1, MIN(threads, count)))
    for (int64_t r = 0; r < count; r++) {
        const unsigned mode = ieee_mode();
        for (int64_t begin = 0; begin < width; begin += most) {
            const int64_t at = rows[r] * width + begin;
            const Job job = {(char *)weight + at * weight_size, low ? low + at : NULL, exp_avg + at,
                             exp_avg_sq + at,
                             grad ? (const char *)grad + (r * width + begin) * grad_size
                                  : (const char *)zeros,
                             constants};
            update(&job, 0, MIN(most, width - begin));
        }
        restore(mode);
    }
}

void mc_split(int64_t n, const float *from, uint16_t *high, int16_t *low, int64_t threads) {
    const int64_t unit = unit_size(n, threads);
#pragma omp parallel for num_threads((int)MAX(1, MIN(threads, n / unit)))
    for (int64_t i = 0; i < n; i += unit)
        split_range(MIN(unit, n - i), from + i, high + i, low + i);
}

void mc_join(int64_t n, const uint16_t *high, const int16_t *low, float *to, int64_t threads) {
    const int64_t unit = unit_size(n, threads);
#pragma omp parallel for num_threads((int)MAX(1, MIN(threads, n / unit)))
    for (int64_t i = 0; i < n; i += unit) join_range(MIN(unit, n - i), high + i, low + i, to + i);
}

/* 64 bytes past the cache, to an address that is a multiple of 64; 0 where the compiler cannot. */
#if defined(__x86_64__)
#define HAS_STREAM 1
INLINE void stream64(char *to, const char *from) {
    for (int k = 0; k < 64; k += 16)
        _mm_stream_si128((__m128i *)(to + k), _mm_loadu_si128((const __m128i *)(from + k)));
}
#elif defined(__clang__)
#define HAS_STREAM 1
typedef uint64_t Lane __attribute__((vector_size(16)));
INLINE void stream64(char *to, const char *from) {
    for (int k = 0; k < 64; k += 16) {
        Lane lane;
        memcpy(&lane, from + k, 16);
        __builtin_nontemporal_store(lane, (Lane *)(to + k));
    }
}
#else
#define HAS_STREAM 0
INLINE void stream64(char *to, const char *from) { memcpy(to, from, 64); }
#endif

/* Copies `bytes` (both a multiple of 64, like `to`); returns whether the cache was bypassed. */
int mc_stream_copy(int64_t bytes, char *to, const char *from, int64_t threads) {
    const int64_t unit = unit_size(bytes, threads), units = (bytes + unit - 1) / unit;
#pragma omp parallel for schedule(dynamic) num_threads((int)MAX(1, threads))
    for (int64_t u = 0; u < units; u++) {
        for (int64_t i = u * unit; i < MIN(bytes, (u + 1) * unit); i += 64)
            stream64(to + i, from + i);
#if defined(__x86_64__)
        _mm_sfence();
#endif
    }
    return HAS_STREAM;
}
