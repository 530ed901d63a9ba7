/* What the files of the noise kernel share: the layout of a group, vector widths, the functions they call in one another.
 *
 * Compile with -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math and never with -ffast-math: every IEEE addition,
 * multiplication, division and square root must be rounded separately, so that the results are the same bits as numpy's.
 * The last two options only tell the compiler that nobody looks at errno or the exception flags.
 */
#ifndef HUSHGRAD_GAUSS_H
#define HUSHGRAD_GAUSS_H

#include <stddef.h>
#include <stdint.h>

#define PAIRS 128
#define GROUP (2 * PAIRS)
#define GROUP_BLOCKS 96 /* cipher blocks for a group */

#if defined(__x86_64__) && defined(__GNUC__)
#define CIPHER 1
#define WIDTHS 1 /* one binary with a copy of each kernel for every vector width: see _widths.h */
#else
#define CIPHER 0
#define WIDTHS 0
#endif

#if WIDTHS
#define CHOSEN(function)                                                                                                  \
    (hushgrad_bytes == 64 ? TYPED(function##_64) : hushgrad_bytes == 32 ? TYPED(function##_32) : TYPED(function##_16))
#else
#define CHOSEN(function) TYPED(function##_16)
#endif

extern int hushgrad_bytes; /* of a vector, as chosen by hushgrad_vectors */
int hushgrad_vectors(int most);

#define INLINE static inline __attribute__((always_inline))

/* The polynomials of _transform.py in single precision; the longer ones are only needed in one file. */
#define LOG32_SERIES                                                                                                      \
    {1.0f, -0.5000012f, 0.33325517f, -0.2519568f, 0.17544077f, -0.34074646f, -0.5900887f, -1.9598706f, -2.458962f, -1.733612f}
#define SIN32_SERIES {0.7853982f, -0.08074551f, 0.0024903931f, -3.6572394e-05f, 3.0899668e-07f}
#define COS32_SERIES {1.0f, -0.30842513f, 0.015854325f, -0.0003259386f, 3.5297971e-06f}

void hushgrad_gaussians_f32(const uint32_t *words, float *out, size_t groups);
void hushgrad_gaussians_f64(const uint32_t *words, double *out, size_t groups);
void hushgrad_write_f32(const float *x, float scale, float *out, size_t n);
void hushgrad_write_f64(const double *x, double scale, double *out, size_t n);
void hushgrad_add_f32(const float *x, float scale, float *out, size_t n);
void hushgrad_add_f64(const double *x, double scale, double *out, size_t n);

#if CIPHER
/* How to draw: which instructions, the round keys, and the first two fields of the counter. */
typedef struct {
    const uint8_t *round_keys;
    uint64_t cipher, step, index;
} address;

/* Where numbers go: out, by way of the buffers of a recursion if there are any, buffer j at state + j * stride. */
typedef struct {
    float *out, scale, *state;
    size_t stride;
    float decay[4], weight[4];
} row;

/* Draw as many of n numbers as possible without a detour through memory, and say how many that were; maybe none. */
size_t hushgrad_in_registers(const address *at, uint64_t start, const row *to, size_t n, int add, size_t buffers);

void hushgrad_draw_f32(const address *at, uint64_t start, float scale, int add, float *out, size_t n);
void hushgrad_draw_f64(const address *at, uint64_t start, double scale, int add, double *out, size_t n);
#endif

#endif
