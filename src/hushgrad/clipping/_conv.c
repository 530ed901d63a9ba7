/* The gradient of a small convolution's kernel for each example, with its squared norm, for float32.
 *
 * G_i = g_i P_i, where row t of P_i is the patch under output position t. Patches of one example at a time are copied into a scratch that
 * stays in the cache, so that memory sees x, g and G once each.
 */
#include <string.h>

#include "_lanes.h"

typedef struct {
    size_t channels, height, width;       /* of the input, */
    size_t above, left, padded_h, padded_w; /* its zero padding, and its size with it on all sides */
    size_t kernel_h, kernel_w, stride_h, stride_w, dilation_h, dilation_w;
    size_t out_channels, out_h, out_w;
    size_t taps, row; /* channels kernel_h kernel_w, and that rounded up to whole vectors */
} geometry;

INLINE void pad(const geometry *c, const float *x, float *padded) {
    memset(padded, 0, c->channels * c->padded_h * c->padded_w * sizeof(float));
    for (size_t k = 0; k < c->channels; k++)
        for (size_t y = 0; y < c->height; y++)
            memcpy(padded + (k * c->padded_h + c->above + y) * c->padded_w + c->left, x + (k * c->height + y) * c->width,
                   c->width * sizeof(float));
}

/* One row of the kernel at every position of one row of the output. */
INLINE void unfold_row(const geometry *c, const float *from, float *to, size_t run) {
    for (size_t t = 0; t < c->out_w; t++, from += c->stride_w, to += c->row)
        for (size_t k = 0; k < run; k++) to[k] = from[k];
}

INLINE void unfold_dilated(const geometry *c, const float *from, float *to) {
    for (size_t t = 0; t < c->out_w; t++, from += c->stride_w, to += c->row)
        for (size_t k = 0; k < c->kernel_w; k++) to[k] = from[k * c->dilation_w];
}

INLINE void unfold(const geometry *c, const float *padded, float *patches) {
    for (size_t tap = 0; tap < c->channels * c->kernel_h; tap++)
        for (size_t y = 0; y < c->out_h; y++) {
            const size_t line = y * c->stride_h + tap % c->kernel_h * c->dilation_h;
            const float *from = padded + (tap / c->kernel_h * c->padded_h + line) * c->padded_w;
            float *to = patches + y * c->out_w * c->row + tap * c->kernel_w;
            if (c->dilation_w != 1) unfold_dilated(c, from, to);
            else if (c->kernel_w == 3) unfold_row(c, from, to, 3); /* a known length is one or two moves */
            else if (c->kernel_w == 4) unfold_row(c, from, to, 4);
            else if (c->kernel_w == 5) unfold_row(c, from, to, 5);
            else if (c->kernel_w == 8) unfold_row(c, from, to, 8);
            else unfold_row(c, from, to, c->kernel_w);
        }
}

/* G[o, k] for `high` output channels and `wide` vectors of taps, all in registers. */
INLINE void tile(const geometry *c, const float *g, const float *patches, float *G, size_t o, size_t k, const size_t high,
                 const size_t wide) {
    const size_t positions = c->out_h * c->out_w;
    lanes sum[8][4] = {{{0}}};
    for (size_t t = 0; t < positions; t++)
        for (size_t i = 0; i < high; i++)
            for (size_t j = 0; j < wide; j++)
                sum[i][j] += g[(o + i) * positions + t] * *(const lanes *)(patches + t * c->row + k + j * LANES);
    for (size_t i = 0; i < high; i++)
        for (size_t j = 0; j < wide; j++) {
            float *to = G + (o + i) * c->taps + k + j * LANES;
            const size_t left = c->taps - k - j * LANES;
            if (left >= LANES) *(lanes *)to = sum[i][j];
            else memcpy(to, &sum[i][j], left * sizeof(float));
        }
}

INLINE void strip(const geometry *c, const float *g, const float *patches, float *G, size_t k, const size_t high,
                  const size_t wide) {
    size_t o = 0;
    for (; c->out_channels - o >= high; o += high) tile(c, g, patches, G, o, k, high, wide);
    for (; o < c->out_channels; o++) tile(c, g, patches, G, o, k, 1, wide);
}

INLINE void product(const geometry *c, const float *g, const float *patches, float *G) {
    size_t k = 0;
    for (; c->row - k >= 4 * LANES; k += 4 * LANES) strip(c, g, patches, G, k, 4, 4);
    switch ((c->row - k) / LANES) { /* sixteen sums at a time hide the latency of each */
        case 3: strip(c, g, patches, G, k, 4, 3); break;
        case 2: strip(c, g, patches, G, k, 8, 2); break;
        case 1: strip(c, g, patches, G, k, 8, 1); break;
    }
}

/* G and its squared norm for `examples` examples; room: channels padded_h padded_w + out_h out_w row floats. */
WIDE void hushgrad_kernel_gradients(const geometry *c, const float *x, const float *g, size_t examples, float *room, float *G,
                                    float *sq_norms) {
    const size_t in = c->channels * c->height * c->width, out = c->out_channels * c->out_h * c->out_w;
    float *patches = room, *padded = room + c->out_h * c->out_w * c->row;
    memset(patches, 0, c->out_h * c->out_w * c->row * sizeof(float)); /* what lies between taps and row stays 0 */
    const int as_is = c->padded_h == c->height && c->padded_w == c->width;
    for (size_t i = 0; i < examples; i++, x += in, g += out, G += c->out_channels * c->taps) {
        if (!as_is) pad(c, x, padded);
        unfold(c, as_is ? x : padded, patches);
        product(c, g, patches, G);
        sq_norms[i] = (float)sq_norm(G, c->out_channels * c->taps);
    }
}
