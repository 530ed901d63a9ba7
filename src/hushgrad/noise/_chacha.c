/* ChaCha20 (RFC 8439) at any address: the key stream of _chacha.py, the same words as numpy's and as the kernel on a device.
 *
 * LANES blocks at a time: each word of the state is a vector over the blocks.
 */
#include "_gauss.h"

#define LANES 16
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

#define ROTATED(x, n) ((x) << (n) | (x) >> (32 - (n)))
#define QUARTER(a, b, c, d)                                                                                               \
    a += b, d ^= a, d = ROTATED(d, 16);                                                                                   \
    c += d, b ^= c, b = ROTATED(b, 12);                                                                                   \
    a += b, d ^= a, d = ROTATED(d, 8);                                                                                    \
    c += d, b ^= c, b = ROTATED(b, 7);

#if WIDTHS && !defined(__clang__)
#define WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDEST
#endif

/* The words of blocks block, block + 1, ... of (step, index); fields as check_address has them. */
WIDEST void hushgrad_chacha(const uint32_t *key, uint64_t step, uint64_t index, uint64_t block, uint32_t *out, size_t blocks) {
    static const uint32_t constants[4] = {0x61707865, 0x3320646e, 0x79622d32, 0x6b206574};
    for (size_t first = 0; first < blocks; first += LANES) {
        words s[16], x[16];
        for (int w = 0; w < 4; w++) s[w] = (words){0} + constants[w];
        for (int w = 0; w < 8; w++) s[4 + w] = (words){0} + key[w];
        for (int l = 0; l < LANES; l++) {
            uint64_t at = block + first + (uint64_t)l;
            s[12][l] = (uint32_t)at;
            s[13][l] = (uint32_t)(step >> 32) << 16 | (uint32_t)(at >> 32);
        }
        s[14] = (words){0} + (uint32_t)index;
        s[15] = (words){0} + (uint32_t)step;
        for (int w = 0; w < 16; w++) x[w] = s[w];
        for (int round = 0; round < 10; round++) {
            QUARTER(x[0], x[4], x[8], x[12])
            QUARTER(x[1], x[5], x[9], x[13])
            QUARTER(x[2], x[6], x[10], x[14])
            QUARTER(x[3], x[7], x[11], x[15])
            QUARTER(x[0], x[5], x[10], x[15])
            QUARTER(x[1], x[6], x[11], x[12])
            QUARTER(x[2], x[7], x[8], x[13])
            QUARTER(x[3], x[4], x[9], x[14])
        }
        for (int w = 0; w < 16; w++) x[w] += s[w];
        size_t here = blocks - first < LANES ? blocks - first : LANES;
        for (size_t l = 0; l < here; l++)
            for (int w = 0; w < 16; w++) out[16 * (first + l) + w] = x[w][l];
    }
}
