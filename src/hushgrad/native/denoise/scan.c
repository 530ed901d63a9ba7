/* Denoisers in one pass over memory, for float32; the same formulas as the torch code that abi.h names, to rounding.
 *
 * Scans are vectorised by doubling: y += a y shifted by 1, y += a^2 y shifted by 2, ... is x[i] + a x[i-1] + a^2 x[i-2] + ... over
 * the lanes of a register, and a register hands on one number to the next.
 */
#include "widths.h"

#include <math.h>
#if WIDTHS
#include <immintrin.h>
#endif

/* sum_{j<i} alpha^(i-1-j) v[j]. */
static float state_before(const signal *s, size_t i) {
    size_t j = i > s->reach ? i - s->reach : 0;
    float state = j ? 0 : s->before;
    for (; j < i; j++) state = s->v[j] + s->alpha * state;
    return state;
}

#define BLOCK 1024 /* read twice, and its result written twice, in the first-level cache */
#define SOON 4096  /* how far ahead memory is fetched, into the second-level cache; the processor itself looks no farther than a page */

#define TYPED(name) name
#define KERNELS "denoise/scan_of.h"
#include "widths.h"

void hushgrad_smooth(const signal *s, size_t low, size_t high, float *out) { CHOSEN(smooth)(s, low, high, out); }
