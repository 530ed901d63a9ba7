/* Denoisers in one pass over memory, for float32; the same formulas as the torch code beside them, to rounding.
 *
 * Scans are vectorised by doubling: y += a y shifted by 1, y += a^2 y shifted by 2, ... is x[i] + a x[i-1] + a^2 x[i-2] + ... over
 * the lanes of a register, and a register hands on one number to the next.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORS 1
#include <immintrin.h>
#else
#define VECTORS 0
#endif

/* Whether smoothing is worth calling: the widest vectors that this processor has, in lanes; 0 for none. */
int hushgrad_lanes(void) {
#if VECTORS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return 16;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 8 : 0;
#else
    return 0;
#endif
}

#if VECTORS
/* One smoothing: signal v of length d, alpha, and the ghost cells before and after it that stand for all that lies beyond. */
typedef struct {
    const float *v;
    uint64_t d, reach; /* elements farther away than reach are not felt */
    float alpha, scale, before, after;
} signal;

/* sum_{j<i} alpha^(i-1-j) v[j]. */
static float state_before(const signal *s, size_t i) {
    size_t j = i > s->reach ? i - s->reach : 0;
    float state = j ? 0 : s->before;
    for (; j < i; j++) state = s->v[j] + s->alpha * state;
    return state;
}

#define BLOCK 1024 /* read twice, and its result written twice, in the first-level cache */
#define SOON 4096  /* how far ahead memory is fetched, into the second-level cache; the processor itself looks no farther than a page */

/* Lane i takes lane i - by (or i + by, mirrored), and 0 where there is none. */
#define SHIFTED_16(x, by)                                                                                                 \
    (VECTOR)(mirrored ? _mm512_alignr_epi32(_mm512_setzero_si512(), (__m512i)(x), by)                                     \
                      : _mm512_alignr_epi32((__m512i)(x), _mm512_setzero_si512(), 16 - (by)))
#define LANE_8(i, by) (mirrored ? (i) + (by) : (i) - (by))
#define LANES_8(F, by) _mm256_setr_epi32(F(0, by), F(1, by), F(2, by), F(3, by), F(4, by), F(5, by), F(6, by), F(7, by))
#define FROM_8(i, by) (LANE_8(i, by) & 7)
#define KEEP_8(i, by) (LANE_8(i, by) < 0 || LANE_8(i, by) > 7 ? 0 : -1)
#define SHIFTED_8(x, by)                                                                                                  \
    (VECTOR) _mm256_and_si256((__m256i)_mm256_permutevar8x32_ps((__m256)(x), LANES_8(FROM_8, by)), LANES_8(KEEP_8, by))

#define LANES 16
#define SHIFTED SHIFTED_16
#define NAME(function) function##_16
#define TARGET __attribute__((target("avx512f,avx512dq")))
#include "_scan_of.h"
#undef LANES
#undef NAME
#undef TARGET
#undef SHIFTED

#define LANES 8
#define SHIFTED SHIFTED_8
#define NAME(function) function##_8
#define TARGET __attribute__((target("avx2,fma")))
#include "_scan_of.h"

/* out[i] = scale (v[i] + alpha before[i] + alpha after[i]) for i in [low, high). */
void hushgrad_smooth(int lanes, const signal *s, size_t low, size_t high, float *out) {
    (lanes == 16 ? smooth_16 : smooth_8)(s, low, high, out);
}
#endif

#if VECTORS
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE
#endif

/* Adam's moments and the direction mean factor / sqrt(max(square - noise, floor)), in one pass. */
WIDE void hushgrad_direction(const float *restrict g, float *restrict mean, float *restrict square, float *restrict out, size_t n,
                             float fresh1, float fresh2, float noise, float floor, float factor) {
    for (size_t i = 0; i < n; i++) {
        const float m = mean[i] + fresh1 * (g[i] - mean[i]), s = (1 - fresh2) * square[i] + fresh2 * (g[i] * g[i]);
        const float above = s - noise;
        mean[i] = m;
        square[i] = s;
        out[i] = m * factor / sqrtf(above > floor ? above : floor);
    }
}
