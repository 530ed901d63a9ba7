/* Random words to Gaussians: the arithmetic of _transform.py, operation for operation. See _gauss.h for how to compile it. */
#include "_gauss.h"

#include <math.h>
#include <string.h>

static const float LOG32[] = LOG32_SERIES, SIN32[] = SIN32_SERIES, COS32[] = COS32_SERIES;
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
    }

KERNELS(f32, float, int32_t, 23, 127, sqrtf, LOG32, SIN32, COS32)
KERNELS(f64, double, int64_t, 52, 1023, sqrt, LOG64, SIN64, COS64)
