"""How a model is put together: its modules, their hooks, and functions among their attributes.

All of them may be exchanged between two passes, and what runs before the first trained layer leaves no trace in a graph: so a pass is known
only together with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import starmap
from operator import attrgetter, methodcaller
from typing import Any

from torch import Tensor, nn

from hushgrad.clipping._torch import global_hooks

__all__ = ["PLAIN", "Wiring"]

PLAIN = frozenset((bool, int, float, str, type(None)))
_values, _forward = methodcaller("values"), attrgetter("forward")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Wiring:
    """A number for each way in which a model was put together so far."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._numbers: dict[Any, int] = {}
        self._watched: tuple[list[dict[Any, Any]], list[tuple[dict[str, Any], str]], list[type[nn.Module]]] = ([], [], [])
        self._empty: list[dict[Any, Any]] = []  # tables of hooks and children that have none: most of them
        self._seen: Any = None
        self._number = -1

    def number(self) -> int:
        """That of the present way. As long as all is the very same, that is a matter of microseconds."""
        if any(self._empty) or self._now() != self._seen:
            self.look()
        return self._number

    def look(self) -> None:
        """Look at everything anew: an attribute was added or removed."""
        modules = list(self._model.modules())
        tables = [vars(m)[name] for m in modules for name in ("_modules", *_HOOKS) if name in vars(m)] + global_hooks()
        places = [(vars(m), name) for m in modules for name, v in vars(m).items() if _is_function(v)]
        self._empty = [table for table in tables if not table]
        self._watched = [table for table in tables if table], places, list({type(m): None for m in modules})
        self._seen = self._now()
        key = (
            tuple((type(m), _what(type(m).forward), *(_all(vars(m).get(name, {}).values()) for name in _HOOKS)) for m in modules),
            tuple((name, _what(d[name])) for d, name in places),
            tuple(_all(table.values()) for table in global_hooks()),
        )
        self._number = self._numbers.setdefault(key, len(self._numbers))

    def _now(self) -> Any:
        tables, places, types = self._watched
        return [*map(tuple, map(_values, tables))], [*starmap(dict.get, places)], [*map(_forward, types)]


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, (nn.Module, Tensor, type))


def _all(functions: Iterable[Callable[..., Any]]) -> tuple[Any, ...]:
    return tuple(_what(f) for f in functions)


def _what(function: Any) -> Any:
    """What a function does: its code, and the plain values that it closes over. One made anew for each pass is the same."""
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
