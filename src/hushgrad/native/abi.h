/* What Python and C agree on: constants, structs, functions, and beside each function its reference in numpy or torch.
 *
 * `make abi` (_generate.py) writes _abi.py and abi.c from this file, and into HUSHGRAD_ABI a checksum of all that is declared here. A
 * library that was built from another header than the Python code has another number and is refused when it is loaded.
 *
 * The syntax is a small part of C: `#define NAME integer`, `typedef struct {...} name;`, one prototype after another, no arrays.
 * A kernel has the bits of its reference ("bit for bit"), or differs from it by rounding only ("to rounding").
 */
#ifndef HUSHGRAD_ABI_H
#define HUSHGRAD_ABI_H

#include <stddef.h>
#include <stdint.h>

#define HUSHGRAD_ABI 1766454172

/* Constants ------------------------------------------------------------------------------------------------------------- */

#define PAIRS 128          /* of Gaussians in a group */
#define GROUP 256          /* Gaussians that are made together */
#define GROUP_BLOCKS 96    /* cipher blocks for a group */
#define ROUND_KEYS 240     /* bytes of a key's 15 round keys */
#define TILE 1024          /* numbers of a row that are worked on together */
#define TILE_STRIDE 1104   /* from tile to tile: at a multiple of 4096 bytes they would compete for the same lines of the cache */
#define PARTS 8            /* of a combination, read together */
#define OUTPUTS_AT_MOST 32 /* of a layer whose weighted sum is made here; for more, a library's matrix product is as fast */
#define PATCH_ROW 16       /* floats that a row of patches is rounded up to: the widest vector */
#define PANEL_DEPTH 256    /* terms of a sum in double precision at a time: a panel of columns stays in the first-level cache */
#define PANEL_ROWS 144     /* at most, that are widened at a time: their panels stay in the second-level cache */
#define PANEL_COLUMNS 16   /* at most, of a panel */
#define WITNESS_WORDS 1024 /* of 8 bytes, of a block that is hashed */
#define WITNESS_BLOCKS 32  /* that are drawn and then hashed: the second-level cache holds them */

/* Structs --------------------------------------------------------------------------------------------------------------- */

/* How to draw: the round keys, which instructions, and the first two fields of the counter. */
typedef struct {
    const uint8_t *round_keys;
    uint64_t cipher, step, index;
} address;

/* A block of rows: the weights of the history and where that is, the weights of the rows in one another, their diagonal, and where they
 * are to be kept. */
typedef struct {
    const void *weights, *history, *inner, *diagonal;
    void *const *kept;
    uint64_t rows, count;
} solutions;

/* Sums on a grid, for all numbers of a call: scale / h, h, 1 / h, and the most steps of a sum. */
typedef struct {
    double ratio, h, inverse, limit;
} facts;

/* How far sum / h + ratio z may be off, for z of one precision: relative to |x| + |y| of the pair, and absolutely; where |x| + |y| is
 * beyond far, nothing is known. */
typedef struct {
    double relative, absolute, far;
} bound;

/* One convolution, of one example and one group: the input, its zero padding, its size with it on all sides, the kernel's moves, the
 * output; taps are channels kernel_h kernel_w, and row is that rounded up to PATCH_ROW. */
typedef struct {
    size_t channels, height, width, above, left, padded_h, padded_w;
    size_t kernel_h, kernel_w, stride_h, stride_w, dilation_h, dilation_w;
    size_t out_channels, out_h, out_w, taps, row;
} geometry;

/* One smoothing: signal v of length d, alpha, and the ghost cells before and after it that stand for all that lies beyond; elements
 * farther away than reach are not felt. */
typedef struct {
    const float *v;
    uint64_t d, reach;
    float alpha, scale, before, after;
} signal;

/* Library both ---------------------------------------------------------------------------------------------------------- */

/* Work with vectors of at most so many bytes from now on, and say how many there are on this processor. The widest are chosen when a
 * library is loaded; tests try the others. Reference: none. */
