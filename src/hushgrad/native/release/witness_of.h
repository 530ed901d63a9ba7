/* The hash of one block for one vector width. */

#if WIDTHS
/* The products of the even words and those of the odd ones: a multiplication reads the lower half of 64 bits. */
typedef uint32_t NAME(words) __attribute__((vector_size(BYTES), aligned(4), may_alias));
typedef uint64_t NAME(sums) __attribute__((vector_size(BYTES)));

TARGET static uint64_t NAME(nh)(const word *w, const uint32_t *key) {
    NAME(sums) even = {0}, odd = {0};
    for (int i = 0; i < WITNESS_WORDS; i += 2 * WITNESS_LANES) {
        _Pragma("GCC unroll 4") for (int j = i; j < i + WITNESS_LANES; j += BYTES / 4) {
            const int k = j + WITNESS_LANES;
            const NAME(sums) a = (NAME(sums))(*(const NAME(words) *)(w + j) + *(const NAME(words) *)(key + j));
            const NAME(sums) b = (NAME(sums))(*(const NAME(words) *)(w + k) + *(const NAME(words) *)(key + k));
            even += (NAME(sums))MULTIPLIED(a, b);
            odd += (NAME(sums))MULTIPLIED(a >> 32, b >> 32);
        }
    }
    uint64_t sum = 0;
    even += odd;
    for (int j = 0; j < BYTES / 8; j++) sum += even[j];
    return sum;
}
#else
static uint64_t NAME(nh)(const word *w, const uint32_t *key) {
    uint64_t sums[WITNESS_LANES] = {0}, sum = 0;
    for (int i = 0; i < WITNESS_WORDS; i += 2 * WITNESS_LANES)
        for (int j = i, k = i + WITNESS_LANES; j < i + WITNESS_LANES; j++, k++)
            sums[j - i] += (uint64_t)(uint32_t)(w[j] + key[j]) * (uint32_t)(w[k] + key[k]);
    for (int j = 0; j < WITNESS_LANES; j++) sum += sums[j];
    return sum;
}
#endif
