"""What code names: the variables and attributes that a data set reads its records from."""

from __future__ import annotations

import functools
import types


def own_classes(kind: type) -> list[type]:
    """A class and those that it comes from; torch's own hold nobody's records."""
    return [cls for cls in kind.__mro__ if cls is not object and cls.__module__.partition(".")[0] not in ("torch", "typing")]


def methods_of(kind: type) -> dict[str, types.FunctionType]:
    """The functions of a class by name, those behind properties, too."""
    found: dict[str, types.FunctionType] = {}
    for cls in reversed(own_classes(kind)):
        for name, each in vars(cls).items():
            code = each.fget if isinstance(each, property) else each
            code = code.func if isinstance(code, functools.cached_property) else getattr(code, "__func__", code)
            if isinstance(code, types.FunctionType):
                found[name] = code
    return found


def names_of_reading(kind: type) -> set[str]:
    """Every name in the code that reads a record, in the methods that it names, and so on."""
    methods, names, todo = methods_of(kind), set[str](), ["__getitem__", "__getitems__"]
    while todo:
        method = methods.pop(todo.pop(), None)
        if method is not None:
            new = names_in(method.__code__) - names
            names |= new
            todo += sorted(new)
    return names


def names_in(code: types.CodeType) -> set[str]:
    """Every name of a variable, an attribute or a function in ``code`` and in the functions that it makes."""
    inner = (names_in(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*inner)
