/* The kernels of clipping, for float32. The formulas are those of the torch code that abi.h names, to rounding.
 *
 * A vector wider than the processor's registers would be cut into pieces that live in memory, ten times slower, so that each width is
 * compiled by itself.
 */
#include "widths.h"

#include <math.h>
#include <string.h>
#if WIDTHS
#include <immintrin.h>
#endif

#define TYPED(name) name
#define KERNELS "clip/clip_of.h"
#include "widths.h"

int hushgrad_outer_sq_norms(const float *x, size_t d, const float *g, size_t p, size_t rows, double wild, double *of_weight,
                            double *of_bias) {
    return CHOSEN(outer_sq_norms)(x, d, g, p, rows, wild, of_weight, of_bias);
}

int hushgrad_total(const double *const *parts, size_t count, size_t rows, double factor, double *total, double *norms) {
    return CHOSEN(total)(parts, count, rows, factor, total, norms);
}

int hushgrad_clip(const double *const *parts, size_t count, size_t rows, double factor, double bound, double least, int single,
                  void *norms, void *weights) {
    return CHOSEN(clip)(parts, count, rows, factor, bound, least, single, norms, weights);
}

void hushgrad_outer_sums(const float *x, size_t d, const float *g, size_t p, const float *weights, size_t rows, float *of_weight,
                         float *of_bias) {
    CHOSEN(outer_sums)(x, d, g, p, weights, rows, of_weight, of_bias);
}

void hushgrad_products(const float *x, size_t d, const float *g, size_t p, size_t rows, size_t some, float *out, int add) {
    CHOSEN(products)(x, d, g, p, rows, some, out, add);
}

void hushgrad_outer_gradients(const float *x, size_t d, const float *g, size_t p, size_t rows, size_t examples, float *G,
                              double *sq_norms) {
    CHOSEN(outer_gradients)(x, d, g, p, rows, examples, G, sq_norms);
}

void hushgrad_offset_gradients(const float *x, size_t d, size_t pixels, const float *g, size_t p, size_t positions, size_t depth,
                               const size_t *starts, size_t taps, size_t examples, size_t stride, float *G) {
    CHOSEN(offset_gradients)(x, d, pixels, g, p, positions, depth, starts, taps, examples, stride, G);
}

void hushgrad_kernel_gradients(const geometry *c, const float *x, const float *g, size_t examples, float *room, float *G,
                               double *sq_norms) {
    CHOSEN(kernel_gradients)(c, x, g, examples, room, G, sq_norms);
}

void hushgrad_sq_norms(const float *x, size_t rows, size_t n, double *out) { CHOSEN(sq_norms)(x, rows, n, out); }

void hushgrad_gram(const float *x, size_t examples, size_t stride, size_t rows, size_t depth, size_t down, size_t along,
                   double *room, double *out) {
    CHOSEN(gram)(x, examples, stride, rows, depth, down, along, room, out);
}

void hushgrad_group_norms(const float *left, size_t m, const float *right, size_t n, const size_t *rows, const size_t *starts,
                          size_t groups, double wild, double *sq_norms, double *masses) {
    CHOSEN(group_norms)(left, m, right, n, rows, starts, groups, wild, sq_norms, masses);
}

void hushgrad_wide_sums(const float *x, size_t d, const float *g, size_t p, const double *weights, size_t rows, size_t first,
                        size_t some, double *room, double *out, float *onto, int add) {
    CHOSEN(wide_sums)(x, d, g, p, weights, rows, first, some, room, out, onto, add);
}

void hushgrad_wide_kept(const float *G, size_t n, const double *weights, size_t rows, size_t first, size_t some, double *out) {
    CHOSEN(wide_kept)(G, n, weights, rows, first, some, out);
}

size_t hushgrad_row_norms(const int64_t *ids, const int64_t *example, const float *values, size_t width, size_t first, size_t count,
                          uint32_t *slots, size_t size, uint32_t *next, uint32_t *last, double *room, double *sq_norms,
                          double *sq_masses) {
    return CHOSEN(row_norms)(ids, example, values, width, first, count, slots, size, next, last, room, sq_norms, sq_masses);
}
