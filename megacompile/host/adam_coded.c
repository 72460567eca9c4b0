/* Host AdamW on coded moments: decode, step, code again, in one pass. Built and called by
 * adam_coded.py, with the arithmetic of adam.h.
 *
 * In:  as adam.c, but each moment as codes with an fp32 scale per block: 8 bits by the dynamic
 *      books, or 4 bits (two codes in a byte, the even element low): first by the dynamic book,
 *      second by the linear one without zero. The books come from kernels/quantize.py.
 * Out: weights, codes and scales overwritten.
 * Invariant: blocks begin at the arrays' begin and units of work are whole blocks, so the thread
 * count changes nothing. A block whose largest magnitude is not finite gets an infinite scale; one
 * below the smallest normal number counts as zero.
 *
 * A dynamic book is piecewise linear, so the nearest code needs no search. With the rank q of a
 * code (its distance from zero's, plus one in the unsigned book), decade d holds the ranks of one
 * power of two, evenly spaced: q(x) = slope[d] * x + base[d]. The slopes fall from decade to decade
 * and neighbouring lines meet at their common edge, so q(x) is the least of all lines; only the
 * midpoint between two decades lies beyond that edge, at 0.2 of the upper decade's first bin. */
#include "adam.h"

enum { LARGEST = 256 };

typedef struct {
    float value[256];
    float slope[7], base[7]; /* per decade: rank = slope * magnitude + base */
    int decades, zero;       /* zero: the code of 0 */
    float gap, top;          /* see rank_of; above top comes the code of 1 */
#if defined(__AVX512F__)
    float near[4][16];   /* by a magnitude's exponent / 2: one or two lines that can be the least */
    float parts[4][16];  /* by a rank's exponent: a decade's values as a line in two precisions */
    float levels[4][16]; /* of 16 codes: the midpoints that a bisection compares with, by level */
#endif
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

#if defined(__AVX512F__)
/* The lines that are least somewhere in [4**j / 2, 4**j * 2): two at most, as edges are 10 apart.
 * Where zero meets the first code, at `half`, a line that has the gap of all other decades there. */
static void tabulate_lines(Dynamic *d, float half, float rank) {
    for (int j = 0; j < 16; j++) {
        const float low = ldexpf(0.5f, 2 * (j - 15)), high = 4 * low;
        int near = 0, far = 0;
        for (int k = 1; k < d->decades; k++) {
            if (d->slope[k] * low + d->base[k] < d->slope[near] * low + d->base[near]) near = k;
            if (d->slope[k] * high + d->base[k] < d->slope[far] * high + d->base[far]) far = k;
        }
        if (low <= half && half < high) {
            const float edge = (rank + 1 - d->base[0]) / d->slope[0], slope = 0.8f / (edge - half);
            d->near[0][j] = d->near[2][j] = slope;
            d->near[1][j] = d->near[3][j] = rank + 1 - slope * edge;
            continue;
        }
        d->near[0][j] = d->slope[near], d->near[1][j] = d->base[near];
        d->near[2][j] = d->slope[far], d->near[3][j] = d->base[far];
    }
}

/* value = (slope + slope_rest) * rank + base + base_rest, the first product and sum exact. */
static void tabulate_parts(Dynamic *d, const double *book, int is_signed) {
    const int size = 256, origin = is_signed ? d->zero : -1;
    for (int e = 0; e < 9; e++) {
        const int first = 1 << e, last = 2 * first - 1;
        if (origin + first >= size) break;
        const int single = first == last || origin + last >= size;
        const double begin = book[origin + first];
        const double slope = single ? 0 : (book[origin + last] - begin) / (last - first);
        const double base = begin - first * slope;
        const double grid = single ? 1e-30 : ldexp(1, ilogb(slope) - 14);
        const double coarse = floor(slope / grid) * grid, coarse_base = floor(base / grid) * grid;
        const int at = (127 + e) & 15; /* low bits of the exponent */
        d->parts[0][at] = (float)coarse;
        d->parts[1][at] = single ? (float)base : (float)coarse_base;
        d->parts[2][at] = (float)(slope - coarse);
        d->parts[3][at] = single ? 0 : (float)(base - coarse_base);
    }
}

/* At level l the code so far is a multiple of 16 >> l, and the next bit is set above the midpoint. */
static void tabulate_levels(Dynamic *d, const double *book) {
    for (int l = 0; l < 4; l++)
        for (int code = 0; code < 16; code += 16 >> l) {
            const int above = code + (8 >> l);
            d->levels[l][code] = (float)((book[above - 1] + book[above]) / 2);
        }
}
#endif

static Dynamic dynamic_of(const double *book, int size, int is_signed) {
    Dynamic d = {.decades = size == 256 ? 7 : 3, .zero = is_signed ? size / 2 - 1 : 0};
    for (int i = 0; i < size; i++) d.value[i] = (float)book[i];
    for (int k = 0; k < d.decades; k++) {
        const double bins = ldexp(1, is_signed ? k : k + 1), unit = pow(10, k + 1 - d.decades);
        d.slope[k] = (float)(bins / (0.9 * unit));
        d.base[k] = (float)(bins - bins * 0.1 / 0.9);
    }
    /* between 0 and the first code: at half of that, which is less than 0.2 of its bin */
    const double first = book[d.zero + 1], rank = is_signed ? 1 : 2;
    d.gap = (float)((first / 2 * d.slope[0] + d.base[0] - rank) / rank);
    d.top = (float)((book[size - 1] + book[size - 2]) / 2);
#if defined(__AVX512F__)
    if (size == 16) tabulate_levels(&d, book);
    else tabulate_lines(&d, (float)(first / 2), (float)rank), tabulate_parts(&d, book, is_signed);
#endif
    return d;
}

/* ---- decode ---- */

#if defined(__AVX512F__)
INLINE __m512 value_of(__m512i codes, const Dynamic *d, int is_signed) {
    const __m512i offset = _mm512_sub_epi32(codes, _mm512_set1_epi32(is_signed ? d->zero : -1));
    const __m512i rank = is_signed ? _mm512_abs_epi32(offset) : offset;
    const __m512 q = _mm512_cvtepi32_ps(rank);
    const __m512i e = _mm512_srli_epi32(_mm512_castps_si512(q), 23);
#define PART(i) _mm512_permutexvar_ps(e, _mm512_loadu_ps(d->parts[i]))
    const __m512 fine = _mm512_fmadd_ps(q, PART(2), PART(3));
    __m512 value = _mm512_add_ps(_mm512_fmadd_ps(q, PART(0), PART(1)), fine);
#undef PART
    if (!is_signed) return value;
    const __mmask16 negative = _mm512_cmplt_epi32_mask(offset, _mm512_setzero_si512());
    value = _mm512_maskz_mov_ps(_mm512_test_epi32_mask(rank, rank), value);
    return _mm512_mask_sub_ps(value, negative, _mm512_setzero_ps(), value);
}
#endif

INLINE void decode8(const uint8_t *codes, float scale, const Dynamic *d, int n, float *out,
                    int is_signed) {
    int i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16) {
        const __m512i c = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(codes + i)));
        const __m512 value = value_of(c, d, is_signed);
        _mm512_storeu_ps(out + i, _mm512_mul_ps(value, _mm512_set1_ps(scale)));
    }
