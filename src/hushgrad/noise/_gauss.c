/* The noise kernels: the arithmetic of _transform.py and NumpyKernel, operation for operation, and the key stream of
 * _keystream.py by the processor's own AES instructions where it has them.
 *
 * Compile with -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math and never with -ffast-math: every IEEE addition,
 * multiplication, division and square root must be rounded separately, so that the results are the same bits as numpy's.
 * The last two options only tell the compiler that nobody looks at errno or the exception flags.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define CIPHER 1
#else
#define CIPHER 0
#endif

#define PAIRS 128
#define GROUP_BLOCKS 96 /* cipher blocks for a group of 256 numbers */

/* One binary with a copy of each function for every vector width; the loader picks one. Contraction is off in all of them. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE
#endif

static const float LOG32[] = {1.0f,         -0.5000012f,  0.33325517f, -0.2519568f, 0.17544077f,
                              -0.34074646f, -0.5900887f,  -1.9598706f, -2.458962f,  -1.733612f};
static const float SIN32[] = {0.7853982f, -0.08074551f, 0.0024903931f, -3.6572394e-05f, 3.0899668e-07f};
static const float COS32[] = {1.0f, -0.30842513f, 0.015854325f, -0.0003259386f, 3.5297971e-06f};
static const double LOG64[] = {1.0,
                               -0.49999999999999023,
                               0.3333333333361931,
                               -0.2499999996684111,
                               0.20000002031370526,
                               -0.16666590679409987,
                               0.14287606118661553,
                               -0.12466842774185391,
                               0.1153620293486034,
                               -0.05905289935040555,
                               0.3928002967931491,
                               1.641118843588303,
                               7.760628433535017,
                               26.68059902636099,
                               72.58379957646765,
                               151.4655282034524,
                               239.6381824056025,
                               277.58570995112507,
                               223.12436325902686,
                               111.5016083008295,
                               26.45998799395012};
static const double SIN64[] = {0.7853981633974483,    -0.08074551218828079,    0.0024903945701927163, -3.6576204182147085e-05,
                               3.133616889192818e-07, -1.7572474204808876e-09, 6.948154114367228e-12, -2.0225906185890113e-14};
static const double COS64[] = {1.0,
                               -0.30842513753404244,
                               0.015854344243815502,
                               -0.0003259918869273893,
                               3.59086044858802e-06,
                               -2.461136949485674e-08,
                               1.1501157415860445e-10,
                               -3.897903725211399e-13,
                               9.928366448096768e-16};

#define LENGTH(series) ((int)(sizeof(series) / sizeof((series)[0])))
#define HORNER(total, series, x)                                                                                          \
    do {                                                                                                                  \
        total = series[LENGTH(series) - 1];                                                                               \
        _Pragma("GCC unroll 24") for (int c_ = LENGTH(series) - 2; c_ >= 0; c_--) total = total * (x) + series[c_];       \
    } while (0)

/* The functions for one floating-point type; bits is the signed integer of its size. */
#define KERNELS(suffix, real, bits, mantissa, bias, root, LOG, SIN, COS)                                                  \
    static inline real as_real_##suffix(bits b) {                                                                         \
        real r;                                                                                                           \
        memcpy(&r, &b, sizeof r);                                                                                         \
        return r;                                                                                                         \
    }                                                                                                                     \
    static inline bits as_bits_##suffix(real r) {                                                                         \
        bits b;                                                                                                           \
        memcpy(&b, &r, sizeof b);                                                                                         \
        return b;                                                                                                         \
    }                                                                                                                     \
                                                                                                                          \
    /* Whole groups of 256 numbers from their 384 words each. */                                                          \
    WIDE void hushgrad_gaussians_##suffix(const uint32_t *words, real *out, size_t groups) {                              \
        for (size_t g = 0; g < groups; g++, words += 3 * PAIRS, out += 2 * PAIRS) {                                       \
            for (int i = 0; i < PAIRS; i++) {                                                                             \
                uint32_t a = words[i], b = words[PAIRS + i], t = words[2 * PAIRS + i];                                    \
                real high = (real)(int32_t)(a & 0x7FFFFFFFu) * (real)0x1p-32;                                             \
                real low = ((real)(int32_t)(b >> 1) + (real)0.5) * (real)0x1p-63;                                         \
                real v = high + low;                                                                                      \
                bits pattern = as_bits_##suffix(v), upper = (bits)((int32_t)a >> 31); /* all ones where u = 1 - v */      \
                real fraction = as_real_##suffix((pattern & (((bits)1 << mantissa) - 1)) | ((bits)(bias - 1) << mantissa)); \
                int32_t halvings = (int32_t)(bias - 1) - (int32_t)(pattern >> mantissa);                                  \
                halvings &= ~((int32_t)a >> 31);                                                                          \
                bits f_low = as_bits_##suffix(fraction - (real)1.0), f_up = as_bits_##suffix(-v);                         \
                real f = as_real_##suffix((f_up & upper) | (f_low & ~upper));                                             \
                real e, s, s2, sine, cosine;                                                                              \
                HORNER(e, LOG, f);                                                                                        \
                e = e * -f;                                                                                               \
                e = e + (real)halvings * (real)0.6931471805599453;                                                        \
                e = e + e;                                                                                                \
                real radius = root(e);                                                                                    \
                s = (real)(int32_t)((t << 2) | 2u) * (real)0x1p-31;                                                       \
                s2 = s * s;                                                                                               \
                HORNER(sine, SIN, s2);                                                                                    \
                sine = sine * s;                                                                                          \
                HORNER(cosine, COS, s2);                                                                                  \
                bits minus = (bits)((int32_t)t >> 31) & (bits)((bits)1 << (8 * sizeof(bits) - 1));                        \
                bits c = as_bits_##suffix(cosine) ^ minus, n = as_bits_##suffix(sine);                                    \
                bits swap = -(bits)((t >> 30) & 1u), both = (c ^ n) & swap;                                               \
                out[i] = radius * as_real_##suffix(c ^ both);                                                             \
                out[PAIRS + i] = radius * as_real_##suffix(n ^ both);                                                     \
            }                                                                                                             \
        }                                                                                                                 \
    }                                                                                                                     \
                                                                                                                          \
    WIDE void hushgrad_write_##suffix(const real *x, real scale, real *out, size_t n) {                                   \
        for (size_t i = 0; i < n; i++) out[i] = x[i] * scale;                                                             \
    }                                                                                                                     \
                                                                                                                          \
    WIDE void hushgrad_add_##suffix(const real *restrict x, real scale, real *restrict out, size_t n) {                   \
        for (size_t i = 0; i < n; i++) out[i] = out[i] + x[i] * scale;                                                    \
    }                                                                                                                     \
                                                                                                                          \
    /* One step of a buffered Toeplitz recursion; buffer j starts at state + j * stride. A few buffers: in one pass. */   \
    static inline __attribute__((always_inline)) void few_buffers_##suffix(real *restrict x, real *restrict state,        \
                                                                           size_t stride, const real *decay,              \
                                                                           const real *weight, const int buffers, size_t n) {\
        for (size_t i = 0; i < n; i++) {                                                                                  \
            real total = x[i];                                                                                            \
            _Pragma("GCC unroll 4") for (int j = 0; j < buffers; j++) total = total - state[j * stride + i] * weight[j];  \
            _Pragma("GCC unroll 4") for (int j = 0; j < buffers; j++)                                                     \
                state[j * stride + i] = state[j * stride + i] * decay[j] + total;                                         \
            x[i] = total;                                                                                                 \
        }                                                                                                                 \
    }                                                                                                                     \
                                                                                                                          \
    static inline __attribute__((always_inline)) void many_buffers_##suffix(real *restrict x, real *restrict state,       \
                                                                            size_t stride, const real *decay,             \
                                                                            const real *weight, size_t buffers, size_t n) {\
        for (size_t begin = 0; begin < n; begin += 512) { /* a block stays in the first-level cache between the loops */  \
            size_t end = begin + 512 < n ? begin + 512 : n;                                                               \
            for (size_t j = 0; j < buffers; j++) {                                                                        \
                const real *s = state + j * stride, w = weight[j];                                                        \
                for (size_t i = begin; i < end; i++) x[i] = x[i] - s[i] * w;                                              \
            }                                                                                                             \
            for (size_t j = 0; j < buffers; j++) {                                                                        \
                real *s = state + j * stride, d = decay[j];                                                               \
                for (size_t i = begin; i < end; i++) s[i] = s[i] * d + x[i];                                              \
            }                                                                                                             \
        }                                                                                                                 \
    }                                                                                                                     \
                                                                                                                          \
    WIDE void hushgrad_buffers_##suffix(real *x, real *state, size_t stride, const real *decay, const real *weight,       \
                                        size_t buffers, size_t n) {                                                       \
        real d[4], w[4]; /* copies: no store into the state can change them */                                            \
        for (size_t j = 0; j < buffers && j < 4; j++) d[j] = decay[j], w[j] = weight[j];                                  \
        switch (buffers) {                                                                                                \
            case 1: few_buffers_##suffix(x, state, stride, d, w, 1, n); break;                                            \
            case 2: few_buffers_##suffix(x, state, stride, d, w, 2, n); break;                                            \
            case 3: few_buffers_##suffix(x, state, stride, d, w, 3, n); break;                                            \
            case 4: few_buffers_##suffix(x, state, stride, d, w, 4, n); break;                                            \
            default: many_buffers_##suffix(x, state, stride, decay, weight, buffers, n);                                  \
        }                                                                                                                 \
    }                                                                                                                     \
                                                                                                                          \
    /* out[k] += sum_h weights[k, h] parts[h], in the order of h; row k starts at out + k * stride. */                    \
    WIDE void hushgrad_combine_##suffix(const real *weights, size_t rows, const real *const *parts, size_t count,         \
                                        real *out, size_t stride, size_t n) {                                             \
        for (size_t begin = 0; begin < n; begin += 1024) { /* four pieces of parts stay in the first-level cache */       \
            size_t m = n - begin < 1024 ? n - begin : 1024, h = 0;                                                        \
            for (; h + 4 <= count; h += 4) {                                                                              \
                const real *p0 = parts[h] + begin, *p1 = parts[h + 1] + begin;                                            \
                const real *p2 = parts[h + 2] + begin, *p3 = parts[h + 3] + begin;                                        \
                for (size_t k = 0; k < rows; k++) {                                                                       \
                    const real *w = weights + k * count + h, w0 = w[0], w1 = w[1], w2 = w[2], w3 = w[3];                  \
                    if (w0 == 0 && w1 == 0 && w2 == 0 && w3 == 0) continue;                                               \
                    real *restrict total = out + k * stride + begin;                                                      \
                    for (size_t i = 0; i < m; i++)                                                                        \
                        total[i] = (((total[i] + p0[i] * w0) + p1[i] * w1) + p2[i] * w2) + p3[i] * w3;                    \
                }                                                                                                         \
            }                                                                                                             \
            for (; h < count; h++) {                                                                                      \
                const real *p = parts[h] + begin;                                                                         \
                for (size_t k = 0; k < rows; k++) {                                                                       \
                    real w = weights[k * count + h], *restrict total = out + k * stride + begin;                          \
                    for (size_t i = 0; i < m; i++) total[i] = total[i] + p[i] * w;                                        \
                }                                                                                                         \
            }                                                                                                             \
        }                                                                                                                 \
    }                                                                                                                     \
                                                                                                                          \
    /* Forward substitution: x[k] = (x[k] + sum_{j<k} inner[k, j] x[j]) / diagonal[k]. */                                 \
    WIDE void hushgrad_solve_##suffix(const real *inner, const real *diagonal, size_t rows, real *x, size_t stride,       \
                                      size_t n) {                                                                         \
        for (size_t begin = 0; begin < n; begin += 512) {                                                                 \
            size_t m = n - begin < 512 ? n - begin : 512;                                                                 \
            for (size_t k = 0; k < rows; k++) {                                                                           \
                real *restrict total = x + k * stride + begin;                                                            \
                for (size_t j = 0; j < k; j++) {                                                                          \
                    const real *p = x + j * stride + begin;                                                               \
                    real w = inner[k * rows + j];                                                                         \
                    for (size_t i = 0; i < m; i++) total[i] = total[i] + p[i] * w;                                        \
                }                                                                                                         \
                for (size_t i = 0; i < m; i++) total[i] = total[i] / diagonal[k];                                         \
            }                                                                                                             \
        }                                                                                                                 \
    }

