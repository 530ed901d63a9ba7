"""Tensors and arrays that a forward reads and nobody trains: schedules, masks, orders, in attributes, globals, closures or anywhere else.

They may be written to between two passes. A value of 0, without zeros, or in order may block a path between examples that another value
opens, so the kinds of these numbers are part of what identifies a pass. Tensors in the model's own attributes are listed; others are
discovered while a model is proved, and then their holders are looked up.
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CellType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hushgrad.clipping.proof.call_trace import kinds_of

_MOST = 1 << 22  # larger tensors are not inspected after a write
_FEW = 64  # so few numbers are compared directly: arrays, and writes through ``.data``, have no version
_GATE = 4096  # a larger frozen parameter is not a gate
_SOME = 16  # numbers compared in a larger tensor

Place = tuple[Any, Any]  # a holder (list, dict, closure cell, object) and a key; or a weak reference and None


class UntrainedTensors:
    """The kinds of all these tensors; computed again only after a write."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self._seen: list[tuple[Any, Any, Any]] = []  # the value, a mark of its state, and its kinds
        self._own: set[tuple[int, Any]] = set()  # written by the forward itself: the seal tests that memory
        self._met: list[Place] = []

    def look(self, model: nn.Module, attributes: Iterable[dict[str, Any]]) -> None:
        """List them again."""
        every = (*_buffers(model), *_places(attributes), *self._met)
        self.places = [(d, name) for d, name in every if (id(d), name) not in self._own]
        self._seen = [(None, None, None)] * len(self.places)

    def meet(self, model: nn.Module, met: Callable[[], list[Tensor]]) -> bool:
        """Watch what a forward has read, wherever it is held, from the next look on, and whatever replaces it.

        Args:
            model: its own tensors are known.
            met: returns the tensors; called twice, since some live only until reference cycles of finished passes are collected.
        """
        if not self._unknown(model, met()):
            return False
        gc.collect()
        tensors = self._unknown(model, met())
        if tensors:
            self._met = [place for place in self._met if place[1] is not None or _value(place) is not None] + _held(tensors)
        return bool(tensors)

    def _unknown(self, model: nn.Module, tensors: list[Tensor]) -> list[Tensor]:
        known = {id(t) for t in (*model.parameters(), *map(_value, (*_buffers(model), *self.places, *self._met)))}
        weights = [t for t in tensors if isinstance(t, nn.Parameter) and t.numel() > _GATE]  # of a teacher model held elsewhere
        known |= set(map(id, weights))
        return [t for t in tensors if id(t) not in known and not t.requires_grad]

    def kinds(self) -> tuple[Any, ...]:
        """The kinds of each tensor."""
        for k, place in enumerate(self.places):
            value = _value(place)
            mark, held = _mark(value), None if place[1] is None else value  # do not keep alive what no known holder keeps
            if held is not self._seen[k][0] or mark != self._seen[k][1]:
                self._seen[k] = held, mark, _kinds(value)
        return tuple([kinds for *_, kinds in self._seen])

    @contextmanager
    def written(self) -> Iterator[list[Place]]:
        """What a pass inside writes belongs to the forward from then on, and is no longer compared; the yielded list has it afterwards."""
        before = [(place, value, _mark(value)) for place in self.places for value in [_value(place)]]
        found: list[Place] = []
        yield found
        for place, value, mark in before:
            now = _value(place)
            if now is not value or _mark(now) != mark:
                self._own.add((id(place[0]), place[1]))
                found.append(place)


def _buffers(model: nn.Module) -> list[Place]:
    """The buffers of all modules; those of compiled scripts are in no dict, and are discovered."""
    return [(m._buffers, name) for m in model.modules() if isinstance(m._buffers, dict) for name in m._buffers]


def _held(tensors: list[Tensor]) -> list[Place]:
    """Where these are held, except in this list."""
    ids = {id(t) for t in tensors}
    found: list[Place] = []
    for holder in gc.get_referrers(*tensors):
        if isinstance(holder, (list, tuple, deque)):
            found += [(holder, k) for k, v in enumerate(holder) if id(v) in ids and holder is not tensors]
        elif isinstance(holder, CellType):
            found.append((holder, "cell_contents"))
        else:
            inside = holder if isinstance(holder, dict) else getattr(holder, "__dict__", None)
            found += [(inside, name) for name, v in inside.items() if id(v) in ids] if isinstance(inside, dict) else []
            slots = [name for kind in type(holder).__mro__ for name in getattr(kind, "__slots__", ())]
            found += [(holder, name) for name in slots if id(getattr(holder, name, None)) in ids]
    there = {id(_value(place)) for place in found}
    return found + [
        (weakref.ref(t), None) for t in tensors if id(t) not in there
    ]  # in a cache written in C (lru_cache), or frozen by gc.freeze


def _value(place: Place) -> Any:
    held, where = place
    if where is None:
        return held()
    if isinstance(held, dict):
        return held.get(where)
    if isinstance(where, str):
        return getattr(held, where, None)
    return held[where] if where < len(held) else None


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
    some = value.view(-1)[:: value.numel() // _SOME].tolist() if value.is_cpu and value.is_contiguous() else None
    return some, None if value.is_inference() else value._version


def _kinds(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        usual = value.size <= _FEW and value.dtype.kind in "biuf"
        return kinds_of(torch.as_tensor(value.copy())) if usual else None
    return kinds_of(value) if _is_readable(value) and 0 < value.numel() <= _MOST else None


def _is_readable(value: Any) -> bool:
    """Whether a tensor is not trained and has storage: sharded models free that of layers that do not run."""
    usual = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not (value.is_meta or value.requires_grad)
    return usual and (not value.numel() or value.untyped_storage().nbytes() > 0)
