"""The scaling law of private language models beside the published table that it was fitted to."""

from __future__ import annotations

import json
import runpy
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushgrad.accounting import calibrate_noise, epsilon
from hushgrad.cli.main import main
from hushgrad.events import Gaussian
from hushgrad.planner import allocations, scaling_law
from hushgrad.planner.scaling_law import LAW

TABLE = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "scaling.py"))["TABLE"]  # arXiv 2501.18914, Table 2


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0]:.0e}-{row[1]}")
def test_published_losses_and_the_best_models_are_met(row):
    records, budget, compute, loss, parameters, steps, batch = row
    noise = calibrate_noise(epsilon=budget, delta=1e-8, steps=int(steps), rate=batch / records)
    assert LAW.loss(parameters, steps, noise / batch) == pytest.approx(loss, rel=0.03)
    best = allocations(compute=compute, epsilon=budget, delta=1e-8, dataset_size=int(records), exact=1)[0]
    assert parameters / 2 < best.parameters < parameters * 2


def test_compute_beyond_which_nothing_is_gained_was_never_fitted():
    found = [scaling_law.saturating(epsilon=row[1], delta=1e-8, dataset_size=int(row[0])) / row[2] for row in TABLE[4::3]]
    assert all(1 / 3 <= ratio <= 3 for ratio in found), found


@given(st.floats(1e17, 1e22), st.floats(1, 64), st.sampled_from([10**6, 10**7, 10**8]))
def test_answers_take_the_compute_and_stay_within_what_was_published(compute, budget, records):
    found = allocations(compute=compute, epsilon=budget, delta=1e-8, dataset_size=records, exact=0)
    assert all(a.loss <= b.loss for a, b in pairwise(found))
    for one in found:
        assert (
            0.99 * compute <= 6 * 512 * one.parameters * one.batch_size * (one.steps + 1) <= 1.01 * compute * (1 + 1 / one.steps)
        )
        assert 4.49e6 < one.parameters < 3.36e8 and 1000 <= one.steps <= 128_000 and 512 <= one.batch_size <= 2**20


def test_the_noise_that_is_shown_meets_the_budget():
    best = allocations(compute=1e20, epsilon=4, delta=1e-8, dataset_size=10**7, exact=1)[0]
    event = Gaussian(best.noise_multiplier).sampled(rate=best.batch_size / 10**7) * best.steps
    assert 3.99 < epsilon(event, delta=1e-8) <= 4


def test_more_noise_or_fewer_steps_never_help():
    assert LAW.loss(1e8, 1e4, 1e-5) < LAW.loss(1e8, 1e4, 1e-4) and LAW.loss(1e8, 1e5, 1e-5) < LAW.loss(1e8, 1e4, 1e-5)


BUDGET = ["--epsilon", "4", "--delta", "1e-8", "--dataset-size", "1e7"]


def test_the_command_answers_in_text_and_json(capsys):
    assert main(["plan", "--compute", "1e20", *BUDGET]) == 0
    assert "parameters  batch size" in capsys.readouterr().out
    assert main(["plan", "--compute", "1e20", *BUDGET, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["allocations"]) == 5 and "Table 2" in found["fit"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["1e12", *BUDGET], "has no runs of less or more"),
        (["nan", *BUDGET], "compute=nan"),
        (["1e22", "--epsilon", "4", "--delta", "1e-8", "--dataset-size", "1000"], "published law covers"),
        (["1e20", *BUDGET, "--epochs", "3"], "has no option --epochs"),
    ],
)
def test_what_the_law_does_not_cover_is_refused_in_a_sentence(words, message, capsys):
    assert main(["plan", "--compute", *words]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
