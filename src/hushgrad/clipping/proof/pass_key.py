"""What identifies a pass before it runs: its key; and whether it must make the calls of an earlier one, whatever its data.

The values that are compared here are listed elsewhere (:mod:`~hushgrad.clipping.proof.state`,
:mod:`~hushgrad.clipping.proof.straight_line`); this is what every pass does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain, starmap
from operator import attrgetter, is_, itemgetter, methodcaller
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules import module as _module

from hushgrad.clipping._torch import dispatch_modes, function_modes, is_autocast, packing

if TYPE_CHECKING:
    from hushgrad.clipping.proof.untrained_tensors import UntrainedTensors

PLAIN = frozenset((bool, int, float, str, type(None)))  # attributes that may decide what a forward does
OF_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
values_of, forward_of, _kind = methodcaller("values"), attrgetter("forward"), attrgetter("dtype", "ndim")
_code, _inside, _hooks, _keys = attrgetter("__code__"), attrgetter("cell_contents"), itemgetter(*OF_HOOKS), methodcaller("keys")
_lacks_its_own = methodcaller("isdisjoint", frozenset(("forward", "_conv_forward", "_call_impl", "_compiled_call_impl")))


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

    def key(self, data: Iterable[Tensor]) -> tuple[Any, ...]:
        """The composition, autocast, the kinds of untrained tensors, the plain attributes except clocks, and dtype and rank of ``data``."""
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
        return (
            self._wired,
            is_autocast(),
            self._untrained.kinds() if self._untrained.places else (),
            tuple(values),
            *map(_kind, data),
        )


class Line:
    """What decides about the calls of a chain of layers, as :class:`~hushgrad.clipping.proof.straight_line.StraightLine` has listed it."""

    _modules: list[nn.Module]
    _classes: list[type]  # theirs, and all bases
    _tables: list[dict[str, Any]]  # of children and parameters
    _params: list[nn.Parameter | None]
    _places: list[tuple[Any, str]]  # whatever else is looked up, with its name
    _functions: list[FunctionType]
    _cells: list[CellType]  # of their closures
    _lacks: Callable[[Any], bool]  # whether a class has nothing in front of its modules' attributes
    _seen: list[Any] | None = None

    def holds(self) -> bool:
        """Whether a pass that begins now makes the calls of one that began when this was asked first."""
        if function_modes() or dispatch_modes() or packing(True) is not None or _module._global_backward_pre_hooks:
            return False
        try:
            now = [
                *chain.from_iterable(map(_hooks, map(vars, self._modules))),
                *chain.from_iterable(map(values_of, self._tables)),
                *map(type, self._modules),
                *map(type, self._params),
                *starmap(getattr, self._places),
                *map(_code, self._functions),
                *map(_inside, self._cells),
            ]
        except (AttributeError, ValueError):  # deleted, or emptied
            return False
        seen = self._seen = now if self._seen is None else self._seen
        if len(now) != len(seen) or not all(map(is_, now, seen)):
            return False
        mine, its = map(vars, self._modules), map(vars, self._classes)
        return all(map(_lacks_its_own, map(_keys, mine))) and all(map(self._lacks, map(_keys, its)))
