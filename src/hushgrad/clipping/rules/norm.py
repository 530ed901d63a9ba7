"""LayerNorm and GroupNorm: y = weight * xhat + bias, with xhat normalised within one example.

G_i = sum_t g[i,t] * xhat[i,t] for the weight and sum_t g[i,t] for the bias: no larger than a row of activations, so they are formed
once and kept, and the layer's input and gradient are freed at once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hushgrad.clipping.base import Example, Record, Rule, rule
from hushgrad.clipping.rules.input_checks import require_batch


@rule(nn.LayerNorm)
class LayerNorm(Rule):
    """Normalised over the last dimensions."""

    parameters = frozenset({"weight", "bias"})
    positions = True

    @staticmethod
    def examples() -> tuple[Example, ...]:
        """One dimension, and two."""
        return (
            (nn.LayerNorm(5), (torch.randn(6, 5),)),
            (nn.LayerNorm((3, 5)), (torch.randn(6, 3, 5),)),
        )

    def features(self, module: nn.Module) -> int:
        """The dimensions that are normalised over."""
        assert isinstance(module, nn.LayerNorm)
        return len(module.normalized_shape)

    def per_example(self, record: Record) -> dict[str, Tensor]:
        """One pass over x and g each."""
        module, x, g = record.module, record.x, record.g
        assert isinstance(module, nn.LayerNorm)
        B, shape = x.shape[0], module.normalized_shape
        require_batch(record, 1 + len(shape))
        positions = (B, x[0].numel() // max(1, _numel(shape)) if B else 0, *shape)
        made = {}
        if "weight" in record.names:
            xhat = torch.native_layer_norm(x, shape, None, None, module.eps)[0]
            made["weight"] = xhat.mul_(g).view(positions).sum(1)
        if "bias" in record.names:
            made["bias"] = g.reshape(positions).sum(1)
        return made


@rule(nn.GroupNorm)
class GroupNorm(Rule):
    """Normalised over groups of channels."""

    parameters = frozenset({"weight", "bias"})

    @staticmethod
    def examples() -> tuple[Example, ...]:
        """One."""
        return ((nn.GroupNorm(2, 4), (torch.randn(6, 4, 3),)),)

    def per_example(self, record: Record) -> dict[str, Tensor]:
        """One pass over x and g each."""
        module, x, g = record.module, record.x, record.g
        assert isinstance(module, nn.GroupNorm)
        B, C = x.shape[:2]
        if B == 0:
            return {name: x.new_zeros(0, C) for name in record.names}
        made = {}
        if "weight" in record.names:
            positions = x[0, 0].numel()
            xhat = torch.native_group_norm(x.contiguous(), None, None, B, C, positions, module.num_groups, module.eps)[0]
            made["weight"] = xhat.mul_(g).view(B, C, -1).sum(2)
        if "bias" in record.names:
            made["bias"] = g.reshape(B, C, -1).sum(2)
        return made


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())
