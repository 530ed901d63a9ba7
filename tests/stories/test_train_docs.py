"""The snippets of the pages run, in order, as they are printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["tutorial.md", "sampling.md"])
def test_snippets_run(page, capsys):
    scope: dict[str, object] = {}
    snippets = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.S)
    assert len(snippets) >= 4
    for snippet in snippets:
        exec(compile(snippet, page, "exec"), scope)
    if page == "tutorial.md":
        assert capsys.readouterr().out.count("-DP per example") >= 4
