"""Experiments: the results of the source papers, each one reproducible by a command."""
