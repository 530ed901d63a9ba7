"""What a forward writes to a model's attributes, undone."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hushgrad.clipping.proof.state import TORCHS

__all__ = ["attributes_restored"]

_HELD = (list, dict, set, deque)


@contextmanager
def attributes_restored(attributes: Sequence[dict[str, Any]], written: Callable[[], None] | None = None) -> Iterator[None]:
    """What a forward inside writes to these, and to lists and dicts that they hold, is undone; ``written`` is told of it."""
    kept = [
        (d, {name: (v, copy.copy(v) if type(v) in _HELD else None) for name, v in d.items() if name not in TORCHS})
        for d in attributes
    ]
    try:
        yield
    finally:
        found = [_undone(d, values) for d, values in kept]
        if written is not None and any(found):
            written()


def _undone(d: dict[str, Any], values: dict[str, tuple[Any, Any]]) -> bool:
    """Put back; whether there was something to put back."""
    new = [name for name in d if name not in values and name not in TORCHS]
    for name in new:
        del d[name]
    wrote = bool(new)
    for name, (value, inside) in values.items():
        if d.get(name) is not value:
            d[name], wrote = value, True
        if inside is not None and _differ(value, inside):
            _refill(value, inside)
            wrote = True
    return wrote


def _differ(value: Any, inside: Any) -> bool:
    if len(value) != len(inside):
        return True
    if isinstance(value, dict):
        return any(name not in inside or v is not inside[name] for name, v in value.items())
    return any(a is not b for a, b in zip(inside, value, strict=True))


def _refill(value: Any, inside: Any) -> None:
    value.clear()
    value.update(inside) if isinstance(value, (dict, set)) else value.extend(inside)