int hushgrad_vectors(int most);

/* Library exact: every operation is rounded by itself, and never fused --------------------------------------------------- */

/* Whole groups of Gaussians from their words. Reference, bit for bit: hushgrad.noise._box_muller.gaussians. */
void hushgrad_gaussians_f32(const uint32_t *words, float *out, size_t groups);
void hushgrad_gaussians_f64(const uint32_t *words, double *out, size_t groups);

/* out = scale x. Reference, bit for bit: hushgrad.noise._kernel.NumpyKernel.emit. */
void hushgrad_write_f32(const float *x, float scale, float *out, size_t n);
void hushgrad_write_f64(const double *x, double scale, double *out, size_t n);

/* out += scale x. Reference, bit for bit: hushgrad.noise._kernel.NumpyKernel.emit. */
void hushgrad_add_f32(const float *x, float scale, float *out, size_t n);
void hushgrad_add_f64(const double *x, double scale, double *out, size_t n);

/* One step of a buffered Toeplitz recursion from given draws z, which are left alone; buffer j starts at state + j stride. Then out =
 * scale x, or out += scale x. Reference, bit for bit: hushgrad.noise._kernel.NumpyKernel.buffers. */
void hushgrad_buffers_f32(const float *z, float *state, size_t stride, const float *decay, const float *weight, size_t count,
                          float scale, int add, float *out, size_t n);
void hushgrad_buffers_f64(const double *z, double *state, size_t stride, const double *decay, const double *weight, size_t count,
                          double scale, int add, double *out, size_t n);

/* out[k] += sum_h weights[k, h] parts[h], in the order of h. Reference, bit for bit: hushgrad.noise._kernel.NumpyKernel.combine. */
void hushgrad_combine_f32(const float *weights, size_t rows, const float *const *parts, size_t count, float *out, size_t stride,
                          size_t n);
void hushgrad_combine_f64(const double *weights, size_t rows, const double *const *parts, size_t count, double *out, size_t stride,
                          size_t n);

/* Forward substitution: x[k] = (x[k] + sum_{j<k} inner[k, j] x[j]) / diagonal[k].
 * Reference, bit for bit: hushgrad.noise._kernel.NumpyKernel.solve. */
void hushgrad_solve_f32(const float *inner, const float *diagonal, size_t rows, float *x, size_t stride, size_t n);
void hushgrad_solve_f64(const double *inner, const double *diagonal, size_t rows, double *x, size_t stride, size_t n);

/* What the processor's AES can do: with 1, 2 or 4 blocks in each register; 0, nothing, so use another AES, and none of the functions
 * that draw. Reference: none. */
int hushgrad_cipher(void);

/* A key of 32 bytes as its ROUND_KEYS. Reference, bit for bit: hushgrad.noise._aes_ctr.KeyStream.words. */
void hushgrad_expand_key(const uint8_t *key, uint8_t *schedule);

/* Numbers start, start + 1, ...: out = scale z, or out += scale z. Reference, bit for bit: hushgrad.noise._kernel.NumpyKernel.draw. */
void hushgrad_draw_f32(const address *at, uint64_t start, float scale, int add, float *out, size_t n);
void hushgrad_draw_f64(const address *at, uint64_t start, double scale, int add, double *out, size_t n);

/* The same for several tensors at once, from a table of rows of four numbers: first an address, then for each of `count` tensors (index,
 * start, n, where out is). Reference, bit for bit: hushgrad.noise._kernel.NumpyKernel.draw_all. */
void hushgrad_draw_many_f32(const uint64_t *table, size_t count, float scale, int add);
void hushgrad_draw_many_f64(const uint64_t *table, size_t count, double scale, int add);

/* Rows of a table that is `width` wide: table[places[k]] += scales[k] times the numbers rows[k] width, rows[k] width + 1, ...
 * Reference, bit for bit: hushgrad.noise.table_rows.add_rows. */