#endif
    for (; i < n; i++) out[i] = d->value[codes[i]] * scale;
}

INLINE void decode4(const uint8_t *codes, float scale, const float *book, int n, float *out) {
    int i = 0;
#if defined(__AVX512F__)
    const __m512 table = _mm512_mul_ps(_mm512_loadu_ps(book), _mm512_set1_ps(scale));
    for (; i + 16 <= n; i += 16) {
        const __m128i pairs = _mm_loadl_epi64((const __m128i *)(codes + i / 2));
        const __m128i high = _mm_srli_epi16(pairs, 4); /* what crosses bytes is not looked at */
        const __m512i c = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(pairs, high));
        _mm512_storeu_ps(out + i, _mm512_permutexvar_ps(c, table)); /* by the low four bits */
    }
#endif
    for (; i < n; i++) out[i] = book[codes[i / 2] >> (4 * (i & 1)) & 15] * scale;
}

/* ---- code ---- */

/* The scale of a block, and what to multiply by: 0 where all its codes are those of zero. */
INLINE float scale_of(const float *x, int n, float *inverse) {
    uint32_t most = 0; /* as integers, NaN is above infinity */
#pragma omp simd reduction(max : most)
    for (int i = 0; i < n; i++) {
        const uint32_t bits = as_bits(x[i]) & 0x7fffffffu;
        most = most > bits ? most : bits;
    }
    const int finite = most < 0x7f800000u, normal = most >= 0x00800000u;
    *inverse = finite && normal ? 1 / as_float(most) : 0;
    return finite ? (normal ? as_float(most) : 0) : INFINITY;
}

