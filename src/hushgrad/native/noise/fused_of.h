/* The f32 numbers of whole groups without leaving the registers, for one way to run the cipher; cipher.c includes this file once
 * for each. While the arithmetic of some pairs runs, the cipher works on the words of the next ones. Operation for operation this
 * is gaussians of gauss_of.h with write or add.
 *
 * VECTORS vectors of BYTES are worked on side by side. NAME(blocks) are cipher blocks of as many bytes, which go through
 * NAME(first), NAME(round) thirteen times and NAME(last), with one NAME(key) after the other.
 */
typedef float NAME(reals) __attribute__((vector_size(BYTES)));
typedef float NAME(loose) __attribute__((vector_size(BYTES), aligned(4), may_alias)); /* anywhere in memory */
typedef int32_t NAME(ints) __attribute__((vector_size(BYTES)));
typedef uint32_t NAME(naturals) __attribute__((vector_size(BYTES)));
typedef long long NAME(counters) __attribute__((vector_size(BYTES))); /* two for each block, the lower half second */
#define REALS NAME(reals)
#define INTS NAME(ints)
#define COUNTERS NAME(counters)
#define LANES (BYTES / 4)
#define TURNS (PAIRS / (VECTORS * LANES)) /* for the pairs of a group */
#define PART (GROUP / TURNS)              /* numbers that are made in one of them */
#define EACH _Pragma("GCC unroll 2") for (int j = 0; j < VECTORS; j++)

#if BYTES == 64
#define BLOCKS_OF(high, low) (COUNTERS){high, low, high, low, high, low, high, low}
#define IN_TURN (COUNTERS){0, 0, 0, 1, 0, 2, 0, 3}
#define LOWER(n) (COUNTERS) _mm512_maskz_set1_epi64(0xAA, n)
#define ROOT(x) (REALS) _mm512_sqrt_ps((__m512)(x))
#define SWAP_BIT _mm512_set1_epi32(1 << 30)
#define IF_SWAPPED(t, x, y) (REALS) _mm512_mask_mov_ps((__m512)(y), _mm512_test_epi32_mask((__m512i)(t), SWAP_BIT), (__m512)(x))
#else
#define BLOCKS_OF(high, low) (COUNTERS){high, low, high, low}
#define IN_TURN (COUNTERS){0, 0, 0, 1}
#define LOWER(n) (COUNTERS) _mm256_blend_epi32(_mm256_setzero_si256(), _mm256_set1_epi64x(n), 0xCC)
#define ROOT(x) (REALS) _mm256_sqrt_ps((__m256)(x))
#define IF_NEGATIVE(a, x, y) (REALS) _mm256_blendv_ps((__m256)(y), (__m256)(x), (__m256)(a))
#define IF_SWAPPED(t, x, y) IF_NEGATIVE((t) << 1, x, y)
#endif

typedef struct {
    NAME(blocks) a[VECTORS], b[VECTORS], t[VECTORS];
} NAME(words);

/* The cipher's input for the pairs of turn q, counted from the group whose first counters are base. */
TARGET INLINE NAME(words) NAME(input)(const NAME(key) *key, COUNTERS base, uint64_t q) {
    NAME(words) w;
    base = base + LOWER((long long)(q / TURNS * GROUP_BLOCKS + q % TURNS * (VECTORS * LANES / 4)));
#define FIRST(n) NAME(first)(base + BLOCKS_OF(0, n + j * LANES / 4), key[0])
    EACH w.a[j] = FIRST(0), w.b[j] = FIRST(PAIRS / 4), w.t[j] = FIRST(PAIRS / 2);
#undef FIRST
    return w;
}

TARGET INLINE void NAME(cipher_round)(NAME(words) *w, NAME(key) key) {
    EACH w->a[j] = NAME(round)(w->a[j], key);
    EACH w->b[j] = NAME(round)(w->b[j], key);
    EACH w->t[j] = NAME(round)(w->t[j], key);
}

/* One step of a polynomial. */
TARGET INLINE REALS NAME(step)(REALS total, REALS x, float c) {
    total = total * x + c;
    IN_PLACE(total);
    return total;
}

