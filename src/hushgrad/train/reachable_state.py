"""The state that a function can reach besides its arguments: by name, in closures, globals, objects, classes and modules.

A loss that is called with one example at a time cannot see another one, unless it remembers something (a centre, a queue, a running mean)
or reads what the loop has set between its calls. So does a model that the loop has changed since it handed out the batch.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from ctypes import Array
from functools import partial
from inspect import signature
from queue import SimpleQueue
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn, strided

from hushgrad.clipping._torch import is_wrapped
from hushgrad.clipping.fingerprint import fingerprint
from hushgrad.train.what_is_reached import Names, Reached, all_in, cells_of, reached_from

_MOST = 2000  # objects that are looked at, the nearest first
_LEAVES = frozenset((int, float, complex, str, bytes, bool, type(None), Tensor, nn.Parameter))  # with nothing inside
_BYTES = (np.ndarray, array, bytearray, memoryview, Array)
_NUMBERS = (int, float, complex)
_FEW = 16
_MANY = 1 << 12  # numbers of a tensor whose content is compared at every call; torch does not count writes to ``.data``
_CLOSED = (GeneratorType, SimpleQueue)


class ReachableState:
    """A snapshot of what a function can reach.

    >>> total = [0.0]
    >>> def loss(x):
    ...     total[0] += x
    >>> before = ReachableState(loss)
    >>> loss(1.5)
    >>> before.is_still(ReachableState(loss), calls=1)
    False
    """

    def __init__(self, fn: Any) -> None:
        self._numbers: list[int] = []
        self._values: list[Any] = []
        self._all: list[Any] = []  # objects, and how often they were written to
        self._held: list[Any] = []  # alive: another object would get the same id
        self._closed = False  # something is among them whose inside cannot be seen
        queue = deque([Reached((), fn, frozenset())])
        seen: set[tuple[int, Names]] = set()
        leaves: list[Any] = []
        while queue and len(self._held) < _MOST:
            reached = queue.popleft()
            self._held.append(reached.value)
            for one in reached_from(reached.value, reached.names):
                self._note(one.value)
                if type(one.value) in _LEAVES:
                    leaves.append(one.value)
                    continue
                if (at := (id(one.value), one.names)) not in seen:
                    seen.add(at)
                    queue.append(one)
        self._held += leaves

    def _note(self, value: Any) -> None:
        if isinstance(value, Tensor):  # what is trained moves by what is released
            self._all.append((id(value), 0 if value.requires_grad else content_of(value, _MANY)))
        elif type(value) is int:
            self._numbers.append(value)
        elif isinstance(value, (float, complex, str, bytes, bool)):
            self._values.append(value)
        elif isinstance(value, _BYTES):
            self._all.append((id(value), content_of(value)))
        elif isinstance(value, (list, tuple, dict, set, frozenset, deque)):
            self._all.append((id(value), len(value)))
        else:
            self._closed = self._closed or isinstance(value, _CLOSED)
            self._all.append((id(value), 0))

    def is_still(self, now: ReachableState, *, calls: int | None) -> bool:
        """Whether nothing has changed except integers that count this many calls; None: whatever they count."""
        if now._closed or self._all != now._all or not self.is_like(now) or len(self._numbers) != len(now._numbers):
            return False
        return calls is None or all(b - a in (0, calls) for a, b in zip(self._numbers, now._numbers, strict=True))

    def is_like(self, now: ReachableState) -> bool:
        """Whether another function, created by the same code, holds the same numbers and strings, except for integers."""
        return self._values == now._values


def content_of(value: Any, most: int | None = None) -> Any:
    """What a tensor, an array or a buffer holds, to be compared; of a tensor of more than ``most`` numbers, how often it was written to."""
    if not isinstance(value, Tensor):
        return hash(
            bytes(memoryview(value).cast("B")) if isinstance(value, (array, memoryview, Array, bytearray)) else value.tobytes()
        )
    usual = value.layout is strided and not (value.is_meta or is_wrapped(value))
    if usual and most is not None and value.numel() <= _FEW and value.is_cpu:
        return str(value.tolist())  # quicker
    if usual and (most is None or value.is_inference() or (value.numel() <= most and value.is_cpu)):
        return fingerprint(value)
    return 0 if value.is_inference() else value._version


def made_by(fn: Any) -> Any:
    """What two functions have in common if the same line of a program created them."""
    while isinstance(fn, (partial, MethodType)):
        fn = fn.func if isinstance(fn, partial) else fn.__func__
    return fn.__code__ if isinstance(fn, FunctionType) else type(fn)


def binds_data(fn: Any) -> bool:
    """Whether it holds tensors, arrays or numbers, in its closure, its arguments or its object: those of a batch, if made for one."""
    bound: list[Any] = []
    while isinstance(fn, partial):
        bound += [*fn.args, *fn.keywords.values()]
        fn = fn.func
    if isinstance(fn, FunctionType):
        bound += [one.value for one in cells_of(fn)]
    of = fn.__self__ if isinstance(fn, MethodType) else fn
    bound += [] if isinstance(fn, FunctionType) else _held_by(of, _defaults(type(of)))
    return any(
        type(v) in _NUMBERS or (isinstance(v, (Tensor, np.ndarray)) and type(v) is not nn.Parameter) for v in all_in(bound)
    )


def _held_by(value: Any, usual: Sequence[Any]) -> list[Any]:
    """What an object and those inside of it hold, but for the ``usual`` values and for functions."""
    found, queue, seen = list[Any](), [value], {id(value)}
    while queue and len(seen) < _MOST:
        for one in (one.value for one in reached_from(queue.pop(), None)):
            found += [] if any(type(one) is type(v) and one == v for v in usual if type(v) in _NUMBERS) else [one]
            if (
                id(one) not in seen
                and type(one) not in _LEAVES
                and not isinstance(one, (FunctionType, MethodType, type, ModuleType))
            ):
                seen.add(id(one))
                queue.append(one)
    return found


def _defaults(kind: Any) -> list[Any]:
    """What its constructor is given if nobody says otherwise."""
    try:
        return [p.default for p in signature(kind).parameters.values()]
    except (TypeError, ValueError):  # written in C
        return []
