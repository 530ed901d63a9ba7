"""Argument checks: one sentence shape for every refusal.

Each check returns the value in its canonical type, so that a constructor can write
``rate = _check.probability(rate=rate)``. NaN passes no check, and a ``bool`` is never taken for a number.

    >>> positive_int(steps=3)
    3
    >>> positive(noise_multiplier=-1.0)
    Traceback (most recent call last):
    ...
    hushgrad.errors.ArgumentError: Expected noise_multiplier=-1.0 to be greater than 0.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import math
import re
import sys
import types
from collections.abc import Callable, Collection, Mapping
from numbers import Integral, Real
from typing import Any, NoReturn, TypeVar

from hushgrad.errors import ArgumentError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_DEEPEST = 200  # levels of JSON
_LARGEST = 2**63 - 1  # largest count: more fits no array, file or database


def fail(name: str, value: object, constraint: str, remedy: str = "") -> NoReturn:
    """Raise an ArgumentError in its standard form: ``Expected {name}={value!r} {constraint}. {remedy}``."""
    try:
        shown = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or deeply nested lists
        shown = f"<{type(value).__name__}>"
    if len(shown) > 100:
        shown = shown[:60] + "..." + shown[-37:]  # both ends: the name of a file is the last part of its path
    raise ArgumentError(f"Expected {name}={shown} {constraint}.{' ' + remedy if remedy else ''}")


def answering(remedies: Mapping[str, str] | None = None, *, also: Collection[str] = ()) -> Callable[[F], F]:
    """A decorator that refuses unknown keyword arguments with an :class:`ArgumentError` that names the right one.

    Args:
        remedies: what to say about words that people bring from other libraries.
        also: further names that are accepted, if the function passes options on.

        >>> @answering({"target_epsilon": "Say epsilon."})
        ... def plan(*, epsilon: float) -> float: return epsilon
        >>> plan(target_epsilon=3.0)
        Traceback (most recent call last):
        ...
        hushgrad.errors.ArgumentError: Expected 'target_epsilon' to be an argument of plan. Say epsilon.
    """

    def wrap(function: F) -> F:
        taken = inspect.signature(function).parameters.values()
        known = [one.name for one in taken if one.name not in ("self", "cls") and one.kind is not one.VAR_KEYWORD]
        answer, names, words = _answer, [*known, *also], remedies or {}

        def called(*arguments: Any, **named: Any) -> Any:
            for name in named:
                if name not in names:
                    answer(function.__name__, name, names, words)
            return function(*arguments, **named)

        # With the function's own globals, so that doctest and inspect find it in its module.
        made = types.FunctionType(called.__code__, function.__globals__, function.__name__, None, called.__closure__)
        return functools.update_wrapper(made, function)  # type: ignore[return-value]

    return wrap


def _answer(function: str, name: str, known: list[str], remedies: Mapping[str, str]) -> NoReturn:
    close = difflib.get_close_matches(name, known, n=1)
    remedy = remedies.get(name) or (f"Did you mean {close[0]!r}?" if close else f"It takes {', '.join(known)}.")
    raise ArgumentError(f"Expected {name!r} to be an argument of {function}. {remedy}")


def parsed(text: str | bytes) -> Any:
    """The value of JSON text. Raises ArgumentError for invalid text, for nesting that is too deep, and for an object with a repeated key,
    which one reader would resolve to the first value and another to the last.
    """
    try:
        if _depth(text) > _DEEPEST:  # before Python's recursion limit is reached
            raise ArgumentError(f"Expected JSON text, got something else: it is nested more than {_DEEPEST} levels deep.")
        return json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(f"Expected JSON text, got something else: {error}.") from None


def parsed_object(text: str | bytes) -> dict[str, Any]:
    """The object in JSON text; an empty one for any other text, which may be half-written or another program's."""
    try:
        found = parsed(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def toml(text: str) -> dict[str, Any]:
    """The tables of TOML text; raises ValueError for invalid text."""
    if sys.version_info >= (3, 11):
        import tomllib as reader
    else:
        import tomli as reader  # the same module, for Python 3.10
    tables: dict[str, Any] = reader.loads(text)
    return tables


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object names a thing twice")
    return found


def _depth(text: str | bytes) -> int:
    """How deep brackets are nested outside strings; 0 if there are too few to matter."""
    text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    if text.count("[") + text.count("{") <= _DEEPEST:
        return 0
    level = deepest = 0
    for bracket in re.findall(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', text):
        level += (bracket in "[{") - (bracket in "]}")
        deepest = max(deepest, level)
    return deepest


def _only(argument: dict[str, Any]) -> tuple[str, Any]:
    ((name, value),) = argument.items()
    return name, value


def _real(name: str, value: object, constraint: str, remedy: str = "") -> float:
    # numpy scalars register as Real/Integral, so they pass; bools do too, and are refused first.
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):
        fail(name, value, "to be a number", remedy)
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:  # an integer beyond the largest float
        number = math.nan
    if math.isnan(number):
        fail(name, value, constraint, remedy)
    return number


def number(remedy: str = "", **argument: Any) -> float:
    """A finite real number."""
    ((name, value),) = argument.items()
    if type(value) is float and math.isfinite(value):  # nearly always, and it is checked in every step
        return value
    x = _real(name, value, "to be finite", remedy)
    return x if math.isfinite(x) else fail(name, value, "to be finite", remedy)


def positive(remedy: str = "", **argument: Any) -> float:
    """A finite real number greater than 0."""
    name, value = _only(argument)
    x = _real(name, value, "to be greater than 0", remedy)
    return x if 0 < x < math.inf else fail(name, value, "to be finite" if x == math.inf else "to be greater than 0", remedy)


def non_negative(remedy: str = "", **argument: Any) -> float:
    """A finite real number of at least 0."""
    name, value = _only(argument)
    x = _real(name, value, "to be at least 0 and finite", remedy)
    return x if 0 <= x < math.inf else fail(name, value, "to be at least 0 and finite", remedy)


def between(low: float, high: float, *, closed: str = "neither", remedy: str = "", **argument: Any) -> float:
    """A number in an interval; ``closed`` is one of "neither", "left", "right", "both"."""
    name, value = _only(argument)
    left, right = closed in ("left", "both"), closed in ("right", "both")
    constraint = f"to lie in {'[' if left else '('}{low:g}, {high:g}{']' if right else ')'}"
    x = _real(name, value, constraint, remedy)
    inside = (low <= x if left else low < x) and (x <= high if right else x < high)
    return x if inside else fail(name, value, constraint, remedy)


def probability(remedy: str = "", **argument: Any) -> float:
    """A number in [0, 1]."""
    return between(0, 1, closed="both", remedy=remedy, **argument)


def rate(remedy: str = "", **argument: Any) -> float:
    """A sampling rate: a number in (0, 1]. Subnormal floats are refused."""
    x = between(0, 1, closed="right", remedy=remedy, **argument)
    if x < sys.float_info.min:
        fail(*_only(argument), f"to be at least {sys.float_info.min!r}, the least float with all its digits", remedy)
    return x


def delta(remedy: str = "", *, zero: bool = False, **argument: Any) -> float:
    """A privacy delta: a number in (0, 1), or also 0 where ``zero`` is allowed. Subnormal floats are refused."""
    x = between(0, 1, closed="left" if zero else "neither", remedy=remedy, **argument)
    if 0 < x < sys.float_info.min:
        fail(
            *_only(argument),
            f"to be {'0 or ' * zero}at least {sys.float_info.min!r}, the least float with all its digits",
            remedy,
        )
    return x


def integer(low: int | None = None, *, remedy: str = "", **argument: Any) -> int:
    """An integer; if ``low`` is given, one from ``low`` to 2^63 - 1. Floats are refused even when they are whole."""
    ((name, value),) = argument.items()
    if type(value) is int and (low is None or low <= value <= _LARGEST):  # nearly always, and it is checked in every step
        return value
    constraint = "to be an integer" if low is None else f"to be an integer of at least {low}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        fail(name, value, constraint, remedy)
    whole = int(value)
    if whole > _LARGEST and low is not None:
        fail(name, value, "to be less than 2^63", remedy)
    return whole if low is None or whole >= low else fail(name, value, constraint, remedy)


def positive_int(remedy: str = "", **argument: Any) -> int:
    """An integer of at least 1."""
    return integer(1, remedy=remedy, **argument)


def flag(**argument: Any) -> bool:
    """True or False."""
    return instance(bool, **argument)


def each(**checks: Callable[..., Any]) -> Mapping[str, Callable[..., Any]]:
    """The checks of a value's fields by name, for the class attribute ``expected`` of a :class:`Value`."""
    return types.MappingProxyType(checks)


def optional(check: Callable[..., Any]) -> Callable[..., Any]:
    """A check that lets None through."""
    return lambda **argument: None if _only(argument)[1] is None else check(**argument)


def one_of(choices: Collection[T], remedy: str = "", **argument: Any) -> T:
    """One of a few allowed values; a misspelt string is answered with the closest allowed one."""
    name, value = _only(argument)
    if any(_is(value, choice) for choice in choices):  # not "in": a list is unhashable, and is refused below
        return value  # type: ignore[no-any-return]
    if not remedy and isinstance(value, str):
        close = difflib.get_close_matches(value, [str(c) for c in choices], n=1)
        remedy = f"Did you mean {close[0]!r}?" if close else ""
    return fail(name, value, f"to be one of {', '.join(repr(c) for c in choices)}", remedy)


def _is(value: object, choice: object) -> bool:
    """Whether they are equal; never for an array, which compares element by element."""
    same = value == choice
    return not getattr(same, "shape", ()) and bool(same)


def several(**argument: Any) -> tuple[Any, ...]:
    """The items of a list, tuple or array as a tuple; a string is refused."""
    name, value = _only(argument)
    try:
        return tuple(fail(name, value, "to be a list") if isinstance(value, (str, bytes)) else value)
    except TypeError:  # not iterable, or an array without dimensions
        fail(name, value, "to be a list")


def instance(kind: type[T] | tuple[type, ...], remedy: str = "", **argument: Any) -> T:
    """An instance of a class."""
    name, value = _only(argument)
    if isinstance(value, kind):
        return value  # type: ignore[return-value]
    names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
    if isinstance(value, type) and issubclass(value, kind):  # as a table of plans prints it
        remedy = f"That is the class itself: give one of its kind, {value.__name__}(...)."
    return fail(name, value, f"to be of type {names}", remedy)
