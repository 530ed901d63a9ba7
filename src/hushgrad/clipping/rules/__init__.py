"""Layer rules: per-example gradient norms and weighted sums, one file per layer family.

A new rule is one file and one import line here.
"""

from hushgrad.clipping.rules.linear import Linear
from hushgrad.clipping.rules.vmap import Vmap, VmapTree

__all__ = ["Linear", "Vmap", "VmapTree"]
