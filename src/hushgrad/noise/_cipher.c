/* AES-256 in counter mode: the key stream of _keystream.py by the processor's own instructions, and numbers drawn from it.
 *
 * The same bytes as any other AES; constant time, for the rounds are single instructions. A key is kept as its 15 round keys.
 */
#include "_gauss.h"

#if CIPHER
#include <immintrin.h>
#endif

#define ROUNDS 14

/* What the processor can do: 0, nothing, so use another AES; 1, a block in each register; 2, four blocks. */
int hushgrad_cipher(void) {
#if CIPHER
    __builtin_cpu_init();
    if (__builtin_cpu_supports("vaes") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")) return 2;
    return __builtin_cpu_supports("aes") && __builtin_cpu_supports("ssse3");
#else
    return 0;
#endif
}

#if CIPHER
#define AES __attribute__((target("aes,ssse3")))
#define VAES __attribute__((target("vaes,aes,avx512f,avx512bw,avx512dq")))

AES static inline __m128i running_xor(__m128i x) {
    x = _mm_xor_si128(x, _mm_slli_si128(x, 4));
    return _mm_xor_si128(x, _mm_slli_si128(x, 8));
}

AES void hushgrad_expand_key(const uint8_t *key, uint8_t *schedule) {
    __m128i even = _mm_loadu_si128((const __m128i *)key), odd = _mm_loadu_si128((const __m128i *)key + 1);
    __m128i *to = (__m128i *)schedule;
#define NEXT_EVEN(constant)                                                                                               \
    even = _mm_xor_si128(running_xor(even), _mm_shuffle_epi32(_mm_aeskeygenassist_si128(odd, constant), 0xff));           \
    _mm_storeu_si128(to++, even)
#define NEXT_ODD                                                                                                          \
    odd = _mm_xor_si128(running_xor(odd), _mm_shuffle_epi32(_mm_aeskeygenassist_si128(even, 0), 0xaa));                   \
    _mm_storeu_si128(to++, odd)
    _mm_storeu_si128(to++, even);
    _mm_storeu_si128(to++, odd);
    NEXT_EVEN(1);
    NEXT_ODD;
    NEXT_EVEN(2);
    NEXT_ODD;
    NEXT_EVEN(4);
    NEXT_ODD;
    NEXT_EVEN(8);
    NEXT_ODD;
    NEXT_EVEN(16);
    NEXT_ODD;
    NEXT_EVEN(32);
    NEXT_ODD;
    NEXT_EVEN(64);
}

/* The blocks of the counters (high, low), (high, low + 1), ...; blocks is a multiple of 32. The counter is big-endian. */
AES static void key_stream_1(const uint8_t *schedule, uint64_t high, uint64_t low, uint8_t *out, size_t blocks) {
    const __m128i swap = _mm_set_epi8(8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    const __m128i *key = (const __m128i *)schedule;
    for (size_t b = 0; b < blocks; b += 8, low += 8) {
        __m128i x[8];
        for (int j = 0; j < 8; j++)
            x[j] = _mm_xor_si128(_mm_shuffle_epi8(_mm_set_epi64x((int64_t)(low + j), (int64_t)high), swap), _mm_loadu_si128(key));
        for (int r = 1; r < ROUNDS; r++) {
            __m128i k = _mm_loadu_si128(key + r);
            _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++) x[j] = _mm_aesenc_si128(x[j], k);
        }
        for (int j = 0; j < 8; j++)
            _mm_storeu_si128((__m128i *)out + b + j, _mm_aesenclast_si128(x[j], _mm_loadu_si128(key + ROUNDS)));
    }
}

VAES static void key_stream_2(const uint8_t *schedule, uint64_t high, uint64_t low, uint8_t *out, size_t blocks) {
    const __m512i swap = _mm512_broadcast_i32x4(_mm_set_epi8(8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    const __m512i four = _mm512_set_epi64(4, 0, 4, 0, 4, 0, 4, 0);
    __m512i counter = _mm512_broadcast_i32x4(_mm_set_epi64x((int64_t)low, (int64_t)high)), key[ROUNDS + 1];
    counter = _mm512_add_epi64(counter, _mm512_set_epi64(3, 0, 2, 0, 1, 0, 0, 0));
    for (int r = 0; r <= ROUNDS; r++) key[r] = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)schedule + r));
    for (size_t b = 0; b < blocks; b += 32) {
        __m512i x[8];
        _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++, counter = _mm512_add_epi64(counter, four))
            x[j] = _mm512_xor_si512(_mm512_shuffle_epi8(counter, swap), key[0]);
        _Pragma("GCC unroll 14") for (int r = 1; r < ROUNDS; r++)
            _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++) x[j] = _mm512_aesenc_epi128(x[j], key[r]);
        _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++)
            _mm512_storeu_si512((__m512i *)(out + 16 * b) + j, _mm512_aesenclast_epi128(x[j], key[ROUNDS]));
    }
}

