"""What identifies a pass before it runs: its key; and whether it must make the calls of an earlier one, whatever its data.

The values that are compared here are listed elsewhere (:mod:`~hushgrad.clipping.proof.state`,
:mod:`~hushgrad.clipping.proof.straight_line`); this is what every pass does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import starmap
from operator import attrgetter, is_, methodcaller
from types import CellType, CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hushgrad.clipping._torch import dispatch_modes, function_modes, is_autocast, packing

if TYPE_CHECKING:
    from hushgrad.clipping.proof.untrained_tensors import UntrainedTensors

PLAIN = frozenset((bool, int, float, str, type(None)))  # attributes that may decide what a forward does
values_of, forward_of, _kind = methodcaller("values"), attrgetter("forward"), attrgetter("dtype", "ndim")
_code, _inside, _bases = attrgetter("__code__"), attrgetter("cell_contents"), attrgetter("__mro__")


class Wired:
    """How a model is composed of modules, hooks and functions; see :class:`~hushgrad.clipping.proof.state.Wiring`."""

    watched: tuple[list[dict[Any, Any]], list[tuple[dict[str, Any], str]], list[type[nn.Module]]]
    empty: list[dict[Any, Any]]  # dicts of hooks and children that are empty: most of them
    seen: list[Any]  # what was found in those that are watched
    number: int  # of this composition
    look: Callable[[], None]  # lists everything again


class Key:
    """Identifies a pass before it runs, by the values that :class:`~hushgrad.clipping.proof.state.Attributes` has listed."""

    _dicts: list[dict[str, Any]]
    _places: list[tuple[dict[str, Any], str]]
    _size: int  # total size of the dictionaries when they were listed
    _wiring: Wired
    _wired: int
    _untrained: UntrainedTensors
    _list: Callable[[], None]  # lists everything again
    _found: tuple[int, tuple[Any, ...]] | None = None  # composition and plain attributes in the last key; None: list them again

    def key(self, data: Iterable[Tensor], *, again: bool = False) -> tuple[Any, ...]:
        """The composition, autocast, the kinds of untrained tensors, the plain attributes except clocks, and dtype and rank of ``data``.

        ``again``: composition and attributes are those of the last key.
        """
        if not again or self._found is None:
            wiring = self._wiring
            tables, places, types = wiring.watched
            now = [*map(tuple, map(values_of, tables)), *starmap(dict.get, places), *map(forward_of, types)]
            if now != wiring.seen or any(wiring.empty):
                wiring.look()
            if sum(map(len, self._dicts)) != self._size or wiring.number != self._wired:
                self._list()
            values = [*starmap(dict.get, self._places)]
            if not PLAIN.issuperset(map(type, values)):
                values = [v if type(v) in PLAIN else type(v) for v in values]
            self._found = self._wired, tuple(values)
        wired, plain = self._found
        return (wired, is_autocast(), self._untrained.kinds() if self._untrained.places else (), plain, *map(_kind, data))


class Line:
    """What decides about the calls of a chain of layers, as :class:`~hushgrad.clipping.proof.straight_line.StraightLine` has listed it."""

    _modules: list[nn.Module]
    _kinds: list[type]  # theirs
    _own: list[dict[str, Any]]  # their attributes
    _classes: list[type]  # theirs, and all that they are made from
    _bases: list[tuple[type, ...]]  # of these, as they are asked for members
    _params: list[nn.Parameter | None]
    _plain: list[type]  # theirs
    _dicts: list[dict[Any, Any]]  # all in which something is looked up: attributes, hooks, children, classes, functions by name
    _version: Callable[[dict[Any, Any]], int]
    _versions: list[int]  # of these dicts
    _functions: list[FunctionType]
    _codes: list[CodeType]
    _cells: list[CellType]  # of their closures
    _inside: list[Any]

    def holds(self) -> bool:
        """Whether a pass that begins now makes the calls of one that began when these were listed."""
        return (
            [*map(self._version, self._dicts)] == self._versions
            and not (function_modes() or dispatch_modes())
            and packing(True) is None
            and all(map(is_, map(vars, self._modules), self._own))
            and [*map(type, self._modules)] == self._kinds
            and all(map(is_, map(_bases, self._classes), self._bases))
            and [*map(type, self._params)] == self._plain
            and all(map(is_, map(_code, self._functions), self._codes))
            and all(map(is_, map(_inside, self._cells), self._inside))
        )
