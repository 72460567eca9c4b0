/* Coding of moments in plain loops, and what the coded kernels share. See adam_coded.c. BITS is 8 or 4.
 *
 * A dynamic book is piecewise linear, so the nearest code needs no search. With the rank q of a
 * code (its distance from zero's, plus one in the unsigned book), decade d holds the ranks of one
 * power of two, evenly spaced: q(x) = slope[d] * x + base[d]. The slopes fall from decade to decade
 * and neighbouring lines meet at their common edge, so q(x) is the least of all lines; only the
 * midpoint between two decades lies beyond that edge, at 0.2 of the upper decade's first bin. */
#ifndef MEGACOMPILE_HOST_ADAM_CODED_H
#define MEGACOMPILE_HOST_ADAM_CODED_H
#include "adam.h"

/* BLOCK: elements per scale. A dynamic book has SIZE codes in DECADES. */
enum { BLOCK = BITS == 8 ? 256 : 128, SIZE = BITS == 8 ? 256 : 16, DECADES = BITS == 8 ? 7 : 3 };

typedef struct {
    float value[SIZE];
    float slope[DECADES], base[DECADES]; /* per decade: rank = slope * magnitude + base */
    int zero;                            /* the code of 0 */
    float gap, top;                      /* see rank_of; above top comes the code of 1 */
} Dynamic;

typedef struct {
    uint8_t *codes;
    float *scales;
} Moment;

typedef struct {
    void *weight;
    int16_t *low;
    Moment first, second;
    const void *grad;
    Constants c;
    Dynamic books[2]; /* of the first and the second moment; 4 bits use books[1].value alone */
} Job;

static Dynamic dynamic_of(const double *book, int is_signed) {
    Dynamic d = {.zero = is_signed ? SIZE / 2 - 1 : 0};
    for (int i = 0; i < SIZE; i++) d.value[i] = (float)book[i];
    for (int k = 0; k < DECADES; k++) {
        const double bins = ldexp(1, is_signed ? k : k + 1), unit = pow(10, k + 1 - DECADES);
        d.slope[k] = (float)(bins / (0.9 * unit));
        d.base[k] = (float)(bins - bins * 0.1 / 0.9);
    }
    /* between 0 and the first code: at half of that, which is less than 0.2 of its bin */
    const double first = book[d.zero + 1], rank = is_signed ? 1 : 2;
    d.gap = (float)((first / 2 * d.slope[0] + d.base[0] - rank) / rank);
    d.top = (float)((book[SIZE - 1] + book[SIZE - 2]) / 2);
    return d;
}

INLINE void decode(const uint8_t *codes, float scale, const Dynamic *d, int n, float *out) {
    for (int i = 0; i < n; i++) {
        const int code = BITS == 8 ? codes[i] : codes[i / 2] >> (4 * (i & 1)) & 15;
        out[i] = d->value[code] * scale;
    }
}

/* The scale of a block whose largest magnitude has these bits (as integers, NaN is above infinity),
 * and what to multiply by: 0 where all its codes are those of zero. */
INLINE float scale_of(uint32_t most, float *inverse) {
    const int finite = most < 0x7f800000u, normal = most >= 0x00800000u;
    *inverse = finite && normal ? 1 / as_float(most) : 0;
    return finite ? (normal ? as_float(most) : 0) : INFINITY;
}

INLINE uint32_t most_of(const float *x, int n) {
    uint32_t most = 0;
#pragma omp simd reduction(max : most)
    for (int i = 0; i < n; i++) {
        const uint32_t bits = as_bits(x[i]) & 0x7fffffffu;
        most = most > bits ? most : bits;
    }
    return most;
}

/* The rank of the nearest code of a magnitude, 1 excluded: its bin in the least of all lines, or,
 * just above a power of two, where the code below is still nearer, one less. */
INLINE float rank_of(float magnitude, const Dynamic *d) {
    float q = FMA(magnitude, d->slope[0], d->base[0]);
    for (int k = 1; k < DECADES; k++) q = MIN(q, FMA(magnitude, d->slope[k], d->base[k]));
    const float power = as_float(as_bits(q) & 0x7f800000u);
    const float gap = MIN(0.2f, power * d->gap);
    return q - power <= gap ? q - 1 : q;
}

INLINE void encode_dynamic(const float *x, float inverse, const Dynamic *d, int n, uint8_t *codes,
                           int is_signed) {
#pragma omp simd
    for (int i = 0; i < n; i++) {
        const float y = x[i] * inverse;
        const int rank = (int)rank_of(is_signed ? fabsf(y) : y, d);
        const int offset = (is_signed && y < 0 ? -rank : rank) + (y > d->top);
        codes[i] = (uint8_t)(offset + (is_signed ? d->zero : -1));
    }
}

/* (i + 1) / 16 for i = 0 ... 15: as many codes above as midpoints at or above 16 x. */
INLINE void encode_linear4(const float *x, float inverse, int n, uint8_t *codes) {
#pragma omp simd
    for (int i = 0; i < n; i++) {
        const int code = 15 - (int)(16.5f - 16 * (x[i] * inverse));
        codes[i] = (uint8_t)MAX(code, 0);
    }
}

INLINE void pack4(const uint8_t *codes, int n, uint8_t *packed) {
    for (int i = 0; i < n / 2; i++) packed[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
}

#endif
