/* Words to Gaussians for one floating-point type and one vector width; widths.h includes this file once for each. Plain loops,
 * which compilers turn into vectors by themselves. */

/* Whole groups of 256 numbers from their 384 words each. */
TARGET static void NAME(gaussians)(const uint32_t *words, REAL *out, size_t groups) {
    for (size_t g = 0; g < groups; g++, words += 3 * PAIRS, out += 2 * PAIRS) {
        for (int i = 0; i < PAIRS; i++) {
            uint32_t a = words[i], b = words[PAIRS + i], t = words[2 * PAIRS + i];
            REAL high = (REAL)(int32_t)(a & 0x7FFFFFFFu) * (REAL)0x1p-32;
            REAL low = ((REAL)(int32_t)(b >> 1) + (REAL)0.5) * (REAL)0x1p-63;
            REAL v = high + low;
            BITS pattern = TYPED(as_bits)(v), upper = (BITS)((int32_t)a >> 31); /* all ones where u = 1 - v */
            REAL fraction = TYPED(as_real)((pattern & (((BITS)1 << MANTISSA) - 1)) | ((BITS)(BIAS - 1) << MANTISSA));
            int32_t halvings = (int32_t)(BIAS - 1) - (int32_t)(pattern >> MANTISSA);
            halvings &= ~((int32_t)a >> 31);
            BITS f_low = TYPED(as_bits)(fraction - (REAL)1.0), f_up = TYPED(as_bits)(-v);
            REAL f = TYPED(as_real)((f_up & upper) | (f_low & ~upper));
            REAL e, s, s2, sine, cosine;
            HORNER(e, LOG, f);
            e = e * -f;
            e = e + (REAL)halvings * (REAL)0.6931471805599453;
            e = e + e;
            REAL radius = ROOT(e);
            s = (REAL)(int32_t)((t << 2) | 2u) * (REAL)0x1p-31;
            s2 = s * s;
            HORNER(sine, SIN, s2);
            sine = sine * s;
            HORNER(cosine, COS, s2);
            BITS minus = (BITS)((int32_t)t >> 31) & SIGN;
            BITS c = TYPED(as_bits)(cosine) ^ minus, n = TYPED(as_bits)(sine);
            BITS swap = -(BITS)((t >> 30) & 1u), both = (c ^ n) & swap;
            out[i] = radius * TYPED(as_real)(c ^ both);
            out[PAIRS + i] = radius * TYPED(as_real)(n ^ both);
        }
    }
}

TARGET static void NAME(write)(const REAL *x, REAL scale, REAL *out, size_t n) {
    for (size_t i = 0; i < n; i++) out[i] = x[i] * scale;
}

TARGET static void NAME(add)(const REAL *restrict x, REAL scale, REAL *restrict out, size_t n) {
    for (size_t i = 0; i < n; i++) out[i] = out[i] + x[i] * scale;
}

