/* Host AdamW: one pass over flat arrays, in place. Built and called by host_adam.py.
 *
 * In:  weights as fp32, or as two 16-bit halves; fp32 moments; fp32 or bf16 gradient; constants.
 * Out: weights and moments overwritten. Nothing else is touched, nothing is allocated.
 * Invariant: every element is computed by the same IEEE operations whatever its position, so the
 * result depends neither on the thread count nor on how a caller cuts its buffers. They are the
 * operations of torch's fused kernel, in its order and with its fused multiply-adds; the build
 * therefore forbids the compiler to contract others (-ffp-contract=off).
 *
 * Plain loops, because memory is the bound: on a 2-core Zen 4 a pass over the same bytes without the
 * arithmetic takes as long (within 2 %), streaming stores make it 17-25 % slower (the lines are in
 * cache anyway, they were just read) and software prefetch 0-27 % slower. */
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

/* Without the instruction, torch's kernel multiplies and adds too, and libm's fmaf is slow. */
#if defined(FP_FAST_FMAF) || defined(__FMA__) || defined(__aarch64__)
#define FMA(a, b, c) __builtin_fmaf(a, b, c)
#else
#define FMA(a, b, c) ((a) * (b) + (c))
#endif

typedef struct {
    double lr, beta1, beta2, eps, weight_decay, step, grad_scale;
} Hyper;

typedef struct {
    float grad_scale;   /* times -1 when maximising */
    float decay;        /* AdamW: the weight is multiplied by 1 - lr * weight_decay */
    float coupled;      /* Adam: weight_decay, added to the gradient times the weight */
    float lerp;         /* 1 - beta1, or -beta1 when lerp_from_grad */
    int lerp_from_grad;
    float beta2, one_minus_beta2, correction2_sqrt, eps;
    float minus_step_size;
} Constants;

typedef struct {
    void *weight;   /* float, or the high halves */
    int16_t *low;   /* the low halves, or NULL */
    float *exp_avg, *exp_avg_sq;
    const void *grad;
    Constants c;
} Job;

/* Scalars in double, then rounded once to float, as torch does. */
static Constants constants_of(const Hyper *h, int maximize) {
    const float lerp = (float)(1 - h->beta1);
    return (Constants){
        .grad_scale = (float)(maximize ? -h->grad_scale : h->grad_scale),
        .decay = (float)(1 - h->lr * h->weight_decay),
        .coupled = (float)h->weight_decay,
        .lerp = lerp < 0.5f ? lerp : lerp - 1,
        .lerp_from_grad = lerp >= 0.5f,
        .beta2 = (float)h->beta2,
        .one_minus_beta2 = (float)(1 - h->beta2),
        .correction2_sqrt = (float)sqrt(1 - pow(h->beta2, h->step)),
        .eps = (float)h->eps,
        .minus_step_size = (float)-(h->lr / (1 - pow(h->beta1, h->step))),
    };
}

INLINE float as_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
INLINE uint32_t as_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

INLINE uint32_t join_halves(uint16_t high, int16_t low) {
    return ((uint32_t)high << 16) + (uint32_t)(int32_t)low;
}
INLINE uint16_t high_half(uint32_t bits) { return (uint16_t)((bits + 0x8000u) >> 16); }
INLINE int16_t low_half(uint32_t bits) { return (int16_t)bits; } /* = bits - (high << 16) */

