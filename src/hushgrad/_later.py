"""Names of a room that are imported when they are first asked for, because they need torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def later(room: str, homes: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a room: ``homes`` says which of its names live in which of its files (or in another room's).

    >>> getattribute = later("hushgrad", {"errors": ("HushgradError",)})
    >>> getattribute("HushgradError").__name__
    'HushgradError'
    """
    found = {name: home for home, names in homes.items() for name in names}

    def getattribute(name: str) -> Any:
        if name not in found:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        home = found[name]
        module = importlib.import_module(home if home.startswith("hushgrad.") else f"{room}.{home}")
        return module if home == name else vars(module)[name]

    return getattribute
