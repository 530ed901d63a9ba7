/* The hash of one block for one vector width: plain loops, which compilers turn into vectors by themselves. */

TARGET static uint64_t NAME(nh)(const word *w, const uint32_t *key) {
    uint64_t sums[WITNESS_LANES] = {0}, sum = 0;
    for (int i = 0; i < WITNESS_WORDS; i += 2 * WITNESS_LANES) {
        __builtin_prefetch((const char *)(w + i) + SOON);
        __builtin_prefetch((const char *)(w + i) + SOON + 64);
        for (int j = 0; j < WITNESS_LANES; j++)
            sums[j] += (uint64_t)(uint32_t)(w[i + j] + key[i + j]) * (uint32_t)(w[i + WITNESS_LANES + j] + key[i + WITNESS_LANES + j]);
    }
    for (int j = 0; j < WITNESS_LANES; j++) sum += sums[j];
    return sum;
}
