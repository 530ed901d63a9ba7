"""What code can read besides its arguments: by name, in closures, globals, objects, classes and modules."""

from __future__ import annotations

from array import array
from collections import UserDict, UserList, deque
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dis import get_instructions
from functools import _lru_cache_wrapper, cache, partial
from pathlib import Path
from queue import Queue
from sys import modules, stdlib_module_names
from sysconfig import get_paths
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple
from weakref import ReferenceType

import numpy as np
import torch
from torch import Tensor, nn

from hushgrad.train.silent_hooks import is_silent

_HOOKS = frozenset(vars(nn.Module())) - {"_parameters", "_buffers", "_modules"}
_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_INSTALLED = tuple(Path(get_paths()[name]).resolve() for name in ("purelib", "platlib"))  # where packages are that others wrote
_MACHINERY = (__name__.partition(".")[0] + ".", "torch._", "torch.distributed", "torch.fx", "torch.jit", "logging")
SILENT = "a hook that only looks"
_ALL = frozenset(("__dict__", "vars", "setattr", "getattr", "globals"))  # whoever uses these may mean any name
_OTHER = frozenset(("__init__", "__repr__", "__eq__", "__hash__", "__getstate__", "__setstate__"))  # no part of a call
_WRAPPED = (UserDict, UserList, ContextVar, ReferenceType, BuiltinMethodType, Queue, _lru_cache_wrapper)
_HOLDERS = (nn.Module, nn.ParameterDict, nn.ParameterList)
_PLAIN = frozenset((list, tuple, dict, set, frozenset, deque))  # without attributes of their own

Names = frozenset[str] | None  # attributes that are looked at; None: all of them


class Reached(NamedTuple):
    """A value, where its holder has it, and the attributes of it that are looked at."""

    at: Any
    value: Any
    names: Names


def all_in(values: Iterable[Any]) -> Iterator[Any]:
    """The values, those of lists, tuples and dicts included."""
    for value in values:
        if isinstance(value, (list, tuple, dict)):
            yield from all_in(value.values() if isinstance(value, dict) else value)
        else:
            yield value


def reached_from(value: Any, names: Names) -> list[Reached]:
    """What an object holds, as far as code that uses these names may read or write it."""
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [Reached(k, one, names) for k, one in enumerate(value)] + _besides(value, names)
    if isinstance(value, dict):
        return [Reached(_key(k), one, names) for k, one in value.items()] + _besides(value, names)
    if isinstance(value, MethodType):
        return _method("method", value.__func__, value.__self__)
    if isinstance(value, partial):
        return [Reached(name, getattr(value, name), names) for name in ("func", "args", "keywords")]
    if isinstance(value, FunctionType):
        return _of_function(value)
    if isinstance(value, np.ndarray):
        return [Reached(k, one, names) for k, one in enumerate(value.flat)] if value.dtype.hasobject else []
    kind: Any = type(value)
    if isinstance(value, (Tensor, array)) or _is_machinery(kind):
        return []
    if isinstance(value, _WRAPPED):
        return [Reached("inside", _unwrapped(value), None)]
    if isinstance(value, ModuleType):
        return (
            [] if _is_library(value.__name__) else [Reached(n, v, names) for n, v in vars(value).items() if names and n in names]
        )
    return _of_class(value, names, value) if isinstance(value, type) else _of_object(value, names)


def _key(name: Any) -> Any:
    return name if type(name) in (str, int) else repr(name) if isinstance(name, (tuple, float, bytes)) else id(name)


def _besides(value: Any, names: Names) -> list[Reached]:
    """The attributes of a list or dict that is of a class of its own."""
    return [] if type(value) in _PLAIN else _of_object(value, names)


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
        return _of_module(value, own, names) + _of_class(type(value), names, value)
    found = [Reached(n, v, names) for n, v in own.items() if names is None or n in names]
    return found + _of_class(type(value), names, value)


def _of_module(value: nn.Module, own: dict[str, Any], names: Names) -> list[Reached]:
    """Its hooks and attributes, with all of its children; of a library's layer those that the forward may name."""
    found = [one for table in _TABLES for one in hooks_in(own.get(table), table)]
    kind: Any = type(value)
    is_layer = _is_library(kind.__module__)
    known = (
        {} if is_layer and kind not in _HOLDERS else own.get("_parameters", {})
    )  # a layer's weights are not what a loop writes to
    frozen = {n: p for n, p in known.items() if p is not None and not p.requires_grad}
    every = {**{n: v for n, v in own.items() if n not in _HOOKS}, **frozen, **own.get("_buffers", {})}
    by_library = is_layer or not _has_forward(kind)
    used = (None if kind in _HOLDERS else _used_by(kind)) if by_library else names
    inner = None if by_library else names
    found += [Reached(n, v, inner) for n, v in every.items() if used is None or n in used]
    return found + [Reached(n, m, inner) for n, m in own.get("_modules", {}).items() if by_library or names is None or n in names]


