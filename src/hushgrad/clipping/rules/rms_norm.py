"""RMSNorm: y = weight * x / rms(x), the root mean square taken over the last dimensions.

G_i = sum_t g[i,t] * xhat[i,t]: no larger than a row of activations, so it is made once and kept.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hushgrad.clipping.base import Example, Record, Rule, rule
from hushgrad.clipping.rules.input_checks import require_batch


@rule(nn.RMSNorm)
class RMSNorm(Rule):
    """Normalised over the last dimensions, without a mean or a bias."""

    parameters = frozenset({"weight"})
    positions = True

    @staticmethod
    def examples() -> tuple[Example, ...]:
        """One."""
        return ((nn.RMSNorm(5), (torch.randn(6, 5),)),)

    def features(self, module: nn.Module) -> int:
        """The dimensions that are normalised over."""
        assert isinstance(module, nn.RMSNorm)
        return len(module.normalized_shape)

    def per_example(self, record: Record) -> dict[str, Tensor]:
        """One pass over x and g."""
        module, x = record.module, record.x
        assert isinstance(module, nn.RMSNorm)
        shape = module.normalized_shape
        require_batch(record, 1 + len(shape))
        xhat = torch.rms_norm(x, shape, None, module.eps)
        return {"weight": (xhat * record.g).reshape(len(x), -1, *shape).sum(1) if len(x) else x.new_zeros(0, *shape)}
