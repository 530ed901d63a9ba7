/* The two recursions of the smoothing for one vector width; _scan.c includes this file once for each. */

typedef float NAME(vector) __attribute__((vector_size(4 * LANES)));
typedef float NAME(loose) __attribute__((vector_size(4 * LANES), aligned(4), may_alias)); /* anywhere in memory */
#define VECTOR NAME(vector)

typedef int32_t NAME(lanes) __attribute__((vector_size(4 * LANES)));

/* One lane of x in every lane. */
TARGET static inline __attribute__((always_inline)) VECTOR NAME(spread)(VECTOR x, const int lane) {
    return __builtin_shuffle(x, (NAME(lanes)){0} + lane);
}

/* alpha, alpha^2, alpha^3, ...: how far the state before a register reaches into it. */
TARGET static inline __attribute__((always_inline)) VECTOR NAME(powers)(float alpha, int mirrored) {
    VECTOR out;
    float power = alpha;
    for (int i = 0; i < LANES; i++, power *= alpha) out[mirrored ? LANES - 1 - i : i] = power;
    return out;
}

/* x[i] + alpha x[i-1] + alpha^2 x[i-2] + ... within a register (or i+1, i+2, ..., mirrored). */
TARGET static inline __attribute__((always_inline)) VECTOR NAME(scan)(VECTOR x, float alpha, const int mirrored) {
    const float alpha2 = alpha * alpha, alpha4 = alpha2 * alpha2;
    x += alpha * SHIFTED(x, 1);
    x += alpha2 * SHIFTED(x, 2);
    x += alpha4 * SHIFTED(x, 4);
    if (LANES > 8) x += alpha4 * alpha4 * SHIFTED(x, LANES / 2);
    return x;
}

/* out[i] = scale f[i] with f[i] = v[i] + alpha f[i-1]; returns the last f. */
TARGET static float NAME(forward)(const signal *s, float state, size_t low, size_t high, float *out) {
    const VECTOR powers = NAME(powers)(s->alpha, 0);
    const float alpha = s->alpha, scale = s->scale, across = powers[LANES - 1];
    VECTOR states = (VECTOR){0} + state;
    size_t i = low;
    for (; i + LANES <= high; i += LANES) {
        VECTOR own = NAME(scan)(*(const NAME(loose) *)(s->v + i), alpha, 0);
        *(NAME(loose) *)(out + i) = scale * (own + states * powers);
        states = NAME(spread)(own, LANES - 1) + across * states;
    }
    state = states[0];
    for (; i < high; i++) state = s->v[i] + alpha * state, out[i] = scale * state;
    return state;
}

/* out[i] += scale alpha b[i+1] with b[i] = v[i] + alpha b[i+1]. */
TARGET static void NAME(backward)(const signal *s, float state, size_t low, size_t high, float *out) {
    const VECTOR powers = NAME(powers)(s->alpha, 1);
    const float alpha = s->alpha, scale = s->scale, across = powers[0];
    size_t i = high;
    for (; i > low && (i - low) % LANES; i--) {
        out[i - 1] += scale * alpha * state;
        state = s->v[i - 1] + alpha * state;
    }
    VECTOR states = (VECTOR){0} + state;
    for (; i > low; i -= LANES) {
        VECTOR v = *(const NAME(loose) *)(s->v + i - LANES), own = NAME(scan)(v, alpha, 1);
        *(NAME(loose) *)(out + i - LANES) += scale * (own - v + states * powers);
        states = NAME(spread)(own, 0) + across * states;
    }
}

#undef VECTOR