/* f and halvings as in _box_muller.py: -ln u = halvings ln 2 - ln(1 + f). */
TARGET INLINE void NAME(uniform_of)(INTS a, INTS b, REALS *f, REALS *halvings) {
    REALS v = __builtin_convertvector(a & INT32_MAX, REALS) * 0x1p-32f;
    v = v + (__builtin_convertvector((INTS)((NAME(naturals))b >> 1), REALS) + 0.5f) * 0x1p-63f;
#if BYTES == 64 /* getmant and getexp take a number apart exactly as its bit fields do */
    __mmask16 lower = _knot_mask16(_mm512_movepi32_mask((__m512i)a)); /* u = v; elsewhere u = 1 - v and f = -v */
    __m512 fraction = _mm512_maskz_getmant_ps(lower, (__m512)v, _MM_MANT_NORM_p5_1, _MM_MANT_SIGN_src);
    *f = (REALS)_mm512_sub_ps(fraction, _mm512_mask_mov_ps((__m512)v, lower, _mm512_set1_ps(1.0f)));
    *halvings = (REALS)_mm512_maskz_sub_ps(lower, _mm512_set1_ps(-1.0f), _mm512_getexp_ps((__m512)v));
#else
    REALS fraction = (REALS)(((INTS)v & 0x7FFFFF) | 0x3F000000);
    *f = IF_NEGATIVE(a, -v, fraction - 1.0f); /* u = 1 - v where a is negative */
    *halvings = __builtin_convertvector((126 - ((INTS)v >> 23)) & ~(a >> 31), REALS);
#endif
}

/* The pairs of some triples of words, and rounds 1 to 13 of the next ones: polynomials and rounds in turns, for each alone would
 * wait for itself. */
TARGET INLINE void NAME(pairs_of)(const NAME(words) *w, REALS *x, REALS *y, const NAME(key) *key, NAME(words) *next) {
    static const float LOG32[] = LOG32_SERIES, SIN32[] = SIN32_SERIES, COS32[] = COS32_SERIES;
    REALS f[VECTORS], halvings[VECTORS], s[VECTORS], square[VECTORS], log[VECTORS], sine[VECTORS], cosine[VECTORS];
    INTS a[VECTORS], b[VECTORS], t[VECTORS];
    EACH a[j] = (INTS)NAME(last)(w->a[j], key[ROUNDS]);
    EACH b[j] = (INTS)NAME(last)(w->b[j], key[ROUNDS]);
    EACH t[j] = (INTS)NAME(last)(w->t[j], key[ROUNDS]);
#define TWO_ROUNDS(first) _Pragma("GCC unroll 2") for (int r = j; r < 2; r += VECTORS) NAME(cipher_round)(next, key[first + r])
    EACH {
        NAME(uniform_of)(a[j], b[j], &f[j], &halvings[j]);
        s[j] = __builtin_convertvector((t[j] << 2) | 2, REALS) * 0x1p-31f;
        square[j] = s[j] * s[j];
        log[j] = (REALS){0} + LOG32[9], sine[j] = (REALS){0} + SIN32[4], cosine[j] = (REALS){0} + COS32[4];
        TWO_ROUNDS(1);
    }
    _Pragma("GCC unroll 9") for (int c = 8; c >= 0; c--) {
        NAME(cipher_round)(next, key[11 - c]);
        EACH log[j] = NAME(step)(log[j], f[j], LOG32[c]);
        if (c % 2) EACH cosine[j] = NAME(step)(cosine[j], square[j], COS32[c / 2]);
        else if (c) EACH sine[j] = NAME(step)(sine[j], square[j], SIN32[c / 2 - 1]);
    }
    EACH {
        REALS e = halvings[j] * 0.6931471805599453f - log[j] * f[j]; /* in truth a sum: f is negative */
        REALS radius = ROOT(e + e), n = sine[j] * s[j], c = (REALS)((INTS)cosine[j] ^ (t[j] & INT32_MIN));
        x[j] = radius * IF_SWAPPED(t[j], n, c);
        y[j] = radius * IF_SWAPPED(t[j], c, n);
        TWO_ROUNDS(12);
    }
}

/* What becomes of the numbers x from place i on: themselves, or x from one step of a buffered recursion; then out = scale x, or
 * out += scale x. */
