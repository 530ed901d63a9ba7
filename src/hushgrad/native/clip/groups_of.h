/* Norms of sums of outer products over groups of rows that lie anywhere: ‖sum_r left_r right_r^T‖² = sum_{r,s} <left_r, left_s> <right_r, right_s>.
 *
 * Inner products are made along the rows, a few rows by as many at a time, so that nothing is copied, turned or filled up. Products of
 * floats are exact in double, so that only additions are rounded, to 53 bits.
 */

#define SIDE (BYTES == 64 ? 4 : 2) /* rows and columns of a tile: their sums and factors are held in registers */

/* The inner products of SIDE rows of x (n floats each) with SIDE others. */
TARGET INLINE void NAME(inner)(const float *x, size_t n, const size_t *rows, const size_t *columns, double out[SIDE][SIDE]) {
    const float *a[SIDE], *b[SIDE];
    DOUBLES sum[SIDE][SIDE] = {{{0}}};
    for (size_t h = 0; h < SIDE; h++) a[h] = x + rows[h] * n, b[h] = x + columns[h] * n;
    const size_t whole = n - n % HALF;
    for (size_t t = 0; t < whole; t += HALF) {
        DOUBLES right[SIDE];
        for (size_t k = 0; k < SIDE; k++) right[k] = WIDENED(b[k] + t);
        for (size_t h = 0; h < SIDE; h++) {
            const DOUBLES left = WIDENED(a[h] + t);
            for (size_t k = 0; k < SIDE; k++) sum[h][k] += left * right[k];
        }
    }
    for (size_t h = 0; h < SIDE; h++)
        for (size_t k = 0; k < SIDE; k++) {
            double total = 0;
            for (size_t lane = 0; lane < HALF; lane += 2) total += sum[h][k][lane] + sum[h][k][lane + 1];
            for (size_t t = whole; t < n; t++) total += (double)a[h][t] * b[k][t];
            out[h][k] = total;
        }
}

/* See abi.h. Of a tile beside the diagonal each product stands for two. */
TARGET static void NAME(group_norms)(const float *left, size_t m, const float *right, size_t n, const size_t *rows, const size_t *starts,
                              size_t groups, double wild, double *sq_norms, double *masses) {
    for (size_t e = 0; e < groups; e++) {
        const size_t *mine = rows + starts[e], count = starts[e + 1] - starts[e];
        double norm = 0, mass = 0;
        for (size_t i = 0; i < count; i += SIDE)
            for (size_t j = i; j < count; j += SIDE) {
                size_t down[SIDE], along[SIDE]; /* beyond the last row, that one again */
                double x[SIDE][SIDE], g[SIDE][SIDE];
                for (size_t h = 0; h < SIDE; h++) down[h] = mine[i + h < count ? i + h : count - 1], along[h] = mine[j + h < count ? j + h : count - 1];
                NAME(inner)(left, m, down, along, x);
                NAME(inner)(right, n, down, along, g);
                for (size_t h = 0; h < SIDE && i + h < count; h++)
                    for (size_t k = 0; k < SIDE && j + k < count; k++) norm += (i < j ? 2 : 1) * (x[h][k] * g[h][k]);
                for (size_t h = 0; i == j && h < SIDE && i + h < count; h++)
                    mass += x[h][h] > wild || g[h][h] > wild ? INFINITY : sqrt(x[h][h] * g[h][h]);
            }
        sq_norms[e] = norm < 0 ? 0 : norm;
        masses[e] = mass;
    }
}
#undef SIDE
