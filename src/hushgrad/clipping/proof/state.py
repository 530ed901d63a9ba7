"""What identifies a pass besides its inputs: the model's plain attributes, and how it is composed.

A number or string among the attributes may decide what the forward does. One that the forward itself changes is a *clock*: it differs in
every pass, so later passes are tried by advancing it. Modules, hooks, and functions among the attributes may be replaced between two
passes, and what runs before the first trained layer leaves no trace in a graph. Whatever a proof's forward writes to attributes is undone.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import starmap
from typing import Any

from torch import Tensor, nn

from hushgrad.clipping._torch import global_hooks
from hushgrad.clipping.proof.pass_key import PLAIN, Key, Wired, forward_of, values_of
from hushgrad.clipping.proof.untrained_tensors import UntrainedTensors
from hushgrad.clipping.thresholds import SCHEDULE_VALUES

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
TORCHS = frozenset(vars(nn.Module())) - {"training"}  # hooks, parameters and children: not the forward's to write
_HELD = (list, dict, set, deque)

Place = tuple[dict[str, Any], str]
Time = tuple[dict[str, Any], str, Any]  # a clock and its value


class Attributes(Key):
    """The plain numbers and strings of all modules, and of the configuration objects that they hold."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._clocks: set[tuple[int, str]] = set()
        self._dicts, self._places = [], []
        self.timed: list[Place] = []  # the clocks
        self._values: dict[tuple[int, str], set[Any]] = {}  # values of numbers in proved passes
        self.were_set = False  # to several values, of one that does not just count
        self._size = -1  # listed on first use: a copy's modules do not exist before
        self._wiring, self._wired = Wiring(model), -1
        self._untrained = UntrainedTensors()

    def all(self) -> list[dict[str, Any]]:
        """The attributes of all modules and of their configuration objects, as they are now."""
        self.key(())  # lists them again if some were added, or modules replaced
        return self._dicts

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self._model}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["model"])  # type: ignore[misc]

    def _list(self) -> None:
        self._found = None
        self._wiring.look()
        self._wired = self._wiring.number
        self._dicts = attributes_of(self._model)
        self._size = sum(map(len, self._dicts))
        self._untrained.look(self._model, self._dicts)
        every = [(place, (id(place[0]), place[1]) in self._clocks) for place in self._all()]
        self._places = [place for place, is_clock in every if not is_clock]
        self.timed = [place for place, is_clock in every if is_clock]

    def _all(self) -> list[Place]:
        return [(d, name) for d in self._dicts for name, v in d.items() if type(v) in PLAIN and name not in TORCHS]

    def meet(self, met: Callable[[], list[Tensor]]) -> None:
        """Watch the tensors ``met`` that a forward has read, wherever they are held."""
        self._list()
        if self._untrained.meet(self._model, met):
            self._list()

    def proved(self) -> None:
        """Record that these values were proved. A number with several proved values follows a schedule: it is no longer compared."""
        before = len(self._clocks)
        if self._size < 0:
            self._list()
        for d, name in self._places:
            if type(d.get(name)) in (int, float):
                seen = self._values.setdefault((id(d), name), set())
                seen.add(d[name])
                self.were_set = self.were_set or (len(seen) > 1 and not _counts(seen))
                if len(seen) >= SCHEDULE_VALUES:
                    self._clocks.add((id(d), name))
        if len(self._clocks) > before:
            self._list()

    def _set(self) -> list[Place]:
        """Numbers that had other values in earlier proofs."""
        return [(d, name) for d, name in self._all() if self._values.get((id(d), name), {d[name]}) - {d[name]}]

    @contextmanager
    def clocks(self) -> Iterator[list[Place]]:
        """Numbers that change in a pass inside are clocks from then on; the yielded list has them afterwards."""
        self._list()
        before = [(d, name, d[name]) for d, name in self._all()]
        found: list[Place] = []
        with self._untrained.written() as written:
            yield found
        known = len(self._clocks)
        for d, name, value in before:
            now = d.get(name)
            if type(now) in PLAIN and now != value:
                self._clocks.add((id(d), name))
                if type(now) in (int, float):
                    found.append((d, name))
        if written or len(self._clocks) > known:
            self._list()

    def times(self) -> list[Time]:
        """The present values of the clocks."""
        return [(d, name, d[name]) for d, name in self.timed if name in d]

    @contextmanager
    def at(self, times: list[Time]) -> Iterator[None]:
        """Inside, the clocks have these values."""
        now = self.times() if times else []
        try:
            for d, name, value in times:
                d[name] = value
            yield
        finally:
            for d, name, value in now:
                d[name] = value

    @contextmanager
    def later(self, clocks: list[Place], passes: int, only: int | None = None) -> Iterator[int]:
        """Inside, clocks, and numbers that the user sets before a pass, or ``only`` one, are ``passes`` ahead; yields how many exist."""
        every = {(id(d), name): (d, name) for d, name in (*clocks, *self._set())}.values()
        kept = [(d, name, d[name]) for d, name in every if type(d.get(name)) in (int, float)]  # one may start as None
        for k, (d, name, value) in enumerate(kept):
            d[name] = value + passes if only in (None, k) else value
        try:
            yield len(kept)
        finally:
            for d, name, value in kept:
                d[name] = value