/* `split`, `bf16` and `coupled` are literals at every call, so each kind becomes its own loop. */
INLINE void update(const Job *job, int64_t begin, int64_t end, int split, int bf16, int coupled) {
    const Constants c = job->c;
    float *master = job->weight, *exp_avg = job->exp_avg, *exp_avg_sq = job->exp_avg_sq;
    uint16_t *high = job->weight;
    int16_t *low = job->low;
    const float *grad32 = job->grad;
    const uint16_t *grad16 = job->grad;
    const int from_grad = c.lerp_from_grad;
#pragma omp simd
    for (int64_t i = begin; i < end; i++) {
        float w = split ? as_float(join_halves(high[i], low[i])) : master[i];
        float g = (bf16 ? as_float((uint32_t)grad16[i] << 16) : grad32[i]) * c.grad_scale;
        if (coupled) g = FMA(w, c.coupled, g);
        else w *= c.decay;
        float m = exp_avg[i];
        m = FMA(c.lerp, g - m, from_grad ? g : m);
        float v = FMA(c.one_minus_beta2 * g, g, exp_avg_sq[i] * c.beta2);
        w += (c.minus_step_size * m) / (sqrtf(v) / c.correction2_sqrt + c.eps);
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
        if (split) {
            uint32_t bits = as_bits(w);
            high[i] = high_half(bits);
            low[i] = low_half(bits);
        } else {
            master[i] = w;
        }
    }
}

static void update_kind(const Job *job, int64_t begin, int64_t end, int64_t kind) {
    switch (kind) {
        case 0: update(job, begin, end, 0, 0, 0); break;
        case 1: update(job, begin, end, 1, 0, 0); break;
        case 2: update(job, begin, end, 0, 1, 0); break;
        case 3: update(job, begin, end, 1, 1, 0); break;
        case 4: update(job, begin, end, 0, 0, 1); break;
        case 5: update(job, begin, end, 1, 0, 1); break;
        case 6: update(job, begin, end, 0, 1, 1); break;
        default: update(job, begin, end, 1, 1, 1); break;
    }
}

/* Elements per unit of work: a few units per thread so that a busy core does not hold up the rest,
 * a multiple of 64 so that no cache line is shared. */
INLINE int64_t unit_size(int64_t n, int64_t threads) {
    int64_t unit = n / (4 * MAX(threads, 1));
    return MIN(MAX(unit, 4096), 262144) / 64 * 64;
}

/* `low` is NULL where the weight is whole. Bits of `kind`: 0 split, 1 bf16 gradient, 2 Adam instead
 * of AdamW, 3 maximise. */
void mc_adam(int64_t n, void *weight, int16_t *low, float *exp_avg, float *exp_avg_sq,
             const void *grad, const Hyper *hyper, int64_t kind, int64_t threads) {
    const Job job = {weight, low, exp_avg, exp_avg_sq, grad, constants_of(hyper, kind >> 3 & 1)};
    kind &= hyper->weight_decay != 0 ? 7 : 3; /* no decay: no 0 * weight in the gradient */
    const int64_t unit = unit_size(n, threads), units = (n + unit - 1) / unit;
#pragma omp parallel for schedule(dynamic) num_threads((int)MAX(1, MIN(threads, units)))
    for (int64_t u = 0; u < units; u++) {
#if defined(__x86_64__)
        unsigned mode = _mm_getcsr(); /* denormals and rounding as IEEE says, on every thread */
        _mm_setcsr(0x1f80);
#endif
        update_kind(&job, u * unit, MIN(n, (u + 1) * unit), kind);
#if defined(__x86_64__)
        _mm_setcsr(mode);
#endif
    }
}

void mc_split(int64_t n, const uint32_t *bits, uint16_t *high, int16_t *low, int64_t threads) {
#pragma omp parallel for simd num_threads((int)MAX(1, MIN(threads, n / 4096)))
    for (int64_t i = 0; i < n; i++) {
        high[i] = high_half(bits[i]);
        low[i] = low_half(bits[i]);
    }
}

void mc_join(int64_t n, const uint16_t *high, const int16_t *low, uint32_t *bits, int64_t threads) {
#pragma omp parallel for simd num_threads((int)MAX(1, MIN(threads, n / 4096)))
    for (int64_t i = 0; i < n; i++) bits[i] = join_halves(high[i], low[i]);
}

/* 64 bytes past the cache, to an address that is a multiple of 64; 0 where the compiler cannot. */
#if defined(__AVX512F__)
#define HAS_STREAM 1
INLINE void stream64(char *to, const char *from) {
    _mm512_stream_si512((void *)to, _mm512_loadu_si512((const void *)from));
}
#elif defined(__x86_64__)
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

int mc_has_threads(void) {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}
