"""Release: the only place where noise is added to a sum.

``core`` turns the clipped sum of a step into its privatised gradient, ``placement`` says where sums, noise and states live (whole,
replicated in several processes, or sharded over them), ``lazy`` adds the noise of large tables when their rows are read, ``keys``
holds the secret from which all noise is derived.
"""
