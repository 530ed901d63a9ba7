"""LayerNorm and GroupNorm: y = weight * xhat + bias, with xhat normalised within one example.

G_i = sum_t g[i,t] * xhat[i,t] for the weight and sum_t g[i,t] for the bias: no larger than a row of activations, so they are made
once, kept, and the layer's input and gradient are released at once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hushgrad.clipping.base import Record, Rule, rule

__all__ = ["GroupNorm", "LayerNorm"]


@rule(nn.LayerNorm)
class LayerNorm(Rule):
    """Normalised over the last dimensions."""

    parameters = frozenset({"weight", "bias"})

    def per_example(self, record: Record) -> dict[str, Tensor]:
        """One pass over x and g each."""
        module, x, g = record.module, record.x, record.g
        assert isinstance(module, nn.LayerNorm)
        B, shape = x.shape[0], module.normalized_shape
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
    """Normalised over groups of channels: G_i[c] = r (sum_t g x - m sum_t g), m and r the group's mean and inverse deviation."""

    parameters = frozenset({"weight", "bias"})

    def per_example(self, record: Record) -> dict[str, Tensor]:
        """No normalised copy is made."""
        module, x, g = record.module, record.x, record.g
        assert isinstance(module, nn.GroupNorm)
        B, C = x.shape[:2]
        if B == 0:
            return {name: x.new_zeros(0, C) for name in record.names}
        x, g = x.reshape(B, C, -1), g.reshape(B, C, -1)
        total = g.sum(2)
        made = {"bias": total}
        if "weight" in record.names:
            var, mean = torch.var_mean(x.view(B, module.num_groups, -1), dim=2, correction=0)
            each = C // module.num_groups
            mean, scale = mean.repeat_interleave(each, 1), (var + module.eps).rsqrt_().repeat_interleave(each, 1)
            made["weight"] = (g * x).sum(2).sub_(total * mean).mul_(scale)
        return {name: made[name] for name in record.names}


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())