/* The f32 numbers of whole groups, 32 pairs at a time, without leaving the registers: while the arithmetic of one set of pairs
 * runs, the cipher works on the words of the next. Operation for operation hushgrad_gaussians_f32 with hushgrad_write_f32 or
 * hushgrad_add_f32, where getmant and getexp take a number apart exactly as its bit fields do. */
typedef struct {
    __m512i a[2], b[2], t[2];
} words;

#define EACH _Pragma("GCC unroll 2") for (int j = 0; j < 2; j++)
#define STEP(total, x, c) EACH total[j] = _mm512_add_ps(_mm512_mul_ps(total[j], x[j]), _mm512_set1_ps(c))

/* The cipher's input for pairs [32 q, 32 q + 32), counted from the group whose first counter is base. */
VAES static inline __attribute__((always_inline)) words counters(const __m512i *key, __m512i base, uint64_t q) {
    const __m512i swap = _mm512_broadcast_i32x4(_mm_set_epi8(8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    const __m512i at = _mm512_add_epi64(base, _mm512_maskz_set1_epi64(0xAA, (int64_t)(q / 4 * GROUP_BLOCKS + q % 4 * 8)));
    words w;
#define PLUS(n) _mm512_add_epi64(at, _mm512_set_epi64(n, 0, n, 0, n, 0, n, 0))
#define FIRST(n) _mm512_xor_si512(_mm512_shuffle_epi8(PLUS(n), swap), key[0])
    EACH w.a[j] = FIRST(4 * j), w.b[j] = FIRST(4 * j + 32), w.t[j] = FIRST(4 * j + 64);
    return w;
}

VAES static inline __attribute__((always_inline)) void cipher_round(words *w, __m512i key) {
    EACH w->a[j] = _mm512_aesenc_epi128(w->a[j], key);
    EACH w->b[j] = _mm512_aesenc_epi128(w->b[j], key);
    EACH w->t[j] = _mm512_aesenc_epi128(w->t[j], key);
}

VAES static inline __attribute__((always_inline)) void last_round(words *w, __m512i key) {
    EACH w->a[j] = _mm512_aesenclast_epi128(w->a[j], key);
    EACH w->b[j] = _mm512_aesenclast_epi128(w->b[j], key);
    EACH w->t[j] = _mm512_aesenclast_epi128(w->t[j], key);
}

/* f and halvings as in _transform.py: -ln u = halvings ln 2 - ln(1 + f). */
VAES static inline __attribute__((always_inline)) void uniform_of(__m512i a, __m512i b, __m512 *f, __m512 *halvings) {
    __m512 high = _mm512_cvtepi32_ps(_mm512_and_si512(a, _mm512_set1_epi32(INT32_MAX)));
    __m512 low = _mm512_add_ps(_mm512_cvtepi32_ps(_mm512_srli_epi32(b, 1)), _mm512_set1_ps(0.5f));
    __m512 v = _mm512_add_ps(_mm512_mul_ps(high, _mm512_set1_ps(0x1p-32f)), _mm512_mul_ps(low, _mm512_set1_ps(0x1p-63f)));
    __mmask16 lower = _knot_mask16(_mm512_movepi32_mask(a)); /* u = v; elsewhere u = 1 - v and f = -v */
    __m512 fraction = _mm512_maskz_getmant_ps(lower, v, _MM_MANT_NORM_p5_1, _MM_MANT_SIGN_src);
    *f = _mm512_sub_ps(fraction, _mm512_mask_mov_ps(v, lower, _mm512_set1_ps(1.0f)));
    *halvings = _mm512_maskz_sub_ps(lower, _mm512_set1_ps(-1.0f), _mm512_getexp_ps(v));
}

/* The pairs of 32 triples of words, and rounds 1 to 13 of the next ones: polynomials and rounds in turns, for each alone would
 * wait for itself. */
VAES static inline __attribute__((always_inline)) void pairs_of(const words *w, __m512 *x, __m512 *y, const __m512i *key,
                                                                words *next) {
    static const float LOG32[] = LOG32_SERIES, SIN32[] = SIN32_SERIES, COS32[] = COS32_SERIES;
    __m512 f[2], halvings[2], s[2], square[2], log[2], sine[2], cosine[2];
    EACH {
        uniform_of(w->a[j], w->b[j], &f[j], &halvings[j]);
        __m512i odd = _mm512_or_si512(_mm512_slli_epi32(w->t[j], 2), _mm512_set1_epi32(2));
        s[j] = _mm512_mul_ps(_mm512_cvtepi32_ps(odd), _mm512_set1_ps(0x1p-31f));
        square[j] = _mm512_mul_ps(s[j], s[j]);
        log[j] = _mm512_set1_ps(LOG32[9]), sine[j] = _mm512_set1_ps(SIN32[4]), cosine[j] = _mm512_set1_ps(COS32[4]);
        cipher_round(next, key[1 + j]);
    }
    _Pragma("GCC unroll 9") for (int c = 8; c >= 0; c--) {
        cipher_round(next, key[11 - c]);
        STEP(log, f, LOG32[c]);
        if (c % 2) STEP(cosine, square, COS32[c / 2]);
        else if (c) STEP(sine, square, SIN32[c / 2 - 1]);
    }
    EACH {
        __m512 e = _mm512_mul_ps(halvings[j], _mm512_set1_ps(0.6931471805599453f));
        e = _mm512_sub_ps(e, _mm512_mul_ps(log[j], f[j])); /* in truth a sum: f is negative */
        __m512 radius = _mm512_sqrt_ps(_mm512_add_ps(e, e)), n = _mm512_mul_ps(sine[j], s[j]);
        __m512i sign = _mm512_and_si512(w->t[j], _mm512_set1_epi32(INT32_MIN));
        __m512 c = _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(cosine[j]), sign));
        __mmask16 swap = _mm512_test_epi32_mask(w->t[j], _mm512_set1_epi32(1 << 30));
        x[j] = _mm512_mul_ps(radius, _mm512_mask_mov_ps(c, swap, n));
        y[j] = _mm512_mul_ps(radius, _mm512_mask_mov_ps(n, swap, c));
        cipher_round(next, key[12 + j]);
    }
}

