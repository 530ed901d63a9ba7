/* The small steps between two matrix products: one call where torch needs three to nine. Long sums are carried in double. */

#define AT_A_TIME 64 /* examples of a weighted sum: few enough for a column of their inputs to stay in the first-level cache */

/* The squared norms of g_i x_i^T and of g_i, for x (rows, d) and g (rows, p); whether some squared norm of x or g exceeds `wild`. */
TARGET static int NAME(outer_sq_norms)(const float *restrict x, size_t d, const float *restrict g, size_t p, size_t rows, double wild,
                                  double *restrict of_weight, double *restrict of_bias) {
    int found = 0;
    for (size_t i = 0; i < rows; i++) {
        const double sq_g = NAME(sq_norm)(g + i * p, p), sq_x = NAME(sq_norm)(x + i * d, d);
        of_bias[i] = sq_g;
        of_weight[i] = sq_g * sq_x;
        found |= sq_g > wild || sq_x > wild;
    }
    return found;
}

/* factor sum_k parts[k][i], as squared norms of examples. */
TARGET INLINE double NAME(square_of)(const double *const *parts, size_t count, size_t i, double factor) {
    double sum = 0;
    for (size_t k = 0; k < count; k++) sum += parts[k][i];
    return sum * factor;
}

/* These squares and their roots; whether all are finite. */
TARGET static int NAME(total)(const double *const *restrict parts, size_t count, size_t rows, double factor, double *restrict total,
                         double *restrict norms) {
    int finite = 1;
    for (size_t i = 0; i < rows; i++) {
        total[i] = NAME(square_of)(parts, count, i, factor);
        norms[i] = sqrt(total[i]);
        finite &= isfinite(total[i]) != 0;
    }
    return finite;
}

/* Their roots and min(1, bound / root), 0 below `least`, in single or double precision; whether all are finite. Where one is not, its
 * weight is 0. */
TARGET static int NAME(clip)(const double *const *restrict parts, size_t count, size_t rows, double factor, double bound, double least,
                        int single, void *restrict norms, void *restrict weights) {
    int finite = 1;
    for (size_t i = 0; i < rows; i++) {
        const double norm = sqrt(NAME(square_of)(parts, count, i, factor)), quotient = bound / norm;
        const double weight = quotient >= 1 ? 1 : quotient >= least ? quotient : 0; /* NaN fails both comparisons */
        if (single) ((float *)norms)[i] = (float)norm, ((float *)weights)[i] = (float)weight;
        else ((double *)norms)[i] = norm, ((double *)weights)[i] = weight;
        finite &= isfinite(norm) != 0;
    }
    return finite;
}

/* sum_i weights[i] g_i x_i^T (p, d) and sum_i weights[i] g_i (p), for x (rows, d) and g (rows, p), p <= OUTPUTS_AT_MOST. */
TARGET static void NAME(outer_sums)(const float *restrict x, size_t d, const float *restrict g, size_t p, const float *restrict weights,
                               size_t rows, float *restrict of_weight, float *restrict of_bias) {
    const size_t whole = d / LANES * LANES;
    double total[OUTPUTS_AT_MOST] = {0};
    float weighted[AT_A_TIME * OUTPUTS_AT_MOST], rest[AT_A_TIME * LANES]; /* rest: the last columns of x, filled up with zeros */
    for (size_t low = 0; low < rows || !low; low += AT_A_TIME, x += AT_A_TIME * d, g += AT_A_TIME * p, weights += AT_A_TIME) {
        const size_t some = rows - low < AT_A_TIME ? rows - low : AT_A_TIME; /* none at all: zeros are written */
        for (size_t i = 0; i < some; i++)
            for (size_t j = 0; j < p; j++) total[j] += weighted[i * p + j] = weights[i] * g[i * p + j];
        NAME(product) m = {.a = weighted, .b = x, .out = of_weight, .rows = p, .columns = whole, .depth = some};
        m.down = 1, m.along = p, m.b_row = m.out_row = d, m.add = low > 0;
        NAME(multiply)(&m);
        if (whole == d) continue;
        for (size_t i = 0; i < some; i++)
            for (size_t k = 0; k < LANES; k++) rest[i * LANES + k] = whole + k < d ? x[i * d + whole + k] : 0;
        m.b = rest, m.b_row = LANES, m.out = of_weight + whole, m.columns = d - whole;
        NAME(multiply)(&m);
    }
    for (size_t j = 0; j < p; j++) of_bias[j] = (float)total[j];
}
