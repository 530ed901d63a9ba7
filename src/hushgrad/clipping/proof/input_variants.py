"""Variants of a model's inputs that a proof runs: finite, without outliers, perturbed, reordered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from hushgrad._precision import widest
from hushgrad.clipping.proof.inputs import Reading, leaves, mapped, tensors_in
from hushgrad.clipping.thresholds import OUTLIER


def floats(output: Any) -> list[Tensor]:
    """The floating-point tensors in a model's output."""
    return [t for t in tensors_in(output) if t.is_floating_point()]


def finite(inputs: Any, reading: Reading | None = None) -> Any:
    """Detached, with NaN and infinity replaced: nothing can be proved about those.

    With a ``reading``, what all examples share (a mask of infinities) stays as it is.
    """
    shared = {k for k, layout in enumerate(reading.layouts) if layout is None} if reading is not None else ()
    number = count()

    def change(t: Tensor) -> Tensor:
        kept = next(number) in shared or not _has_numbers(t)
        return t.detach() if kept else t.detach().nan_to_num(0.0, 1e4, -1e4)

    return mapped(inputs, partial(_within, change))


def has_shared_infinities(inputs: Any, reading: Reading) -> bool:
    """Whether NaN or infinity is in what all examples share."""
    pairs = zip(leaves(inputs), reading.layouts, strict=True)
    return any(
        layout is None and isinstance(t, Tensor) and _has_numbers(t) and not bool(t.isfinite().all()) for t, layout in pairs
    )


def _has_numbers(t: Tensor) -> bool:
    """Whether it may hold infinities that can be looked at: of a sparse tensor they stay."""
    return t.is_floating_point() and t.layout is torch.strided


def _within(change: Callable[[Tensor], Tensor], leaf: Any) -> Any:
    """A changed tensor, or a packed sequence with its rows changed."""
    return change(leaf) if isinstance(leaf, Tensor) else leaf._replace(data=change(leaf.data))


def copied(inputs: Any) -> Any:
    """A copy, since the model may write to its inputs."""
    return mapped(inputs, partial(_within, Tensor.clone))


def tamed(inputs: Any) -> Any | None:
    """The inputs with outliers clamped; None if there are none."""
    wild = []

    def change(t: Tensor) -> Tensor:
        if not _has_numbers(t) or not t.numel():
            return t
        t = t.detach()
        size = t.abs().nan_to_num(0.0, 0.0, 0.0)
        usual = widest(size[size > 0]).median() if bool((size > 0).any()) else torch.ones((), dtype=torch.float64)
        limit = float(min(max(OUTLIER * float(usual), 1.0), 1e4))
        wild.append(bool((size > limit).any()) or not bool(t.isfinite().all()))
        return t.nan_to_num(0.0, limit, -limit).clamp(-limit, limit)

    made = mapped(inputs, partial(_within, change))
    return made if any(wild) else None


def jittered(t: Tensor) -> Tensor:
    """Similar examples: every number is moved a little."""
    if not t.is_floating_point() or not t.numel():
        return t
    noise = torch.linspace(-0.3, 0.4, t.numel(), dtype=t.dtype, device=t.device).reshape(t.shape)
    return t + noise * (1 + t.abs())


def shuffled(t: Tensor) -> Tensor:
    """Examples in another order by any criterion that a model may sort them by."""
    if t.is_floating_point():
        return jittered(t.flip(0))
    if t.dim() > 1 or t.dtype is torch.bool or not t.numel():
        return t.flip(0).roll(1, -1)
    return torch.arange(1, len(t) + 1, device=t.device, dtype=t.dtype).flip(0).roll(1) % (t.max().clamp(min=1) + 1)
