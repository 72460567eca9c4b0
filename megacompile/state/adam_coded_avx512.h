/* The coded step on whole blocks where the CPU has AVX-512 with byte permutations (Ice Lake, Zen 4
 * and later); elsewhere update_blocks leaves all to the plain loops. See adam_coded.c.
 *
 * In:  a job, begin and end of a unit of work; tables of the books.
 * Out: weights, codes and scales of the whole blocks, and where they end.
 * Invariant: values are those of the plain loops bit for bit, codes too but for ties and for what is
 * not finite, like its block's scale.
 *
 * The codes of a block wait for its scale, so they are made while the next block takes its step, and
 * so are its weights, whose divisions leave most of the core idle. Chunks of 64 elements, four
 * vectors whose instructions alternate, as a core looks only so far ahead: eight were a quarter
 * slower on a Zen 4. There it is bound by its instructions: without any division it would be a
 * tenth faster. Within the cache a parameter takes 0.77 ns in 8 bits and 0.63 in 4, in FP32 0.53. */
#if defined(__AVX512VBMI__) && defined(__AVX512DQ__) && defined(__AVX512BW__)
#include <immintrin.h>

#define EACH _Pragma("GCC unroll 4") for (int k = 0; k < 4; k++)
/* Added to magnitudes: thus no exponent / 2 is below 48. */
#define LEAST 0x1p-31

typedef struct {
    _Alignas(64) uint8_t plane[4][256]; /* byte b of each code's value; of each rank's in a signed book */
    _Alignas(64) float value[16];       /* of 16 codes */
    /* Lines of ranks, slope * magnitude + base. What `number` has for a magnitude's exponent / 2,
     * added to the magnitude's bits, gives the number of its line in the upper five. */
    _Alignas(64) int32_t number[16];
    _Alignas(64) float slope[16], base[16];
    __m512i zero; /* 32 times the code of 0 */
} Tables;

typedef struct {
    Tables books[2];
    __m512 grad_scale, decay, lerp, beta2, one_minus_beta2, correction2_sqrt, eps, minus_step_size;
} Wide;

/* The ranks of one decade, or of one of the two ends, where they are constant. */
typedef struct {
    double edge, slope, base;
} Line;

/* At most one edge lies between 4**j / 2 and 4**j * 2, as edges are 5 apart or more. */
static void tabulate_lines(Tables *t, const Line *lines, int count) {
    for (int j = 0; j < 16; j++) {
        const double low = ldexp(0.5, 2 * (j - 15));
        int next = 1;
        while (next < count && lines[next].edge + LEAST <= low) next++;
        const double edge = next < count ? lines[next].edge + LEAST : 4 * low;
        t->number[j] = (int32_t)(((uint32_t)next << 27) - as_bits((float)MIN(edge, 4 * low)) - 1);
    }
    for (int i = 0; i < count; i++) {
        t->slope[i] = (float)lines[i].slope;
        t->base[i] = (float)(lines[i].base - lines[i].slope * LEAST);
    }
}

static Tables tables_of(const double *book, int is_signed) {
    const int zero = is_signed ? SIZE / 2 - 1 : 0, top = SIZE - 1 - zero;
    Tables t = {.zero = _mm512_set1_epi16((short)zero)};
    Line lines[DECADES + 2] = {{0, 0, 0.5}};
    for (int k = 0; k < DECADES; k++) {
        const double bins = ldexp(1, is_signed ? k : k + 1), unit = pow(10, k + 1 - DECADES);
        const int rank = (int)bins - !is_signed; /* of the decade's first code, from zero's */
        const double *code = book + zero + rank;
        lines[k + 1] = (Line){(code[0] + code[-1]) / 2, bins / (0.9 * unit), rank - bins * 0.1 / 0.9};
    }
    lines[DECADES + 1] = (Line){(book[SIZE - 1] + book[SIZE - 2]) / 2, 0, top + 0.5};
    tabulate_lines(&t, lines, DECADES + 2);
    for (int i = 0; i < SIZE - zero; i++)
        for (int b = 0; b < 4; b++) t.plane[b][i] = (uint8_t)(as_bits((float)book[zero + i]) >> 8 * b);
    for (int i = 0; i < 16; i++) t.value[i] = (float)book[i];
    return t;
}

