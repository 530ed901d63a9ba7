/* The noise kernels: the arithmetic of _transform.py and NumpyKernel, operation for operation.
 *
 * Compile with -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math and never with -ffast-math: every IEEE addition,
 * multiplication, division and square root must be rounded separately, so that the results are the same bits as numpy's.
 * The last two options only tell the compiler that nobody looks at errno or the exception flags.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define PAIRS 128

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
