"""Sampling: who takes part in which step, and the loader that deals the batches."""
