"""Tables that programs write into pages, between two marks."""

from __future__ import annotations

__all__ = ["between", "written"]


def written(text: str, name: str, lines: list[str]) -> str:
    """``text`` with ``lines`` between the marks ``<!-- name: begin -->`` and ``<!-- name: end -->``."""
    head, _, tail = _cut(text, name)
    return head + "\n".join(lines) + f"\n{tail}"


def between(text: str, name: str) -> list[str]:
    """The lines that are there now."""
    return _cut(text, name)[1].splitlines()


def _cut(text: str, name: str) -> tuple[str, str, str]:
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    first, last = text.index(begin) + len(begin), text.index(end)
    return text[:first], text[first:last], text[last:]
