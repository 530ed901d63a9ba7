"""Names in code: the variables and attributes from which a data set reads its records."""

from __future__ import annotations

import dis
import functools
import types


def own_classes(kind: type) -> list[type]:
    """A class and its bases, without those of torch, which hold no records."""
    return [cls for cls in kind.__mro__ if cls is not object and cls.__module__.partition(".")[0] not in ("torch", "typing")]


def methods_of(kind: type) -> dict[str, types.FunctionType]:
    """The functions of a class by name, including those behind properties."""
    found: dict[str, types.FunctionType] = {}
    for cls in reversed(own_classes(kind)):
        for name, each in vars(cls).items():
            code = each.fget if isinstance(each, property) else each
            code = code.func if isinstance(code, functools.cached_property) else getattr(code, "__func__", code)
            if isinstance(code, types.FunctionType):
                found[name] = code
    return found


def names_of_reading(kind: type) -> set[str]:
    """Every name in the code that reads a record, and in the methods that it calls, recursively."""
    return set[str]().union(*map(names_in, _reading(kind)))


def names_only_read(kind: type) -> set[str]:
    """The same without attributes that this code writes: what it counts or caches itself."""
    written = {step.argval for code in _reading(kind) for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"}
    return names_of_reading(kind) - written


def _reading(kind: type) -> list[types.CodeType]:
    """The code of the methods that read a record."""
    methods, found, todo = methods_of(kind), [], ["__getitem__", "__getitems__"]
    while todo:
        method = methods.pop(todo.pop(), None)
        if method is not None:
            found.append(method.__code__)
            todo += sorted(names_in(method.__code__))
    return found


def names_in(code: types.CodeType) -> set[str]:
    """Every name of a variable, attribute or function in ``code`` and in the functions defined inside it."""
    inner = (names_in(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*inner)
