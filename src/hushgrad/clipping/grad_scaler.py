"""Detects losses that were scaled by a GradScaler: their norms are scaled as well, so clipping would be wrong.

A factor of the user's own is part of the loss, a scaler's is not, and the two cannot be distinguished after the multiplication. torch has
no hook for ``scale``, so the method is patched while a model is captured: its result announces itself in the backward pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import wraps
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.amp import GradScaler

from hushgrad.clipping._torch import backward_task
from hushgrad.clipping._torch_compile import eagerly

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
    """Detect scaled losses until :func:`unwatch`, or as long as ``capture`` lives."""
    _watching.add(capture)
    GradScaler.scale = _watched  # type: ignore[method-assign]


def unwatch(capture: Any) -> None:
    """Stop for ``capture``; after the last one, torch's own method is restored."""
    _watching.discard(capture)
    if not _watching and GradScaler.scale is _watched:
        GradScaler.scale = _torchs  # type: ignore[method-assign]
