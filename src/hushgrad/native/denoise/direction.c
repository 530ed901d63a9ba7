/* Adam's moments in one pass over memory, for float32; the bits are the same for every vector width. */
#include "widths.h"

#include <math.h>

#define TYPED(name) name
#define KERNELS "denoise/direction_of.h"
#include "widths.h"

void hushgrad_direction(const float *g, float *mean, float *square, float *out, size_t n, float fresh1, float fresh2, float noise,
                        float floor, float factor) {
    CHOSEN(direction)(g, mean, square, out, n, fresh1, fresh2, noise, floor, factor);
}
