/* Random words to Gaussians: the arithmetic of _box_muller.py, operation for operation. */
#include "noise/gauss.h"

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

/* A number as its bits, and back. */
#define AS_BITS                                                                                                           \
    static inline BITS TYPED(as_bits)(REAL r) {                                                                           \
        BITS b;                                                                                                           \
        memcpy(&b, &r, sizeof b);                                                                                         \
        return b;                                                                                                         \
    }                                                                                                                     \
    static inline REAL TYPED(as_real)(BITS b) {                                                                           \
        REAL r;                                                                                                           \
        memcpy(&r, &b, sizeof r);                                                                                         \
        return r;                                                                                                         \
    }

#define FUNCTIONS                                                                                                         \
    void TYPED(hushgrad_gaussians)(const uint32_t *words, REAL *out, size_t groups) { CHOSEN(gaussians)(words, out, groups); } \
    void TYPED(hushgrad_write)(const REAL *x, REAL scale, REAL *out, size_t n) { CHOSEN(write)(x, scale, out, n); }       \
    void TYPED(hushgrad_add)(const REAL *x, REAL scale, REAL *out, size_t n) { CHOSEN(add)(x, scale, out, n); }

#define KERNELS "noise/gauss_of.h"

#define REAL float
#define BITS int32_t /* the signed integer of its size */
#define SIGN INT32_MIN
#define MANTISSA 23
#define BIAS 127
#define ROOT sqrtf
#define LOG LOG32
#define SIN SIN32
#define COS COS32
#define TYPED(name) name##_f32
AS_BITS
#include "widths.h"
FUNCTIONS
#undef REAL
#undef BITS
#undef SIGN
#undef MANTISSA
#undef BIAS
#undef ROOT
#undef LOG
#undef SIN
#undef COS
#undef TYPED

#define REAL double
#define BITS int64_t
#define SIGN INT64_MIN
#define MANTISSA 52
#define BIAS 1023
#define ROOT sqrt
#define LOG LOG64
#define SIN SIN64
#define COS COS64
#define TYPED(name) name##_f64
AS_BITS
#include "widths.h"
FUNCTIONS