static Wide wide_of(const Job *job, const double *first_book, const double *second_book) {
#define ALL(x) .x = _mm512_set1_ps(job->c.x)
    return (Wide){.books = {tables_of(first_book, 1), tables_of(second_book, 0)},
                  ALL(grad_scale), ALL(decay), ALL(lerp), ALL(beta2), ALL(one_minus_beta2),
                  ALL(correction2_sqrt), ALL(eps), ALL(minus_step_size)};
#undef ALL
}

/* In registers, 64 elements are four vectors in the order in which unpacking puts 16-bit numbers: of every eight,
 * the first four in one and the last four in the next. */

INLINE void unpack_halves(__m512i low, __m512i high, __m512 *to) {
    to[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(low, high));
    to[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(low, high));
}

INLINE void load_32(const float *from, __m512 *to) {
    const __m512 a = _mm512_loadu_ps(from), b = _mm512_loadu_ps(from + 16);
    to[0] = _mm512_shuffle_f32x4(a, b, 0x88), to[1] = _mm512_shuffle_f32x4(a, b, 0xdd);
}

INLINE void store_32(const __m512 *from, float *to) {
    const __m512i order = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i next = _mm512_add_epi64(order, _mm512_set1_epi64(4));
    const __m512d a = _mm512_castps_pd(from[0]), b = _mm512_castps_pd(from[1]);
    _mm512_storeu_pd(to, _mm512_permutex2var_pd(a, order, b));
    _mm512_storeu_pd(to + 16, _mm512_permutex2var_pd(a, next, b));
}

/* high << 16, plus low: as an unsigned number 0x8000 above it. */
INLINE void join_32(const uint16_t *high, const int16_t *low, __m512 *to) {
    const __m512i half = _mm512_set1_epi16((short)0x8000);
    unpack_halves(_mm512_xor_si512(_mm512_loadu_si512(low), half), _mm512_loadu_si512(high), to);
    for (int k = 0; k < 2; k++)
        to[k] = _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_castps_si512(to[k]), _mm512_set1_epi32(0x8000)));
}

INLINE void split_32(const __m512 *from, uint16_t *high, int16_t *low) {
    static const uint16_t EVEN[32] __attribute__((aligned(64))) = {
        0,  2,  4,  6,  32, 34, 36, 38, 8,  10, 12, 14, 40, 42, 44, 46,
        16, 18, 20, 22, 48, 50, 52, 54, 24, 26, 28, 30, 56, 58, 60, 62};
    const __m512i even = _mm512_load_si512(EVEN), odd = _mm512_add_epi16(even, _mm512_set1_epi16(1));
    const __m512i half = _mm512_set1_epi32(0x8000);
    const __m512i a = _mm512_castps_si512(from[0]), b = _mm512_castps_si512(from[1]);
    _mm512_storeu_si512(low, _mm512_permutex2var_epi16(a, even, b));
    _mm512_storeu_si512(high, _mm512_permutex2var_epi16(_mm512_add_epi32(a, half), odd, _mm512_add_epi32(b, half)));
}

INLINE void load_grad(const void *from, int64_t at, int bf16, __m512 *to) {
    for (int k = 0; k < 64; k += 32) {
        if (!bf16) load_32((const float *)from + at + k, to + k / 16);
        else unpack_halves(_mm512_setzero_si512(), _mm512_loadu_si512((const uint16_t *)from + at + k), to + k / 16);
    }
}

/* Bytes of the values of ranks below 128. */
INLINE __m512i look_up_128(__m512i ranks, const uint8_t *table) {
    const __m512i *t = (const __m512i *)table;
    return _mm512_permutex2var_epi8(t[0], ranks, t[1]);
}

