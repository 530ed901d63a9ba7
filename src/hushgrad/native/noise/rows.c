/* Rows of correlated noise: the arithmetic of NumpyKernel, operation for operation. */
#include "noise/gauss.h"

#include <string.h>

#define ROWS 8       /* of a combination, kept in registers */
#define MOST_ROWS 16 /* whose weights are copied at a time */

#if CIPHER
static size_t in_registers(const address *at, uint64_t start, float *state, size_t stride, const float *decay,
                           const float *weight, size_t count, float scale, int add, float *out, size_t n) {
    row to = {.out = out, .scale = scale, .state = state, .stride = stride};
    for (size_t j = 0; j < count && j < 4; j++) to.decay[j] = decay[j], to.weight[j] = weight[j];
    return hushgrad_in_registers(at, start, &to, n, add, count);
}
#endif

#define KERNELS "noise/rows_of.h"

#define REAL float
#define TYPED(name) name##_f32
#define IN_REGISTERS in_registers
#include "noise/rows_drawn.h"
#undef REAL
#undef TYPED
#undef IN_REGISTERS

#define REAL double
#define TYPED(name) name##_f64
#define IN_REGISTERS(...) 0
#include "noise/rows_drawn.h"
