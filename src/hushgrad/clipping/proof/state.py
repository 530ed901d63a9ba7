"""What a model keeps beside its parameters: plain attributes, which its forward may read and write.

A number or a word among them may decide what the forward does, so the structure of a pass is known only together with them. One that the
forward itself changes is a *clock*: it differs in every pass, so that the passes of a later time are tried, too, by setting it forward.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import starmap
from typing import Any

from torch import Tensor, nn

from hushgrad.clipping.costs import SCHEDULE
from hushgrad.clipping.proof.beside import Beside
from hushgrad.clipping.proof.wiring import PLAIN, Wiring

__all__ = ["Attributes", "Time", "attributes_restored"]

_HELD = (list, dict, set, deque)
_TORCHS = frozenset(vars(nn.Module())) - {"training"}  # hooks, parameters and children: not the forward's to write

Place = tuple[dict[str, Any], str]
Time = tuple[dict[str, Any], str, Any]  # a clock and its value


class Attributes:
    """The plain numbers and words of all modules, and of the configurations that they hold."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._clocks: set[tuple[int, str]] = set()
        self._dicts: list[dict[str, Any]] = []
        self._places: list[Place] = []
        self._timed: list[Place] = []  # the clocks
        self._values: dict[tuple[int, str], set[Any]] = {}  # of numbers, in passes that were proved
        self._size = -1  # listed when they are first asked for: a copy's modules are not there before
        self._wiring, self._wired = Wiring(model), -1
        self._beside = Beside()

    def key(self) -> tuple[Any, ...]:
        """Their values, without the clocks, how the model is put together, and of what kinds its other tensors are."""
        wiring = self._wiring.number()
        if sum(map(len, self._dicts)) != self._size or wiring != self._wired:
            self._list()
        values = [*starmap(dict.get, self._places)]
        if not PLAIN.issuperset(map(type, values)):
            values = [v if type(v) in PLAIN else type(v) for v in values]
        return self._wired, self._beside.kinds() if self._beside.places else (), *values

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self._model}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["model"])  # type: ignore[misc]

    def _list(self) -> None:
        self._wiring.look()
        self._wired = self._wiring.number()
        self._dicts = _dicts(self._model)
        self._size = sum(map(len, self._dicts))
        self._beside.look(self._model, self._dicts)
        every = [(place, (id(place[0]), place[1]) in self._clocks) for place in self._all()]
        self._places = [place for place, is_clock in every if not is_clock]
        self._timed = [place for place, is_clock in every if is_clock]

    def _all(self) -> list[Place]:
        return [(d, name) for d in self._dicts for name, v in d.items() if type(v) in PLAIN and name not in _TORCHS]

    def meet(self, tensors: list[Tensor]) -> None:
        """A forward has computed with these, whoever holds them."""
        self._list()
        self._beside.meet(self._model, tensors)

    def proved(self) -> None:
        """These values were proved. A number that had several, all proved, follows a schedule: it is no longer compared."""
        for d, name in self._places:
            if type(d.get(name)) in (int, float):
                seen = self._values.setdefault((id(d), name), set())
                seen.add(d[name])
                if len(seen) >= SCHEDULE:
                    self._clocks.add((id(d), name))
        self._list()

    def _set(self) -> list[Place]:
        """Numbers that had other values in earlier proofs."""
        return [(d, name) for d, name in self._all() if self._values.get((id(d), name), {d[name]}) - {d[name]}]

    @contextmanager
    def clocks(self) -> Iterator[list[Place]]:
        """The numbers that change in a pass inside are clocks from then on; they are in the list afterwards."""
        self._list()
        before = [(d, name, d[name]) for d, name in self._all()]
        found: list[Place] = []
        with self._beside.written():
            yield found
        for d, name, value in before:
            now = d.get(name)
            if type(now) in PLAIN and now != value:
                self._clocks.add((id(d), name))
                if type(now) in (int, float):
                    found.append((d, name))
        self._list()

    def times(self) -> list[Time]:
        """What the clocks say now."""
        return [(d, name, d[name]) for d, name in self._timed if name in d] if self._timed else []

    @contextmanager
    def at(self, times: list[Time]) -> Iterator[None]:
        """Inside, the clocks say this."""
        now = self.times() if times else []
        try:
            for d, name, value in times:
                d[name] = value
            yield
        finally:
            for d, name, value in now:
                d[name] = value

    @contextmanager
    def later(self, clocks: list[Place], passes: int) -> Iterator[bool]:
        """The clocks, so many passes later, and numbers that somebody sets before a pass; False if there are none."""
        every = {(id(d), name): (d, name) for d, name in (*clocks, *self._set())}.values()
        kept = [(d, name, d[name]) for d, name in every if type(d.get(name)) in (int, float)]  # one may begin as None
        for d, name, value in kept:
            d[name] = value + passes
        try:
            yield bool(kept)
        finally:
            for d, name, value in kept:
                d[name] = value


def _dicts(model: nn.Module) -> list[dict[str, Any]]:
    """The attributes of all modules, and of the plain objects (configurations) among them."""
    found = {id(m): vars(m) for m in model.modules()}
    for d in list(found.values()):
        for name, v in d.items():
            plain = name not in _TORCHS and not isinstance(v, (Tensor, nn.Module, type))
            if plain and isinstance(getattr(v, "__dict__", None), dict):
                found.setdefault(id(v), vars(v))
    return list(found.values())


@contextmanager
def attributes_restored(model: nn.Module, written: Callable[[], None] | None = None) -> Iterator[None]:
    """What a forward inside writes to attributes, and to lists and dicts that they hold, is undone; ``written`` is told of it."""
    kept = [
        (d, {name: (v, copy.copy(v) if type(v) in _HELD else None) for name, v in d.items() if name not in _TORCHS})
        for d in _dicts(model)
    ]
    try:
        yield
    finally:
        found = [_undone(d, values) for d, values in kept]
        if written is not None and any(found):
            written()


def _undone(d: dict[str, Any], values: dict[str, tuple[Any, Any]]) -> bool:
    """Put back; whether there was something to put back."""
    new = [name for name in d if name not in values and name not in _TORCHS]
    for name in new:
        del d[name]
    wrote = bool(new)
    for name, (value, inside) in values.items():
        if d.get(name) is not value:
            d[name], wrote = value, True
        if inside is not None and _differ(value, inside):
            _refill(value, inside)
            wrote = True
    return wrote


def _differ(value: Any, inside: Any) -> bool:
    if len(value) != len(inside):
        return True
    if isinstance(value, dict):
        return any(name not in inside or v is not inside[name] for name, v in value.items())
    return any(a is not b for a, b in zip(inside, value, strict=True))


def _refill(value: Any, inside: Any) -> None:
    value.clear()
    value.update(inside) if isinstance(value, (dict, set)) else value.extend(inside)
