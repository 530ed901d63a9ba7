/* A universal hash of memory, 8 bytes at a time, in the processor's whole numbers: its vectors are busy where this is used most.
 *
 * NH (Black, Halevi, Krawczyk, Krovetz and Rogaway, "UMAC: fast and secure message authentication", CRYPTO 1999, section 4): of a block of
 * words w, under a key k as long, the sum over pairs of neighbours of (w_i + k_i mod 2^64) (w_j + k_j mod 2^64), mod 2^128. Two different
 * blocks of one length have the same hash with probability at most 2^-64 over the key (theorem 4.2).
 */
#ifndef HUSHGRAD_NH_H
#define HUSHGRAD_NH_H

#include "widths.h"

typedef uint64_t __attribute__((may_alias, aligned(4))) word; /* memory of any type */
__extension__ typedef unsigned __int128 nh_sum;

/* What `count` words, an even number, add to their block's hash. */
INLINE nh_sum nh(nh_sum sum, const word *w, const uint64_t *key, size_t count) {
    _Pragma("GCC unroll 16") for (size_t i = 0; i < count; i += 2) sum += (nh_sum)(w[i] + key[i]) * (w[i + 1] + key[i + 1]);
    return sum;
}

/* The hash of a block, its lower half first. */
INLINE void nh_write(nh_sum sum, uint64_t *out) {
    out[0] = (uint64_t)sum;
    out[1] = (uint64_t)(sum >> 64);
}

#endif
