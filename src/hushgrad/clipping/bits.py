"""Whether an example's activations are its own to the last bit: what a certified sum assumes of the model and the machine.

Libraries choose their kernels by the shape of a batch. For most shapes a row of the output is, bit for bit, a function of that row of the
input; for batches of very few rows another kernel may add up in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hushgrad.clipping.rules.vmap import tensors_of
from hushgrad.errors import CaptureError

__all__ = ["least_rows"]

_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32)


def least_rows(model: nn.Module, *inputs: Any, named: Mapping[str, Any] | None = None) -> int:
    """The least batch size from which on every row of the outputs has the same bits as in the whole batch, of the sizes tried.

    Tried are the first 1 to 8, 12, 16, 32 rows and half of them; the rows in another order, and one row of zeros among them. The model is
    run in evaluation mode, without gradients.

        >>> least_rows(nn.Identity(), torch.randn(8, 3))
        1

    Raises:
        CaptureError: if a row's bits depend on its place, or on another row's content.
    """
    first = next(value for value in (*inputs, *(named or {}).values()) if isinstance(value, Tensor))
    B = first.shape[0]

    def run(change: Callable[[Tensor], Tensor]) -> list[Tensor]:
        def moved(value: Any) -> Any:
            return change(value) if isinstance(value, Tensor) and value.dim() and value.shape[0] == B else value

        args, kwargs = tree_map(moved, (inputs, dict(named or {})))
        return [y for y in tensors_of(model(*args, **kwargs)) if y.dim()]

    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            whole = [y for y in run(lambda t: t) if y.shape[0] == B]
            _require_own(whole, run)
            sizes = [size for size in sorted({*_SIZES, B // 2}) if 0 < size < B]
            return next((size + 1 for size in reversed(sizes) if not _same(whole, run(lambda t, k=size: t[:k]), size)), 1)  # type: ignore[misc]
    finally:
        for module in training:
            module.training = True


def _require_own(whole: list[Tensor], run: Callable[[Callable[[Tensor], Tensor]], list[Tensor]]) -> None:
    rolled = run(lambda t: t.roll(1, 0))
    blanked = run(lambda t: torch.cat([torch.zeros_like(t[:1]), t[1:]]))
    for y, moved, others in zip(whole, rolled, blanked, strict=False):
        if not (_equal(y.roll(1, 0), moved) and _equal(y[1:], others[1:])):
            raise CaptureError(
                "An example's activations depend on its neighbours in their last bits on this machine, so a certified sum cannot be "
                "had. Use one thread, make narrow layers wider (more than 8 outputs), or say certified=False."
            )


def _same(whole: list[Tensor], some: list[Tensor], size: int) -> bool:
    return all(_equal(y[:size], z) for y, z in zip(whole, some, strict=False))


def _equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit; NaN is NaN."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
