"""The snippets of the pages run, in order, as they are printed."""

from __future__ import annotations

import pytest
from snippets import snippets_run


@pytest.mark.parametrize(("page", "count"), [("tutorial.md", 5), ("sampling.md", 4)])
def test_snippets_run(page, count, capsys):
    snippets_run(page, count)
    if page == "tutorial.md":
        assert capsys.readouterr().out.count("-DP per example") >= 4
