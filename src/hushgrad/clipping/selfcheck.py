"""Self-check: the captured gradients of your model against a loop of single-example backward passes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hushgrad import _check
from hushgrad.clipping.flat import Flat
from hushgrad.clipping.functional import clipped_sum
from hushgrad.errors import CaptureError


def self_check(
    model: nn.Module, loss_fn: Callable[..., Tensor], batch: Any, *, loss_reduction: str = "mean", tolerance: float = 1e-3
) -> dict[str, float]:
    """The relative error of each parameter's clipped sum, by name; raises CaptureError where one exceeds ``tolerance``.

    ``batch`` is (inputs, *targets), each a tensor with the examples first; the loss is ``loss_fn(model(inputs), *targets)``. The loop
    takes one backward pass for each example, so a few examples are enough. Torch's own dropout, also inside attention and recurrent
    layers, is switched off meanwhile. A model that mixes examples fails, and so does a loss that is not the ``loss_reduction`` over
    examples (a mean over all tokens).

    Args:
        model: the module to test.
        loss_fn: the loss of a batch.
        batch: (inputs, *targets), a few examples.
        loss_reduction: whether the loss is the "mean" or the "sum" over the examples.
        tolerance: the largest relative error that passes.

        >>> model, batch = nn.Linear(3, 2), (torch.randn(6, 3), torch.randint(2, (6,)))
        >>> max(self_check(model, nn.functional.cross_entropy, batch).values()) < 1e-5
        True
    """
    _check.positive(tolerance=tolerance)
    with _no_dropout(model):
        rows = _one_by_one(model, loss_fn, batch)
        norms = torch.stack(
            [sum((g.square().sum() for g in row.values()), torch.zeros((), dtype=torch.float32)).sqrt() for row in rows]
        )
        clipper = Flat(max(float(norms.nan_to_num().median()), 1e-12))  # half of the examples are clipped
        clipped = clipped_sum(model, loss_fn, batch, clipper, loss_reduction=loss_reduction)
    weights = clipper.weights(norms.square())
    errors = {name: _error(found, [row[name] for row in rows], weights) for name, found in clipped.raw_sums.items()}
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    if wrong:
        worst = max(wrong, key=lambda name: wrong[name])
        raise CaptureError(
            f"{len(wrong)} of {len(errors)} parameters differ from single-example passes by more than {tolerance:g}, {worst} the most "
            f"({wrong[worst]:.2g}). Look for layers that mix examples with hushgrad.clipping.isolation(model, inputs), use a loss that is "
            f"the {loss_reduction} of the examples' own losses, and switch off what draws random numbers."
        )
    return errors


def _one_by_one(model: nn.Module, loss_fn: Callable[..., Tensor], batch: Any) -> list[dict[str, Tensor]]:
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = []
    for i in range(len(batch[0])):
        inputs, *targets = (part[i : i + 1] for part in batch)
        grads = torch.autograd.grad(loss_fn(model(inputs), *targets), list(params.values()), allow_unused=True)
        rows.append({n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(params.items(), grads, strict=True)})
    return rows or _check.fail("batch", batch, "to hold an example")


def _error(found: Tensor, rows: list[Tensor], weights: Tensor) -> float:
    """Against the sum of magnitudes, since clipped gradients may cancel in the sum."""
    expected = sum((w * g for w, g in zip(weights, rows, strict=True)), torch.zeros_like(rows[0]))
    scale = sum((w * g.abs() for w, g in zip(weights, rows, strict=True)), torch.zeros_like(rows[0]))
    return float(torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(scale).clamp(min=1e-12))


@contextmanager
def _no_dropout(model: nn.Module) -> Any:
    kinds = (nn.modules.dropout._DropoutNd, nn.MultiheadAttention, nn.RNNBase)
    layers = [m for m in model.modules() if isinstance(m, kinds) and m.training]
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer in layers:
            layer.training = True
