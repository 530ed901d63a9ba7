"""The noise that really reaches the parameters has the scale that the theorems ask for, whatever the estimator reports.

On rows of zeros every loss is flat, so the private parameters are the noise itself, up to the known l2. Scales are compared over
4000 numbers: their relative standard error is about 1.1 %, so the bound of 6 % is a false alarm in less than one in 10⁶.
"""

from __future__ import annotations

import numpy as np
import pytest

from hushgrad.accounting.gaussian import gaussian_mu
from hushgrad.estimators import DPLogisticRegression, DPMean
from hushgrad.estimators.randomness import Randomness

X, Y = np.zeros((4, 4000)), np.array([0, 1, 0, 1])
EPSILON, DELTA = 0.5, 1e-5
SHARE = 1 - 1e-3  # the rest pays for the inexact minimum


def model(method, relation, **options):
    return DPLogisticRegression(
        EPSILON, delta=DELTA, data_norm=1.0, method=method, relation=relation, fit_intercept=False, random_state=0, **options
    )


def scale(method, relation, times):
    """What is measured, over what the theorem asks for."""
    if method == "mean":
        fitted = DPMean(EPSILON, delta=DELTA, data_norm=1.0, relation=relation, random_state=0).fit(X)
        return fitted.mean_.std() * len(X) / (times / gaussian_mu(EPSILON, DELTA))
    fitted = model(method, relation).fit(X, Y)
    noise = fitted.coef_[0].std() * fitted.l2_
    if method == "objective":
        return noise / (times / gaussian_mu(EPSILON * SHARE, DELTA * SHARE))
    return noise / (times / gaussian_mu(EPSILON, DELTA))


CASES = [(m, r, t) for m in ("objective", "output", "mean") for r, t in (("replace_one", 2), ("zero_out", 1))]


@pytest.mark.parametrize(("method", "relation", "times"), CASES)
def test_the_noise_has_the_scale_of_the_theorem(method, relation, times):
    assert scale(method, relation, times) == pytest.approx(1.0, abs=0.06)


@pytest.mark.parametrize(("method", "relation", "times"), CASES)
@pytest.mark.parametrize("defect", [0.9, 0.5])
def test_less_noise_is_noticed(method, relation, times, defect, monkeypatch):
    honest = Randomness.normal
    monkeypatch.setattr(Randomness, "normal", lambda self, size: defect * honest(self, size))
    assert scale(method, relation, times) < 0.94


@pytest.mark.parametrize(("defect", "holds"), [(1.0, True), (0.5, False)])
def test_a_noisy_gradient_step_has_the_scale_of_the_theorem(defect, holds, monkeypatch):
    """1000 numbers (standard error 2.2 %) over 10,000 rows, so that the noisy count, a hundredth of the budget, is known to 1 %."""
    honest = Randomness.normal
    monkeypatch.setattr(Randomness, "normal", lambda self, size: defect * honest(self, size))
    rows = np.zeros((10_000, 1000))
    fitted = model("gd", "add_remove", gd_steps=1, learning_rate=1.0).fit(rows, np.arange(10_000) % 2)
    asked = 1 / (np.sqrt(0.99) * gaussian_mu(EPSILON, DELTA))
    assert bool(abs(fitted.coef_[0].std() * len(rows) / asked - 1) < 0.15) is holds
