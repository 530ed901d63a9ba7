"""InstanceNorm: y = weight * xhat + bias per channel, xhat normalised within one channel of one example.

G_i = sum_t g[i,:,t] * xhat[i,:,t] for the weight and sum_t g[i,:,t] for the bias: one number per channel, made once and kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hushgrad.clipping.base import Example, Record, Rule, rule
from hushgrad.clipping.rules.input_checks import require_batch


@rule(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
class InstanceNorm(Rule):
    """Normalised within one channel of one example."""

    parameters = frozenset({"weight", "bias"})

    @staticmethod
    def examples() -> tuple[Example, ...]:
        """One to three dimensions."""
        return (
            (nn.InstanceNorm1d(2, affine=True), (torch.randn(5, 2, 4),)),
            (nn.InstanceNorm2d(2, affine=True), (torch.randn(5, 2, 4, 3),)),
            (nn.InstanceNorm3d(2, affine=True), (torch.randn(5, 2, 3, 2, 2),)),
        )

    def check(self, module: nn.Module) -> str | None:
        """Running statistics would carry data into the checkpoint, without noise."""
        layer: Any = module
        if layer.track_running_stats:
            return "track_running_stats keeps means of the data in buffers, without noise. Leave it out"
        return None

    def per_example(self, record: Record) -> dict[str, Tensor]:
        """One pass over x and g each."""
        module, x, g = record.module, record.x, record.g
        layer: Any = module
        dims = {nn.InstanceNorm1d: 3, nn.InstanceNorm2d: 4, nn.InstanceNorm3d: 5}
        require_batch(record, next(d for kind, d in dims.items() if isinstance(module, kind)))
        made = {}
        if "weight" in record.names:
            made["weight"] = F.instance_norm(x, eps=layer.eps).mul_(g).flatten(2).sum(2) if len(x) else x.new_zeros(x.shape[:2])
        if "bias" in record.names:
            made["bias"] = g.flatten(2).sum(2)
        return made
