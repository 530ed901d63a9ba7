"""The files of a search: written atomically, and never quoted in an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hushgrad import _check
from hushgrad.errors import ArgumentError
from hushgrad.release.atomic import replacing


def found(path: Path, read: Callable[[Any], Any], *, each_line: bool = False) -> Any:
    """The content of a file of the search. Errors never quote it, because it may be the key."""
    try:
        text = path.read_text(encoding="utf-8")
        return read([_check.parsed(line) for line in text.splitlines()] if each_line else _check.parsed(text))
    except (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError):
        raise ArgumentError(f"Expected {path.name} to be as it was written; it was damaged. Start a new search.") from None


def write(path: Path, content: Any) -> None:
    """Write atomically: half a file would be a search that cannot continue, or one that seems complete."""
    with replacing(path, mode=0o644) as new:
        new.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def outcome_of(folder: Path) -> dict[str, Any]:
    """The outcome of a finished trial, from its report."""
    told: dict[str, Any] = found(folder / "report.json", lambda content: dict(content["outcome"]))
    return told
