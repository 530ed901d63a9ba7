/* ChaCha20 for one vector width: LANES blocks at a time, each word of the state a vector over the blocks. */
#define LANES (BYTES / 4)
typedef uint32_t NAME(words) __attribute__((vector_size(BYTES)));
#define WORDS NAME(words)

TARGET static void NAME(chacha)(const uint32_t *key, uint64_t step, uint64_t index, uint64_t block, uint32_t *out, size_t blocks) {
    static const uint32_t constants[4] = {0x61707865, 0x3320646e, 0x79622d32, 0x6b206574};
    for (size_t first = 0; first < blocks; first += LANES) {
        WORDS s[16], x[16];
        for (int w = 0; w < 4; w++) s[w] = (WORDS){0} + constants[w];
        for (int w = 0; w < 8; w++) s[4 + w] = (WORDS){0} + key[w];
        WORDS low = {0}, high = {0};
        for (int l = 0; l < LANES; l++) {
            uint64_t at = block + first + (uint64_t)l;
            low[l] = (uint32_t)at;
            high[l] = (uint32_t)(step >> 32) << 16 | (uint32_t)(at >> 32);
        }
        s[12] = low;
        s[13] = high;
        s[14] = (WORDS){0} + (uint32_t)index;
        s[15] = (WORDS){0} + (uint32_t)step;
        for (int w = 0; w < 16; w++) x[w] = s[w];
        for (int round = 0; round < 10; round++) {
            QUARTER(x[0], x[4], x[8], x[12])
            QUARTER(x[1], x[5], x[9], x[13])
            QUARTER(x[2], x[6], x[10], x[14])
            QUARTER(x[3], x[7], x[11], x[15])
            QUARTER(x[0], x[5], x[10], x[15])
            QUARTER(x[1], x[6], x[11], x[12])
            QUARTER(x[2], x[7], x[8], x[13])
            QUARTER(x[3], x[4], x[9], x[14])
        }
        for (int w = 0; w < 16; w++) x[w] += s[w];
        size_t here = blocks - first < LANES ? blocks - first : LANES;
        for (size_t l = 0; l < here; l++)
            for (int w = 0; w < 16; w++) out[16 * (first + l) + w] = x[w][l];
    }
}

#undef LANES
#undef WORDS