void hushgrad_draw_rows_f32(const address *at, const int64_t *rows, const int64_t *places, const float *scales, size_t count,
                            size_t width, float *table);
void hushgrad_draw_rows_f64(const address *at, const int64_t *rows, const int64_t *places, const double *scales, size_t count,
                            size_t width, double *table);

/* As draw_many with add, and what came out is hashed while it is in the cache: rows of five numbers, first an address and where witness's
 * key is, then for each tensor (index, start, n, where out is, where its hashes go).
 * Reference, bit for bit: hushgrad.noise._kernel.NumpyKernel.draw_seen. */
void hushgrad_draw_seen_f32(const uint64_t *table, size_t count, float scale);
void hushgrad_draw_seen_f64(const uint64_t *table, size_t count, double scale);

/* As buffers, from draws of their own, which never leave the first-level cache or even the registers.
 * Reference, bit for bit: hushgrad.noise._kernel.NumpyKernel.draw_buffers. */
void hushgrad_drawn_buffers_f32(const address *at, uint64_t start, float *state, size_t stride, const float *decay,
                                const float *weight, size_t count, float scale, int add, float *out, size_t n);
void hushgrad_drawn_buffers_f64(const address *at, uint64_t start, double *state, size_t stride, const double *decay,
                                const double *weight, size_t count, double scale, int add, double *out, size_t n);

/* Rows of noise with a banded C, drawn, combined with the history and solved in one go, a tile at a time: row k, which is also the number
 * of the step from at->step on, is kept in kept[k], and the first goes to out as well. room holds rows TILE_STRIDE numbers.
 * Reference, bit for bit: hushgrad.noise._kernel.NumpyKernel.draw_solutions. */
void hushgrad_drawn_solutions_f32(const address *at, uint64_t start, const solutions *s, float *room, float scale, int add,
                                  float *out, size_t n);
void hushgrad_drawn_solutions_f64(const address *at, uint64_t start, const solutions *s, double *room, double scale, int add,
                                  double *out, size_t n);

/* Rows that are combinations of draws: row k of out += sum_j weights[k, j] z of step at->step + j. room holds PARTS TILE_STRIDE numbers.
 * Reference, bit for bit: hushgrad.noise._kernel.NumpyKernel.draw_combinations. */
void hushgrad_drawn_combinations_f32(const address *at, uint64_t start, const float *weights, size_t rows, size_t draws, float *room,
                                     float *out, size_t stride, size_t n);
void hushgrad_drawn_combinations_f64(const address *at, uint64_t start, const double *weights, size_t rows, size_t draws,
                                     double *room, double *out, size_t stride, size_t n);

/* out = h rint(out / h + ratio z) for the numbers start, start + 1, ..., with the bounds for z in single and in double precision; how many
 * are in doubt, and their places in out. Reference, bit for bit where it is certain: hushgrad.noise._kernel.NumpyKernel.draw_rounded. */
size_t hushgrad_rounded(const address *at, uint64_t start, const facts *f, const bound *bounds, double *out, size_t n,
                        uint64_t *places);

/* The ChaCha20 words of blocks block, block + 1, ... of (step, index). Reference, bit for bit: hushgrad.noise._chacha.chacha_blocks. */
void hushgrad_chacha(const uint32_t *key, uint64_t step, uint64_t index, uint64_t block, uint32_t *out, size_t blocks);

/* One hash of two numbers for each block of `size` bytes at an address that 4 divides, the last one filled up with zeros.
 * Reference, bit for bit: hushgrad._universal_hash.by_torch. */
void hushgrad_witness(const unsigned char *bytes, size_t size, const uint64_t *key, uint64_t *out);

/* The law of wa A + wb B on the places `grid`: masses between grid[k] and grid[k+1] are split so that the mean is kept; `outside` has
 * (mass, moment) below the first place and (mass, moment) above the last. Each sum is first raised by `raise` times the size of its
 * parts. Returns the longest row of one cell. Reference, to rounding: hushgrad.accounting.pld.bounds.convex_order._split. */
