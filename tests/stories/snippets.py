"""The Python of a page of the documentation, run as it is printed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["DOCS", "pages", "snippets_run"]

DOCS = Path(__file__).resolve().parents[2] / "docs"


def pages() -> Iterator[str]:
    """All pages that hold Python, but the notebooks and the reference."""
    for page in (*DOCS.glob("*.md"), *DOCS.glob("explanation/*.md")):
        if _snippets(str(page.relative_to(DOCS))):
            yield str(page.relative_to(DOCS))


def snippets_run(page: str, count: int = 0, *, apart: bool = False, given: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run a page's snippets, one after the other, or each by itself (``apart``); the names that the last one left.

    Args:
        page: its path in the documentation.
        count: how many snippets there are; 0: any number.
        apart: each begins without the names of those before.
        given: names that are there at the beginning.
    """
    snippets = _snippets(page)
    assert len(snippets) == count or not count
    names: dict[str, Any] = {"__name__": "__main__", **(given or {})}
    for snippet in snippets:
        names = {"__name__": "__main__"} if apart else names
        exec(compile(snippet, page, "exec", dont_inherit=True), names)
    return names


def _snippets(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.DOTALL | re.MULTILINE)
