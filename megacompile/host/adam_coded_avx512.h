/* The coded step on whole blocks where the CPU has AVX-512 with byte permutations (Ice Lake, Zen 4
 * and later); elsewhere update_blocks leaves all to the plain loops. See adam_coded.c.
 *
 * In:  a job, begin and end of a unit of work; tables of the books.
 * Out: weights, codes and scales of the whole blocks, and where they end.
 * Invariant: values are those of the plain loops bit for bit, codes too but for ties.
 *
 * The codes of a block wait for its scale, so they are made while the next block takes its step,
 * whose divisions leave most of the core idle; for the same reason weights follow their moments one
 * chunk later. Chunks of 64 elements, four vectors whose instructions alternate, as a core looks
 * only so far ahead. `lanes` transposes 4 by 4 dwords, since packing and unpacking work within 16
 * bytes. On one core of a Zen 4: 0.88 ns per parameter in 8 bits and 0.70 in 4, where AVX-512 step
 * by step took 1.56 and 1.07 and moments in fp32 take 0.52. */
#if defined(__AVX512VBMI__) && defined(__AVX512DQ__) && defined(__AVX512BW__)
#define EACH _Pragma("GCC unroll 4") for (int k = 0; k < 4; k++)

typedef struct {
    _Alignas(64) uint8_t plane[4][256]; /* byte b of each code's value */
    _Alignas(64) float value[16];       /* of 16 codes */
    /* By a magnitude's exponent / 2: where the second line begins, and both lines of ranks,
     * min(slope * magnitude + base, cap), the second first. */
    _Alignas(64) float edge[16], slope[32], base[32], cap[32];
    __m512i zero; /* 32 times the code of 0 */
} Tables;

typedef struct {
    Tables books[2];
    __m512 grad_scale, decay, lerp, beta2, one_minus_beta2, correction2_sqrt, eps, minus_step_size;
} Wide;

/* The ranks of one decade, or of one of the two ends, where they are constant. */
typedef struct {
    double edge, slope, base, cap;
} Line;

/* At most one edge lies between 4**j / 2 and 4**j * 2, as edges are 5 apart or more. */
static void tabulate_lines(Tables *t, const Line *lines, int count) {
    for (int j = 0; j < 16; j++) {
        const double low = ldexp(0.5, 2 * (j - 15));
        int first = 0;
        while (first + 1 < count && lines[first + 1].edge <= low) first++;
        const int next = first + 1 < count && lines[first + 1].edge < 4 * low;
        t->edge[j] = next ? (float)lines[first + 1].edge : INFINITY;
        for (int k = 0; k < 2; k++) {
            const Line *line = &lines[first + (next && k == 0)];
            t->slope[16 * k + j] = (float)line->slope;
            t->base[16 * k + j] = (float)line->base;
            t->cap[16 * k + j] = (float)line->cap;
        }
    }
}

static Tables tables_of(const double *book, int size, int is_signed) {
    const int decades = size == 256 ? 7 : 3, zero = is_signed ? size / 2 - 1 : 0, top = size - 1 - zero;
    Tables t = {.zero = _mm512_set1_epi16((short)zero)};
    Line lines[9] = {{0, 0, 0.5, 1}};
    for (int k = 0; k < decades; k++) {
        const double bins = ldexp(1, is_signed ? k : k + 1), unit = pow(10, k + 1 - decades);
        const int rank = (int)bins - !is_signed; /* of the decade's first code, from zero's */
        const double *code = book + zero + rank;
        lines[k + 1] = (Line){(code[0] + code[-1]) / 2, bins / (0.9 * unit), rank - bins * 0.1 / 0.9,
                              rank + bins - 0.5};
    }
    lines[decades + 1] = (Line){(book[size - 1] + book[size - 2]) / 2, 0, top + 0.5, top + 1};
    tabulate_lines(&t, lines, decades + 2);
    for (int i = 0; i < size; i++)
        for (int b = 0; b < 4; b++) t.plane[b][i] = (uint8_t)(as_bits((float)book[i]) >> 8 * b);
    for (int i = 0; i < 16; i++) t.value[i] = (float)book[i];
    return t;
}

