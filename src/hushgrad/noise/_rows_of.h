/* The row kernels for one floating-point type, REAL; _rows.c includes this file once for each. */

/* 64 bytes, unaligned: one register or several, by the processor. */
typedef REAL NAME(vector) __attribute__((vector_size(64), aligned(sizeof(REAL)), may_alias));
#define VECTOR NAME(vector)
#define LANES (64 / sizeof(REAL))
#define AT(p) (*(VECTOR *)(p))
#define READ(p) (*(const VECTOR *)(p))

/* Buffers --------------------------------------------------------------------------------------------------------------- */

/* One step of a buffered Toeplitz recursion; buffer j starts at state + j * stride. Then out = scale x, or out += scale x. */
static inline __attribute__((always_inline)) void NAME(few_buffers)(const REAL *x, REAL *state, size_t stride,
                                                                    const REAL *decay, const REAL *weight, const int buffers,
                                                                    REAL scale, const int add, REAL *out, size_t n) {
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

static inline __attribute__((always_inline)) void NAME(many_buffers)(REAL *restrict x, REAL *restrict state, size_t stride,
                                                                     const REAL *decay, const REAL *weight, size_t buffers,
                                                                     REAL scale, int add, REAL *restrict out, size_t n) {
    for (size_t j = 0; j < buffers; j++) {
        const REAL *s = state + j * stride, w = weight[j];
        for (size_t i = 0; i < n; i++) x[i] = x[i] - s[i] * w;
    }
    for (size_t j = 0; j < buffers; j++) {
        REAL *restrict s = state + j * stride, d = decay[j];
        for (size_t i = 0; i < n; i++) s[i] = s[i] * d + x[i];
    }
    (add ? NAME(hushgrad_add) : NAME(hushgrad_write))(x, scale, out, n);
}

/* x must be in the first-level cache. */
WIDE static void NAME(buffers)(REAL *restrict x, REAL *restrict state, size_t stride, const REAL *decay, const REAL *weight,
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


/* From given draws z, which are left alone. */
void NAME(hushgrad_buffers)(const REAL *z, REAL *state, size_t stride, const REAL *decay, const REAL *weight, size_t count,
                            REAL scale, int add, REAL *out, size_t n) {
    REAL x[TILE] __attribute__((aligned(64)));
    for (size_t begin = 0; begin < n; begin += TILE) {
        size_t m = n - begin < TILE ? n - begin : TILE;
        memcpy(x, z + begin, m * sizeof(REAL));
        NAME(buffers)(x, state + begin, stride, decay, weight, count, scale, add, out + begin, m);
    }
}

#if CIPHER
/* From draws of their own, which never leave the first-level cache or, where IN_REGISTERS can do it, the registers. */
void NAME(hushgrad_drawn_buffers)(const address *at, uint64_t start, REAL *state, size_t stride, const REAL *decay,
                                  const REAL *weight, size_t count, REAL scale, int add, REAL *out, size_t n) {
    REAL x[TILE] __attribute__((aligned(64)));
    for (size_t m; n; start += m, state += m, out += m, n -= m) {
        m = IN_REGISTERS(at, start, state, stride, decay, weight, count, scale, add, out, n);
        if (m) continue;
        m = (n < TILE ? n : TILE);
        if (start % GROUP && m > GROUP - start % GROUP) m = GROUP - start % GROUP; /* so that the rest is whole groups */
        NAME(hushgrad_draw)(at, start, 1, 0, x, m);
        NAME(buffers)(x, state, stride, decay, weight, count, scale, add, out, m);
    }
}
#endif

/* Linear combinations --------------------------------------------------------------------------------------------------- */

/* out[k] += sum_h w[h, k] parts[h] for a block of rows and parts, with w transposed; n is a multiple of LANES. Meanwhile the
 * first fetched of the next parts are fetched: each is too short a stretch of memory for the processor to see it coming. */
static inline __attribute__((always_inline)) void NAME(combine_block)(const REAL *w, const int rows, const REAL *const *parts,
                                                                      const int count, REAL *out, size_t stride, size_t n,
                                                                      const REAL *const *next, int fetched) {
    for (size_t i = 0; i < n; i += LANES) {
        for (int h = 0; h < fetched; h++) __builtin_prefetch(next[h] + i);
        VECTOR total[ROWS];
        _Pragma("GCC unroll 8") for (int k = 0; k < rows; k++) total[k] = READ(out + k * stride + i);
        for (int h = 0; h < count; h++) {
            VECTOR part = READ(parts[h] + i);
            _Pragma("GCC unroll 8") for (int k = 0; k < rows; k++) total[k] = total[k] + part * w[h * ROWS + k];
        }
        _Pragma("GCC unroll 8") for (int k = 0; k < rows; k++) AT(out + k * stride + i) = total[k];
    }
}

/* Where the parts from h on are, as many as are read together; after the last one, the first ones of the next tile. */
static inline int NAME(places_of)(const REAL *const *parts, size_t h, size_t count, size_t at, const REAL **places) {
    if (h == count) h = 0, at += TILE;
    const int some = count - h < PARTS ? (int)(count - h) : PARTS;
    for (int p = 0; p < some; p++) places[p] = parts[h + p] + at;
    return some;
}

/* out[k] += sum_h weights[k, h] parts[h], in the order of h; row k starts at out + k * stride, and parts at their offset. */
WIDE static void NAME(combine)(const REAL *weights, size_t rows, const REAL *const *parts, size_t count, size_t offset,
                               REAL *out, size_t stride, size_t n) {
    const size_t whole = n / LANES * LANES;
    for (size_t h = 0; h < count; h += PARTS) {
        for (size_t begin = 0; begin < n; begin += 1024) {
            const size_t end = begin + 1024 < whole ? begin + 1024 : whole;
            const REAL *places[PARTS], *next[PARTS];
            const int some = NAME(places_of)(parts, h, count, offset + begin, places);
            const int fetched = NAME(places_of)(parts, h + some, count, offset + begin, next);
            for (size_t k = 0; k < rows; k += ROWS) {
                const size_t few = rows - k < ROWS ? rows - k : ROWS;
                REAL w[PARTS * ROWS];
                int any = 0;
                for (int p = 0; p < some; p++)
                    for (size_t r = 0; r < few; r++) any |= (w[p * ROWS + r] = weights[(k + r) * count + h + p]) != 0;
                if (!any) continue;
                if (begin < end && few == ROWS)
                    NAME(combine_block)(w, ROWS, places, some, out + k * stride + begin, stride, end - begin, next, k ? 0 : fetched);
                else if (begin < end)
                    for (size_t r = 0; r < few; r++)
                        NAME(combine_block)(w + r, 1, places, some, out + (k + r) * stride + begin, stride, end - begin, next, 0);
                if (begin + 1024 >= n)
                    for (size_t r = 0; r < few; r++)
                        for (int p = 0; p < some; p++)
                            for (size_t i = whole; i < n; i++)
                                out[(k + r) * stride + i] = out[(k + r) * stride + i] + parts[h + p][offset + i] * w[p * ROWS + r];
            }
        }
    }
}

void NAME(hushgrad_combine)(const REAL *weights, size_t rows, const REAL *const *parts, size_t count, REAL *out, size_t stride,
                            size_t n) {
    NAME(combine)(weights, rows, parts, count, 0, out, stride, n);
}

/* Forward substitution: x[k] = (x[k] + sum_{j<k} inner[k, j] x[j]) / diagonal[k]. */
WIDE void NAME(hushgrad_solve)(const REAL *inner, const REAL *diagonal, size_t rows, REAL *x, size_t stride, size_t n) {
    const size_t whole = n / (2 * LANES) * (2 * LANES);
    for (size_t i = 0; i < whole; i += 2 * LANES)
        for (size_t k = 0; k < rows; k++) {
            VECTOR left = READ(x + k * stride + i), right = READ(x + k * stride + i + LANES);
            for (size_t j = 0; j < k; j++) {
                const REAL w = inner[k * rows + j];
                left = left + READ(x + j * stride + i) * w;
                right = right + READ(x + j * stride + i + LANES) * w;
            }
            if (diagonal[k] != 1) left = left / diagonal[k], right = right / diagonal[k];
            AT(x + k * stride + i) = left;
            AT(x + k * stride + i + LANES) = right;
        }
    for (size_t i = whole; i < n; i++)
        for (size_t k = 0; k < rows; k++) {
            REAL total = x[k * stride + i];
            for (size_t j = 0; j < k; j++) total = total + x[j * stride + i] * inner[k * rows + j];
            x[k * stride + i] = total / diagonal[k];
        }
}

#if CIPHER
/* Rows of noise with a banded C, drawn, combined with the history and solved in one go, a tile at a time: row k, which is also the
 * number of the step from at->step on, is kept in kept[k], and the first goes to out as well. room holds rows x STRIDE numbers. */
void NAME(hushgrad_drawn_solutions)(const address *at, uint64_t start, const solutions *s, REAL *room, REAL scale, int add,
                                    REAL *out, size_t n) {
    for (size_t begin = 0, m; begin < n; begin += m) {
        const size_t skip = (start + begin) % GROUP; /* whole groups, but for the first and the last */
        m = n - begin < TILE - skip ? n - begin : TILE - skip;
        address here = *at;
        for (size_t k = 0; k < s->rows; k++, here.step++) NAME(hushgrad_draw)(&here, start + begin, 1, 0, room + k * STRIDE, m);
        NAME(combine)(s->weights, s->rows, (const REAL *const *)s->history, s->count, begin, room, STRIDE, m);
        NAME(hushgrad_solve)(s->inner, s->diagonal, s->rows, room, STRIDE, m);
        for (size_t k = 0; k < s->rows; k++) memcpy((REAL *)s->kept[k] + begin, room + k * STRIDE, m * sizeof(REAL));
        (add ? NAME(hushgrad_add) : NAME(hushgrad_write))(room, scale, out + begin, m);
    }
}

/* Rows that are combinations of draws: row k of out += sum_j weights[k, j] z of step at->step + j. room holds PARTS x STRIDE. */
void NAME(hushgrad_drawn_combinations)(const address *at, uint64_t start, const REAL *weights, size_t rows, size_t draws,
                                       REAL *room, REAL *out, size_t stride, size_t n) {
    REAL w[PARTS * MOST_ROWS];
    const REAL *parts[PARTS];
    for (size_t begin = 0, m; begin < n; begin += m) {
        const size_t skip = (start + begin) % GROUP;
        m = n - begin < TILE - skip ? n - begin : TILE - skip;
        for (size_t j = 0; j < draws; j += PARTS) {
            const size_t some = draws - j < PARTS ? draws - j : PARTS;
            int any = 0;
            for (size_t k = 0; k < rows; k++)
                for (size_t p = 0; p < some; p++) any |= weights[k * draws + j + p] != 0;
            if (!any) continue;
            address here = *at;
            here.step += j;
            for (size_t p = 0; p < some; p++, here.step++) {
                NAME(hushgrad_draw)(&here, start + begin, 1, 0, room + p * STRIDE, m);
                parts[p] = room + p * STRIDE;
            }
            for (size_t k = 0; k < rows; k += MOST_ROWS) {
                const size_t few = rows - k < MOST_ROWS ? rows - k : MOST_ROWS;
                for (size_t r = 0; r < few; r++) memcpy(w + r * some, weights + (k + r) * draws + j, some * sizeof(REAL));
                NAME(combine)(w, few, parts, some, 0, out + k * stride + begin, stride, m);
            }
        }
    }
}
#endif

#undef VECTOR
#undef LANES
#undef AT
#undef READ
