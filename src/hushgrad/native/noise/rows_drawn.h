/* What becomes of draws, for one floating-point type, REAL; rows.c includes this file once for each. */
#include "widths.h"

/* Buffers --------------------------------------------------------------------------------------------------------------- */

void TYPED(hushgrad_buffers)(const REAL *z, REAL *state, size_t stride, const REAL *decay, const REAL *weight, size_t count,
                             REAL scale, int add, REAL *out, size_t n) {
    REAL x[TILE] __attribute__((aligned(64)));
    for (size_t begin = 0; begin < n; begin += TILE) {
        size_t m = n - begin < TILE ? n - begin : TILE;
        memcpy(x, z + begin, m * sizeof(REAL));
        CHOSEN(buffers)(x, state + begin, stride, decay, weight, count, scale, add, out + begin, m);
    }
}

#if CIPHER
void TYPED(hushgrad_drawn_buffers)(const address *at, uint64_t start, REAL *state, size_t stride, const REAL *decay,
                                   const REAL *weight, size_t count, REAL scale, int add, REAL *out, size_t n) {
    REAL x[TILE] __attribute__((aligned(64)));
    for (size_t m; n; start += m, state += m, out += m, n -= m) {
        m = IN_REGISTERS(at, start, state, stride, decay, weight, count, scale, add, out, n);
        if (m) continue;
        m = (n < TILE ? n : TILE);
        if (start % GROUP && m > GROUP - start % GROUP) m = GROUP - start % GROUP; /* so that the rest is whole groups */
        TYPED(hushgrad_draw)(at, start, 1, 0, x, m);
        CHOSEN(buffers)(x, state, stride, decay, weight, count, scale, add, out, m);
    }
}
#endif

/* Linear combinations --------------------------------------------------------------------------------------------------- */

void TYPED(hushgrad_combine)(const REAL *weights, size_t rows, const REAL *const *parts, size_t count, REAL *out, size_t stride,
                             size_t n) {
    CHOSEN(combine)(weights, rows, parts, count, 0, out, stride, n);
}

void TYPED(hushgrad_solve)(const REAL *inner, const REAL *diagonal, size_t rows, REAL *x, size_t stride, size_t n) {
    CHOSEN(solve)(inner, diagonal, rows, x, stride, n);
}

#if CIPHER
void TYPED(hushgrad_drawn_solutions)(const address *at, uint64_t start, const solutions *s, REAL *room, REAL scale, int add,
                                     REAL *out, size_t n) {
    for (size_t begin = 0, m; begin < n; begin += m) {
        const size_t skip = (start + begin) % GROUP; /* whole groups, but for the first and the last */
        m = n - begin < TILE - skip ? n - begin : TILE - skip;
        address here = *at;
        for (size_t k = 0; k < s->rows; k++, here.step++) TYPED(hushgrad_draw)(&here, start + begin, 1, 0, room + k * TILE_STRIDE, m);
        CHOSEN(combine)(s->weights, s->rows, (const REAL *const *)s->history, s->count, begin, room, TILE_STRIDE, m);
        TYPED(hushgrad_solve)(s->inner, s->diagonal, s->rows, room, TILE_STRIDE, m);
        for (size_t k = 0; k < s->rows; k++) memcpy((REAL *)s->kept[k] + begin, room + k * TILE_STRIDE, m * sizeof(REAL));
        (add ? TYPED(hushgrad_add) : TYPED(hushgrad_write))(room, scale, out + begin, m);
    }
}

void TYPED(hushgrad_drawn_combinations)(const address *at, uint64_t start, const REAL *weights, size_t rows, size_t draws,
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
                TYPED(hushgrad_draw)(&here, start + begin, 1, 0, room + p * TILE_STRIDE, m);
                parts[p] = room + p * TILE_STRIDE;
            }
            for (size_t k = 0; k < rows; k += MOST_ROWS) {
                const size_t few = rows - k < MOST_ROWS ? rows - k : MOST_ROWS;
                for (size_t r = 0; r < few; r++) memcpy(w + r * some, weights + (k + r) * draws + j, some * sizeof(REAL));
                CHOSEN(combine)(w, few, parts, some, 0, out + k * stride + begin, stride, m);
            }
        }
    }
}
#endif