KERNELS(f32, float, int32_t, 23, 127, sqrtf, LOG32, SIN32, COS32)
KERNELS(f64, double, int64_t, 52, 1023, sqrt, LOG64, SIN64, COS64)

/* AES-256 in counter mode -------------------------------------------------------------------------------------------------
 * The same bytes as any other AES; constant time, for the rounds are single instructions. A key is kept as its 15 round keys.
 */
#define ROUNDS 14

/* What the processor can do: 0, nothing, so use another AES; 1, a block in each register; 2, four blocks. */
int hushgrad_cipher(void) {
#if CIPHER
    __builtin_cpu_init();
    if (__builtin_cpu_supports("vaes") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) return 2;
    return __builtin_cpu_supports("aes") && __builtin_cpu_supports("ssse3");
#else
    return 0;
#endif
}

#if CIPHER
#define AES __attribute__((target("aes,ssse3")))
#define VAES __attribute__((target("vaes,aes,avx512f,avx512bw")))

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

/* Numbers start, start + 1, ... of (step, index), the first two fields of the counter; a few groups at a time, in the first-level
 * cache. out = scale z, or out += scale z. */
#define FEW 8
#define DRAW(suffix, real)                                                                                                \
    void hushgrad_draw_##suffix(int cipher, const uint8_t *schedule, uint64_t step, uint64_t index, uint64_t start,       \
                                real scale, int add, real *out, size_t n) {                                               \
        static const size_t group = 2 * PAIRS;                                                                            \
        uint32_t words[FEW * 3 * PAIRS];                                                                                  \
        real z[FEW * 2 * PAIRS];                                                                                          \
        while (n) {                                                                                                       \
            size_t skip = start % group, groups = (skip + n + group - 1) / group;                                         \
            groups = groups < FEW ? groups : FEW;                                                                         \
            uint64_t high = step << 16 | index >> 16, low = index << 48 | start / group * GROUP_BLOCKS;                   \
            (cipher == 2 ? key_stream_2 : key_stream_1)(schedule, high, low, (uint8_t *)words, groups * GROUP_BLOCKS);    \
            hushgrad_gaussians_##suffix(words, z, groups);                                                                \
            size_t count = groups * group - skip < n ? groups * group - skip : n;                                         \
            (add ? hushgrad_add_##suffix : hushgrad_write_##suffix)(z + skip, scale, out, count);                         \
            start += count, out += count, n -= count;                                                                     \
        }                                                                                                                 \
    }

DRAW(f32, float)
DRAW(f64, double)
#endif