@cache
def _used_by(kind: Any) -> Names:
    """The names that a class's forward uses, and the methods of its own that it may call."""
    methods = {
        n: fn
        for one in reversed(kind.__mro__)
        if one is not nn.Module
        for n, fn in vars(one).items()
        if isinstance(fn, FunctionType)
    }
    found, asked = frozenset(("forward",)), set[str]()
    while calls := [n for n in found if n in methods and n not in asked]:
        asked.update(calls)
        for name in calls:
            used = names_in(methods[name].__code__)
            if used is None:
                return None
            found |= used
    return found


def hooks_in(table: Any, name: str) -> list[Reached]:
    """The hooks of a table that has this ``name``, but for those of torch and of this package; first those that may change a pass."""
    every = table.values() if isinstance(table, dict) else ()  # scripted modules have none
    owners: list[tuple[Any, Any]] = [(hook, type(getattr(hook, "__self__", hook))) for hook in every]
    users = sorted((hook for hook, kind in owners if not _is_machinery(kind)), key=is_silent)
    return [Reached((SILENT if is_silent(hook) else "", name, k), hook, None) for k, hook in enumerate(users)]


@cache
def _has_forward(kind: Any) -> bool:
    """Whether a class of the user's own has the forward, so that the names that it uses are known."""
    return any("forward" in vars(one) and not _is_library(one.__module__) for one in kind.__mro__)


def _of_class(kind: type, names: Names, of: Any) -> list[Reached]:
    """What a class and its bases hold; for functions, what they use of the object or class ``of``."""
    found: list[Reached] = []
    runs = ("forward", "setup_context", "backward", "vjp") if issubclass(kind, torch.autograd.Function) else ("forward",)
    for one in kind.__mro__:
        if _is_library(one.__module__):
            continue
        for name, value in list(vars(one).items()):
            called = name in runs or (name.startswith("__") and isinstance(value, FunctionType) and name not in _OTHER)
            if called or names is None or name in names:
                found += _member((one.__qualname__, name), value, names, of, called=called)
    return found


def _member(at: Any, value: Any, names: Names, of: Any, *, called: bool) -> list[Reached]:
    if isinstance(value, MemberDescriptorType):  # a slot, perhaps empty
        return [Reached(at, getattr(of, value.__name__, None), names)] if not isinstance(of, type) else []
    if isinstance(value, GetSetDescriptorType):
        return []
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, FunctionType):
        return _method(at, value, of) if called or names is not None else []
    return [Reached(at, value, names)]


def _method(at: Any, fn: Any, of: Any) -> list[Reached]:
    if not isinstance(fn, FunctionType):
        return [Reached(at, of, None)]
    return [Reached((at, "function"), fn, None), Reached((at, "of"), of, names_in(fn.__code__))]


def _of_function(fn: FunctionType) -> list[Reached]:
    if _is_library(fn.__module__):
        return []
    names, used = names_in(fn.__code__), _globals(fn.__code__)
    named: list[tuple[Any, Any]] = [(name, fn.__globals__[name]) for name in used if name in fn.__globals__]
    named += [(("import", name), modules[name]) for name in _imported(fn.__code__) if name in modules]
    defaults = [*enumerate(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).items()]
    own = [("attributes", vars(fn))] if vars(fn) else []
    every = [*((("default", k), v) for k, v in defaults), *own, *named]
    return [*cells_of(fn), *(Reached(at, v, names) for at, v in every)]


def cells_of(fn: FunctionType) -> list[Reached]:
    """What a function holds in its closure."""
    cells: list[Reached] = []
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
        try:
            cells.append(Reached(("cell", name), cell.cell_contents, names_in(fn.__code__)))
        except ValueError:  # not set yet
            continue
    return cells


@cache
def words_in(code: CodeType) -> frozenset[str]:
    """The names that code uses, nested code included, and its strings, for ``getattr`` and the like."""
    inner = [words_in(one) for one in code.co_consts if isinstance(one, CodeType)]
    return frozenset(code.co_names).union(_strings(code.co_consts), *inner)


def names_in(code: CodeType) -> Names:
    """The same; None: it may mean any name."""
    found = words_in(code)
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
    return (value for value in all_in(values) if isinstance(value, str))


@cache
def _is_machinery(kind: Any) -> bool:
    """Whether it is a part of what runs beside the user's program: this package, torch's compiler, sharding and loggers."""
    return not issubclass(kind, nn.Module) and (kind.__module__ or "").startswith(_MACHINERY)


def _is_library(module: str | None) -> bool:
    return _is_installed((module or "").split(".")[0])


@cache
def _is_installed(package: str) -> bool:
    """Whether it came with Python or an installer: then its code keeps nothing of a run, except in its objects."""
    if package in stdlib_module_names and package != "__main__":
        return True
    file = vars(modules.get(package, object)).get("__file__")
    return file is not None and any(place in Path(file).resolve().parents for place in _INSTALLED)