static Wide wide_of(const Job *job, const double *first_book, const double *second_book, int bits) {
    const int size = bits == 8 ? 256 : 16;
#define ALL(x) .x = _mm512_set1_ps(job->c.x)
    return (Wide){.books = {tables_of(first_book, size, 1), tables_of(second_book, size, 0)},
                  ALL(grad_scale), ALL(decay), ALL(lerp), ALL(beta2), ALL(one_minus_beta2),
                  ALL(correction2_sqrt), ALL(eps), ALL(minus_step_size)};
#undef ALL
}

INLINE __m512i lanes(__m512i x) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, x);
}

/* ---- 16-bit halves, 32 at a time ---- */

/* In the order in which unpacking puts them in theirs. */
INLINE __m512i load_halves(const void *from) {
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    return _mm512_permutexvar_epi64(order, _mm512_loadu_si512(from));
}

INLINE void unpack_halves(__m512i low, __m512i high, __m512 *to) {
    to[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(low, high));
    to[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(low, high));
}

/* What a negative low half borrows is taken off the high one. */
INLINE void join_32(const uint16_t *high, const int16_t *low, __m512 *to) {
    const __m512i l = load_halves(low);
    unpack_halves(l, _mm512_add_epi16(load_halves(high), _mm512_srai_epi16(l, 15)), to);
}

INLINE void split_32(const __m512 *from, uint16_t *high, int16_t *low) {
    static const uint16_t EVEN[32] __attribute__((aligned(64))) = {
        0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
        32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
    const __m512i even = _mm512_load_si512(EVEN), odd = _mm512_add_epi16(even, _mm512_set1_epi16(1));
    const __m512i a = _mm512_castps_si512(from[0]), b = _mm512_castps_si512(from[1]);
    const __m512i l = _mm512_permutex2var_epi16(a, even, b), h = _mm512_permutex2var_epi16(a, odd, b);
    _mm512_storeu_si512(low, l);
    _mm512_storeu_si512(high, _mm512_sub_epi16(h, _mm512_srai_epi16(l, 15)));
}

INLINE void load_32(const void *from, int64_t at, int bf16, __m512 *to) {
    if (bf16) unpack_halves(_mm512_setzero_si512(), load_halves((const uint16_t *)from + at), to);
    else for (int k = 0; k < 2; k++) to[k] = _mm512_loadu_ps((const float *)from + at + 16 * k);
}

/* ---- codes, 64 at a time ---- */

INLINE __m512i look_up(__m512i codes, const uint8_t *table) {
    const __m512i *t = (const __m512i *)table;
    const __m512i low = _mm512_permutex2var_epi8(t[0], codes, t[1]);
    const __m512i high = _mm512_permutex2var_epi8(t[2], codes, t[3]);
    return _mm512_mask_mov_epi8(low, _mm512_movepi8_mask(codes), high);
}

INLINE void decode8_64(const uint8_t *codes, float scale, const Tables *t, __m512 *value) {
    const __m512i at = lanes(_mm512_loadu_si512(codes));
    __m512i p[4];
    EACH p[k] = look_up(at, t->plane[k]);
    const __m512i low[2] = {_mm512_unpacklo_epi8(p[0], p[1]), _mm512_unpackhi_epi8(p[0], p[1])};
    const __m512i high[2] = {_mm512_unpacklo_epi8(p[2], p[3]), _mm512_unpackhi_epi8(p[2], p[3])};
    unpack_halves(low[0], high[0], value);
    unpack_halves(low[1], high[1], value + 2);
    EACH value[k] = _mm512_mul_ps(value[k], _mm512_set1_ps(scale));
}

/* The permutation reads the low four bits of a lane. */
INLINE void decode4_64(const uint8_t *codes, float scale, const Tables *t, __m512 *value) {
    const __m512 table = _mm512_mul_ps(_mm512_load_ps(t->value), _mm512_set1_ps(scale));
    EACH {
        const __m512i pairs = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const void *)(codes + 8 * k)));
        const __m512i at = _mm512_or_si512(pairs, _mm512_slli_epi64(pairs, 28));
        value[k] = _mm512_permutexvar_ps(at, table);
    }
}

