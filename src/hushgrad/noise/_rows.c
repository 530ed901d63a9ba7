/* Rows of correlated noise: the arithmetic of NumpyKernel, operation for operation. See _gauss.h for how to compile it. */
#include "_gauss.h"

#include <string.h>

#define TILE 1024    /* numbers that are worked on together */
#define STRIDE 1104  /* from tile to tile: at a multiple of 4096 bytes they would compete for the same lines of the cache */
#define ROWS 8       /* of a combination, kept in registers */
#define PARTS 8      /* of a combination, read together */
#define MOST_ROWS 16 /* whose weights are copied at a time */

/* For a block of rows: the weights of the history and where that is, the weights of the rows in one another, their diagonal, and
 * where they are to be kept. */
typedef struct {
    const void *weights, *history, *inner, *diagonal;
    void *const *kept;
    uint64_t rows, count;
} solutions;

#if CIPHER
static size_t in_registers(const address *at, uint64_t start, float *state, size_t stride, const float *decay,
                           const float *weight, size_t count, float scale, int add, float *out, size_t n) {
    row to = {.out = out, .scale = scale, .state = state, .stride = stride};
    for (size_t j = 0; j < count && j < 4; j++) to.decay[j] = decay[j], to.weight[j] = weight[j];
    return hushgrad_in_registers(at, start, &to, n, add, count);
}
#endif

#define KERNELS "_rows_of.h"

#define REAL float
#define TYPED(name) name##_f32
#define IN_REGISTERS in_registers
#include "_rows_drawn.h"
#undef REAL
#undef TYPED
#undef IN_REGISTERS

#define REAL double
#define TYPED(name) name##_f64
#define IN_REGISTERS(...) 0
#include "_rows_drawn.h"
