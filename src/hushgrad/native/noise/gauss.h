/* What the files of the noise kernels share. They are compiled so that every IEEE addition, multiplication, division and square root is
 * rounded separately (see setup.py), for the results have the same bits as numpy's. */
#ifndef HUSHGRAD_GAUSS_H
#define HUSHGRAD_GAUSS_H

#include "widths.h"

/* The polynomials of _box_muller.py in single precision; the longer ones are only needed in one file. */
#define LOG32_SERIES                                                                                                      \
    {1.0f, -0.5000012f, 0.33325517f, -0.2519568f, 0.17544077f, -0.34074646f, -0.5900887f, -1.9598706f, -2.458962f, -1.733612f}
#define SIN32_SERIES {0.7853982f, -0.08074551f, 0.0024903931f, -3.6572394e-05f, 3.0899668e-07f}
#define COS32_SERIES {1.0f, -0.30842513f, 0.015854325f, -0.0003259386f, 3.5297971e-06f}

#if CIPHER
/* Where numbers go: out, by way of the buffers of a recursion if there are any, buffer j at state + j * stride; and the hashes of what
 * is there then, under a key of witness's, if they are asked for. */
typedef struct {
    float *out, scale, *state;
    size_t stride;
    float decay[4], weight[4];
    const uint64_t *key;
    uint64_t *hashes;
} row;

/* Draw as many of n numbers as possible without a detour through memory, and say how many that were; maybe none. */
size_t hushgrad_in_registers(const address *at, uint64_t start, const row *to, size_t n, int add, size_t buffers);
#endif

#endif
