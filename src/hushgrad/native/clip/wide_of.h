/* Sums of products of floats in double: each number is widened once, into panels that stay in the cache, and multiplied and added there.
 *
 * Squares and products of floats are exact in double, so that only additions are rounded, to 53 bits.
 */

#define WIDE LANES  /* columns of a tile: two vectors of doubles */
#define DEEP PANEL_DEPTH
#define TALL (12 * HIGH) /* rows at a time */
#define SQUARE (LANES < 8 ? LANES : LANES / 2) /* rows of a tile of a Gram matrix, whose panels are those of its columns: some of one panel */
_Static_assert(TALL <= PANEL_ROWS && WIDE <= PANEL_COLUMNS, "callers make room for the widest vectors");

/* out[i, j] = sum_t weights[t] a[i, t] b[j, t], added to what is there if `add`; a[i, t] is a[i * a_down + t * a_along], and so is b. No
 * weights: 1. With `onto`, and depth at most DEEP, the complete sum is added to that and rounded to single precision, instead of `out`. */
typedef struct {
    const float *a, *b;
    const double *weights;
    double *out;
    float *onto;
    int add;
    size_t rows, columns, depth, a_down, a_along, b_down, b_along, out_row;
} NAME(wide_product);

/* Rows of `from` in panels of `width`, the terms `low` to `low + some` of each next to each other, filled up with zeros. */
TARGET INLINE void NAME(widen)(const float *from, size_t down, size_t along, size_t rows, size_t some, const double *weights, double *to,
                        const size_t width) {
    for (size_t first = 0; first < rows; first += width, to += width * some) {
        const size_t here = rows - first < width ? rows - first : width;
        for (size_t t = 0; t < some; t++) {
            const float *at = from + first * down + t * along;
            const double by = weights ? weights[t] : 1;
            for (size_t r = 0; r < here; r++) to[t * width + r] = by * at[r * down];
            for (size_t r = here; r < width; r++) to[t * width + r] = 0;
        }
    }
}

/* `full` rows from i on, which lie in a panel of `width` of them, and the columns of a panel from j on. */
TARGET INLINE void NAME(wide_tile)(const NAME(wide_product) *m, const double *a, const double *b, size_t some, size_t i, size_t j,
                                   const int add, const size_t full, const size_t width) {
    DOUBLES sum[HIGH > SQUARE ? HIGH : SQUARE][2] = {{{0}}};
    const size_t high = m->rows - i < full ? m->rows - i : full, wide = m->columns - j < WIDE ? m->columns - j : WIDE;
    const size_t at = i * m->out_row + j;
    for (size_t h = 0; h < high; h++) /* while the tile is computed: its rows are no stretch of memory that the processor sees coming */
        if (m->onto) __builtin_prefetch(m->onto + at + h * m->out_row, 1, 2);
        else
            __builtin_prefetch(m->out + at + h * m->out_row, 1, 2), __builtin_prefetch(m->out + at + h * m->out_row + HALF, 1, 2);
    for (size_t t = 0; t < some; t++, a += width, b += WIDE) {
        const DOUBLES b0 = *(const DOUBLES *)b, b1 = *(const DOUBLES *)(b + HALF);
        for (size_t h = 0; h < full; h++) {
            sum[h][0] += a[h] * b0;
            sum[h][1] += a[h] * b1;
        }
    }
    if (high < full || wide < WIDE) {
        for (size_t h = 0; h < high; h++)
            for (size_t k = 0; k < wide; k++) {
                const size_t to = at + h * m->out_row + k;
                const double term = k < HALF ? sum[h][0][k] : sum[h][1][k - HALF];
                if (m->onto) m->onto[to] = (float)(m->onto[to] + term);
                else m->out[to] = add ? m->out[to] + term : term;
            }
        return;
    }
    for (size_t h = 0; h < full; h++)
        for (size_t k = 0; k < 2; k++) {
            const size_t to = at + h * m->out_row + k * HALF;
            if (m->onto)
                *(NAME(narrow) *)(m->onto + to) = __builtin_convertvector(WIDENED(m->onto + to) + sum[h][k], NAME(narrow));
            else if (add) *(DOUBLES *)(m->out + to) += sum[h][k];
            else *(DOUBLES *)(m->out + to) = sum[h][k];
        }
}

