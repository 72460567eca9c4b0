/* Host AdamW on coded moments: decode, step, code again, in one pass. Built by adam.py, once per
 * number of BITS, called by adam_coded.py, with the arithmetic of adam.h.
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

INLINE void encode(const Job *job, int64_t begin, int n, int second, const float *x) {
    const Moment *moment = second ? &job->second : &job->first;
    const Dynamic *book = &job->books[second];
    uint8_t unpacked[BLOCK], *codes = BITS == 8 ? moment->codes + begin : unpacked;
    float inverse;
    moment->scales[begin / BLOCK] = scale_of(most_of(x, n), &inverse);
    if (inverse == 0) memset(codes, book->zero, (size_t)n);
    else if (BITS == 4 && second) encode_linear4(x, inverse, n, codes);
    else encode_dynamic(x, inverse, book, n, codes, !second);
    if (BITS == 4) pack4(codes, n, moment->codes + begin / 2);
}

static void update(const Job *job, int64_t begin, int64_t end) {
    float joined[BLOCK], first[BLOCK], second[BLOCK];
    for (int64_t i = begin; i < end; i += BLOCK) {
        const int n = (int)MIN(BLOCK, end - i);
        const int64_t block = i / BLOCK, at = i * BITS / 8;
        float *weight = job->low ? joined : (float *)job->weight + i;
        uint16_t *high = (uint16_t *)job->weight + i;
        if (job->low) join_range(n, high, job->low + i, weight);
        decode(job->first.codes + at, job->first.scales[block], &job->books[0], n, first);
        decode(job->second.codes + at, job->second.scales[block], &job->books[1], n, second);
        step_kind(weight, first, second, job->grad, i, n, &job->c);
        if (job->low) split_range(n, weight, high, job->low + i);
        encode(job, i, n, 0, first);
        encode(job, i, n, 1, second);
    }
}

/* `low` is NULL where the weight is whole; 4-bit arrays have an even number of elements. */
void mc_adam_coded(int64_t n, void *weight, int16_t *low, uint8_t *first, float *first_scales,
                   uint8_t *second, float *second_scales, const double *first_book,
                   const double *second_book, const void *grad, const Hyper *h, int64_t bf16,
                   int64_t adamw, int64_t maximize, int64_t threads) {
    Job job = {weight, low, {first, first_scales}, {second, second_scales}, grad,
               constants_of(h, (int)bf16, (int)adamw, (int)maximize), {{.zero = 0}}};
    job.books[0] = dynamic_of(first_book, 1);
    if (BITS == 8) job.books[1] = dynamic_of(second_book, 0);
    else for (int i = 0; i < SIZE; i++) job.books[1].value[i] = (float)second_book[i];
    const Wide wide = wide_of(&job, first_book, second_book);
    const int64_t unit = unit_size(n, threads) / 256 * 256, units = (n + unit - 1) / unit;
#pragma omp parallel for schedule(dynamic) num_threads((int)MAX(1, MIN(threads, units)))
    for (int64_t u = 0; u < units; u++) {
#if defined(__x86_64__)
        unsigned mode = _mm_getcsr();
        _mm_setcsr(0x1f80);
#endif
        const int64_t end = MIN(n, (u + 1) * unit);
        update(&job, update_blocks(&job, &wide, u * unit, end), end);
#if defined(__x86_64__)
        _mm_setcsr(mode);
#endif
    }
}