long hushgrad_sum_above(const double *a, const double *p, long na, const double *b, const double *q, long nb, double wa, double wb,
                        double raise, const double *grid, long n, double *out, double *outside);

/* Mass and first moment of each cell [edges[k], edges[k+1]); the outermost cells hold what is beyond them too. Returns the longest row of
 * one cell. Reference, to rounding: hushgrad.accounting.pld.bounds.convex_order._collected. */
long hushgrad_sum_below(const double *a, const double *p, long na, const double *b, const double *q, long nb, double wa, double wb,
                        const double *edges, long n, double *mass, double *moment);

/* Adam's moments and the direction mean factor / sqrt(max(square - noise, floor)), in one pass.
 * Reference, to rounding: hushgrad.denoise.second_moment._direction. */
void hushgrad_direction(const float *g, float *mean, float *square, float *out, size_t n, float fresh1, float fresh2, float noise,
                        float floor, float factor);

/* table[ids[k]] += weights[k] values[k], in the order of k, for values (count, width) and a table (rows, width): columns `first` to `first +
 * some`. Whether all ids are there; else nothing is added. Reference, bit for bit: hushgrad.clipping.record.Sum.add_rows. */
int hushgrad_add_rows(const int64_t *ids, const float *values, const float *weights, size_t count, size_t width, size_t first,
                      size_t some, float *table, size_t rows);

/* Library contracted: products and sums may be rounded together ---------------------------------------------------------------- */

/* The squared norms of g_i x_i^T and of g_i, for x (rows, d) and g (rows, p); whether some squared norm of x or g exceeds `wild`.
 * Reference, to rounding: hushgrad.clipping.rules.linear._sq_norms_of_rows. */
int hushgrad_outer_sq_norms(const float *x, size_t d, const float *g, size_t p, size_t rows, double wild, double *of_weight,
                            double *of_bias);

/* factor sum_k parts[k][i], as squared norms of examples, and their roots; whether all are finite.
 * Reference, to rounding: hushgrad.clipping.clipper.Clipper.clip. */
int hushgrad_total(const double *const *parts, size_t count, size_t rows, double factor, double *total, double *norms);

/* Their roots and min(1, bound / root), 0 below `least`, in single or double precision; whether all are finite. Where one is not, its
 * weight is 0. Reference, to rounding: hushgrad.clipping.clipper.Clipper.clip. */
int hushgrad_clip(const double *const *parts, size_t count, size_t rows, double factor, double bound, double least, int single,
                  void *norms, void *weights);

/* sum_i weights[i] g_i x_i^T (p, d) and sum_i weights[i] g_i (p), for x (rows, d) and g (rows, p), p <= OUTPUTS_AT_MOST.
 * Reference, to rounding: hushgrad.clipping.rules.linear._add_weighted_rows. */
void hushgrad_outer_sums(const float *x, size_t d, const float *g, size_t p, const float *weights, size_t rows, float *of_weight,
                         float *of_bias);

/* out (some, d) = sum_t g_t x_t^T for x (rows, d) and g (rows, p), from g's first column on; added to what is there if `add`.
 * Reference, to rounding: hushgrad.clipping.record.Sum.addmm. */
void hushgrad_products(const float *x, size_t d, const float *g, size_t p, size_t rows, size_t some, float *out, int add);

/* The same for each of `examples` pairs of matrices that lie one after the other: G (examples, p, d), with the squared norm of each.
 * Reference, to rounding: hushgrad.clipping.rules.linear.Linear.per_example. */
void hushgrad_outer_gradients(const float *x, size_t d, const float *g, size_t p, size_t rows, size_t examples, float *G,
                              double *sq_norms);

/* For each of `examples` x (pixels, d) and g (p, positions), and each offset k: sum_t g[., t] x[starts[k] + t, .]^T over t < depth, which
 * goes to G + k stride (examples, p, d). Reference, to rounding: hushgrad.clipping.rules.kernels.per_example_kernel. */
