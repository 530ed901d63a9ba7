"""Noise: a keyed random-access source and every correlated mechanism, each with its theorem."""