/* Ranks of 64 values from zero's code, by a dynamic book; those of negative values are negative. */
INLINE void rank_64(const float *x, __m512 inverse, const Tables *t, int is_signed, __m512i *rank) {
    const __m512 least = _mm512_set1_ps(0x1p-31f), minus = _mm512_set1_ps(-0.0f);
    __m512 y[4], magnitude[4], edge[4], line[4];
    __m512i at[4]; /* the upper half of a table is the first line's: an exponent / 2 is 48 ... 63 */
    __mmask16 second[4];
    EACH y[k] = _mm512_mul_ps(_mm512_load_ps(x + 16 * k), inverse);
    EACH magnitude[k] = is_signed ? _mm512_range_ps(y[k], least, 0xb) : _mm512_max_ps(y[k], least);
    EACH at[k] = _mm512_srli_epi32(_mm512_castps_si512(magnitude[k]), 24);
    EACH edge[k] = _mm512_permutexvar_ps(at[k], _mm512_load_ps(t->edge));
    EACH second[k] = _mm512_cmp_ps_mask(magnitude[k], edge[k], _CMP_GT_OQ);
    EACH at[k] = _mm512_mask_xor_epi32(at[k], second[k], at[k], _mm512_set1_epi32(16));
#define OF(x) _mm512_permutex2var_ps(_mm512_load_ps(t->x), at[k], _mm512_load_ps(t->x + 16))
    EACH line[k] = _mm512_fmadd_ps(magnitude[k], OF(slope), OF(base));
    EACH line[k] = _mm512_min_ps(line[k], OF(cap));
#undef OF
    if (is_signed) EACH line[k] = _mm512_or_ps(line[k], _mm512_and_ps(y[k], minus));
    EACH rank[k] = _mm512_cvttps_epi32(line[k]);
}

/* As encode_linear4. */
INLINE __m512i linear_ranks_of(__m512 x, __m512 inverse) {
    const __m512 y = _mm512_mul_ps(x, inverse);
    const __m512 above = _mm512_fnmadd_ps(_mm512_set1_ps(16), y, _mm512_set1_ps(16.5f));
    return _mm512_sub_epi32(_mm512_set1_epi32(15), _mm512_cvttps_epi32(above));
}

/* Saturation gives -1, which has no code, that above it. */
INLINE void store_codes(const __m512i *rank, const Tables *t, int is_signed, int bits, uint8_t *codes) {
    __m512i low = _mm512_packs_epi32(rank[0], rank[1]), high = _mm512_packs_epi32(rank[2], rank[3]);
    if (is_signed) low = _mm512_add_epi16(low, t->zero), high = _mm512_add_epi16(high, t->zero);
    const __m512i bytes = lanes(_mm512_packus_epi16(low, high));
    const __m512i pairs = _mm512_maddubs_epi16(bytes, _mm512_set1_epi16(0x1001));
    if (bits == 8) _mm512_storeu_si512(codes, bytes);
    else _mm256_storeu_si256((__m256i *)codes, _mm512_cvtepi16_epi8(pairs));
}

/* ---- the step ---- */

/* Moments of two blocks: one that takes its step, and the one before it that is coded. */
typedef struct {
    _Alignas(64) float first[2 * LARGEST], second[2 * LARGEST], root[2 * LARGEST];
    float inverse[2]; /* of the block that is coded */
    __m512i most[2];  /* of the other one's magnitudes, as bits */
} Waiting;

INLINE void moments_16(__m512 *first, __m512 *second, __m512 grad, const Wide *c) {
    const __m512 g = _mm512_mul_ps(grad, c->grad_scale), new = _mm512_mul_ps(c->one_minus_beta2, g);
    *first = _mm512_fmadd_ps(c->lerp, _mm512_sub_ps(g, *first), *first);
    *second = _mm512_fmadd_ps(new, g, _mm512_mul_ps(*second, c->beta2));
}

/* The moments from `begin` on, at `place` of what waits, and the roots that the weights need. */
INLINE void step_moments(const Job *job, const Wide *wide, int64_t begin, int bits, Waiting *w, int place) {
    const int64_t block = begin / block_of(bits), at = begin * bits / 8;
    const float scale1 = job->first.scales[block], scale2 = job->second.scales[block];
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512i most1 = w->most[0], most2 = w->most[1];
    __m512 m[4], v[4], grad[4];
    (bits == 8 ? decode8_64 : decode4_64)(job->first.codes + at, scale1, &wide->books[0], m);
    (bits == 8 ? decode8_64 : decode4_64)(job->second.codes + at, scale2, &wide->books[1], v);
    load_32(job->grad, begin, job->c.bf16, grad);
    load_32(job->grad, begin + 32, job->c.bf16, grad + 2);
    EACH moments_16(m + k, v + k, grad[k], wide);
    EACH _mm512_store_ps(w->first + place + 16 * k, m[k]);
    EACH _mm512_store_ps(w->second + place + 16 * k, v[k]);
    EACH _mm512_store_ps(w->root + place + 16 * k, _mm512_sqrt_ps(v[k]));
    EACH most1 = _mm512_max_epu32(most1, _mm512_and_si512(_mm512_castps_si512(m[k]), magnitude));
    EACH most2 = _mm512_max_epu32(most2, _mm512_and_si512(_mm512_castps_si512(v[k]), magnitude));
    w->most[0] = most1, w->most[1] = most2;
}

