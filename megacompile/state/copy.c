/* A copy that takes the CRC-32 of what it moves, in one pass, on CPUs that multiply polynomials.
 *
 * Stores go past the cache: where a drive has read the buffer, a line of it is in another core's cache, and to
 * get it back takes longer than all the rest.
 *
 * CRC-32 is a remainder over GF(2). Multiplied by the right powers of x, what was read so far moves to where the
 * next bytes are, and is added to them; the remainder stays the same. Four lanes do this, 16 bytes each. The
 * constants are x^(512+32), x^(512-32), x^(128+32), x^(128-32) modulo the polynomial, bits reflected.
 */
#include "adam.h"

#if defined(__PCLMUL__)
#include <wmmintrin.h> /* immintrin.h has all of AVX-512 too, and takes 0.1 s to read */

enum { LANES = 4, STEP = 16 * LANES };

static inline __m128i moved(__m128i x, __m128i powers) {
    return _mm_xor_si128(_mm_clmulepi64_si128(x, powers, 0x00), _mm_clmulepi64_si128(x, powers, 0x11));
}

static inline __m128i copied(uint8_t *to, const uint8_t *from) {
    __m128i bytes = _mm_loadu_si128((const __m128i *)from);
    _mm_stream_si128((__m128i *)to, bytes);
    return bytes;
}

/* Copies a multiple of 64 bytes, at most `count`, to a multiple of 64, and returns how many. `rest` gets 16 bytes
 * whose CRC-32, from zero, not inverted, is that of the bytes, from `before`. */
int mc_copy_folded(uint8_t *to, const uint8_t *from, int64_t count, int64_t before, uint8_t *rest) {
    const __m128i far = _mm_set_epi64x(0x1c6e41596, 0x154442bd4), near = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    __m128i lane[LANES];
    int64_t done = STEP;
    if (count < STEP) return 0;
    for (int i = 0; i < LANES; i++) lane[i] = copied(to + 16 * i, from + 16 * i);
    lane[0] = _mm_xor_si128(lane[0], _mm_cvtsi32_si128((int)before));
    for (; done + STEP <= count; done += STEP)
        for (int i = 0; i < LANES; i++)
            lane[i] = _mm_xor_si128(moved(lane[i], far), copied(to + done + 16 * i, from + done + 16 * i));
    _mm_sfence();
    for (int i = 1; i < LANES; i++) lane[0] = _mm_xor_si128(moved(lane[0], near), lane[i]);
    _mm_storeu_si128((__m128i *)rest, lane[0]);
    return (int)done;
}
#else
int mc_copy_folded(uint8_t *to, const uint8_t *from, int64_t count, int64_t before, uint8_t *rest) {
    return 0;
}
#endif
