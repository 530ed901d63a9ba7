/* Rows that are added to a table, in their order: the arithmetic of torch, operation for operation. */
#include "widths.h"

#define TYPED(name) name
#define KERNELS "rows/rows_of.h"
#include "widths.h"

int hushgrad_add_rows(const int64_t *ids, const float *values, const float *weights, size_t count, size_t width, size_t first,
                      size_t some, float *table, size_t rows) {
    for (size_t k = 0; k < count; k++)
        if (ids[k] < 0 || (uint64_t)ids[k] >= rows) return 0;
    if (some) CHOSEN(add_rows)(ids, values, weights, count, width, first, some, table);
    return 1;
}
