/* The row kernels for one floating-point type and one vector width; widths.h includes this file once for each. */

/* A register's worth, anywhere in memory. */
typedef REAL NAME(vector) __attribute__((vector_size(BYTES), aligned(sizeof(REAL)), may_alias));
#define VECTOR NAME(vector)
#define LANES (BYTES / sizeof(REAL))
#define AT(p) (*(VECTOR *)(p))
#define READ(p) (*(const VECTOR *)(p))

/* Buffers --------------------------------------------------------------------------------------------------------------- */

/* One step of a buffered Toeplitz recursion; buffer j starts at state + j * stride. Then out = scale x, or out += scale x. */
TARGET INLINE void NAME(few_buffers)(const REAL *x, REAL *state, size_t stride, const REAL *decay, const REAL *weight,
                                     const int buffers, REAL scale, const int add, REAL *out, size_t n) {
    const size_t whole = n / LANES * LANES;
    for (size_t i = 0; i < whole; i += LANES) {
        VECTOR total = READ(x + i), s[4];
        _Pragma("GCC unroll 4") for (int j = 0; j < buffers; j++) s[j] = READ(state + j * stride + i);
        _Pragma("GCC unroll 4") for (int j = 0; j < buffers; j++) total = total - s[j] * weight[j];
        _Pragma("GCC unroll 4") for (int j = 0; j < buffers; j++) AT(state + j * stride + i) = s[j] * decay[j] + total;
        AT(out + i) = add ? READ(out + i) + total * scale : total * scale;
    }
    for (size_t i = whole; i < n; i++) {
        REAL total = x[i];
        for (int j = 0; j < buffers; j++) total = total - state[j * stride + i] * weight[j];
        for (int j = 0; j < buffers; j++) state[j * stride + i] = state[j * stride + i] * decay[j] + total;
        out[i] = add ? out[i] + total * scale : total * scale;
    }
}

TARGET INLINE void NAME(many_buffers)(REAL *restrict x, REAL *restrict state, size_t stride, const REAL *decay,
                                      const REAL *weight, size_t buffers, REAL scale, int add, REAL *restrict out, size_t n) {
    for (size_t j = 0; j < buffers; j++) {
        const REAL *s = state + j * stride, w = weight[j];
        for (size_t i = 0; i < n; i++) x[i] = x[i] - s[i] * w;
    }
    for (size_t j = 0; j < buffers; j++) {
        REAL *restrict s = state + j * stride, d = decay[j];
        for (size_t i = 0; i < n; i++) s[i] = s[i] * d + x[i];
    }
    (add ? TYPED(hushgrad_add) : TYPED(hushgrad_write))(x, scale, out, n);
}

/* x must be in the first-level cache. */
TARGET static void NAME(buffers)(REAL *restrict x, REAL *restrict state, size_t stride, const REAL *decay, const REAL *weight,
                                 size_t count, REAL scale, int add, REAL *restrict out, size_t n) {
    REAL d[4], w[4]; /* copies: no store into the state can change them */
    for (size_t j = 0; j < count && j < 4; j++) d[j] = decay[j], w[j] = weight[j];
#define FIXED(k)                                                                                                          \
    if (count == k && add) NAME(few_buffers)(x, state, stride, d, w, k, scale, 1, out, n);                                \
    if (count == k && !add) NAME(few_buffers)(x, state, stride, d, w, k, scale, 0, out, n)
    FIXED(1);
    FIXED(2);
    FIXED(3);
    FIXED(4);
#undef FIXED
    if (count > 4) NAME(many_buffers)(x, state, stride, decay, weight, count, scale, add, out, n);
}

/* Linear combinations --------------------------------------------------------------------------------------------------- */

/* out[k] += sum_h w[h, k] parts[h] for a block of rows and parts, with w transposed; n is a multiple of LANES. Meanwhile the
 * first fetched of the next parts are fetched: each is too short a stretch of memory for the processor to see it coming. */
TARGET INLINE void NAME(combine_block)(const REAL *w, const size_t rows, const REAL *const *parts, size_t count, REAL *out,
                                       size_t stride, size_t n, const REAL *const *next, size_t fetched) {
    for (size_t i = 0; i < n; i += LANES) {
        for (size_t h = 0; h < fetched; h++) __builtin_prefetch(next[h] + i);
        VECTOR total[ROWS];
        _Pragma("GCC unroll 8") for (size_t k = 0; k < rows; k++) total[k] = READ(out + k * stride + i);
        for (size_t h = 0; h < count; h++) {
            VECTOR part = READ(parts[h] + i);
            _Pragma("GCC unroll 8") for (size_t k = 0; k < rows; k++) total[k] = total[k] + part * w[h * ROWS + k];
        }
        _Pragma("GCC unroll 8") for (size_t k = 0; k < rows; k++) AT(out + k * stride + i) = total[k];
    }
}