/* What becomes of 16 numbers z from place i on: x = z, or x from one step of a buffered recursion; then out = scale x, or
 * out += scale x. */
VAES static inline __attribute__((always_inline)) void finish(__m512 x, const row *to, size_t i, const int add, const int buffers) {
    __m512 s[4];
#define BUFFER _Pragma("GCC unroll 4") for (int j = 0; j < buffers; j++)
    BUFFER s[j] = _mm512_loadu_ps(to->state + j * to->stride + i);
    BUFFER x = _mm512_sub_ps(x, _mm512_mul_ps(s[j], _mm512_set1_ps(to->weight[j])));
    BUFFER _mm512_storeu_ps(to->state + j * to->stride + i,
                            _mm512_add_ps(_mm512_mul_ps(s[j], _mm512_set1_ps(to->decay[j])), x));
    x = _mm512_mul_ps(x, _mm512_set1_ps(to->scale));
    _mm512_storeu_ps(to->out + i, add ? _mm512_add_ps(_mm512_loadu_ps(to->out + i), x) : x);
}

/* Ask for the cache lines of 16 numbers some time before they are needed, for writing. The processor does so by itself within a
 * page of memory, but here a page is done with too soon: without this, four buffers of 40 MB each take half as long again. */
#define SOON 512
static inline __attribute__((always_inline)) void fetch(const row *to, size_t i, const int buffers) {
    _Pragma("GCC unroll 4") for (int j = 0; j < buffers; j++) __builtin_prefetch(to->state + j * to->stride + i + SOON, 1);
    __builtin_prefetch(to->out + i + SOON, 1);
}

VAES static inline __attribute__((always_inline)) void in_registers(const uint8_t *round_keys, uint64_t high, uint64_t low,
                                                                    const row *to, size_t groups, const int add,
                                                                    const int buffers) {
    __m512i key[ROUNDS + 1], base = _mm512_broadcast_i32x4(_mm_set_epi64x((int64_t)low, (int64_t)high));
    base = _mm512_add_epi64(base, _mm512_set_epi64(3, 0, 2, 0, 1, 0, 0, 0));
    for (int r = 0; r <= ROUNDS; r++) key[r] = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)round_keys + r));
    words w = counters(key, base, 0);
    for (int r = 1; r < ROUNDS; r++) cipher_round(&w, key[r]);
    const row here = *to; /* a copy: no store can change it */
    for (size_t q = 0; q < 4 * groups; q++) {
        __m512 x[2], y[2];
        words next = counters(key, base, q + 1);
        last_round(&w, key[ROUNDS]);
        pairs_of(&w, x, y, key, &next);
        const size_t i = q / 4 * GROUP + q % 4 * 32;
        EACH fetch(&here, i + 16 * j, buffers);
        EACH fetch(&here, i + PAIRS + 16 * j, buffers);
        EACH finish(x[j], &here, i + 16 * j, add, buffers);
        EACH finish(y[j], &here, i + PAIRS + 16 * j, add, buffers);
        w = next;
    }
}

