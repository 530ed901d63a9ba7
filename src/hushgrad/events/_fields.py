"""Checks and printing that the values of this package share."""

from __future__ import annotations

import enum
from dataclasses import fields as fields_of
from typing import Any

from hushgrad import _check
from hushgrad._value import Value, is_silent

_LEAST_NOISE = 1e-100  # below this, or above its inverse, squares leave the range of floats


def noise(**argument: Any) -> float:
    """A scale of noise: 0, or a number whose square and inverse square are finite floats."""
    ((name, value),) = argument.items()
    scale = _check.non_negative(**argument)
    if scale and not _LEAST_NOISE <= scale <= 1 / _LEAST_NOISE:
        _check.fail(name, value, f"to be 0 or to lie in [{_LEAST_NOISE:g}, {1 / _LEAST_NOISE:g}]")
    return scale


def positive_noise(**argument: Any) -> float:
    """A positive scale of noise whose square and inverse square are finite floats."""
    _check.positive(**argument)
    return noise(**argument)


def word(kind: Any, **argument: Any) -> Any:
    """The member of an enum, given the member or its value."""
    ((_, value),) = argument.items()
    return value if isinstance(value, kind) else kind(_check.one_of([member.value for member in kind], **argument))


def shown(value: Value) -> str:
    """A value as text: the name of its class and its fields, without later-added ones at their default."""
    texts = [_show_field(f.name, getattr(value, f.name)) for f in fields_of(value) if not is_silent(value, f)]  # type: ignore[arg-type]
    return f"{type(value).__name__}({', '.join(text for text in texts if text)})"


def _show_field(name: str, x: object) -> str:
    if isinstance(x, enum.Enum):
        return f"{name}={x.value}"
    if isinstance(x, bool):
        return name if x else ""  # a flag shows its name or nothing
    if isinstance(x, float):
        return f"{x:.6g}"
    if isinstance(x, tuple):
        shown = [_show_field(name, item) for item in x[:4]]
        return f"[{', '.join(shown)}{', ...' if len(x) > 4 else ''}]"
    return str(x)