void hushgrad_offset_gradients(const float *x, size_t d, size_t pixels, const float *g, size_t p, size_t positions, size_t depth,
                               const size_t *starts, size_t taps, size_t examples, size_t stride, float *G);

/* The gradient G of a small convolution's kernel for each example, with its squared norm; room holds channels padded_h padded_w + out_h
 * out_w row floats. Reference, to rounding: hushgrad.clipping.rules.conv.per_example_kernel. */
void hushgrad_kernel_gradients(const geometry *c, const float *x, const float *g, size_t examples, float *room, float *G,
                               double *sq_norms);

/* The squared norm of each row of x (rows, n). Reference, to rounding: hushgrad.clipping.mass.sq_norm. */
void hushgrad_sq_norms(const float *x, size_t rows, size_t n, double *out);

/* Adds to sq_norms[e] the squared norm of what example e adds to a table: of the sums of its rows with one id; and to sq_masses[e] the
 * squares of the sums of their lengths. Rows first ... first + count, of at most 2^32 - 2; all those of an example are among them or none.
 * Room: `slots` zeros, a power of two above `count`; next and last, `count` each; and `width` doubles. The most rows of one example with one
 * id. Reference, to rounding: hushgrad.clipping.rules.embedding.rows_sq_norm. */
size_t hushgrad_row_norms(const int64_t *ids, const int64_t *example, const float *values, size_t width, size_t first, size_t count,
                          uint32_t *slots, size_t size, uint32_t *next, uint32_t *last, double *room, double *sq_norms,
                          double *sq_masses);

/* Gram matrices of `examples` matrices x (rows, depth), x[i, t] at x[i down + t along], each `stride` floats after the last; room holds
 * PANEL_DEPTH (PANEL_ROWS + rows rounded up to PANEL_COLUMNS) doubles. Reference, to rounding: hushgrad.clipping.mass.gram. */
void hushgrad_gram(const float *x, size_t examples, size_t stride, size_t rows, size_t depth, size_t down, size_t along,
                   double *room, double *out);

/* ‖sum_r left_r right_r^T‖² and sum_r ‖left_r‖ ‖right_r‖ of each group of rows, for left (any, m) and right (any, n); group e has the rows
 * rows[starts[e]] to rows[starts[e + 1] - 1]. The second is infinite where a squared norm is above `wild`.
 * Reference, to rounding: hushgrad.clipping.rules.experts.group_norms. */
void hushgrad_group_norms(const float *left, size_t m, const float *right, size_t n, const size_t *rows, const size_t *starts,
                          size_t groups, double wild, double *sq_norms, double *masses);

/* out (p, d) = sum_i weights[i] g_i x_i^T, for x (rows, d) and g (rows, p): columns `first` to `first + some` of g; added to what is
 * there if `add`. With `onto` (p, d), and at most PANEL_DEPTH rows, `out` is not touched: the complete sum is added to `onto` in double
 * and rounded to single precision, once. Room as for gram, with d for its rows. Reference, to rounding: hushgrad.clipping.sums.Sum.add_outer. */
void hushgrad_wide_sums(const float *x, size_t d, const float *g, size_t p, const double *weights, size_t rows, size_t first,
                        size_t some, double *room, double *out, float *onto, int add);

/* out (n) += sum_i weights[i] G_i, for G (rows, n): columns `first` to `first + some`.
 * Reference, to rounding: hushgrad.clipping.sums.weighted_rows. */
void hushgrad_wide_kept(const float *G, size_t n, const double *weights, size_t rows, size_t first, size_t some, double *out);

/* out[i] = scale (v[i] + alpha before[i] + alpha after[i]) for i in [low, high), where before[i] and after[i] are the sums of alpha^k
 * times what lies k + 1 cells before and after. Reference, to rounding: hushgrad.denoise._laplacian_solver._by_products. */
void hushgrad_smooth(const signal *s, size_t low, size_t high, float *out);

#endif
