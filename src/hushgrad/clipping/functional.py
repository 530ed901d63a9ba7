"""Clipped sums without a training loop, for researchers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hushgrad.clipping.base import ClippedSum, Clipper
from hushgrad.clipping.capture import Capture

__all__ = ["clipped_sum"]


def clipped_sum(
    model: nn.Module, loss_fn: Callable[..., Tensor], batch: Any, clipper: Clipper, *, loss_reduction: str = "mean"
) -> ClippedSum:
    """The sum of clipped per-example gradients of one batch, with the norms: sum_i w_i grad loss_i.

    ``batch`` is (inputs, *targets); the loss is ``loss_fn(model(inputs), *targets)``. ``p.grad`` is left alone.

        >>> from hushgrad.clipping import Flat
        >>> model, batch = nn.Linear(3, 2), (torch.randn(8, 3), torch.randint(2, (8,)))
        >>> clipped = clipped_sum(model, nn.functional.cross_entropy, batch, Flat(0.1))
        >>> bool((clipped.raw_weights * clipped.raw_norms <= 0.1 * 1.00001).all())
        True
    """
    capture = Capture(model, loss_reduction=loss_reduction)
    inputs, *targets = batch
    capture.attach()
    try:
        loss = loss_fn(model(inputs), *targets)
        torch.autograd.backward(loss)
        return capture.collect(clipper)
    finally:
        capture.detach()
