"""Names of a room that are imported when they are first asked for, because they need torch."""

from __future__ import annotations

import importlib
import sys

TYPE_CHECKING = False  # typing's own, without its 17 ms: this is imported before ``cli.entry`` can answer an interrupt
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def later(room: str, instead: Callable[[str], str] = lambda name: "") -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a room that imports what stands under its ``if TYPE_CHECKING:`` on first use.

    So a name is written where type checkers look for it, and nowhere else. ``instead`` may add to what is said of a name that is
    not there.

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
    """Where each of our names under ``if TYPE_CHECKING:`` is imported from."""
    import ast  # here: most commands ask for no such name

    source = sys.modules[room].__spec__.loader.get_source(room)  # type: ignore[union-attr]
    blocks = [node for node in ast.parse(source).body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if str(node.module).startswith("hushgrad")]
    return {alias.name: str(node.module) for node in ours for alias in node.names}
