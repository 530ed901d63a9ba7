"""Losses that a GradScaler multiplied: every norm with them, so that clipping would cut what the scaler meant to divide later.

A factor of the user's own is part of the loss; a scaler's is not, and the two look alike once they are multiplied. torch tells nobody
that ``scale`` was called, so it is watched while a model is captured: what it returns says in its backward pass that it is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import wraps
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.amp import GradScaler

from hushgrad.clipping._torch import backward_task, eagerly

__all__ = ["SCALED", "scaled_tasks", "unwatch", "watch"]

SCALED = (
    "A GradScaler scales this run's loss, and with it every example's norm, which the plan clips before a scaler can divide it again. "
    "Train in bfloat16, which needs no scaler, and leave it out or make it GradScaler(enabled=False)."
)

_torchs = GradScaler.scale
_watching: WeakSet[Any] = WeakSet()
scaled_tasks: deque[int] = deque(maxlen=64)  # backward passes that came through the product of a GradScaler


def _begun(_: Tensor) -> None:
    scaled_tasks.append(backward_task())


@wraps(_torchs)
@eagerly
def _watched(self: GradScaler, outputs: Any) -> Any:
    made: Any = _torchs(self, outputs)
    if not self.is_enabled():
        return made
    if not isinstance(made, (Tensor, list, tuple)):
        made = list(made)  # torch's own is an iterator that can be read once
    for tensor in _tensors(made):
        if tensor.requires_grad:
            tensor.register_hook(_begun)
    return made


def _tensors(made: Any) -> Iterable[Tensor]:
    if isinstance(made, Tensor):
        return [made]
    return [tensor for part in made for tensor in _tensors(part)]


def watch(capture: Any) -> None:
    """Until :func:`unwatch`, or as long as ``capture`` lives, scaled losses are known."""
    _watching.add(capture)
    GradScaler.scale = _watched  # type: ignore[method-assign]


def unwatch(capture: Any) -> None:
    """``capture`` is over; behind the last one torch's own method is put back."""
    _watching.discard(capture)
    if not _watching and GradScaler.scale is _watched:
        GradScaler.scale = _torchs  # type: ignore[method-assign]
