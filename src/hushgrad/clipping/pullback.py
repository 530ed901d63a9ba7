"""Pulls B cotangents back through one graph: at once, or one by one if an operation does not support vmap."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hushgrad.errors import CaptureError

_Ends = Sequence[Tensor] | Sequence[GradientEdge]


def pullback(outputs: _Ends, inputs: _Ends, shares: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """(B, *shape) for each input, from ``shares`` (B, *shape) of each output; None for an input that is not reached.

    Args:
        outputs: where the cotangents enter.
        inputs: where they are read.
        shares: B cotangents for each output.
    """
    try:
        return torch.autograd.grad(outputs, inputs, shares, retain_graph=True, is_grads_batched=True, allow_unused=True)
    except (RuntimeError, NotImplementedError) as error:  # something on the way cannot be mapped over
        if isinstance(error, CaptureError):
            raise
    rows = [torch.autograd.grad(outputs, inputs, one, retain_graph=True, allow_unused=True) for one in zip(*shares, strict=True)]
    return tuple(None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True))  # type: ignore[arg-type]
