/* Muon on the host: the two passes around its iterations, over flat arrays. Built and called by muon.py.
 *
 * In:  a gradient in fp32 or bf16 and a momentum in fp32; weights as fp32, or as two 16-bit halves, and an
 *      orthogonal factor in bf16.
 * Out: the momentum, and the update in bf16; the weights. Nothing is allocated.
 * Invariant: as in adam.c; the operations are those of torch.optim.Muon, lerp and fused multiply-add. */
#include "adam.h"

enum { BLOCK = 256 };

/* To nearest, ties to even, as torch rounds. */
INLINE uint16_t bf16_of(float x) {
    const uint32_t bits = as_bits(x);
    return x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

/* torch's lerp starts from the nearer of its ends. */
typedef struct {
    float weight;
    int from_end;
} Lerp;

static Lerp lerp_of(double weight) {
    const float w = (float)weight;
    return fabsf(w) < 0.5f ? (Lerp){w, 0} : (Lerp){w - 1, 1};
}

INLINE float lerp(float start, float end, float weight, int from_end) {
    return FMA(weight, end - start, from_end ? end : start);
}

INLINE void momentum_range(int64_t n, const void *grad, float *momentum, uint16_t *update, float scale,
                           Lerp first, Lerp second, int bf16, int nesterov) {
    const float *grad32 = grad;
    const uint16_t *grad16 = grad;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const float g = (bf16 ? as_float((uint32_t)grad16[i] << 16) : grad32[i]) * scale;
        const float m = lerp(momentum[i], g, first.weight, first.from_end);
        momentum[i] = m;
        update[i] = bf16_of(nesterov ? lerp(g, m, second.weight, second.from_end) : m);
    }
}

/* `scalars`: of the gradient, the momentum. */
void mc_muon_momentum(int64_t n, const void *grad, float *momentum, uint16_t *update, const double *scalars,
                      int64_t bf16, int64_t nesterov, int64_t threads) {
    const float scale = (float)scalars[0];
    const Lerp first = lerp_of(1 - scalars[1]), second = lerp_of(scalars[1]);
    const int64_t unit = unit_size(n, threads), units = (n + unit - 1) / unit;
#pragma omp parallel for schedule(dynamic) num_threads((int)MAX(1, MIN(threads, units)))
    for (int64_t u = 0; u < units; u++) {
        const int64_t i = u * unit, count = MIN(unit, n - i);
        const char *g = (const char *)grad + i * (bf16 ? 2 : 4);
        if (bf16 && nesterov) momentum_range(count, g, momentum + i, update + i, scale, first, second, 1, 1);
        else if (bf16) momentum_range(count, g, momentum + i, update + i, scale, first, second, 1, 0);
        else if (nesterov) momentum_range(count, g, momentum + i, update + i, scale, first, second, 0, 1);
        else momentum_range(count, g, momentum + i, update + i, scale, first, second, 0, 0);
    }
}

typedef struct {
    void *weight;   /* float, or the high halves */
    int16_t *low;   /* the low halves, or NULL */
    float decay, rate;
} Step;

static void step_range(const Step *job, int64_t begin, int64_t count, const uint16_t *factor) {
    float joined[BLOCK];
    for (int64_t i = 0; i < count; i += BLOCK) {
        const int64_t n = MIN(BLOCK, count - i);
        float *weight = job->low ? joined : (float *)job->weight + begin + i;
        uint16_t *high = (uint16_t *)job->weight + begin + i;
        if (job->low) join_range(n, high, job->low + begin + i, weight);
#pragma omp simd
        for (int64_t k = 0; k < n; k++) {
            const float w = weight[k] * job->decay;
            weight[k] = FMA(as_float((uint32_t)factor[i + k] << 16), job->rate, w);
        }
        if (job->low) split_range(n, weight, high, job->low + begin + i);
    }
}

/* `scalars`: what weights are multiplied by, and the factor before it is added. `low` is NULL where the
 * weight is whole. */
void mc_muon_step(int64_t n, void *weight, int16_t *low, const uint16_t *factor, const double *scalars,
                  int64_t threads) {
    const Step job = {weight, low, (float)scalars[0], (float)scalars[1]};
    const int64_t unit = unit_size(n, threads), units = (n + unit - 1) / unit;
#pragma omp parallel for schedule(dynamic) num_threads((int)MAX(1, MIN(threads, units)))
    for (int64_t u = 0; u < units; u++) step_range(&job, u * unit, MIN(unit, n - u * unit), factor + u * unit);
}
