"""The Python of every page runs as it is printed, from an empty scope, block after block."""

from __future__ import annotations

import pytest
import torch
from snippets import DOCS, pages, snippets_run

ELSEWHERE = {  # run by tests of their own, with what they need beside them; that of inference.md by a run that is there
    *("audit.md", "denoise.md", "federated.md", "inference.md", "integrations.md", "language-models.md", "ledger.md", "tuning.md")
}


@pytest.mark.filterwarnings("ignore")  # other libraries' advice
@pytest.mark.parametrize("page", sorted({*pages()} - ELSEWHERE))
def test_snippets_run(page, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    snippets_run(page, given=_yours() if page == "index.md" else {})
    if page == "tutorial.md":
        assert capsys.readouterr().out.count("-DP per example") >= 4


def _yours():
    """What the first page takes for granted."""
    model, data = torch.nn.Linear(2, 2), (torch.randn(60_000, 2), torch.randint(2, (60_000,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {"model": model, "optimizer": optimizer, "loss_fn": torch.nn.CrossEntropyLoss()}
    return {**names, "train_set": torch.utils.data.TensorDataset(*data)}


def test_pages_that_run_elsewhere_are_there():
    assert all((DOCS / page).is_file() for page in ELSEWHERE)
