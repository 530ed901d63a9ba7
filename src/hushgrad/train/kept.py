"""What a function keeps between its calls: attributes, closures, globals and lists that it reaches.

A loss that is called with one example at a time cannot see another one, unless it remembers: a centre, a queue, a running mean.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

__all__ = ["Kept", "Read"]

_MOST = 2000  # objects that are looked at, the nearest first
_HOOKS = frozenset(vars(nn.Module())) - {"_parameters", "_buffers", "_modules"}


class Kept:
    """What a function holds now.

    >>> total = [0.0]
    >>> def loss(x):
    ...     total[0] += x
    >>> before = Kept(loss)
    >>> loss(1.5)
    >>> before.is_still(Kept(loss), calls=1)
    False
    """

    def __init__(self, fn: Any) -> None:
        self._numbers: list[int] = []
        self._all: list[Any] = []
        self._held: list[Any] = []  # alive: another object would get the same id
        seen, queue = {id(fn)}, deque([fn])
        while queue and len(self._held) < _MOST:
            value = queue.popleft()
            self._held.append(value)
            for one in _inside(value):
                self._note(one)
                if id(one) not in seen:
                    seen.add(id(one))
                    queue.append(one)

    def _note(self, value: Any) -> None:
        if type(value) is int:
            self._numbers.append(value)
        elif isinstance(value, (float, complex, str, bytes, bool)):
            self._all.append(value)
        elif isinstance(value, np.ndarray):
            self._all.append((id(value), hash(value.tobytes())))
        else:
            self._all.append((id(value), value._version if type(value) is Tensor else len(_inside(value))))

    def is_still(self, now: Kept, *, calls: int) -> bool:
        """Whether nothing has changed but whole numbers that count so many calls."""
        if len(self._numbers) != len(now._numbers) or self._all != now._all:
            return False
        return all(b - a in (0, calls) for a, b in zip(self._numbers, now._numbers, strict=True))


class Read:
    """What a plain function reads beside its arguments: tensors, arrays and numbers in its closure, its globals and what was bound to it.

    >>> weight = 1.5
    >>> def loss(x):
    ...     return weight * x
    >>> before = Read(loss)
    >>> weight = 2.5
    >>> before == Read(loss)
    False
    """

    def __init__(self, fn: Any) -> None:
        self._bound = list(_leaves(_bound(fn)))
        self._all = self._bound + list(_leaves(_globals(fn)))
        self._marks = [_mark(value) for value in self._all]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Read) and self._marks == other._marks

    __hash__ = None  # type: ignore[assignment]

    @property
    def binds_data(self) -> bool:
        """Whether its closure, or what was bound to it, holds a tensor or an array."""
        return any(isinstance(value, (Tensor, np.ndarray)) for value in self._bound)


def _bound(fn: Any) -> list[Any]:
    if isinstance(fn, partial):
        return [*fn.args, *fn.keywords.values(), *_bound(fn.func)]
    return _of_function(fn)[: _cells(fn)] if isinstance(fn, FunctionType) else []


def _globals(fn: Any) -> list[Any]:
    fn = fn.func if isinstance(fn, partial) else fn
    return _of_function(fn)[_cells(fn) :] if isinstance(fn, FunctionType) else []


def _cells(fn: FunctionType) -> int:
    return len(fn.__closure__ or ())


def _leaves(values: Iterable[Any]) -> Iterable[Any]:
    """Numbers, tensors and arrays, in plain containers too. What is trained moves by what is released."""
    for value in values:
        if isinstance(value, (list, tuple, dict)):
            yield from _leaves(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, (float, complex, np.ndarray, Tensor)) and not isinstance(value, nn.Parameter):
            yield value


def _mark(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return id(value), hash(value.tobytes())
    return (id(value), value._version) if isinstance(value, Tensor) else value


def _inside(value: Any) -> list[Any]:
    """What an object holds, as far as a function may write to it."""
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, FunctionType):
        return _of_function(value)
    if isinstance(value, (Tensor, np.ndarray, ModuleType, type)):
        return []
    hooks: Iterable[str] = _HOOKS if isinstance(value, nn.Module) else ()
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if isinstance(name, str)]
    own = [getattr(value, name) for name in slots if name != "__dict__" and hasattr(value, name)]
    return own + [v for name, v in getattr(value, "__dict__", {}).items() if name not in hooks]


def _of_function(fn: FunctionType) -> list[Any]:
    if (fn.__module__ or "").split(".")[0] == "torch":
        return []
    cells = []
    for cell in fn.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # not set yet
            continue
    named = [fn.__globals__[name] for name in _names(fn.__code__) if name in fn.__globals__]
    return [*cells, *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values(), vars(fn), *named]


def _names(code: CodeType) -> list[str]:
    """Of globals, in what is inside of it, too."""
    return [*code.co_names, *(name for inner in code.co_consts if isinstance(inner, CodeType) for name in _names(inner))]
