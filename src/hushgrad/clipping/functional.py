"""Clipped sums without a training loop, for researchers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from hushgrad import _check
from hushgrad.clipping.base import ClippedSum
from hushgrad.clipping.capture import Capture
from hushgrad.clipping.clipper import Clipper
from hushgrad.errors import CaptureError


def clipped_sum(
    model: nn.Module, loss_fn: Callable[..., Tensor], batch: Any, clipper: Clipper, *, loss_reduction: str = "mean"
) -> ClippedSum:
    """The sum of clipped per-example gradients of one batch, with the norms: sum_i w_i grad loss_i.

    ``batch`` is (inputs, *targets); the loss is ``loss_fn(model(inputs), *targets)``. ``p.grad`` is left alone. The inputs hold the
    examples in the first dimension, or in the second if time comes first.

    Args:
        model: any module that keeps examples apart.
        loss_fn: the loss of a batch.
        batch: (inputs, *targets).
        clipper: for example ``Flat(1.0)``.
        loss_reduction: whether the loss is the "mean" or the "sum" over the examples.

        >>> from hushgrad.clipping import Flat
        >>> model, batch = nn.Linear(3, 2), (torch.randn(8, 3), torch.randint(2, (8,)))
        >>> clipped = clipped_sum(model, nn.functional.cross_entropy, batch, Flat(0.1))
        >>> bool((clipped.raw_weights * clipped.raw_norms <= 0.1 * 1.00001).all())
        True
    """
    _check.instance(Clipper, clipper=clipper)
    capture = Capture(model, loss_reduction=loss_reduction)
    inputs, *targets = batch
    capture.attach()
    try:
        loss = loss_fn(model(inputs), *targets)
        torch.autograd.backward(loss)
        _require_examples(capture.check(), inputs)
        return capture.collect(clipper)
    finally:
        capture.detach()


def _require_examples(found: int, inputs: Any) -> None:
    """Refuse a model that merges examples and positions in all its layers, so that the batch size cannot be verified."""
    first = next((t for t in tree_flatten(inputs)[0] if isinstance(t, Tensor) and t.dim()), None)
    if first is not None and found not in first.shape[:2]:
        raise CaptureError(
            f"The model's layers got {found} rows, where the inputs have the shape {tuple(first.shape)}. Keep the examples in the first "
            "dimension of every layer: (B, T, d) rather than (B*T, d)."
        )
