/* ChaCha20 (RFC 8439) at any address: the key stream of _chacha.py, the same words as numpy's and as the kernel on a device. */
#include "widths.h"

#define ROTATED(x, n) ((x) << (n) | (x) >> (32 - (n)))
#define QUARTER(a, b, c, d)                                                                                               \
    a += b, d ^= a, d = ROTATED(d, 16);                                                                                   \
    c += d, b ^= c, b = ROTATED(b, 12);                                                                                   \
    a += b, d ^= a, d = ROTATED(d, 8);                                                                                    \
    c += d, b ^= c, b = ROTATED(b, 7);

#define TYPED(name) name
#define KERNELS "noise/chacha_of.h"
#include "widths.h"

void hushgrad_chacha(const uint32_t *key, uint64_t step, uint64_t index, uint64_t block, uint32_t *out, size_t blocks) {
    CHOSEN(chacha)(key, step, index, block, out, blocks);
}
