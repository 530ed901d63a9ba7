/* The norms of gradients of a table, each made of rows that are scattered over it: rows of one example with one id are added up first. */

/* See abi.h; `slots`, a power of two of zeros above `count`, finds the first row with a key, and `next` and `last` chain those with one key. */
TARGET static size_t NAME(row_norms)(const int64_t *ids, const int64_t *example, const float *values, size_t width, size_t first,
                                     size_t count, uint32_t *slots, size_t size, uint32_t *next, uint32_t *last, double *room,
                                     double *sq_norms, double *sq_masses) {
    size_t most = count ? 1 : 0;
    ids += first, example += first, values += first * width;
    for (size_t k = 0; k < count; k++) {
        const uint64_t mixed = ((uint64_t)example[k] * 0x9e3779b97f4a7c15u ^ (uint64_t)ids[k]) * 0xd6e8feb86659fd93u;
        size_t at = (mixed >> 32) & (size - 1);
        while (slots[at] && (ids[slots[at] - 1] != ids[k] || example[slots[at] - 1] != example[k])) at = (at + 1) & (size - 1);
        next[k] = 0, last[k] = (uint32_t)k;
        if (slots[at]) next[last[slots[at] - 1]] = (uint32_t)k, last[slots[at] - 1] = (uint32_t)k, last[k] = UINT32_MAX;
        else slots[at] = (uint32_t)k + 1;
    }
    for (size_t k = 0; k < count; k++) {
        if (last[k] == UINT32_MAX) continue; /* added up with the first row of its key */
        double norm = NAME(sq_norm)(values + k * width, width), size_of = sqrt(norm);
        if (next[k]) {
            size_t terms = 0;
            memset(room, 0, width * sizeof(double));
            size_of = 0;
            for (size_t j = k; terms == 0 || j; j = next[j], terms++) {
                const float *row = values + j * width;
                size_of += sqrt(NAME(sq_norm)(row, width));
                for (size_t i = 0; i < width; i++) room[i] += row[i];
            }
            norm = 0;
            for (size_t i = 0; i < width; i++) norm += room[i] * room[i];
            most = terms > most ? terms : most;
        }
        sq_norms[example[k]] += norm;
        sq_masses[example[k]] += next[k] ? size_of * size_of : norm;
    }
    return most;
}
