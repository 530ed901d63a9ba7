/* Sums plus noise, rounded once to a public grid: what decides a rounding, and when it does not. See secure.py for the proof.
 *
 * Every number is first computed in single precision. Where its error bound leaves two whole numbers possible, its group is
 * computed again in double precision from the same random words; what is in doubt then is left to the caller, as it was.
 */
#include "noise/gauss.h"

#include <string.h>

#if CIPHER
#define KERNELS "noise/grid_of.h"

#define REAL float
#define TYPED(name) name##_f32
#include "widths.h"
static int decided_f32(const float *z, const double *sums, const facts *f, const bound *b, double *result, double *slack) {
    return CHOSEN(decided)(z, sums, f, b, result, slack);
}
#undef REAL
#undef TYPED

#define REAL double
#define TYPED(name) name##_f64
#include "widths.h"
static int decided_f64(const double *z, const double *sums, const facts *f, const bound *b, double *result, double *slack) {
    return CHOSEN(decided)(z, sums, f, b, result, slack);
}
#undef REAL
#undef TYPED

#define FEW 8

size_t hushgrad_rounded(const address *at, uint64_t start, const facts *f, const bound *bounds, double *out, size_t n,
                        uint64_t *places) {
    float z[FEW * GROUP];
    double wide[GROUP], edge[GROUP], result[GROUP], slack[GROUP];
    size_t doubts = 0, done = 0;
    while (done < n) {
        const uint64_t first = (start + done) / GROUP;
        size_t groups = (start + n + GROUP - 1) / GROUP - first;
        groups = groups < FEW ? groups : FEW;
        hushgrad_draw_f32(at, first * GROUP, 1.0f, 0, z, groups * GROUP);
        for (size_t g = 0; g < groups; g++) {
            const size_t skip = (start + done) % GROUP, count = GROUP - skip < n - done ? GROUP - skip : n - done;
            const double *sums = out + done;
            if (count < GROUP) { /* a part of a group, at either end */
                memset(edge, 0, sizeof edge);
                memcpy(edge + skip, sums, count * sizeof *edge);
                sums = edge;
            }
            int certain = decided_f32(z + g * GROUP, sums, f, bounds, result, slack);
            if (!certain) {
                hushgrad_draw_f64(at, (first + g) * GROUP, 1.0, 0, wide, GROUP);
                certain = decided_f64(wide, sums, f, bounds + 1, result, slack);
            }
            if (!certain)
                for (size_t i = skip; i < skip + count; i++)
                    if (!(slack[i] > 0)) {
                        result[i] = sums[i];
                        places[doubts++] = done + i - skip;
                    }
            memcpy(out + done, result + skip, count * sizeof *out);
            done += count;
        }
    }
    return doubts;
}
#endif