INLINE void step_weights(const Job *job, const Wide *c, int64_t begin, const Waiting *w, int place) {
    uint16_t *high = (uint16_t *)job->weight + begin;
    float *whole = (float *)job->weight + begin;
    int16_t *low = job->low ? job->low + begin : NULL;
    __m512 divisor[4], change[4], weight[4];
    EACH divisor[k] = _mm512_div_ps(_mm512_load_ps(w->root + place + 16 * k), c->correction2_sqrt);
    EACH divisor[k] = _mm512_add_ps(divisor[k], c->eps);
    EACH change[k] = _mm512_mul_ps(c->minus_step_size, _mm512_load_ps(w->first + place + 16 * k));
    EACH change[k] = _mm512_div_ps(change[k], divisor[k]);
    if (low) join_32(high, low, weight), join_32(high + 32, low + 32, weight + 2);
    else EACH weight[k] = _mm512_loadu_ps(whole + 16 * k);
    EACH weight[k] = _mm512_add_ps(_mm512_mul_ps(weight[k], c->decay), change[k]);
    if (low) split_32(weight, high, low), split_32(weight + 2, high + 32, low + 32);
    else EACH _mm512_storeu_ps(whole + 16 * k, weight[k]);
}

INLINE void encode_64(const Job *job, const Wide *wide, int64_t begin, int bits, int second,
                      const Waiting *w, int place) {
    const Moment *moment = second ? &job->second : &job->first;
    const float *x = (second ? w->second : w->first) + place;
    const __m512 inverse = _mm512_set1_ps(w->inverse[second]);
    const Tables *t = &wide->books[second];
    __m512i rank[4];
    if (bits == 8 || !second) rank_64(x, inverse, t, !second, rank);
    else EACH rank[k] = linear_ranks_of(_mm512_load_ps(x + 16 * k), inverse);
    store_codes(rank, t, !second, bits, moment->codes + begin * bits / 8);
}

/* All of a block has taken its step: its scales. */
INLINE void close_block(const Job *job, int64_t block, Waiting *w) {
    job->first.scales[block] = scale_of(_mm512_reduce_max_epu32(w->most[0]), &w->inverse[0]);
    job->second.scales[block] = scale_of(_mm512_reduce_max_epu32(w->most[1]), &w->inverse[1]);
    w->most[0] = w->most[1] = _mm512_setzero_si512();
}

/* Where whole blocks end: those before it are done. Rare kinds of step are left to the plain loops. */
INLINE int64_t update_blocks(const Job *job, const Wide *wide, int64_t begin, int64_t end, int bits) {
    if (job->c.coupled != 0 || job->c.lerp_from_grad) return begin;
    const int size = block_of(bits);
    const int64_t whole = (end - begin) / size * size;
    Waiting w = {.inverse = {0, 0}};
    for (int64_t i = 0; i < (whole ? whole + size : 0); i += 64) {
        const int place = (int)(i % (2 * size)), last = (place + 2 * size - 64) % (2 * size);
        const int before = (place + size) % (2 * size);
        const int64_t at = begin + i;
        if (i < whole) step_moments(job, wide, at, bits, &w, place);
        if (i >= size) encode_64(job, wide, at - size, bits, 0, &w, before);
        if (i > 0 && i <= whole) step_weights(job, wide, at - 64, &w, last);
        if (i >= size) encode_64(job, wide, at - size, bits, 1, &w, before);
        if (i < whole && (i + 64) % size == 0) close_block(job, at / size, &w);
    }
    return begin + whole;
}

#else

typedef int Wide;
static Wide wide_of(const Job *job, const double *first_book, const double *second_book, int bits) {
    (void)job, (void)first_book, (void)second_book, (void)bits;
    return 0;
}
INLINE int64_t update_blocks(const Job *job, const Wide *wide, int64_t begin, int64_t end, int bits) {
    (void)job, (void)wide, (void)end, (void)bits;
    return begin;
}

#endif
