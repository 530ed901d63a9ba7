/* A universal hash of memory, 4 bytes at a time: what a release is remembered by. The same numbers as the torch code beside it.
 *
 * NH (Black, Halevi, Krawczyk, Krovetz and Rogaway, "UMAC: fast and secure message authentication", CRYPTO 1999, section 4): of a block of
 * words w, under a key k as long, the sum over pairs (i, j) of (w_i + k_i mod 2^32) (w_j + k_j mod 2^32), mod 2^64. Two different blocks
 * of one length have the same hash with probability at most 2^-32 over the key (theorem 4.2).
 */
#include "widths.h"

#include <string.h>
#if WIDTHS
#include <immintrin.h>
#endif

/* Products of the lower halves of 64 bits, BYTES at a time. */
#define MULTIPLIED(a, b) JOINED(multiplied_, BYTES)(a, b)
#define JOINED(name, bytes) JOINED_(name, bytes)
#define JOINED_(name, bytes) name##bytes
#define multiplied_16(a, b) _mm_mul_epu32((__m128i)(a), (__m128i)(b))
#define multiplied_32(a, b) _mm256_mul_epu32((__m256i)(a), (__m256i)(b))
#define multiplied_64(a, b) _mm512_mul_epu32((__m512i)(a), (__m512i)(b))

#define BLOCK (4 * WITNESS_WORDS)

typedef uint32_t __attribute__((may_alias)) word; /* memory of any type */

#define TYPED(name) name
#define KERNELS "release/witness_of.h"
#include "widths.h"

void hushgrad_witness(const unsigned char *bytes, size_t size, const uint32_t *key, uint64_t *out) {
    word last[WITNESS_WORDS];
    for (; size >= BLOCK; bytes += BLOCK, size -= BLOCK) *out++ = CHOSEN(nh)((const word *)bytes, key);
    if (!size) return;
    memcpy(last, bytes, size);
    memset((unsigned char *)last + size, 0, BLOCK - size);
    *out = CHOSEN(nh)(last, key);
}
