/* Vectors of LANES floats, and the two loops that everything else is made of. */

typedef float NAME(lanes) __attribute__((vector_size(4 * LANES), aligned(4), may_alias)); /* anywhere in memory */
#define VECTOR NAME(lanes)
#define AT(p) (*(VECTOR *)(p))
#define READ(p) (*(const VECTOR *)(p))
typedef double NAME(doubles) __attribute__((vector_size(4 * LANES), aligned(8), may_alias)); /* half as many, in as many bits */
#define DOUBLES NAME(doubles)
#define HALF (LANES / 2)
typedef float NAME(narrow) __attribute__((vector_size(4 * HALF), aligned(4), may_alias));
#undef WIDENED
#if BYTES == 64 /* one instruction, of which compilers make five */
#define WIDENED(p) ((DOUBLES)_mm512_cvtps_pd(_mm256_loadu_ps((const float *)(p))))
#else
#define WIDENED(p) __builtin_convertvector(*(const NAME(narrow) *)(p), DOUBLES)
#endif

#define BLOCK (16 * LANES) /* floats whose squares are added in single precision, four on each of 4 LANES sums: good to 3e-7 */

/* In double: squares of floats neither overflow nor underflow there. */
TARGET static __attribute__((noinline)) double NAME(exact_sq_norm)(const float *x, size_t n) {
    DOUBLES part[2] = {{0}};
    double total = 0;
    const size_t whole = n - n % LANES;
    for (size_t i = 0; i < whole; i += LANES) {
        const DOUBLES low = WIDENED(x + i), high = WIDENED(x + i + HALF);
        part[0] += low * low;
        part[1] += high * high;
    }
    for (int k = 0; k < HALF; k++) total += part[0][k] + part[1][k];
    for (size_t i = whole; i < n; i++) total += (double)x[i] * x[i];
    return total;
}

/* Blocks in single precision, which is twice as fast, and again in double where squares may have overflowed or underflowed. */
TARGET INLINE double NAME(sq_norm)(const float *x, size_t n) {
    double total = 0;
    size_t i = 0;
    for (; n - i >= BLOCK; i += BLOCK) {
        VECTOR part[4];
        for (int k = 0; k < 4; k++) part[k] = READ(x + i + k * LANES) * READ(x + i + k * LANES);
        for (int j = 4; j < 16; j += 4)
            for (int k = 0; k < 4; k++) part[k] += READ(x + i + (j + k) * LANES) * READ(x + i + (j + k) * LANES);
        const VECTOR two[2] = {part[0] + part[1], part[2] + part[3]};
        const DOUBLES sums = WIDENED(&two[0]) + WIDENED((const float *)&two[0] + HALF) + WIDENED(&two[1]) + WIDENED((const float *)&two[1] + HALF);
        double block = 0;
        for (int k = 0; k < HALF; k++) block += sums[k];
        total += block > 1e-25 && block < 1e35 ? block : NAME(exact_sq_norm)(x + i, BLOCK);
    }
    return total + NAME(exact_sq_norm)(x + i, n - i);
}

/* A matrix product: out[i, j] = sum_t a[i, t] b[t, j], added to what is there if `add`. Rows of b and out are contiguous; a[i, t] is
 * a[i * down + t * along]. Beyond `columns` b holds zeros up to a whole vector, and out nothing. */
typedef struct {
    const float *a, *b;
    float *out;
    size_t rows, columns, depth, down, along, b_row, out_row;
    int add;
} NAME(product);

/* `high` rows from i on and `wide` vectors from column j on, all in registers. */
TARGET INLINE void NAME(tile)(const NAME(product) *m, size_t i, size_t j, const size_t high, const size_t wide) {
    const float *a = m->a + i * m->down, *b = m->b + j;
    float *out = m->out + i * m->out_row + j;
    VECTOR sum[HIGH][2] = {{{0}}};
    for (size_t t = 0; t < m->depth; t++, a += m->along, b += m->b_row)
        for (size_t h = 0; h < high; h++)
            for (size_t w = 0; w < wide; w++) sum[h][w] += a[h * m->down] * READ(b + w * LANES);
    for (size_t h = 0; h < high; h++, out += m->out_row)
        for (size_t w = 0; w < wide; w++) {
            const size_t at = w * LANES, left = m->columns - j - at;
            if (left < LANES)
                for (size_t k = 0; k < left; k++) out[at + k] = sum[h][w][k] + (m->add ? out[at + k] : 0);
            else if (m->add) AT(out + at) += sum[h][w];
            else AT(out + at) = sum[h][w];
        }
}

TARGET INLINE void NAME(columns_of)(const NAME(product) *m, size_t i, const size_t high) {
    size_t j = 0;
    for (; j + LANES < m->columns; j += 2 * LANES) NAME(tile)(m, i, j, high, 2);
    if (j < m->columns) NAME(tile)(m, i, j, high, 1);
}

/* In blocks of rows as equal as possible: a block of few rows waits for its own sums. */
TARGET INLINE void NAME(multiply)(const NAME(product) *m) {
    for (size_t i = 0, high; i < m->rows; i += high) {
        const size_t left = m->rows - i, blocks = (left + HIGH - 1) / HIGH;
        high = (left + blocks - 1) / blocks;
        switch (high) { /* a known number of rows stays in registers */
#define ROWS(n) case n: NAME(columns_of)(m, i, n); break;
            ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
#if HIGH > 6
            ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#endif
#undef ROWS
        }
    }
}