/* The rank of the nearest code of a magnitude, 1 excluded: its bin in the least of all lines, or,
 * just above a power of two, where the code below is still nearer, one less. */
INLINE float rank_of(float magnitude, const Dynamic *d, int decades) {
    float q = FMA(magnitude, d->slope[0], d->base[0]);
    for (int k = 1; k < decades; k++) q = MIN(q, FMA(magnitude, d->slope[k], d->base[k]));
    const float power = as_float(as_bits(q) & 0x7f800000u);
    const float gap = MIN(0.2f, power * d->gap);
    return q - power <= gap ? q - 1 : q;
}

#if defined(__AVX512F__)
INLINE __m512i ranks_of(__m512 x, const Dynamic *d) {
    const __m512 least = _mm512_set1_ps(0x1p-31f);
    const __m512 magnitude = _mm512_max_ps(_mm512_abs_ps(x), least);
    const __m512i e = _mm512_srli_epi32(_mm512_castps_si512(magnitude), 24);
#define NEAR(i) _mm512_permutexvar_ps(e, _mm512_loadu_ps(d->near[i]))
    __m512 q = _mm512_min_ps(_mm512_fmadd_ps(magnitude, NEAR(0), NEAR(1)),
                             _mm512_fmadd_ps(magnitude, NEAR(2), NEAR(3)));
#undef NEAR
    const __m512i exponent = _mm512_and_epi32(_mm512_castps_si512(q), _mm512_set1_epi32(0x7f800000));
    const __m512 power = _mm512_castsi512_ps(exponent);
    const __m512 gap = _mm512_set1_ps(0.2f);
    const __mmask16 below = _mm512_cmp_ps_mask(_mm512_sub_ps(q, power), gap, _CMP_LE_OQ);
    return _mm512_cvttps_epi32(_mm512_mask_sub_ps(q, below, q, _mm512_set1_ps(1)));
}
#endif

#if defined(__AVX512F__)
/* The codes of whole vectors of the 16-code book; returns how many. */
INLINE int bisect4(const float *x, float inverse, const Dynamic *d, int n, uint8_t *codes) {
    const __m512 middle = _mm512_set1_ps(d->levels[0][0]);
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m512 y = _mm512_mul_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(inverse));
        __mmask16 above = _mm512_cmp_ps_mask(y, middle, _CMP_GT_OQ);
        __m512i code = _mm512_maskz_set1_epi32(above, 8);
        for (int l = 1; l < 4; l++) {
            const __m512 at = _mm512_permutexvar_ps(code, _mm512_loadu_ps(d->levels[l]));
            above = _mm512_cmp_ps_mask(y, at, _CMP_GT_OQ);
            code = _mm512_mask_add_epi32(code, above, code, _mm512_set1_epi32(8 >> l));
        }
        _mm_storeu_si128((__m128i *)(codes + i), _mm512_cvtepi32_epi8(code));
    }
    return i;
}
#endif

INLINE void encode_dynamic(const float *x, float inverse, const Dynamic *d, int n, uint8_t *codes,
                           int decades, int is_signed) {
    int i = 0;
#if defined(__AVX512F__)
    if (decades == 3) i = bisect4(x, inverse, d, n, codes);
    const __m512i zero = _mm512_set1_epi32(is_signed ? d->zero : -1);
    for (; i + 16 <= n; i += 16) {
        const __m512 y = _mm512_mul_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(inverse));
        __m512i rank = ranks_of(y, d);
        const __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(y));
        if (is_signed) rank = _mm512_mask_sub_epi32(rank, negative, _mm512_setzero_si512(), rank);
        const __mmask16 one = _mm512_cmp_ps_mask(y, _mm512_set1_ps(d->top), _CMP_GT_OQ);
        rank = _mm512_mask_add_epi32(rank, one, rank, _mm512_set1_epi32(1));
        _mm_storeu_si128((__m128i *)(codes + i), _mm512_cvtepi32_epi8(_mm512_add_epi32(rank, zero)));
    }
