"""Lazy imports: names of a package that are imported on first use, because they need torch."""

from __future__ import annotations

import importlib
import sys

TYPE_CHECKING = False  # as in typing, whose import takes 17 ms: this runs before ``cli.entry`` can handle an interrupt
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def later(room: str, instead: Callable[[str], str] = lambda name: "") -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a package that imports the names under its ``if TYPE_CHECKING:`` on first use.

    So each name is written once, where type checkers look for it. ``instead`` gives a hint to append to the error for an unknown name.

    >>> getattribute, listed = later("hushgrad.noise")
    >>> getattribute("Source").__module__, "Source" in listed()
    ('hushgrad.noise.source', True)
    """
    homes: dict[str, str] = {}

    def getattribute(name: str) -> Any:
        homes.update({} if homes else _homes(room))
        if name not in homes:
            raise AttributeError(f"module {room!r} has no attribute {name!r}{instead(name)}")
        home = homes[name]
        return importlib.import_module(f"{room}.{name}") if home == room else getattr(importlib.import_module(home), name)

    return getattribute, lambda: sorted(vars(sys.modules[room])["__all__"])


def _homes(room: str) -> dict[str, str]:
    """The module that each name under ``if TYPE_CHECKING:`` is imported from."""
    import ast  # not at the top: most commands need no such name

    source = sys.modules[room].__spec__.loader.get_source(room)  # type: ignore[union-attr]
    blocks = [node for node in ast.parse(source).body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if str(node.module).startswith("hushgrad")]
    return {alias.name: str(node.module) for node in ours for alias in node.names}
