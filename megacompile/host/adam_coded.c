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
 * adam_coded.h holds the coding in plain loops, adam_coded_avx512.h a faster one of whole blocks. */
#include "adam_coded.h"
#include "adam_coded_avx512.h"

INLINE void decode(const Job *job, int64_t begin, int n, int bits, float *first, float *second) {
    const int64_t block = begin / block_of(bits), at = begin * bits / 8;
    const float s1 = job->first.scales[block], s2 = job->second.scales[block];
    if (bits == 8) {
        decode8(job->first.codes + at, s1, &job->books[0], n, first);
        decode8(job->second.codes + at, s2, &job->books[1], n, second);
    } else {
        decode4(job->first.codes + at, s1, &job->books[0], n, first);
        decode4(job->second.codes + at, s2, &job->books[1], n, second);
    }
}

INLINE void encode(const Job *job, int64_t begin, int n, int bits, int second, const float *x) {
    const int64_t block = begin / block_of(bits), at = begin * bits / 8;
    const Moment *moment = second ? &job->second : &job->first;
    const Dynamic *book = &job->books[second];
    uint8_t unpacked[LARGEST], *codes = bits == 8 ? moment->codes + at : unpacked;
    float inverse;
    moment->scales[block] = scale_of(most_of(x, n), &inverse);
    if (inverse == 0) memset(codes, bits == 4 && second ? 0 : book->zero, (size_t)n);
    else if (bits == 8 && second) encode_dynamic(x, inverse, book, n, codes, 7, 0);
    else if (bits == 8) encode_dynamic(x, inverse, book, n, codes, 7, 1);
    else if (second) encode_linear4(x, inverse, n, codes);
    else encode_dynamic(x, inverse, book, n, codes, 3, 1);
    if (bits == 4) pack4(codes, n, moment->codes + at);
}

INLINE void update(const Job *job, int64_t begin, int64_t end, int bits) {
    float joined[LARGEST], first[LARGEST], second[LARGEST];
    for (int64_t i = begin; i < end; i += block_of(bits)) {
        const int n = (int)MIN(block_of(bits), end - i);
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
static void update8(const Job *job, const Wide *wide, int64_t begin, int64_t end) {
    update(job, update_blocks(job, wide, begin, end, 8), end, 8);
}
static void update4(const Job *job, const Wide *wide, int64_t begin, int64_t end) {
    update(job, update_blocks(job, wide, begin, end, 4), end, 4);
}

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
    const Wide wide = wide_of(&job, first_book, second_book, (int)bits);
    const int64_t unit = unit_size(n, threads) / 256 * 256, units = (n + unit - 1) / unit;
#pragma omp parallel for schedule(dynamic) num_threads((int)MAX(1, MIN(threads, units)))
    for (int64_t u = 0; u < units; u++) {
#if defined(__x86_64__)
        unsigned mode = _mm_getcsr();
        _mm_setcsr(0x1f80);
#endif
        (bits == 8 ? update8 : update4)(&job, &wide, u * unit, MIN(n, (u + 1) * unit));
#if defined(__x86_64__)
        _mm_setcsr(mode);
#endif
    }
}