TARGET INLINE void NAME(finish)(REALS x, const row *to, size_t i, const int add, const int buffers) {
    REALS s[4];
#define AT(p) (*(NAME(loose) *)(p))
#define BUFFER _Pragma("GCC unroll 4") for (int j = 0; j < buffers; j++)
    BUFFER s[j] = AT(to->state + j * to->stride + i);
    BUFFER x = x - s[j] * to->weight[j];
    BUFFER AT(to->state + j * to->stride + i) = s[j] * to->decay[j] + x;
    x = x * to->scale;
    if (add) x = AT(to->out + i) + x;
    AT(to->out + i) = x;
#undef AT
#undef BUFFER
}

/* As many numbers as a turn makes, from place i on, into their block's hash, which is written when it is complete. */
TARGET INLINE nh_sum NAME(hashed)(nh_sum sum, const row *to, size_t i) {
    sum = nh(sum, (const word *)(to->out + i), to->key + i / 2 % WITNESS_WORDS, PART / 2);
    if ((i + PART) % (2 * WITNESS_WORDS)) return sum;
    nh_write(sum, to->hashes + i / (2 * WITNESS_WORDS) * 2);
    return 0;
}

/* With hashed, groups that make whole blocks are hashed one group late, from the first-level cache: what was written just now is not
 * there yet, and reading it would wait. */
TARGET INLINE void NAME(in_registers)(const uint8_t *round_keys, uint64_t high, uint64_t low, const row *to, size_t groups,
                                      const int add, const int buffers, const int hashed) {
    NAME(key) key[ROUNDS + 1];
    const COUNTERS base = BLOCKS_OF((long long)high, (long long)low) + IN_TURN;
    for (int r = 0; r <= ROUNDS; r++) key[r] = KEY(round_keys + 16 * r);
    NAME(words) w = NAME(input)(key, base, 0);
    for (int r = 1; r < ROUNDS; r++) NAME(cipher_round)(&w, key[r]);
    const row here = *to; /* a copy: no store can change it */
    nh_sum sum = 0;
    for (size_t q = 0; q < TURNS * groups; q++) {
        REALS x[VECTORS], y[VECTORS];
        NAME(words) next = NAME(input)(key, base, q + 1);
        NAME(pairs_of)(&w, x, y, key, &next);
        const size_t i = q / TURNS * GROUP + q % TURNS * (VECTORS * LANES);
        if (q % (16 / LANES) == 0) {
            EACH fetch(&here, i + LANES * j, buffers);
            EACH fetch(&here, i + PAIRS + LANES * j, buffers);
        }
        EACH NAME(finish)(x[j], &here, i + LANES * j, add, buffers);
        EACH NAME(finish)(y[j], &here, i + PAIRS + LANES * j, add, buffers);
        w = next;
        if (hashed && q >= TURNS) sum = NAME(hashed)(sum, &here, q * PART - GROUP);
    }
    if (hashed)
        for (size_t i = (groups - 1) * GROUP; i < groups * GROUP; i += PART) sum = NAME(hashed)(sum, &here, i);
}

#define FIXED(add, buffers)                                                                                               \
    TARGET static void NAME(in_registers_##add##buffers)(const uint8_t *round_keys, uint64_t high, uint64_t low, const row *to, \
                                                         size_t groups) {                                                 \
        NAME(in_registers)(round_keys, high, low, to, groups, add, buffers, 0);                                           \
    }
#define FIXED_5(add) FIXED(add, 0) FIXED(add, 1) FIXED(add, 2) FIXED(add, 3) FIXED(add, 4)
FIXED_5(0)
FIXED_5(1)
#undef FIXED
#define FIXED(add, buffers) NAME(in_registers_##add##buffers),
static fixed *const NAME(ways)[2][5] = {{FIXED_5(0)}, {FIXED_5(1)}};
TARGET static void NAME(in_registers_hashed)(const uint8_t *round_keys, uint64_t high, uint64_t low, const row *to, size_t groups) {
    NAME(in_registers)(round_keys, high, low, to, groups, 1, 0, 1);
}

#undef REALS
#undef INTS
#undef COUNTERS
#undef LANES
#undef TURNS
#undef PART
#undef EACH
#undef BLOCKS_OF
#undef IN_TURN
#undef LOWER
#undef ROOT
#undef SWAP_BIT
#undef IF_NEGATIVE
#undef IF_SWAPPED
#undef TWO_ROUNDS
#undef FIXED
#undef FIXED_5
