"""Values: frozen dataclasses with one JSON form.

Every public description in hushgrad (an event, a sampler, a clipper, a noise mechanism, a plan) is a ``Value``: frozen,
compared by content, and written as a JSON object whose first key names its family and whose value names its class:

    {"event": "Gaussian", "noise_multiplier": 1.1}

A family is an abstract subclass that is declared with ``family="..."``; its concrete subclasses register themselves. An
unknown family, class or field is refused, never skipped: a reader that does not understand a description must not guess.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

from hushgrad import _check, _papers
from hushgrad.errors import ArgumentError

V = TypeVar("V", bound="Value")

_DEPTH = 200  # levels of nesting; no real description is deeper, and a crafted file must not exhaust the stack
# Marks a field that was added to a class later: at its default it is left out of the JSON form, so that old files stay valid.
LATER = {"later": True}
_KINDS = 1024  # different items of a list that are cached while it is read


class Value:
    """Base of all frozen values; gives ``to_json`` and ``from_json``."""

    papers: ClassVar[tuple[_papers.Paper, ...]] = ()  # where it is described
    expected: ClassVar[Mapping[str, Callable[..., Any]]] = {}  # checks of fields, by name, which return what is stored
    _families: ClassVar[dict[str, type[Value]]] = {}
    _family: ClassVar[str] = ""
    _classes: ClassVar[dict[str, type[Value]]] = {}

    def __init_subclass__(cls, *, family: str | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.expected = {**getattr(super(cls, cls), "expected", {}), **cls.expected}  # inherited fields keep their checks
        if family is not None:
            cls._family, cls._classes = family, {}
            Value._families[family] = cls
        elif cls._family and not cls.__name__.startswith("_"):
            cls._classes[cls.__name__] = cls

    def __post_init__(self) -> None:
        self._keep(**{name: check(**{name: getattr(self, name)}) for name, check in self.expected.items()})

    def to_json(self) -> dict[str, Any]:
        """This value as a JSON object (built-in types only, ready for ``json.dumps``)."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        content = {f.name: _encode(getattr(self, f.name)) for f in fields if f.init and not is_silent(self, f)}
        return {self._family: type(self).__name__, **content}

    def _keep(self, **checked: Any) -> None:
        """Set fields, in ``__post_init__``, to what their checks returned: plain Python numbers, whatever the caller passed."""
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_json(cls: type[V], data: object) -> V:
        """The value described by ``data``: a JSON object, or the text of one. Anything unknown is refused."""
        if isinstance(data, (str, bytes)):
            data = _check.parsed(data)
        value = _decode(data, depth=0)
        if not isinstance(value, cls):
            _check.fail("data", data, f"to describe a {cls.__name__}")
        return value


def is_silent(value: Value, field: dataclasses.Field[Any]) -> bool:
    """Whether a later-added field has its default, so that it is left out of the JSON form."""
    return bool(field.metadata.get("later")) and getattr(value, field.name) == field.default


def _encode(x: Any) -> Any:
    if isinstance(x, Value):
        return x.to_json()
    if isinstance(x, enum.Enum):
        return x.value  # __post_init__ of the owner turns the string into the enum member again
    if isinstance(x, (tuple, list)):
        return [_encode(item) for item in x]
    if isinstance(x, float) and not math.isfinite(x):
        return {"float": str(x)}  # JSON has no infinity
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    raise TypeError(f"a Value field of type {type(x).__name__} has no JSON form")


def _decode(x: Any, depth: int) -> Any:
    if depth > _DEPTH:
        raise ArgumentError(f"Expected a description nested at most {_DEPTH} deep.")
    if isinstance(x, list):
        return _decode_list(x, depth)
    if not isinstance(x, dict):
        return x
    if set(x) == {"float"} and x["float"] in ("inf", "-inf"):
        return float(x["float"])
    return _decode_value(x, depth)


def _decode_list(items: list[Any], depth: int) -> tuple[Any, ...]:
    """The values of a list. Equal descriptions become one object, so that a million steps of a few kinds are read in seconds.

    They are compared as text, because 1, 1.0 and true are equal in Python but different in JSON.
    """
    if depth > 2:  # long lists are near the top; comparing at every level would take quadratic time on nested files
        return tuple(_decode(item, depth + 1) for item in items)
    seen: dict[str, Any] = {}
    values: list[Any] = []
    for item in items:
        try:
            text = repr(item)
        except RecursionError:
            raise ArgumentError(f"Expected a description nested at most {_DEPTH} deep.") from None
        if text not in seen:
            if len(seen) == _KINDS:
                seen.clear()
            seen[text] = _decode(item, depth + 1)
        values.append(seen[text])
    return tuple(values)


def _known(table: Any, **argument: Any) -> str:
    ((name, value),) = argument.items()
    if not isinstance(value, str):
        _check.fail(name, value, "to be a string")
    return str(_check.one_of(sorted(table), **argument))


def _class_of(family: type[Value], name: str) -> type[Value]:
    """The class of this name. Some classes are imported lazily, so before a name is refused all of its package is imported."""
    home, _, _ = family.__module__.rpartition(".")
    if name not in family._classes and home.startswith("hushgrad."):
        room = importlib.import_module(home)
        names = vars(room).get("__all__", [])
        for public in [name] if name in names else names:
            getattr(room, public)
    there = {word: kind for word, kind in family._classes.items() if not _is_abstract(kind)}  # type: ignore[arg-type]  # mypy checks the hash of instances
    return there[_known(there, **{family._family: name})]


@lru_cache(maxsize=1024)
def _is_abstract(kind: type) -> bool:
    return any(getattr(getattr(kind, name), "__isabstractmethod__", False) for name in dir(kind))


def _decode_value(x: dict[str, Any], depth: int) -> Value:
    # A field may have a family's name (an entry's "event"): then its content is an object, while a class name is a string.
    families = [key for key in x if key in Value._families and isinstance(x[key], str)]
    if len(families) != 1:
        _check.fail("data", x, f"to name one of {', '.join(sorted(Value._families))}")
    family = families[0]
    kind = _class_of(Value._families[family], x[family])
    known = {f.name for f in dataclasses.fields(kind) if f.init}  # type: ignore[arg-type]
    fields = {name: _decode(item, depth + 1) for name, item in x.items() if name != family}
    for name in fields:
        if name not in known:
            _check.fail("field", name, f"to be a field of {kind.__name__}")
    try:
        return kind(**fields)
    except TypeError as error:  # a missing field
        raise ArgumentError(f"Expected a complete {kind.__name__}: {error}.") from None