/* The negative half of a signed book mirrors the positive one, which has the code of 1 besides. */
INLINE void look_up_signed(__m512i codes, const Tables *t, __m512i *plane) {
    const __m512i rank = _mm512_sub_epi8(codes, _mm512_set1_epi8(127)), magnitude = _mm512_abs_epi8(rank);
    const __mmask64 one = _mm512_movepi8_mask(magnitude);
    EACH plane[k] = look_up_128(magnitude, t->plane[k]);
    plane[3] = _mm512_or_si512(plane[3], _mm512_and_si512(rank, _mm512_set1_epi8((char)0x80)));
    plane[3] = _mm512_mask_mov_epi8(plane[3], one, _mm512_set1_epi8(0x3f));
    plane[2] = _mm512_mask_mov_epi8(plane[2], one, _mm512_set1_epi8((char)0x80));
}

INLINE void look_up_unsigned(__m512i codes, const Tables *t, __m512i *plane) {
    const __mmask64 upper = _mm512_movepi8_mask(codes);
    EACH {
        const __m512i low = look_up_128(codes, t->plane[k]), high = look_up_128(codes, t->plane[k] + 128);
        plane[k] = _mm512_mask_mov_epi8(low, upper, high);
    }
}

INLINE void decode8_64(const uint8_t *codes, float scale, const Tables *t, int is_signed, __m512 *value) {
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __m512i at = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(codes));
    __m512i p[4];
    if (is_signed) look_up_signed(at, t, p);
    else look_up_unsigned(at, t, p);
    const __m512i low[2] = {_mm512_unpacklo_epi8(p[0], p[1]), _mm512_unpackhi_epi8(p[0], p[1])};
    const __m512i high[2] = {_mm512_unpacklo_epi8(p[2], p[3]), _mm512_unpackhi_epi8(p[2], p[3])};
    unpack_halves(low[0], high[0], value);
    unpack_halves(low[1], high[1], value + 2);
    EACH value[k] = _mm512_mul_ps(value[k], _mm512_set1_ps(scale));
}

/* The permutation reads the low four bits of a lane. */
INLINE void decode4_64(const uint8_t *codes, float scale, const Tables *t, __m512 *value) {
    const __m512 table = _mm512_mul_ps(_mm512_load_ps(t->value), _mm512_set1_ps(scale));
    const __m512i all = _mm512_castsi256_si512(_mm256_loadu_si256((const void *)codes));
    const __m512i byte = _mm512_setr_epi32(0, 0, 1, 1, 4, 4, 5, 5, 8, 8, 9, 9, 12, 12, 13, 13);
    EACH {
        const __m512i from = _mm512_add_epi32(byte, _mm512_set1_epi32(2 * (k % 2) + 16 * (k / 2)));
        const __m512i pairs = _mm512_permutexvar_epi8(from, all);
        const __m512i at = _mm512_srlv_epi32(pairs, _mm512_set1_epi64(4LL << 32));
        value[k] = _mm512_permutexvar_ps(at, table);
    }
}

/* Ranks of 64 values from zero's code, by a dynamic book; those of negative values are negative. A
 * decade's line ends half a rank below the next decade's first rank. */
INLINE void rank_64(const float *x, __m512 inverse, const Tables *t, int is_signed, __m512i *rank) {
    const __m512 minus = _mm512_set1_ps(-0.0f), ends = _mm512_set1_ps(is_signed ? -0.5f : 0.75f);
    __m512 value[4], magnitude[4], base[4], line[4];
    __m512i at[4];
    EACH value[k] = _mm512_load_ps(x + 16 * k);
    EACH magnitude[k] = is_signed ? _mm512_andnot_ps(minus, value[k]) : value[k];
    EACH magnitude[k] = _mm512_fmadd_ps(magnitude[k], inverse, _mm512_set1_ps(LEAST));
    EACH at[k] = _mm512_srli_epi32(_mm512_castps_si512(magnitude[k]), 24);
    EACH at[k] = _mm512_permutexvar_epi32(at[k], _mm512_load_si512(t->number));
    EACH at[k] = _mm512_add_epi32(at[k], _mm512_castps_si512(magnitude[k]));
    EACH at[k] = _mm512_srli_epi32(at[k], 27);
    EACH base[k] = _mm512_permutexvar_ps(at[k], _mm512_load_ps(t->base));
    EACH line[k] = _mm512_permutexvar_ps(at[k], _mm512_load_ps(t->slope));
    EACH line[k] = _mm512_fmadd_ps(magnitude[k], line[k], base[k]);
    EACH line[k] = _mm512_min_ps(line[k], _mm512_fmadd_ps(base[k], _mm512_set1_ps(2.25f), ends));
    if (is_signed) EACH line[k] = _mm512_or_ps(line[k], _mm512_and_ps(value[k], minus));
    EACH rank[k] = _mm512_cvttps_epi32(line[k]);
}

