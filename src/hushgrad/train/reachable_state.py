"""The state that a function can reach besides its arguments: by name, in closures, globals, objects, classes and modules.

A loss that is called with one example at a time cannot see another one, unless it remembers something (a centre, a queue, a running mean)
or reads what the loop has set between its calls.
"""

from __future__ import annotations

from array import array
from collections import UserDict, UserList, deque
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dis import get_instructions
from functools import _lru_cache_wrapper, cache, partial
from pathlib import Path
from queue import Queue, SimpleQueue
from sys import modules, stdlib_module_names
from sysconfig import get_paths
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    GeneratorType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any
from weakref import ReferenceType

import numpy as np
from torch import Tensor, nn, strided

from hushgrad.clipping._torch import is_wrapped

_MOST = 2000  # objects that are looked at, the nearest first
_HOOKS = frozenset(vars(nn.Module())) - {"_parameters", "_buffers", "_modules"}
_INSTALLED = tuple(Path(get_paths()[name]).resolve() for name in ("purelib", "platlib"))  # where packages are that others wrote
_ALL = frozenset(("__dict__", "vars", "setattr", "getattr", "globals"))  # whoever uses these may mean any name
_OTHER = frozenset(("__init__", "__repr__", "__eq__", "__hash__", "__getstate__", "__setstate__"))  # no part of a call
_FEW = 16  # numbers of a tensor that is compared by value
_LEAVES = frozenset((int, float, complex, str, bytes, bool, type(None), Tensor, nn.Parameter))  # with nothing inside
_WRAPPED = (UserDict, UserList, ContextVar, ReferenceType, BuiltinMethodType, Queue, _lru_cache_wrapper)
_HOLDERS = (nn.Module, nn.ParameterDict, nn.ParameterList)
_CLOSED = (GeneratorType, SimpleQueue)

Names = frozenset[str] | None  # attributes that are looked at; None: all of them
Reached = tuple[Any, Names]


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
        queue = deque[Reached]([(fn, frozenset())])
        seen: set[tuple[int, Names]] = set()
        leaves: list[Any] = []
        while queue and len(self._held) < _MOST:
            reached = queue.popleft()
            self._held.append(reached[0])
            for one in _inside(*reached):
                self._note(one[0])
                if type(one[0]) in _LEAVES:
                    leaves.append(one[0])
                    continue
                if (at := (id(one[0]), one[1])) not in seen:
                    seen.add(at)
                    queue.append(one)
        self._held += leaves

    def _note(self, value: Any) -> None:
        if isinstance(value, Tensor):  # what is trained moves by what is released
            self._all.append((id(value), _written(value)))
        elif type(value) is int:
            self._numbers.append(value)
        elif isinstance(value, (float, complex, str, bytes, bool)):
            self._values.append(value)
        elif isinstance(value, (np.ndarray, array)):
            self._all.append((id(value), hash(value.tobytes())))
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


def _written(tensor: Tensor) -> Any:
    """How often a tensor was written to, if it is not trained; the numbers of a small one, as torch does not count writes to ``.data``."""
    if tensor.requires_grad or tensor.is_inference():
        return 0
    few = tensor.numel() <= _FEW and tensor.is_cpu and tensor.layout is strided and not is_wrapped(tensor)
    return tensor._version, str(tensor.tolist()) if few else ""


def made_by(fn: Any) -> Any:
    """What two functions have in common if the same line of a program created them."""
    while isinstance(fn, (partial, MethodType)):
        fn = fn.func if isinstance(fn, partial) else fn.__func__
    return fn.__code__ if isinstance(fn, FunctionType) else type(fn)


def binds_data(fn: Any) -> bool:
    """Whether it holds tensors or arrays, or numbers in its closure or its arguments: those of a batch, if it was created for one."""
    bound: list[Any] = []
    while isinstance(fn, partial):
        bound += [*fn.args, *fn.keywords.values()]
        fn = fn.func
    if isinstance(fn, FunctionType):
        bound += [value for value, _ in _cells(fn)]
    of_object = [value for value, _ in _inside(fn.__self__ if isinstance(fn, MethodType) else fn, None)]
    numbers = any(type(value) in (int, float, complex) for value in _leaves(bound))
    return numbers or any(
        isinstance(v, (Tensor, np.ndarray)) and type(v) is not nn.Parameter for v in _leaves([*bound, *of_object])
    )


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple, dict)):
            yield from _leaves(value.values() if isinstance(value, dict) else value)
        else:
            yield value


def _inside(value: Any, names: Names) -> list[Reached]:
    """What an object holds, as far as code that uses these names may read or write it."""
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [(one, names) for one in value]
    if isinstance(value, dict):
        return [(one, names) for one in value.values()]
    if isinstance(value, MethodType):
        return _method(value.__func__, value.__self__)
    if isinstance(value, partial):
        return [(one, names) for one in (value.func, value.args, value.keywords)]
    if isinstance(value, FunctionType):
        return _of_function(value)
    if isinstance(value, np.ndarray):
        return [(one, names) for one in value.flat] if value.dtype.hasobject else []
    if isinstance(value, Tensor):
        return []
    if isinstance(value, _WRAPPED):
        return [(_unwrapped(value), None)]
    if isinstance(value, ModuleType):
        return [] if _is_library(value.__name__) else [(v, names) for n, v in vars(value).items() if names and n in names]
    return _of_class(value, names, value) if isinstance(value, type) else _of_object(value, names)


