"""Clipping: per-example gradient clipping at almost the price of ordinary training."""
