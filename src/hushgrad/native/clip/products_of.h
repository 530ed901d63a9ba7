/* Sums of outer products in single precision, for the weights of layers: sum_t g_t x_t^T over some rows of two matrices.
 *
 * A library of matrix products copies both factors into panels first, which is worth it for large ones, and may not use the widest vectors
 * that there are. Here the factors are read where they lie, a few hundred terms at a time.
 */

#define DEEP_SUM 256  /* terms at a time: what is read of x then stays in the second-level cache */
#define WIDE_SUM 256  /* columns of x at a time */

/* out (some, d) = sum_t g_t x_t^T for x (rows, d) and g (rows, p), from g's first column on; added to what is there if `add`. */
TARGET static void NAME(products)(const float *x, size_t d, const float *g, size_t p, size_t rows, size_t some, float *out, int add) {
    const size_t whole = d / LANES * LANES;
    float rest[DEEP_SUM * LANES]; /* the last columns of x, filled up with zeros */
    if (!rows && !add) memset(out, 0, some * d * sizeof(float));
    for (size_t low = 0; low < rows; low += DEEP_SUM, x += DEEP_SUM * d, g += DEEP_SUM * p) {
        const size_t deep = rows - low < DEEP_SUM ? rows - low : DEEP_SUM;
        NAME(product) m = {.a = g, .rows = some, .depth = deep, .down = 1, .along = p, .b_row = d, .out_row = d, .add = add || low};
        for (size_t j = 0; j < whole; j += WIDE_SUM) {
            m.b = x + j, m.out = out + j, m.columns = whole - j < WIDE_SUM ? whole - j : WIDE_SUM;
            NAME(multiply)(&m);
        }
        if (whole == d) continue;
        for (size_t t = 0; t < deep; t++)
            for (size_t k = 0; k < LANES; k++) rest[t * LANES + k] = whole + k < d ? x[t * d + whole + k] : 0;
        m.b = rest, m.b_row = LANES, m.out = out + whole, m.columns = d - whole;
        NAME(multiply)(&m);
    }
}

/* The same of each of `examples` pairs of such matrices, one after the other, with the squared norm of each sum. */
TARGET static void NAME(outer_gradients)(const float *x, size_t d, const float *g, size_t p, size_t rows, size_t examples, float *G,
                                         double *sq_norms) {
    for (size_t i = 0; i < examples; i++, x += rows * d, g += rows * p, G += p * d) {
        NAME(products)(x, d, g, p, rows, p, G, 0);
        sq_norms[i] = NAME(sq_norm)(G, p * d);
    }
}

#define SIDE_BY_SIDE 48 /* rows of g that are turned at a time: four tiles */

/* See abi.h. Some rows of g are turned, and then multiplied with what lies under all offsets of a stretch of positions. */
TARGET static void NAME(offset_gradients)(const float *x, size_t d, size_t pixels, const float *g, size_t p, size_t positions, size_t depth,
                                          const size_t *starts, size_t taps, size_t examples, size_t stride, float *G) {
    float turned[DEEP_SUM * SIDE_BY_SIDE];
    for (size_t i = 0; i < examples; i++, x += pixels * d, g += p * positions, G += p * d)
        for (size_t low = 0; low < depth || !low; low += DEEP_SUM)
            for (size_t row = 0; row < p; row += SIDE_BY_SIDE) {
                const size_t deep = depth - low < DEEP_SUM ? depth - low : DEEP_SUM;
                const size_t some = p - row < SIDE_BY_SIDE ? p - row : SIDE_BY_SIDE;
                for (size_t k = 0; k < some; k++)
                    for (size_t t = 0; t < deep; t++) turned[t * SIDE_BY_SIDE + k] = g[(row + k) * positions + low + t];
                for (size_t k = 0; k < taps; k++)
                    NAME(products)(x + (starts[k] + low) * d, d, turned, SIDE_BY_SIDE, deep, some, G + k * stride + row * d, low > 0);
            }
}
