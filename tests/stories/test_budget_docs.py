"""The Python in the pages of the ledger and of tuning runs as printed."""

from __future__ import annotations

from pathlib import Path

import pytest
from snippets import DOCS, snippets_run

from hushgrad.budget import Ledger
from hushgrad.train import Plan


def test_the_ledger_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Ledger.create("budget.db").add("patients", epsilon=3.0, delta=1e-4)
    names = snippets_run("ledger.md", 1)
    plan = Plan.dpsgd(noise_multiplier=2.0, delta=1e-4, batch_size=10, dataset_size=1000, steps=20)
    taken = []
    names["train_and_book"](plan, lambda: taken.append(1))
    (booked,) = Ledger("budget.db").reservations("patients")
    assert taken == [1] and booked.state == "committed" and booked.charged == plan.event()


def test_the_tuning_page(capsys: pytest.CaptureFixture[str]) -> None:
    snippets_run("tuning.md", 1, apart=True)
    assert "true epsilon 2 at delta 1e-05" in capsys.readouterr().out


def test_the_figures_of_the_tuning_page() -> None:
    """The row for a naive epsilon of 1 and a mean of 10, computed again."""
    from hushgrad.accounting import calibrate
    from hushgrad.events import Gaussian
    from hushgrad.tuning import Stopping, tuning_cost

    noise = calibrate(lambda s: Gaussian(s).sampled(rate=0.02) * 1000, epsilon=1.0, delta=1e-5)
    trial = Gaussian(noise).sampled(rate=0.02) * 1000
    row = next(line for line in (DOCS / "tuning.md").read_text().splitlines() if line.startswith("| 1 | 10 |"))
    printed = [float(cell) for cell in row.strip("|").split("|")[2:]]
    found = [
        tuning_cost(trial, delta=1e-5, stopping=Stopping(mean=10.0, shape=s)).epsilon for s in (-0.5, 0.0, 1.0, float("inf"))
    ]
    assert printed == [pytest.approx(value, abs=0.006) for value in found]
