"""Tensors and arrays that a model holds beside its parameters: schedules, masks, orders.

Nobody trains them, but a forward computes with them, and somebody may write to them between two passes. One that was 0, or had no 0, or was
in order, may shut a way that another value opens: a pass is known only together with the kinds of these numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hushgrad.clipping.proof.course import kinds_of

__all__ = ["Beside"]

_MOST = 4096  # numbers; what is larger is no gate
_FEW = 64  # numbers that are compared: arrays, and writes to ``.data``, do not say that there was one

Place = tuple[Any, Any]  # a list or a dict, and where


class Beside:
    """The kinds of all of them; looked at only when somebody has written."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self._seen: list[tuple[Any, Any, Any]] = []  # what is there, a mark of its state, and its kinds
        self._own: set[tuple[int, Any]] = set()  # what the forward itself writes: its memory is tried by the seal

    def look(self, model: nn.Module, attributes: Iterable[dict[str, Any]]) -> None:
        """List them anew."""
        buffers = ((m._buffers, name) for m in model.modules() for name in m._buffers)
        self.places = [(d, name) for d, name in (*buffers, *_places(attributes)) if (id(d), name) not in self._own]
        self._seen = [(None, None, None)] * len(self.places)

    def kinds(self) -> tuple[Any, ...]:
        """Of each of them."""
        for k, place in enumerate(self.places):
            value = _value(place)
            mark = _mark(value)
            if value is not self._seen[k][0] or mark != self._seen[k][1]:
                self._seen[k] = value, mark, _kinds(value)
        return tuple([kinds for *_, kinds in self._seen])

    @contextmanager
    def written(self) -> Iterator[None]:
        """What a pass inside writes is its own from then on."""
        before = [(place, value, _mark(value)) for place in self.places for value in [_value(place)]]
        yield
        for place, value, mark in before:
            now = _value(place)
            if now is not value or _mark(now) != mark:
                self._own.add((id(place[0]), place[1]))


def _value(place: Place) -> Any:
    held, where = place
    return held.get(where) if isinstance(held, dict) else held[where] if where < len(held) else None


def _places(attributes: Iterable[dict[str, Any]]) -> Iterator[Place]:
    for d in attributes:
        for name, value in d.items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            if isinstance(value, (Tensor, np.ndarray)):
                yield d, name
            elif type(value) in (list, tuple):
                yield from ((value, k) for k, v in enumerate(value) if isinstance(v, (Tensor, np.ndarray)))
            elif type(value) is dict:
                yield from ((value, k) for k, v in value.items() if isinstance(v, (Tensor, np.ndarray)))


def _mark(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.size <= _FEW else None
    if not _is_readable(value):
        return None
    if value.is_cpu and value.numel() <= _FEW:
        return value.tolist()
    return None if value.is_inference() else value._version


def _kinds(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        usual = value.size <= _FEW and value.dtype.kind in "biuf"
        return kinds_of(torch.as_tensor(value.copy())) if usual else None
    return kinds_of(value) if _is_readable(value) and 0 < value.numel() <= _MOST else None


def _is_readable(value: Any) -> bool:
    """Not what is trained, and with memory behind it: sharded models let go of that of layers that do not run."""
    usual = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not (value.is_meta or value.requires_grad)
    return usual and (not value.numel() or value.untyped_storage().nbytes() > 0)
