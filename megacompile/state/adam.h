/* Host AdamW: what its kernels share. The arithmetic of one step on a range of elements, the two
 * halves of a weight, and the cutting of arrays into units of work. See adam.c. */
#ifndef MEGACOMPILE_HOST_ADAM_H
#define MEGACOMPILE_HOST_ADAM_H
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <emmintrin.h>
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
    float coupled;      /* Adam: weight_decay, times the weight added to the gradient; else 0 */
    float lerp;         /* 1 - beta1, or -beta1 when lerp_from_grad */
    int lerp_from_grad;
    float beta2, one_minus_beta2, correction2_sqrt, eps;
    float minus_step_size;
    int bf16;           /* the gradient's dtype */
} Constants;

/* Scalars in double, then rounded once to float, as torch does. */
static Constants constants_of(const Hyper *h, int bf16, int adamw, int maximize) {
    const float lerp = (float)(1 - h->beta1);
    return (Constants){
        .grad_scale = (float)(maximize ? -h->grad_scale : h->grad_scale),
        .decay = (float)(adamw ? 1 - h->lr * h->weight_decay : 1),
        .coupled = (float)(adamw ? 0 : h->weight_decay),
        .lerp = lerp < 0.5f ? lerp : lerp - 1,
        .lerp_from_grad = lerp >= 0.5f,
        .beta2 = (float)h->beta2,
        .one_minus_beta2 = (float)(1 - h->beta2),
        .correction2_sqrt = (float)sqrt(1 - pow(h->beta2, h->step)),
        .eps = (float)h->eps,
        .minus_step_size = (float)-(h->lr / (1 - pow(h->beta1, h->step))),
        .bf16 = bf16,
    };
}

INLINE float as_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
INLINE uint32_t as_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

INLINE uint32_t join_halves(uint16_t high, int16_t low) {
    return ((uint32_t)high << 16) + (uint32_t)(int32_t)low;
}
INLINE uint16_t high_half(uint32_t bits) { return (uint16_t)((bits + 0x8000u) >> 16); }
INLINE int16_t low_half(uint32_t bits) { return (int16_t)bits; } /* = bits - (high << 16) */

INLINE void step(float *weight, float *exp_avg, float *exp_avg_sq, const void *grad, int64_t n,
                 const Constants c, int bf16, int coupled) {
    const float *grad32 = grad;
    const uint16_t *grad16 = grad;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        float w = weight[i], m = exp_avg[i];
        float g = (bf16 ? as_float((uint32_t)grad16[i] << 16) : grad32[i]) * c.grad_scale;
        if (coupled) g = FMA(w, c.coupled, g);
        else w *= c.decay;
        m = FMA(c.lerp, g - m, c.lerp_from_grad ? g : m);
        float v = FMA(c.one_minus_beta2 * g, g, exp_avg_sq[i] * c.beta2);
        weight[i] = w + (c.minus_step_size * m) / (sqrtf(v) / c.correction2_sqrt + c.eps);
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
    }
}

/* One loop per kind: the flags become literals. */
static void step_kind(float *weight, float *exp_avg, float *exp_avg_sq, const void *grad,
                      int64_t begin, int64_t n, const Constants *c) {
    const float *grad32 = (const float *)grad + begin;
    const uint16_t *grad16 = (const uint16_t *)grad + begin;
    if (c->bf16 && c->coupled != 0) step(weight, exp_avg, exp_avg_sq, grad16, n, *c, 1, 1);
    else if (c->bf16) step(weight, exp_avg, exp_avg_sq, grad16, n, *c, 1, 0);
    else if (c->coupled != 0) step(weight, exp_avg, exp_avg_sq, grad32, n, *c, 0, 1);
    else step(weight, exp_avg, exp_avg_sq, grad32, n, *c, 0, 0);
}

INLINE void split_range(int64_t n, const float *from, uint16_t *high, int16_t *low) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = as_bits(from[i]);
        high[i] = high_half(bits);
        low[i] = low_half(bits);
    }
}

INLINE void join_range(int64_t n, const uint16_t *high, const int16_t *low, float *to) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) to[i] = as_float(join_halves(high[i], low[i]));
}

__attribute__((weak)) int mc_has_threads(void) { /* one of a library's files has it */
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}

/* Elements per unit of work: a few units per thread so that a busy core does not hold up the rest,
 * a multiple of 64 so that no cache line is shared. */
INLINE int64_t unit_size(int64_t n, int64_t threads) {
    int64_t unit = n / (4 * MAX(threads, 1));
    return MIN(MAX(unit, 4096), 262144) / 64 * 64;
}

#endif
