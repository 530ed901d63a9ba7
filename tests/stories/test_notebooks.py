"""The notebooks and the migration guide run as they are printed; each notebook is its page."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted((DOCS / "notebooks").glob("*.md"))


def _run(code: list[str], name: str) -> None:
    scope: dict[str, object] = {"__name__": name}
    for block in code:
        exec(compile(block, name, "exec"), scope)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_notebook_is_its_page_and_runs(page, capsys):
    notebook = page.with_suffix(".ipynb").read_text(encoding="utf-8")
    assert notebook == runpy.run_path(str(DOCS / "notebooks.py"))["notebook"](page.read_text(encoding="utf-8")), "make notebooks"
    cells = json.loads(notebook)["cells"]
    _run(["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"], page.stem)
    assert capsys.readouterr().out


def test_there_are_notebooks_for_images_texts_language_tables_ftrl_and_audits():
    assert {page.stem for page in PAGES} == {"image", "text", "language", "tabular", "ftrl", "audit"}


def test_the_migration_guide_runs_and_opacus_words_are_answered_by_name(capsys):
    page = (DOCS / "migration.md").read_text()
    _run(re.findall(r"```python\n(.*?)```", page, flags=re.S), "migration")
    printed = capsys.readouterr().out
    assert "Expected 'module' to be an argument of make_private" in printed and "Plan.dpsgd(epsilon=...)" in printed
    assert printed.count("-DP per example") >= 2 and printed.rstrip().endswith("True")