#define FIXED(add, buffers)                                                                                               \
    VAES static void in_registers_##add##buffers(const uint8_t *round_keys, uint64_t high, uint64_t low, const row *to,   \
                                                 size_t groups) {                                                         \
        in_registers(round_keys, high, low, to, groups, add, buffers);                                                    \
    }
#define BOTH(buffers) FIXED(0, buffers) FIXED(1, buffers)
BOTH(0)
BOTH(1)
BOTH(2)
BOTH(3)
BOTH(4)

typedef void fixed(const uint8_t *, uint64_t, uint64_t, const row *, size_t);
static fixed *const FIXED_ROWS[2][5] = {
    {in_registers_00, in_registers_01, in_registers_02, in_registers_03, in_registers_04},
    {in_registers_10, in_registers_11, in_registers_12, in_registers_13, in_registers_14},
};

static uint64_t high_half(const address *at) { return at->step << 16 | at->index >> 16; }
static uint64_t low_half(const address *at, uint64_t start) { return at->index << 48 | start / GROUP * GROUP_BLOCKS; }

size_t hushgrad_in_registers(const address *at, uint64_t start, const row *to, size_t n, int add, size_t buffers) {
    const size_t groups = start % GROUP ? 0 : n / GROUP;
    if (at->cipher != 2 || buffers > 4 || !groups) return 0;
    FIXED_ROWS[add != 0][buffers](at->round_keys, high_half(at), low_half(at, start), to, groups);
    return groups * GROUP;
}

/* Numbers start, start + 1, ...; out = scale z, or out += scale z. A few groups at a time, in the first-level cache. */
#define FEW 8
static size_t some_words(const address *at, uint64_t start, size_t n, size_t most, uint32_t *words) {
    size_t groups = (start % GROUP + n + GROUP - 1) / GROUP;
    groups = groups < most ? groups : most;
    (at->cipher == 2 ? key_stream_2 : key_stream_1)(at->round_keys, high_half(at), low_half(at, start), (uint8_t *)words,
                                                    groups * GROUP_BLOCKS);
    return groups;
}

#define DRAW(suffix, real)                                                                                                \
    static size_t draw_some_##suffix(const address *at, uint64_t start, real scale, int add, real *out, size_t n,         \
                                     size_t most) {                                                                       \
        uint32_t words[FEW * 3 * PAIRS];                                                                                  \
        real z[FEW * GROUP];                                                                                              \
        const size_t skip = start % GROUP, groups = some_words(at, start, n, most, words);                                \
        hushgrad_gaussians_##suffix(words, z, groups);                                                                    \
        const size_t count = groups * GROUP - skip < n ? groups * GROUP - skip : n;                                       \
        (add ? hushgrad_add_##suffix : hushgrad_write_##suffix)(z + skip, scale, out, count);                             \
        return count;                                                                                                     \
    }                                                                                                                     \
                                                                                                                          \
    /* The same for several tensors at once: (index, start, n, address of out) for each. */                               \
    void hushgrad_draw_many_##suffix(const address *at, const uint64_t *places, size_t count, real scale, int add) {      \
        address here = *at;                                                                                               \
        for (; count--; places += 4) {                                                                                    \
            here.index = places[0];                                                                                       \
            hushgrad_draw_##suffix(&here, places[1], scale, add, (real *)(uintptr_t)places[3], places[2]);                \
        }                                                                                                                 \
    }

DRAW(f32, float)
DRAW(f64, double)

void hushgrad_draw_f32(const address *at, uint64_t start, float scale, int add, float *out, size_t n) {
    for (size_t count; n; start += count, out += count, n -= count) {
        const row to = {.out = out, .scale = scale};
        count = hushgrad_in_registers(at, start, &to, n, add, 0);
        if (!count) count = draw_some_f32(at, start, scale, add, out, n, at->cipher == 2 ? 1 : FEW); /* the next are whole */
    }
}

void hushgrad_draw_f64(const address *at, uint64_t start, double scale, int add, double *out, size_t n) {
    for (size_t count; n; start += count, out += count, n -= count) count = draw_some_f64(at, start, scale, add, out, n, FEW);
}
#endif
