"""Calls a named function with the other keys of a recipe's table as options, each checked for its type.

This is the only place where a file may name code. Recipes, run folders and model files are data; names are imported only if allowed.
``module:function`` in a file runs that module when it is imported, so whoever passes on such a file could run a program on the reader's
machine. It is refused unless the reader allows code: by ``--allow-code``, or by a recipe that is itself a program (.py).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hushgrad import _check
from hushgrad.errors import ArgumentError

# Types that a recipe can write, by the annotation of what takes them.
_KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    str: ((str,), "a string"),
    int: ((int,), "a whole number"),
    float: ((float, int), "a number"),
    bool: ((bool,), "true or false"),
    list: ((list, tuple), "a list"),
    dict: ((dict,), "a table"),
    NoneType: ((NoneType,), ""),
}


def require_known(table: Mapping[str, Any], names: list[str], where: str) -> None:
    """Refuse a key that is not among ``names``, with the closest one.

    Args:
        table: of a recipe.
        names: the keys that it may have.
        where: which table it is, for the message.
    """
    for key in table:
        if key not in names:
            import difflib

            close = difflib.get_close_matches(key, names, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"Known keys: {', '.join(names)}."
            raise ArgumentError(f"Expected {key!r} to be a key of {where}. {hint}")


def call(table: Mapping[str, Any], known: Mapping[str, Callable[..., Any]], what: str, *arguments: Any, allow_code: bool) -> Any:
    """Call the named function with the table's other keys as options.

    Args:
        table: of a recipe, with a name.
        known: functions by name.
        what: the table's own name.
        arguments: what the function gets before the options.
        allow_code: whether a name may be ``module:function``.
    """
    name = str(table["name"])
    options = {key: value for key, value in table.items() if key != "name"}
    if ":" in name:
        return imported(name, what, allow_code)(*arguments, **options)
    make = known[_check.one_of(known, **{what: name})]
    parameters = inspect.signature(make).parameters
    require_known(
        options, [p for p in parameters if parameters[p].kind is inspect.Parameter.KEYWORD_ONLY], f"[{what}] for {name!r}"
    )
    try:
        inspect.signature(make).bind(*arguments, **options)
    except TypeError as error:
        raise ArgumentError(f"Expected a complete [{what}] for {name!r}: {error}.") from None
    kinds = get_type_hints(make)
    for key, value in options.items():
        _require_kind(key, value, kinds[key])
    return make(*arguments, **options)


def _require_kind(key: str, value: Any, kind: Any) -> None:
    """Require that a value has the type that the function declares: "yes,no" is not a list, and would be read letter by letter."""
    union = isinstance(kind, UnionType) or get_origin(kind) is Union
    asked = [get_origin(one) or one for one in (get_args(kind) if union else (kind,))]
    kinds = [_KINDS[one] for one in asked if one in _KINDS]
    if len(kinds) < len(asked):  # a value of the house, which a recipe cannot write
        return
    if not any(isinstance(value, types) and (not isinstance(value, bool) or bool in types) for types, _ in kinds):
        _check.fail(key, value, f"to be {' or '.join(word for types, word in kinds if word)}")


def imported(name: str, what: str, allow_code: bool) -> Callable[..., Any]:
    """The function that ``module:function`` names.

    Args:
        name: ``module:function``.
        what: the table that names it, for the message.
        allow_code: whether the reader of the file has said that code may run.

    Raises:
        ArgumentError: where code is not allowed, or there is no such function.
    """
    require_code_allowed(name, what, allow_code)
    module, _, function = name.partition(":")
    try:
        found: Callable[..., Any] = vars(importlib.import_module(module))[function]
    except (ImportError, KeyError) as error:
        raise ArgumentError(f"Expected {what}={name!r} to name a function as module:function ({error!r}).") from None
    return found


def require_code_allowed(name: str, what: str, allow_code: bool) -> None:
    """Refuse a name of code where code is not allowed; nothing is imported.

    Args:
        name: of a table: ``module:function``, or a word that the library knows.
        what: the table that names it, for the message.
        allow_code: whether the reader of the file has said that code may run.
    """
    if ":" in name and not allow_code:
        raise ArgumentError(
            f"{what}={name!r} names code, which would be run. Read that module, and add --allow-code if you trust it "
            "(allow_code=True in Python)."
        )
