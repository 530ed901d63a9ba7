"""Denoise: post-processing of privatised gradients; it costs no budget."""
