/* The two recursions of the smoothing for one vector width. */
#define LANES (BYTES / 4)

typedef float NAME(vector) __attribute__((vector_size(BYTES)));
typedef float NAME(loose) __attribute__((vector_size(BYTES), aligned(4), may_alias)); /* anywhere in memory */
#define VECTOR NAME(vector)

typedef int32_t NAME(lanes) __attribute__((vector_size(BYTES)));

/* Lane i takes lane i - by (or i + by, mirrored), and 0 where there is none. */
#if BYTES == 64
#define SHIFTED(x, by)                                                                                                    \
    (VECTOR)(mirrored ? _mm512_alignr_epi32(_mm512_setzero_si512(), (__m512i)(x), by)                                     \
                      : _mm512_alignr_epi32((__m512i)(x), _mm512_setzero_si512(), 16 - (by)))
#elif BYTES == 32
#define LANE(i, by) (mirrored ? (i) + (by) : (i) - (by))
#define EIGHT(F, by) _mm256_setr_epi32(F(0, by), F(1, by), F(2, by), F(3, by), F(4, by), F(5, by), F(6, by), F(7, by))
#define FROM(i, by) (LANE(i, by) & 7)
#define KEEP(i, by) (LANE(i, by) < 0 || LANE(i, by) > 7 ? 0 : -1)
#define SHIFTED(x, by)                                                                                                    \
    (VECTOR) _mm256_and_si256((__m256i)_mm256_permutevar8x32_ps((__m256)(x), EIGHT(FROM, by)), EIGHT(KEEP, by))
#else
#define SHIFTED(x, by) NAME(shifted)(x, by, mirrored)
INLINE VECTOR NAME(shifted)(VECTOR x, const int by, const int mirrored) {
    VECTOR out = {0};
    for (int i = by; i < LANES; i++) out[mirrored ? i - by : i] = x[mirrored ? i : i - by];
    return out;
}
#endif

/* One lane of x in every lane. */
TARGET INLINE VECTOR NAME(spread)(VECTOR x, const int lane) {
#ifdef __clang__
    return (VECTOR){0} + x[lane];
#else
    return __builtin_shuffle(x, (NAME(lanes)){0} + lane);
#endif
}

/* alpha, alpha^2, alpha^3, ...: how far the state before a register reaches into it. */
TARGET INLINE VECTOR NAME(powers)(float alpha, int mirrored) {
    VECTOR out;
    float power = alpha;
    for (int i = 0; i < LANES; i++, power *= alpha) out[mirrored ? LANES - 1 - i : i] = power;
    return out;
}

/* x[i] + alpha x[i-1] + alpha^2 x[i-2] + ... within a register (or i+1, i+2, ..., mirrored). */
TARGET INLINE VECTOR NAME(scan)(VECTOR x, float alpha, const int mirrored) {
    const float alpha2 = alpha * alpha, alpha4 = alpha2 * alpha2;
    x += alpha * SHIFTED(x, 1);
    x += alpha2 * SHIFTED(x, 2);
    if (LANES > 4) x += alpha4 * SHIFTED(x, 4);
    if (LANES > 8) x += alpha4 * alpha4 * SHIFTED(x, 8);
    return x;
}

/* sum_{j>=i} alpha^(j-i) v[j]: as many recursions as there are lanes, since one alone would wait for itself. */
TARGET static inline float NAME(state_after)(const signal *s, float across, size_t i) {
    size_t j = s->d - i > s->reach ? i + s->reach : s->d;
    float state = j < s->d ? 0 : s->after;
    for (; (j - i) % LANES; j--) state = s->v[j - 1] + s->alpha * state;
    VECTOR states = {state};
    for (; j > i; j -= LANES) states = *(const NAME(loose) *)(s->v + j - LANES) + across * states;
    return NAME(scan)(states, s->alpha, 1)[0];
}

/* out[i] = scale f[i] with f[i] = v[i] + alpha f[i-1]; returns the last f. Meanwhile the numbers of a later block are fetched. */
TARGET static inline float NAME(forward)(const signal *s, VECTOR powers, float state, size_t low, size_t high, float *out) {
    const float alpha = s->alpha, scale = s->scale, across = powers[LANES - 1];
    VECTOR states = (VECTOR){0} + state;
    size_t i = low;
    for (; i + LANES <= high; i += LANES) {
        __builtin_prefetch(s->v + i + SOON, 0, 2);
        VECTOR own = NAME(scan)(*(const NAME(loose) *)(s->v + i), alpha, 0);
        *(NAME(loose) *)(out + i) = scale * (own + states * powers);
        states = NAME(spread)(own, LANES - 1) + across * states;
    }
    state = states[0];
    for (; i < high; i++) state = s->v[i] + alpha * state, out[i] = scale * state;
    return state;
}

/* out[i] += scale alpha b[i+1] with b[i] = v[i] + alpha b[i+1]. Meanwhile the room of a later block is fetched. */
TARGET static inline void NAME(backward)(const signal *s, VECTOR powers, float state, size_t low, size_t high, float *out) {
    const float alpha = s->alpha, scale = s->scale, across = powers[0];
    size_t i = high;
    for (; i > low && (i - low) % LANES; i--) {
        out[i - 1] += scale * alpha * state;
        state = s->v[i - 1] + alpha * state;
    }
    VECTOR states = (VECTOR){0} + state;
    for (; i > low; i -= LANES) {
        __builtin_prefetch(out + i - LANES + SOON, 1, 2);
        VECTOR v = *(const NAME(loose) *)(s->v + i - LANES), own = NAME(scan)(v, alpha, 1);
        *(NAME(loose) *)(out + i - LANES) += scale * (own - v + states * powers);
        states = NAME(spread)(own, 0) + across * states;
    }
}

/* A block at a time: read twice, but the second time from the cache. */
TARGET static void NAME(smooth)(const signal *s, size_t low, size_t high, float *out) {
    const VECTOR powers = NAME(powers)(s->alpha, 0), mirrored = NAME(powers)(s->alpha, 1);
    float before = state_before(s, low);
    for (size_t begin = low; begin < high; begin += BLOCK) {
        const size_t end = begin + BLOCK < high ? begin + BLOCK : high;
        before = NAME(forward)(s, powers, before, begin, end, out);
        NAME(backward)(s, mirrored, NAME(state_after)(s, mirrored[0], end), begin, end, out);
    }
}

#undef LANES
#undef VECTOR
#undef SHIFTED
#undef LANE
#undef EIGHT
#undef FROM
#undef KEEP
