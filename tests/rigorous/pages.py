"""Tables that programs write into pages, between two marks."""

from __future__ import annotations

__all__ = ["written"]


def written(text: str, name: str, lines: list[str]) -> str:
    """``text`` with ``lines`` between the marks ``<!-- name: begin -->`` and ``<!-- name: end -->``."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, tail = text[: text.index(begin)], text[text.index(end) :]
    return f"{head}{begin}\n" + "\n".join(lines) + f"\n{tail}"
