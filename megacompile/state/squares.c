/* The sum of squares of a flat gradient, for its norm. Built by adam.py, called by master_layout.py.
 *
 * In:  fp32 or bf16. Out: one sum in fp64 for each `unit` elements; nothing is allocated.
 * Invariant: a sum depends neither on the thread count nor on who computes it. */
#include "adam.h"

INLINE double square(const void *x, int64_t i, int bf16) {
    const double v = bf16 ? as_float((uint32_t)((const uint16_t *)x)[i] << 16) : ((const float *)x)[i];
    return v * v;
}

/* Four sums at a time, as one waits for each addition. */
INLINE double squares(const void *x, int64_t n, int bf16) {
    const int64_t part = n / 4;
    double a = 0, b = 0, c = 0, d = 0;
#pragma omp simd reduction(+ : a, b, c, d)
    for (int64_t i = 0; i < part; i++) {
        a += square(x, i, bf16);
        b += square(x, i + part, bf16);
        c += square(x, i + 2 * part, bf16);
        d += square(x, i + 3 * part, bf16);
    }
    for (int64_t i = 4 * part; i < n; i++) a += square(x, i, bf16);
    return (a + b) + (c + d);
}

void mc_squares(int64_t n, const void *x, int64_t bf16, double *sums, int64_t unit, int64_t threads) {
    const int64_t units = (n + unit - 1) / unit;
#pragma omp parallel for schedule(dynamic) num_threads((int)MAX(1, MIN(threads, units)))
    for (int64_t u = 0; u < units; u++) {
        const char *from = (const char *)x + u * unit * (bf16 ? 2 : 4);
        const int64_t count = MIN(unit, n - u * unit);
        sums[u] = bf16 ? squares(from, count, 1) : squares(from, count, 0);
    }
}