/* As encode_linear4. */
INLINE __m512i linear_ranks_of(__m512 x, __m512 inverse) {
    const __m512 y = _mm512_mul_ps(x, inverse);
    const __m512 above = _mm512_fnmadd_ps(_mm512_set1_ps(16), y, _mm512_set1_ps(16.5f));
    return _mm512_sub_epi32(_mm512_set1_epi32(15), _mm512_cvttps_epi32(above));
}

/* Saturation gives -1, which has no code, that above it. */
INLINE void store_codes(const __m512i *rank, const Tables *t, int is_signed, uint8_t *codes) {
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    __m512i low = _mm512_packs_epi32(rank[0], rank[1]), high = _mm512_packs_epi32(rank[2], rank[3]);
    if (is_signed) low = _mm512_add_epi16(low, t->zero), high = _mm512_add_epi16(high, t->zero);
    const __m512i bytes = _mm512_permutexvar_epi64(order, _mm512_packus_epi16(low, high));
    const __m512i pairs = _mm512_maddubs_epi16(bytes, _mm512_set1_epi16(0x1001));
    if (BITS == 8) _mm512_storeu_si512(codes, bytes);
    else _mm256_storeu_si256((__m256i *)codes, _mm512_cvtepi16_epi8(pairs));
}

/* Moments of two blocks in turn: one takes its step, the one before it waits to be coded. */
typedef struct {
    _Alignas(64) float moment[2][2][BLOCK]; /* by turn; first and second */
    float inverse[2]; /* of the block that waits */
    __m512i most[2];  /* of the other one's magnitudes, as bits */
} Waiting;

INLINE void decode_64(const Moment *moment, int64_t begin, const Tables *t, int is_signed, __m512 *value) {
    const uint8_t *codes = moment->codes + begin * BITS / 8;
    const float scale = moment->scales[begin / BLOCK];
    if (BITS == 8) decode8_64(codes, scale, t, is_signed, value);
    else decode4_64(codes, scale, t, value);
}

INLINE void moments_16(__m512 *first, __m512 *second, __m512 grad, const Wide *c) {
    const __m512 g = _mm512_mul_ps(grad, c->grad_scale), new = _mm512_mul_ps(c->one_minus_beta2, g);
    *first = _mm512_fmadd_ps(c->lerp, _mm512_sub_ps(g, *first), *first);
    *second = _mm512_fmadd_ps(new, g, _mm512_mul_ps(*second, c->beta2));
}

/* Second moments have no sign. */
INLINE void step_moments(const Job *job, const Wide *c, int64_t begin, int bf16, float *first, float *second,
                         __m512i *most) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512 m[4], v[4], grad[4];
    decode_64(&job->first, begin, &c->books[0], 1, m);
    decode_64(&job->second, begin, &c->books[1], 0, v);
    load_grad(job->grad, begin, bf16, grad);
    EACH moments_16(m + k, v + k, grad[k], c);
    EACH _mm512_store_ps(first + 16 * k, m[k]);
    EACH _mm512_store_ps(second + 16 * k, v[k]);
    EACH most[0] = _mm512_max_epu32(most[0], _mm512_and_si512(_mm512_castps_si512(m[k]), magnitude));
    EACH most[1] = _mm512_max_epu32(most[1], _mm512_castps_si512(v[k]));
}