/* Where the parts from h on are, as many as are read together; after the last one, the first ones of the next tile. */
TARGET INLINE size_t NAME(places_of)(const REAL *const *parts, size_t h, size_t count, size_t at, const REAL **places) {
    if (h == count) h = 0, at += TILE;
    const size_t some = count - h < PARTS ? count - h : PARTS;
    for (size_t p = 0; p < some; p++) places[p] = parts[h + p] + at;
    return some;
}

/* out[k] += sum_h weights[k, h] parts[h], in the order of h; row k starts at out + k * stride, and parts at their offset. */
TARGET static void NAME(combine)(const REAL *weights, size_t rows, const REAL *const *parts, size_t count, size_t offset,
                                 REAL *out, size_t stride, size_t n) {
    const size_t whole = n / LANES * LANES;
    for (size_t h = 0; h < count; h += PARTS) {
        for (size_t begin = 0; begin < n; begin += TILE) {
            const size_t end = begin + TILE < whole ? begin + TILE : whole;
            const REAL *places[PARTS], *next[PARTS];
            const size_t some = NAME(places_of)(parts, h, count, offset + begin, places);
            const size_t fetched = NAME(places_of)(parts, h + some, count, offset + begin, next);
            for (size_t k = 0; k < rows; k += ROWS) {
                const size_t few = rows - k < ROWS ? rows - k : ROWS;
                REAL w[PARTS * ROWS];
                int any = 0;
                for (size_t p = 0; p < some; p++)
                    for (size_t r = 0; r < few; r++) any |= (w[p * ROWS + r] = weights[(k + r) * count + h + p]) != 0;
                if (!any) continue;
                if (begin < end && few == ROWS)
                    NAME(combine_block)(w, ROWS, places, some, out + k * stride + begin, stride, end - begin, next, k ? 0 : fetched);
                else if (begin < end)
                    for (size_t r = 0; r < few; r++)
                        NAME(combine_block)(w + r, 1, places, some, out + (k + r) * stride + begin, stride, end - begin, next, 0);
                if (begin + TILE >= n)
                    for (size_t r = 0; r < few; r++)
                        for (size_t p = 0; p < some; p++)
                            for (size_t i = whole; i < n; i++)
                                out[(k + r) * stride + i] = out[(k + r) * stride + i] + parts[h + p][offset + i] * w[p * ROWS + r];
            }
        }
    }
}

/* The substitution below for a few vectors side by side: each alone would wait for itself. */
TARGET INLINE void NAME(solve_some)(const REAL *inner, const REAL *diagonal, size_t rows, REAL *x, size_t stride,
                                    const int vectors) {
#define EACH _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++)
    for (size_t k = 0; k < rows; k++) {
        VECTOR total[4];
        EACH total[v] = READ(x + k * stride + v * LANES);
        for (size_t j = 0; j < k; j++) {
            const REAL w = inner[k * rows + j];
            EACH total[v] = total[v] + READ(x + j * stride + v * LANES) * w;
        }
        if (diagonal[k] != 1) EACH total[v] = total[v] / diagonal[k];
        EACH AT(x + k * stride + v * LANES) = total[v];
    }
#undef EACH
}

/* Forward substitution: x[k] = (x[k] + sum_{j<k} inner[k, j] x[j]) / diagonal[k]. */
TARGET static void NAME(solve)(const REAL *inner, const REAL *diagonal, size_t rows, REAL *x, size_t stride, size_t n) {
    size_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) NAME(solve_some)(inner, diagonal, rows, x + i, stride, 4);
    for (; i + LANES <= n; i += LANES) NAME(solve_some)(inner, diagonal, rows, x + i, stride, 1);
    for (; i < n; i++)
        for (size_t k = 0; k < rows; k++) {
            REAL total = x[k * stride + i];
            for (size_t j = 0; j < k; j++) total = total + x[j * stride + i] * inner[k * rows + j];
            x[k * stride + i] = total / diagonal[k];
        }
}

#undef VECTOR
#undef LANES
#undef AT
#undef READ