/* room: DEEP (columns rounded up to WIDE + TALL) doubles. */
TARGET INLINE void NAME(wide_multiply)(const NAME(wide_product) *m, double *room) {
    double *left = room, *right = room + DEEP * TALL;
    for (size_t low = 0; low < m->depth; low += DEEP) {
        const size_t some = m->depth - low < DEEP ? m->depth - low : DEEP;
        NAME(widen)(m->b + low * m->b_along, m->b_down, m->b_along, m->columns, some, NULL, right, WIDE);
        for (size_t top = 0; top < m->rows; top += TALL) {
            const size_t tall = m->rows - top < TALL ? m->rows - top : TALL;
            const double *weights = m->weights ? m->weights + low : NULL;
            NAME(widen)(m->a + top * m->a_down + low * m->a_along, m->a_down, m->a_along, tall, some, weights, left, HIGH);
            for (size_t j = 0; j < m->columns; j += WIDE)
                for (size_t i = 0; i < tall; i += HIGH)
                    NAME(wide_tile)(m, left + i * some, right + j * some, some, top + i, j, m->add || low, HIGH, HIGH);
        }
    }
}

/* A Gram matrix on and above its diagonal, with what its tiles hold besides; each number is widened once. Room as above. */
TARGET INLINE void NAME(wide_square)(const NAME(wide_product) *m, double *room) {
    for (size_t low = 0; low < m->depth; low += DEEP) {
        const size_t some = m->depth - low < DEEP ? m->depth - low : DEEP;
        NAME(widen)(m->b + low * m->b_along, m->b_down, m->b_along, m->columns, some, NULL, room, WIDE);
        for (size_t j = 0; j < m->columns; j += WIDE)
            for (size_t i = 0; i < m->rows && i < j + WIDE; i += SQUARE)
                NAME(wide_tile)(m, room + i / WIDE * WIDE * some + i % WIDE, room + j * some, some, i, j, low > 0, SQUARE, WIDE);
    }
}

/* Gram matrices of `examples` matrices x (rows, depth), x[i, t] at x[i * down + t * along], each `stride` floats after the last. */
TARGET static void NAME(gram)(const float *x, size_t examples, size_t stride, size_t rows, size_t depth, size_t down, size_t along,
                         double *room, double *out) {
    for (size_t e = 0; e < examples; e++, x += stride, out += rows * rows) {
        if (!depth) memset(out, 0, rows * rows * sizeof(double));
        const NAME(wide_product) m = {.b = x, .out = out, .rows = rows, .columns = rows, .depth = depth, .b_down = down,
                                      .b_along = along, .out_row = rows};
        NAME(wide_square)(&m, room);
        for (size_t i = 0; i < rows; i++)
            for (size_t j = 0; j < i; j++) out[i * rows + j] = out[j * rows + i];
    }
}

/* out (p, d) = sum_i weights[i] g_i x_i^T, for x (rows, d) and g (rows, p): columns `first` to `first + some` of g; see abi.h. */
TARGET static void NAME(wide_sums)(const float *x, size_t d, const float *g, size_t p, const double *weights, size_t rows, size_t first,
                              size_t some, double *room, double *out, float *onto, int add) {
    const NAME(wide_product) m = {.a = g + first, .b = x, .weights = weights, .out = onto ? NULL : out + first * d,
                                  .onto = onto ? onto + first * d : NULL, .add = add, .rows = some, .columns = d, .depth = rows,
                                  .a_down = 1, .a_along = p, .b_down = 1, .b_along = d, .out_row = d};
    NAME(wide_multiply)(&m, room);
}

/* out (n) += sum_i weights[i] G_i, for G (rows, n): columns `first` to `first + some`. */
TARGET static void NAME(wide_kept)(const float *G, size_t n, const double *weights, size_t rows, size_t first, size_t some, double *out) {
    for (size_t low = first; low < first + some; low += 1024) {
        const size_t here = first + some - low < 1024 ? first + some - low : 1024, whole = here / HALF * HALF;
        for (size_t i = 0; i < rows; i++) {
            const float *from = G + i * n + low;
            const double by = weights[i];
            for (size_t j = 0; j < whole; j += HALF) *(DOUBLES *)(out + low + j) += by * WIDENED(from + j);
            for (size_t j = whole; j < here; j++) out[low + j] += by * from[j];
        }
    }
}

/* The squared norm of each row of x (rows, n). */
TARGET static void NAME(sq_norms)(const float *x, size_t rows, size_t n, double *out) {
    for (size_t i = 0; i < rows; i++) out[i] = NAME(sq_norm)(x + i * n, n);
}
