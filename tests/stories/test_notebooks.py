"""The notebooks and the migration guide run as they are printed; each notebook is its page."""

from __future__ import annotations

import importlib
import inspect
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
    assert printed.count("-DP per example") == 3 and printed.rstrip().endswith("True")
    assert "All keys matched" in printed and "BatchNorm" in printed and "GroupNorm" in printed


def test_the_migration_guide_names_every_tutorial_of_opacus_and_words_that_opacus_has():
    page = (DOCS / "migration.md").read_text()
    table = page.partition("## Opacus' tutorials")[2].partition("### ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith(("| Opacus", "|---"))]
    assert len(rows) == 8  # as many as its repository has
    headings = {re.sub(r"[^a-z -]", "", name.lower()).replace(" ", "-") for name in re.findall(r"^#+ (.*)$", page, flags=re.M)}
    assert set(re.findall(r"\]\(#([\w-]+)\)", page)) <= headings

    places = {
        "opacus": ["PrivacyEngine", "GradSampleModule"],
        "opacus.validators": ["ModuleValidator"],
        "opacus.utils.batch_memory_manager": ["BatchMemoryManager"],
        "opacus.layers": ["DPMultiheadAttention", "DPLSTM", "DPRNN", "DPGRU"],
        "opacus.grad_sample": ["register_grad_sampler"],
        "opacus.accountants": ["RDPAccountant", "PRVAccountant", "GaussianAccountant"],
        "opacus.accountants.utils": ["get_noise_multiplier"],
        "opacus.optimizers": ["DistributedDPOptimizer"],
    }
    for module, words in places.items():
        for word in words:
            assert word in page and hasattr(importlib.import_module(module), word), (module, word)
    taken = inspect.signature(importlib.import_module("opacus").PrivacyEngine.make_private_with_epsilon).parameters
    for word in "module optimizer data_loader target_epsilon target_delta epochs max_grad_norm poisson_sampling clipping".split():
        assert word in taken and word in page
