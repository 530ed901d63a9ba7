"""The planner against the reference table: amplification beats correlation at small epsilon, and the reverse at large.

Source of the table: banded square-root noise with cyclic Poisson sampling, PLD accounting; 2000 steps, rate 0.01 (20 expected
participations), delta 1e-6, rmse of prefix sums. Columns: 1 band (DP-SGD), 2, 4, 8, 16, 32, 64 bands, BLT without amplification.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.linalg import solve_triangular

from hushgrad.events import Gaussian
from hushgrad.noise import SGDWorkload
from hushgrad.planner import Comparison, compare, plan_for

SETTING = {"delta": 1e-6, "dataset_size": 60_000, "batch_size": 600, "steps": 2000}
BANDS = ("DP-SGD", "Banded(2)", "Banded(4)", "Banded(8)", "Banded(16)", "Banded(32)", "Banded(64)")
TABLE = {
    0.5: (118.7, 123.4, 129.8, 137.1, 145.4, 155.7, 169.7, 172.225),
    2.0: (39.46, 38.4, 38.77, 39.98, 41.77, 44.19, 47.53, 47.696),
    8.0: (21.33, 18.25, 16.17, 14.93, 14.31, 14.24, 14.49, 14.04),
}
WINNERS = {0.5: "DP-SGD", 2.0: "Banded(2)", 8.0: "BLT"}
TRUE_DPSGD = 117.48  # at epsilon 0.5, see test_the_one_row_that_differs


@pytest.fixture(scope="module")
def answers() -> dict[float, Comparison]:
    return {epsilon: compare(epsilon=epsilon, **SETTING) for epsilon in TABLE}


@pytest.mark.parametrize("epsilon", TABLE)
def test_the_winner_of_each_row(answers, epsilon):
    best = answers[epsilon][0]
    assert best.name.startswith(WINNERS[epsilon])
    assert best.relative == 1 and best.plan.guarantee().epsilon <= epsilon


@pytest.mark.parametrize("epsilon", TABLE)
def test_every_column_within_one_per_cent(answers, epsilon):
    """All 24 values but one; that one is checked against a finer accountant below."""
    found = {candidate.name: candidate.rmse for candidate in answers[epsilon]}
    wanted = dict(zip(BANDS, TABLE[epsilon], strict=False))
    wanted[next(name for name in found if name.startswith("BLT"))] = TABLE[epsilon][-1]
    if epsilon == 0.5:
        wanted["DP-SGD"] = TRUE_DPSGD
    for name, rmse in wanted.items():
        assert found[name] == pytest.approx(rmse, rel=0.01), name


def test_the_one_row_that_differs(answers):
    """DP-SGD at epsilon 0.5: the table says 118.7, we say 117.48 (1.03 % less noise for the same promise).

    The table's value is that of dp-accounting on its coarsest grid: at the table's noise that grid says epsilon = 0.49997, a grid
    50 times finer 0.4942. At our noise the finer grid says 0.49998: the smaller noise is enough.
    """
    pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    per_unit = math.sqrt((SETTING["steps"] + 1) / 2)

    def epsilon(rmse: float, interval: float) -> float:
        step = pld.from_gaussian_mechanism(rmse / per_unit, sampling_prob=0.01, value_discretization_interval=interval)
        return float(step.self_compose(SETTING["steps"]).get_epsilon_for_delta(1e-6))

    assert epsilon(118.7, 1e-3) == pytest.approx(0.5, rel=1e-3)
    assert epsilon(118.7, 2e-5) == pytest.approx(0.4942, rel=1e-3)
    ours = answers[0.5][0].rmse
    assert ours == pytest.approx(TRUE_DPSGD, rel=1e-3)
    assert 0.499 < epsilon(ours, 2e-5) <= 0.5
    assert epsilon(0.98 * ours, 2e-5) > 0.5  # the check can fail: 2 % less noise is refuted


def test_plan_for_returns_the_same_plans(answers):
    assert plan_for(epsilon=2.0, **SETTING) == [candidate.plan for candidate in answers[2.0]]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the optimiser of bands tries coefficients whose inverse overflows
@pytest.mark.parametrize(
    ("epsilon", "winner", "rmse"), [(0.5, "Banded(2)", 116.9), (2.0, "Banded(8)", 34.90), (8.0, "Banded(32)", 12.22)]
)
def test_optimised_bands_change_the_winners(epsilon, winner, rmse):
    """The square root is not the best banded strategy for prefix sums: optimised, bands win at all three budgets.

    Measured here, no published value; the error is checked against the inverse of the dense matrix.
    """
    best = compare(epsilon=epsilon, tune_bands=True, **SETTING)[0]
    assert best.name == winner and best.rmse == pytest.approx(rmse, rel=2e-3)
    assert best.rmse < min(TABLE[epsilon])
    steps = SETTING["steps"]
    C = sum(np.diag(np.full(steps - k, c), -k) for k, c in enumerate(best.plan.noise.coefficients))
    B = np.cumsum(solve_triangular(C, np.eye(steps), lower=True), axis=0)
    assert best.noise_multiplier * np.linalg.norm(B) / math.sqrt(steps) == pytest.approx(best.rmse, rel=1e-9)
    band, rate = best.plan.noise.bands, best.plan.participation.rate
    step = Gaussian(best.noise_multiplier / np.linalg.norm(best.plan.noise.coefficients)).sampled(rate=rate)
    assert (best.plan.participation.period, rate) == (
        band,
        pytest.approx(0.01 * band),
    )  # disjoint columns: the theorem's condition
    assert best.plan.event() == step * math.ceil(steps / band)


def test_the_workload_matters():
    """With heavy momentum the optimiser itself averages the noise, and the errors change."""
    short = {"delta": 1e-6, "dataset_size": 2000, "batch_size": 100, "epochs": 2, "epsilon": 2.0}
    plain, momentum = compare(**short), compare(workload=SGDWorkload(momentum=0.9), **short)
    assert momentum[0].rmse > 3 * plain[0].rmse
