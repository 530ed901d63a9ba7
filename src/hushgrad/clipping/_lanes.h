/* Vectors of sixteen floats, which the compiler cuts into what the processor has, and a clone of each function for each width. */
#pragma once
#include <stddef.h>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("avx512f", "avx2,fma", "default")))
#else
#define WIDE
#endif
#define INLINE static inline __attribute__((always_inline)) /* into each clone */

typedef float lanes __attribute__((vector_size(64), aligned(4), may_alias));
#define LANES (sizeof(lanes) / sizeof(float))
#define BLOCK 2048 /* floats whose squares are summed in single precision, on 64 accumulators */

INLINE double sq_norm(const float *x, size_t n) {
    double total = 0;
    size_t i = 0;
    while (n - i >= 4 * LANES) {
        const size_t end = n - i > BLOCK ? i + BLOCK : n;
        lanes part[4] = {{0}}; /* four at a time: each alone would wait for itself */
        for (; end - i >= 4 * LANES; i += 4 * LANES)
            for (int k = 0; k < 4; k++) {
                const lanes v = *(const lanes *)(x + i + k * LANES);
                part[k] += v * v;
            }
        const lanes sum = (part[0] + part[1]) + (part[2] + part[3]);
        for (size_t k = 0; k < LANES; k++) total += sum[k];
    }
    for (; i < n; i++) total += (double)x[i] * x[i];
    return total;
}
