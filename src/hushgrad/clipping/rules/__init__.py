"""Layer rules: per-example gradient norms and weighted sums, one file per layer family.

A new rule is one file and one import line here.
"""

from hushgrad.clipping.rules.conv import Conv
from hushgrad.clipping.rules.embedding import Embedding
from hushgrad.clipping.rules.linear import Linear
from hushgrad.clipping.rules.norm import GroupNorm, LayerNorm
from hushgrad.clipping.rules.vmap import Vmap, VmapTree

__all__ = ["Conv", "Embedding", "GroupNorm", "LayerNorm", "Linear", "Vmap", "VmapTree"]