def _unwrapped(value: Any) -> Any:
    """What stands behind an object of Python's own library that holds one thing."""
    if isinstance(value, (UserDict, UserList)):
        return value.data
    if isinstance(value, ContextVar):
        return value.get(None)
    if isinstance(value, ReferenceType):
        return value()
    if isinstance(value, BuiltinMethodType):  # d.get of a dict; a function of a module has the module
        return None if isinstance(value.__self__, (ModuleType, type)) else value.__self__
    return value.queue if isinstance(value, Queue) else value.__wrapped__  # of a cache


def _of_object(value: Any, names: Names) -> list[Reached]:
    own: dict[str, Any] = getattr(value, "__dict__", {})
    if isinstance(value, nn.Module):
        hooks = [(hook, None) for hook in (*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values())]
        is_layer = _is_library(type(value).__module__)
        known = (
            {} if is_layer and type(value) not in _HOLDERS else own["_parameters"]
        )  # a layer's weights are not what a loop writes to
        frozen = {n: p for n, p in known.items() if p is not None and not p.requires_grad}
        own = {**{n: v for n, v in own.items() if n not in _HOOKS}, **frozen, **own["_buffers"], **own["_modules"]}
        names = None if is_layer else names
    else:
        hooks = []
    found = [*hooks, *((v, names) for n, v in own.items() if names is None or n in names)]
    return found + _of_class(type(value), names, value)


def _of_class(kind: type, names: Names, of: Any) -> list[Reached]:
    """What a class and its bases hold; for functions, what they use of the object or class ``of``."""
    found: list[Reached] = []
    for one in kind.__mro__:
        if _is_library(one.__module__):
            continue
        for name, value in list(vars(one).items()):
            called = name == "forward" or (name.startswith("__") and isinstance(value, FunctionType) and name not in _OTHER)
            if called or names is None or name in names:
                found += _member(value, names, of, called=called)
    return found


def _member(value: Any, names: Names, of: Any, *, called: bool) -> list[Reached]:
    if isinstance(value, MemberDescriptorType):  # a slot, perhaps empty
        return [(getattr(of, value.__name__, None), names)] if not isinstance(of, type) else []
    if isinstance(value, GetSetDescriptorType):
        return []
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, FunctionType):
        return _method(value, of) if called or names is not None else []
    return [(value, names)]


def _method(fn: Any, of: Any) -> list[Reached]:
    return [(fn, None), (of, _names(fn.__code__))] if isinstance(fn, FunctionType) else [(of, None)]


def _of_function(fn: FunctionType) -> list[Reached]:
    if _is_library(fn.__module__):
        return []
    names, used = _names(fn.__code__), _globals(fn.__code__)
    named = [fn.__globals__[name] for name in used if name in fn.__globals__]
    named += [modules[name] for name in _imported(fn.__code__) if name in modules]
    return [*_cells(fn), *((v, names) for v in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values(), vars(fn), *named))]


def _cells(fn: FunctionType) -> list[Reached]:
    cells: list[Reached] = []
    for cell in fn.__closure__ or ():
        try:
            cells.append((cell.cell_contents, _names(fn.__code__)))
        except ValueError:  # not set yet
            continue
    return cells


@cache
def _names(code: CodeType) -> Names:
    """The names that code uses, nested code included; strings count, for ``getattr`` and the like."""
    found = frozenset(code.co_names) | frozenset(_strings(code.co_consts))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= _names(inner) or _ALL
    return None if found & _ALL else found


@cache
def _globals(code: CodeType) -> tuple[str, ...]:
    """The names that code looks up among globals, nested code included."""
    found = {i.argval for i in get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    found |= {*_strings(code.co_consts)} if "globals" in found else set()
    for inner in code.co_consts:
        found.update(_globals(inner) if isinstance(inner, CodeType) else ())
    return tuple(sorted(found))


@cache
def _imported(code: CodeType) -> tuple[str, ...]:
    """Modules that code imports when it runs."""
    return tuple(i.argval for i in get_instructions(code) if i.opname == "IMPORT_NAME")


def _strings(values: Iterable[Any]) -> Iterator[str]:
    return (value for value in _leaves(values) if isinstance(value, str))


def _is_library(module: str | None) -> bool:
    return _is_installed((module or "").split(".")[0])


@cache
def _is_installed(package: str) -> bool:
    """Whether it came with Python or an installer: then its code keeps nothing of a run, except in its objects."""
    if package in stdlib_module_names and package != "__main__":
        return True
    file = vars(modules.get(package, object)).get("__file__")
    return file is not None and any(place in Path(file).resolve().parents for place in _INSTALLED)
