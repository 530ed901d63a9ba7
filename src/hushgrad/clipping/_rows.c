/* The small steps between two matrix products, for float32: one call where torch needs three to nine. The formulas are those of the
 * torch code beside them, to rounding; long sums are carried in double.
 */
#include <math.h>
#include "_lanes.h"

#define COLUMNS 256 /* that are summed at a time, */
#define ROWS 32 /* so many in single precision */

/* The squared norms of g_i x_i^T and of g_i, for x (rows, d) and g (rows, p). */
WIDE void hushgrad_outer_sq_norms(const float *restrict x, size_t d, const float *restrict g, size_t p, size_t rows,
                                  float *restrict of_weight, float *restrict of_bias) {
    for (size_t i = 0; i < rows; i++) {
        const double sq_g = sq_norm(g + i * p, p);
        of_bias[i] = (float)sq_g;
        of_weight[i] = (float)(sq_g * sq_norm(x + i * d, d));
    }
}

/* total[i] = factor sum_k parts[k][i], and its root; whether all are finite. */
WIDE int hushgrad_total(const float *const *restrict parts, size_t count, size_t rows, double factor, float *restrict total,
                        float *restrict norms) {
    int finite = 1;
    for (size_t i = 0; i < rows; i++) {
        double sum = 0;
        for (size_t k = 0; k < count; k++) sum += parts[k][i];
        total[i] = (float)(sum * factor);
        norms[i] = sqrtf(total[i]);
        finite &= isfinite(total[i]) != 0;
    }
    return finite;
}

/* min(1, bound / sqrt(sq_norms[i])); 0 where that is no number. */
WIDE void hushgrad_clip(const float *restrict sq_norms, size_t rows, float bound, float *restrict weights) {
    for (size_t i = 0; i < rows; i++) {
        const float weight = bound / sqrtf(sq_norms[i]);
        weights[i] = weight >= 1 ? 1 : weight >= 0 ? weight : 0; /* NaN fails both comparisons */
    }
}

/* weighted[i] = weights[i] g[i] for g (rows, p), and the sum of its rows. */
WIDE void hushgrad_weigh(const float *restrict g, const float *restrict weights, size_t rows, size_t p, float *restrict weighted,
                         float *restrict sum) {
    for (size_t low = 0; low < p; low += COLUMNS) {
        const size_t width = p - low < COLUMNS ? p - low : COLUMNS;
        double total[COLUMNS] = {0};
        for (size_t begin = 0; begin < rows; begin += ROWS) {
            const size_t end = rows - begin > ROWS ? begin + ROWS : rows;
            float part[COLUMNS] = {0};
            for (size_t i = begin; i < end; i++) {
                const float *from = g + i * p + low;
                float *to = weighted + i * p + low;
                for (size_t j = 0; j < width; j++) part[j] += to[j] = weights[i] * from[j];
            }
            for (size_t j = 0; j < width; j++) total[j] += part[j];
        }
        for (size_t j = 0; j < width; j++) sum[low + j] = (float)total[j];
    }
}
