/* The room's kernels for float32, once for each width of vectors that a processor may have; the caller picks one by its suffix.
 *
 * The formulas are those of the torch code beside them, to rounding. A vector wider than the processor's registers would be cut into
 * pieces that live in memory, ten times slower, so that each width is compiled by itself.
 */
#include <math.h>
#include <stddef.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define OF_WIDTH(function, lanes) function##_##lanes
#define NAMED(function, lanes) OF_WIDTH(function, lanes)
#define NAME(function) NAMED(function, LANES)

/* One convolution, of one example and one group. */
typedef struct {
    size_t channels, height, width;         /* of the input, */
    size_t above, left, padded_h, padded_w; /* its zero padding, and its size with it on all sides */
    size_t kernel_h, kernel_w, stride_h, stride_w, dilation_h, dilation_w;
    size_t out_channels, out_h, out_w;
    size_t taps, row; /* channels kernel_h kernel_w, and that rounded up to 16 */
} geometry;

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORS 1
#else
#define VECTORS 0
#endif

/* The widest vectors that this processor has, in floats. */
int hushgrad_lanes(void) {
#if VECTORS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return 16;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 8;
#endif
    return 4;
}

#if VECTORS
#pragma GCC push_options
#pragma GCC target("avx512f")
#define LANES 16
#define HIGH 12 /* rows of a tile of two vectors: with them and a factor for each row, less than the registers there are */
#include "_lanes_of.h"
#include "_rows_of.h"
#include "_wide_of.h"
#include "_conv_of.h"
#undef LANES
#undef HIGH
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define LANES 8
#define HIGH 6
#include "_lanes_of.h"
#include "_rows_of.h"
#include "_wide_of.h"
#include "_conv_of.h"
#undef LANES
#undef HIGH
#pragma GCC pop_options
#endif

#define LANES 4 /* SSE, NEON */
#define HIGH 6
#include "_lanes_of.h"
#include "_rows_of.h"
#include "_wide_of.h"
#include "_conv_of.h"