INLINE void step_weights(const Job *job, const Wide *c, int64_t begin, int split, const float *first,
                         const float *second) {
    uint16_t *high = (uint16_t *)job->weight + begin;
    float *whole = (float *)job->weight + begin;
    int16_t *low = job->low + begin;
    __m512 divisor[4], change[4], weight[4];
    EACH divisor[k] = _mm512_sqrt_ps(_mm512_load_ps(second + 16 * k));
    EACH divisor[k] = _mm512_div_ps(divisor[k], c->correction2_sqrt);
    EACH divisor[k] = _mm512_add_ps(divisor[k], c->eps);
    EACH change[k] = _mm512_mul_ps(c->minus_step_size, _mm512_load_ps(first + 16 * k));
    EACH change[k] = _mm512_div_ps(change[k], divisor[k]);
    if (split) join_32(high, low, weight), join_32(high + 32, low + 32, weight + 2);
    else load_32(whole, weight), load_32(whole + 32, weight + 2);
    EACH weight[k] = _mm512_add_ps(_mm512_mul_ps(weight[k], c->decay), change[k]);
    if (split) split_32(weight, high, low), split_32(weight + 2, high + 32, low + 32);
    else store_32(weight, whole), store_32(weight + 2, whole + 32);
}

INLINE void encode_64(const Moment *moment, int64_t begin, const Tables *t, int is_signed, const float *x,
                      float inverse) {
    __m512i rank[4];
    if (BITS == 8 || is_signed) rank_64(x, _mm512_set1_ps(inverse), t, is_signed, rank);
    else EACH rank[k] = linear_ranks_of(_mm512_load_ps(x + 16 * k), _mm512_set1_ps(inverse));
    store_codes(rank, t, is_signed, moment->codes + begin * BITS / 8);
}

/* All of a block has taken its step: its scales. */
INLINE void close_block(const Job *job, int64_t block, Waiting *w) {
    job->first.scales[block] = scale_of(_mm512_reduce_max_epu32(w->most[0]), &w->inverse[0]);
    job->second.scales[block] = scale_of(_mm512_reduce_max_epu32(w->most[1]), &w->inverse[1]);
    w->most[0] = w->most[1] = _mm512_setzero_si512();
}

/* Block number `i` from `begin` on takes its step (`steps`), the one before it is written (`writes`). */
INLINE void update_block(const Job *job, const Wide *c, int64_t begin, int64_t i, int bf16, int split,
                         int steps, int writes, Waiting *w) {
    float(*now)[BLOCK] = w->moment[i % 2], (*last)[BLOCK] = w->moment[1 - i % 2];
    for (int k = 0; k < BLOCK; k += 64) {
        const int64_t at = begin + i * BLOCK + k, before = at - BLOCK;
        if (steps) step_moments(job, c, at, bf16, now[0] + k, now[1] + k, w->most);
        if (writes) encode_64(&job->first, before, &c->books[0], 1, last[0] + k, w->inverse[0]);
        if (writes) encode_64(&job->second, before, &c->books[1], 0, last[1] + k, w->inverse[1]);
        if (writes) step_weights(job, c, before, split, last[0] + k, last[1] + k);
    }
    if (steps) close_block(job, begin / BLOCK + i, w);
}

/* Any kind of step, and the ends of a unit of work: one copy, a few percent slower. */
static void update_any(const Job *job, const Wide *c, int64_t begin, int64_t i, int steps, int writes,
                       Waiting *w) {
    update_block(job, c, begin, i, job->c.bf16, job->low != NULL, steps, writes, w);
}

/* Where whole blocks end: those before it are done. Rare kinds of step are left to the plain loops. */
static int64_t update_blocks(const Job *job, const Wide *c, int64_t begin, int64_t end) {
    if (job->c.coupled != 0 || job->c.lerp_from_grad || end - begin < BLOCK) return begin;
    const int64_t count = (end - begin) / BLOCK;
    const int usual = job->c.bf16 && job->low;
    Waiting w = {.inverse = {0, 0}};
    update_any(job, c, begin, 0, 1, 0, &w);
    for (int64_t i = 1; i < count; i++) {
        if (usual) update_block(job, c, begin, i, 1, 1, 1, 1, &w);
        else update_any(job, c, begin, i, 1, 1, &w);
    }
    update_any(job, c, begin, count, 0, 1, &w);
    return begin + count * BLOCK;
}

#else

typedef int Wide;
static Wide wide_of(const Job *job, const double *first_book, const double *second_book) {
    (void)job, (void)first_book, (void)second_book;
    return 0;
}
static int64_t update_blocks(const Job *job, const Wide *wide, int64_t begin, int64_t end) {
    (void)job, (void)wide, (void)end;
    return begin;
}

#endif
