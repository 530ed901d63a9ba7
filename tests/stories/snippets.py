"""The Python of a page of the documentation, run as it is printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

__all__ = ["snippets_run"]

DOCS = Path(__file__).resolve().parents[2] / "docs"


def snippets_run(page: str, count: int, *, apart: bool = False) -> dict[str, Any]:
    """Run the ``count`` snippets that there are, one after the other, or each by itself (``apart``); the names that the last one left."""
    snippets = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(snippets) == count
    names: dict[str, Any] = {}
    for snippet in snippets:
        names = {"__name__": "__main__"} if apart else names
        exec(compile(snippet, page, "exec", dont_inherit=True), names)
    return names
