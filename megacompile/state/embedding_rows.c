/* Rows of a table in host memory: those that a batch looks up, and the sum of the gradients of each. */
#include "adam.h"

enum { COLUMNS = 1024 }; /* of a row that are summed at a time, in cache */

static inline float from_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

/* To nearest, ties to even, as torch rounds. */
static inline uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7fc0;
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

/* Row i of `to`, or row places[i], gets row ids[i] of the table; a row has `bytes`. */
void mc_take_rows(int64_t count, const int64_t *ids, const int64_t *places, const char *table, char *to,
                  int64_t bytes, int64_t threads) {
#pragma omp parallel for num_threads((int)threads) schedule(static)
    for (int64_t i = 0; i < count; i++)
        memcpy(to + (places ? places[i] : i) * bytes, table + ids[i] * bytes, bytes);
}

/* Row rows[r] of the table gains the sum of those rows of `grad` that stand in order[stops[r]] to
 * order[stops[r + 1]], or is set to it as if it had been zero; each sum is rounded to the dtype that it is
 * in. */
void mc_add_rows(int64_t count, const int64_t *rows, const int64_t *stops, const int64_t *order,
                 const void *grad, int64_t grad_is_bf16, void *table, int64_t table_is_bf16, int64_t sets,
                 int64_t width, int64_t threads) {
#pragma omp parallel for num_threads((int)threads) schedule(dynamic, 16)
    for (int64_t r = 0; r < count; r++) {
        float sum[COLUMNS];
        for (int64_t begin = 0; begin < width; begin += COLUMNS) {
            const int64_t n = width - begin < COLUMNS ? width - begin : COLUMNS;
            memset(sum, 0, sizeof sum);
            for (int64_t k = stops[r]; k < stops[r + 1]; k++) {
                const int64_t at = order[k] * width + begin;
                if (grad_is_bf16) {
                    const uint16_t *from = (const uint16_t *)grad + at;
                    for (int64_t j = 0; j < n; j++) sum[j] = from_bf16(to_bf16(sum[j] + from_bf16(from[j])));
                } else {
                    const float *from = (const float *)grad + at;
                    for (int64_t j = 0; j < n; j++) sum[j] += from[j];
                }
            }
            const int64_t at = rows[r] * width + begin;
            if (table_is_bf16) {
                uint16_t *to = (uint16_t *)table + at;
                for (int64_t j = 0; j < n; j++)
                    to[j] = to_bf16((sets ? 0 : from_bf16(to[j])) + from_bf16(to_bf16(sum[j])));
            } else {
                float *to = (float *)table + at;
                for (int64_t j = 0; j < n; j++) to[j] = (sets ? 0 : to[j]) + sum[j];
            }
        }
    }
}