#endif
#pragma omp simd
    for (int k = i; k < n; k++) {
        const float y = x[k] * inverse;
        const int rank = (int)rank_of(is_signed ? fabsf(y) : y, d, decades);
        const int offset = (is_signed && y < 0 ? -rank : rank) + (y > d->top);
        codes[k] = (uint8_t)(offset + (is_signed ? d->zero : -1));
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

INLINE void decode(const Job *job, int64_t begin, int n, int bits, float *first, float *second) {
    const int64_t block = begin / (bits == 8 ? 256 : 128), at = bits == 8 ? begin : begin / 2;
    const float s1 = job->first.scales[block], s2 = job->second.scales[block];
    if (bits == 8) {
        decode8(job->first.codes + at, s1, &job->books[0], n, first, 1);
        decode8(job->second.codes + at, s2, &job->books[1], n, second, 0);
    } else {
        decode4(job->first.codes + at, s1, job->books[0].value, n, first);
        decode4(job->second.codes + at, s2, job->books[1].value, n, second);
    }
}

INLINE void encode(const Job *job, int64_t begin, int n, int bits, int second, const float *x) {
    const int64_t block = begin / (bits == 8 ? 256 : 128), at = bits == 8 ? begin : begin / 2;
    const Moment *moment = second ? &job->second : &job->first;
    const Dynamic *book = &job->books[second];
    uint8_t unpacked[LARGEST], *codes = bits == 8 ? moment->codes + at : unpacked;
    float inverse;
    moment->scales[block] = scale_of(x, n, &inverse);
    if (inverse == 0) memset(codes, bits == 4 && second ? 0 : book->zero, (size_t)n);
    else if (bits == 8 && second) encode_dynamic(x, inverse, book, n, codes, 7, 0);
    else if (bits == 8) encode_dynamic(x, inverse, book, n, codes, 7, 1);
    else if (second) encode_linear4(x, inverse, n, codes);
    else encode_dynamic(x, inverse, book, n, codes, 3, 1);
    if (bits == 4) pack4(codes, n, moment->codes + at);
}

INLINE void update(const Job *job, int64_t begin, int64_t end, int bits) {
    float joined[LARGEST], first[LARGEST], second[LARGEST];
    const int64_t size = bits == 8 ? 256 : 128;
    for (int64_t i = begin; i < end; i += size) {
        const int n = (int)MIN(size, end - i);
        float *weight = job->low ? joined : (float *)job->weight + i;
        uint16_t *high = (uint16_t *)job->weight + i;
        if (job->low) join_range(n, high, job->low + i, weight);
        decode(job, i, n, bits, first, second);
        step_kind(weight, first, second, job->grad, i, n, &job->c);
        if (job->low) split_range(n, weight, high, job->low + i);
        encode(job, i, n, bits, 0, first);
        encode(job, i, n, bits, 1, second);
    }
}

/* One loop per number of bits, which thus become literals. */
static void update8(const Job *job, int64_t begin, int64_t end) { update(job, begin, end, 8); }
static void update4(const Job *job, int64_t begin, int64_t end) { update(job, begin, end, 4); }

/* `low` is NULL where the weight is whole; 4-bit arrays have an even number of elements. */
void mc_adam_coded(int64_t n, void *weight, int16_t *low, uint8_t *first, float *first_scales,
                   uint8_t *second, float *second_scales, const double *first_book,
                   const double *second_book, const void *grad, const Hyper *h, int64_t bits,
                   int64_t bf16, int64_t adamw, int64_t maximize, int64_t threads) {
    Job job = {weight, low, {first, first_scales}, {second, second_scales}, grad,
               constants_of(h, (int)bf16, (int)adamw, (int)maximize), {{.decades = 0}}};
    job.books[0] = dynamic_of(first_book, bits == 8 ? 256 : 16, 1);
    if (bits == 8) job.books[1] = dynamic_of(second_book, 256, 0);
    else for (int i = 0; i < 16; i++) job.books[1].value[i] = (float)second_book[i];
    const int64_t unit = unit_size(n, threads) / 256 * 256, units = (n + unit - 1) / unit;
#pragma omp parallel for schedule(dynamic) num_threads((int)MAX(1, MIN(threads, units)))
    for (int64_t u = 0; u < units; u++) {
#if defined(__x86_64__)
        unsigned mode = _mm_getcsr();
        _mm_setcsr(0x1f80);
#endif
        (bits == 8 ? update8 : update4)(&job, u * unit, MIN(n, (u + 1) * unit));
#if defined(__x86_64__)
        _mm_setcsr(mode);
#endif
    }
}
