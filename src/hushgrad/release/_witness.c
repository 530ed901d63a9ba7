/* A universal hash of memory, 4 bytes at a time: what a release is remembered by. The same numbers as the torch code beside it.
 *
 * NH (Black, Halevi, Krawczyk, Krovetz and Rogaway, "UMAC: fast and secure message authentication", CRYPTO 1999, section 4): of a block of
 * words w, under a key k as long, the sum over pairs (i, j) of (w_i + k_i mod 2^32) (w_j + k_j mod 2^32), mod 2^64. Two different blocks
 * of one length have the same hash with probability at most 2^-32 over the key (theorem 4.2).
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDEST
#endif

#define WORDS 2048 /* of a block */
#define LANES 16   /* neighbours that are multiplied by the next 16 */
#define BLOCK (4 * WORDS)
#define SOON 4096 /* bytes that memory is fetched ahead; the processor itself looks no farther than a page */

typedef uint32_t __attribute__((may_alias)) word; /* memory of any type */

WIDEST static uint64_t nh(const word *w, const uint32_t *key) {
    uint64_t sums[LANES] = {0}, sum = 0;
    for (int i = 0; i < WORDS; i += 2 * LANES) {
        __builtin_prefetch((const char *)(w + i) + SOON);
        __builtin_prefetch((const char *)(w + i) + SOON + 64);
        for (int j = 0; j < LANES; j++)
            sums[j] += (uint64_t)(uint32_t)(w[i + j] + key[i + j]) * (uint32_t)(w[i + LANES + j] + key[i + LANES + j]);
    }
    for (int j = 0; j < LANES; j++) sum += sums[j];
    return sum;
}

/* One hash for each block of `size` bytes at an address that 4 divides, the last one filled up with zeros. */
void hushgrad_witness(const unsigned char *bytes, size_t size, const uint32_t *key, uint64_t *out) {
    word last[WORDS];
    for (; size >= BLOCK; bytes += BLOCK, size -= BLOCK) *out++ = nh((const word *)bytes, key);
    if (!size) return;
    memcpy(last, bytes, size);
    memset((unsigned char *)last + size, 0, BLOCK - size);
    *out = nh(last, key);
}
