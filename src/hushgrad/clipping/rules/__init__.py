"""Layer rules: per-example gradient norms and weighted sums, one file per layer family.

A new rule is one file and one import line here.
"""

from hushgrad.clipping.rules.attention import Attention
from hushgrad.clipping.rules.conv import Conv
from hushgrad.clipping.rules.conv_transpose import ConvTranspose
from hushgrad.clipping.rules.embedding import Embedding
from hushgrad.clipping.rules.embedding_bag import EmbeddingBag
from hushgrad.clipping.rules.instance_norm import InstanceNorm
from hushgrad.clipping.rules.linear import Linear
from hushgrad.clipping.rules.norm import GroupNorm, LayerNorm
from hushgrad.clipping.rules.parameter import Shared, SharedRule
from hushgrad.clipping.rules.rms_norm import RMSNorm
from hushgrad.clipping.rules.rnn import Recurrent
from hushgrad.clipping.rules.rnn_cell import RecurrentCell
from hushgrad.clipping.rules.standardised import StandardisedConv, WSConv2d
from hushgrad.clipping.rules.vmap import Vmap, VmapTree

__all__ = [
    "Attention",
    "Conv",
    "ConvTranspose",
    "Embedding",
    "EmbeddingBag",
    "GroupNorm",
    "InstanceNorm",
    "LayerNorm",
    "Linear",
    "RMSNorm",
    "Recurrent",
    "RecurrentCell",
    "Shared",
    "SharedRule",
    "StandardisedConv",
    "Vmap",
    "VmapTree",
    "WSConv2d",
]
