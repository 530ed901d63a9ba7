/* Rows that are added to a table, for one vector width. */
#define LANES (BYTES / 4)
typedef float NAME(lanes) __attribute__((vector_size(BYTES), aligned(4), may_alias)); /* anywhere in memory */
#define AHEAD 4096 /* bytes of rows that are asked for before they are needed: the processor does not see scattered ones coming */

TARGET static void NAME(add_rows)(const int64_t *ids, const float *values, const float *weights, size_t count, size_t width,
                                  size_t first, size_t some, float *table) {
    const size_t ahead = AHEAD / sizeof(float) / some + 1, whole = some / LANES * LANES;
    for (size_t k = 0; k < count; k++) {
        float *to = table + (size_t)ids[k] * width + first;
        const float *from = values + k * width + first, by = weights[k];
        if (k + ahead < count)
            for (size_t i = 0; i < some; i += 16) __builtin_prefetch(table + (size_t)ids[k + ahead] * width + first + i, 1);
        for (size_t i = 0; i < whole; i += LANES)
            *(NAME(lanes) *)(to + i) = *(NAME(lanes) *)(to + i) + *(const NAME(lanes) *)(from + i) * by;
        for (size_t i = whole; i < some; i++) to[i] = to[i] + from[i] * by;
    }
}
#undef LANES
#undef AHEAD
