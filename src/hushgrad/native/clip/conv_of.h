/* The gradient of a small convolution's kernel for each example, with its squared norm.
 *
 * G_i = g_i P_i, where row t of P_i is the patch under output position t. Patches of one example at a time are copied into a scratch that
 * stays in the cache, so that memory sees x, g and G once each.
 */

TARGET INLINE void NAME(pad)(const geometry *c, const float *x, float *padded) {
    memset(padded, 0, c->channels * c->padded_h * c->padded_w * sizeof(float));
    for (size_t k = 0; k < c->channels; k++)
        for (size_t y = 0; y < c->height; y++)
            memcpy(padded + (k * c->padded_h + c->above + y) * c->padded_w + c->left, x + (k * c->height + y) * c->width,
                   c->width * sizeof(float));
}

/* One row of the kernel at every position of one row of the output. */
TARGET INLINE void NAME(unfold_row)(const geometry *c, const float *from, float *to, size_t run) {
    for (size_t t = 0; t < c->out_w; t++, from += c->stride_w, to += c->row)
        for (size_t k = 0; k < run; k++) to[k] = from[k];
}

TARGET INLINE void NAME(unfold_dilated)(const geometry *c, const float *from, float *to) {
    for (size_t t = 0; t < c->out_w; t++, from += c->stride_w, to += c->row)
        for (size_t k = 0; k < c->kernel_w; k++) to[k] = from[k * c->dilation_w];
}

TARGET INLINE void NAME(unfold)(const geometry *c, const float *padded, float *patches) {
    for (size_t tap = 0; tap < c->channels * c->kernel_h; tap++)
        for (size_t y = 0; y < c->out_h; y++) {
            const size_t line = y * c->stride_h + tap % c->kernel_h * c->dilation_h;
            const float *from = padded + (tap / c->kernel_h * c->padded_h + line) * c->padded_w;
            float *to = patches + y * c->out_w * c->row + tap * c->kernel_w;
            if (c->dilation_w != 1) NAME(unfold_dilated)(c, from, to);
            else if (c->kernel_w == 3) NAME(unfold_row)(c, from, to, 3); /* a known length is one or two moves */
            else if (c->kernel_w == 4) NAME(unfold_row)(c, from, to, 4);
            else if (c->kernel_w == 5) NAME(unfold_row)(c, from, to, 5);
            else if (c->kernel_w == 8) NAME(unfold_row)(c, from, to, 8);
            else NAME(unfold_row)(c, from, to, c->kernel_w);
        }
}

/* G and its squared norm for `examples` examples; room: channels padded_h padded_w + out_h out_w row floats. */
TARGET static void NAME(kernel_gradients)(const geometry *c, const float *x, const float *g, size_t examples, float *room, float *G,
                                    double *sq_norms) {
    const size_t in = c->channels * c->height * c->width, out = c->out_channels * c->out_h * c->out_w;
    float *patches = room, *padded = room + c->out_h * c->out_w * c->row;
    memset(patches, 0, c->out_h * c->out_w * c->row * sizeof(float)); /* what lies between taps and row stays 0 */
    const int as_is = c->padded_h == c->height && c->padded_w == c->width;
    for (size_t i = 0; i < examples; i++, x += in, g += out, G += c->out_channels * c->taps) {
        if (!as_is) NAME(pad)(c, x, padded);
        NAME(unfold)(c, as_is ? x : padded, patches);
        const NAME(product) m = {.a = g, .b = patches, .out = G, .rows = c->out_channels, .columns = c->taps,
                                 .depth = c->out_h * c->out_w, .down = c->out_h * c->out_w, .along = 1, .b_row = c->row,
                                 .out_row = c->taps};
        NAME(multiply)(&m);
        sq_norms[i] = NAME(sq_norm)(G, c->out_channels * c->taps);
    }
}