def _counts(values: set[Any]) -> bool:
    """Whether they are whole numbers without a gap, as epochs are."""
    return all(type(v) is int for v in values) and max(values) - min(values) == len(values) - 1


def attributes_of(model: nn.Module) -> list[dict[str, Any]]:
    """The attribute dictionaries of all modules, and of the plain (configuration) objects among the attributes."""
    found = {id(m): vars(m) for m in model.modules()}
    for d in list(found.values()):
        for name, v in d.items():
            plain = name not in TORCHS and not isinstance(v, (Tensor, nn.Module, type))
            if plain and isinstance(getattr(v, "__dict__", None), dict):
                found.setdefault(id(v), vars(v))
    return list(found.values())


class Wiring(Wired):
    """Numbers the different ways in which a model has been composed so far."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._numbers: dict[Any, int] = {}
        self.watched, self.empty, self.seen, self.number = ([], [], []), [], [None], -1  # nothing is seen yet

    def look(self) -> None:
        """List everything again: an attribute was added or removed."""
        modules = list(self._model.modules())
        tables = [vars(m)[name] for m in modules for name in ("_modules", *_HOOKS) if name in vars(m)] + global_hooks()
        places = [(vars(m), name) for m in modules for name, v in vars(m).items() if _is_function(v)]
        self.empty = [table for table in tables if not table]
        kinds = [kind for kind in {type(m): None for m in modules} if hasattr(kind, "forward")]  # scripted modules have none
        self.watched = [table for table in tables if table], places, kinds
        self.seen = [*map(tuple, map(values_of, self.watched[0])), *starmap(dict.get, places), *map(forward_of, kinds)]
        key = (
            tuple(
                (type(m), _what(getattr(type(m), "forward", None)), *(_all(vars(m).get(name, {}).values()) for name in _HOOKS))
                for m in modules
            ),
            tuple((name, _what(d[name])) for d, name in places),
            tuple(_all(table.values()) for table in global_hooks()),
        )
        self.number = self._numbers.setdefault(key, len(self._numbers))


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, (nn.Module, Tensor, type))


def _all(functions: Iterable[Callable[..., Any]]) -> tuple[Any, ...]:
    return tuple(_what(f) for f in functions)


def _what(function: Any) -> Any:
    """What a function does: its code and the plain values in its closure. A function that is created anew for each pass is the same."""
    function = getattr(function, "func", function)  # of a partial
    code = getattr(function, "__code__", None)
    if code is None:
        return type(function)
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if not _is_empty(cell)]
    return code, tuple(v if type(v) in PLAIN else type(v) for v in (*cells, *(getattr(function, "__defaults__", None) or ())))


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # a name that was never bound
        return True
    return False


# What a forward writes, undone ----------------------------------------------------------------------------------------------


class Kept:
    """What these dictionaries, and lists and dicts in them, hold now; what is written to them later can be undone."""

    def __init__(self, attributes: Sequence[dict[str, Any]]) -> None:
        self._values = [
            (d, {name: (v, copy.copy(v) if type(v) in _HELD else None) for name, v in d.items() if name not in TORCHS})
            for d in attributes
        ]

    def is_changed(self) -> bool:
        """Whether something was written since."""
        return any(_is_changed(d, values) for d, values in self._values)

    def undo(self) -> bool:
        """Put everything back; returns whether something was written."""
        return any([_undone(d, values) for d, values in self._values])


@contextmanager
def attributes_restored(attributes: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Undo what is written inside to these dictionaries, and to lists and dicts in them."""
    kept = Kept(attributes)
    try:
        yield
    finally:
        kept.undo()


def _is_changed(d: dict[str, Any], values: dict[str, tuple[Any, Any]]) -> bool:
    new = any(name not in values and name not in TORCHS for name in d)
    pairs = ((name, *held) for name, held in values.items())
    return new or any(d.get(name) is not v or (inside is not None and _differ(v, inside)) for name, v, inside in pairs)


def _undone(d: dict[str, Any], values: dict[str, tuple[Any, Any]]) -> bool:
    """Restore; returns whether anything had changed."""
    new = [name for name in d if name not in values and name not in TORCHS]
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
