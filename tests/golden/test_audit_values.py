"""Audit bounds against values that can be written down."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from hushgrad.audit import bounds, epsilon_one_run
from hushgrad.audit.bounds import ClaimedCurve
from hushgrad.events import Gaussian, PureDP


def _rates(a: float, b: float) -> bounds.ErrorRates:
    return bounds.ErrorRates(threshold=0, false_alarms=a, misses=b, false_alarms_up=a, misses_up=b, confidence=0.95)


@pytest.mark.parametrize(
    ("successes", "trials", "confidence", "value"),
    [
        (0, 100, 0.95, 1 - 0.05 ** (1 / 100)),  # closed form: (1 - p)^n = 1 - confidence
        (0, 1000, 0.975, 1 - 0.025 ** (1 / 1000)),
        (10, 10, 0.95, 1.0),
        (2, 10, 0.975, 0.5561),  # the usual textbook interval for 2 of 10: (0.0252, 0.5561)
    ],
)
def test_clopper_pearson(successes: int, trials: int, confidence: float, value: float) -> None:
    assert bounds.rate_upper_bound(successes, trials, confidence=confidence) == pytest.approx(value, abs=5e-5)


def test_a_point_on_the_curve_of_mu_one_has_its_epsilon() -> None:
    """Balle and Wang 2018: sigma = 1 has epsilon 4.377 at delta 1e-5."""
    point = _rates(0.05, float(ndtr(ndtri(0.95) - 1.0)))
    assert bounds.mu_lower_bound(point) == pytest.approx(1.0)
    assert bounds.epsilon_gaussian(point, delta=1e-5) == pytest.approx(4.377178, abs=1e-5)


def test_all_guesses_right_in_one_run() -> None:
    """With delta -> 0 and one choice of guesses: p^r = 0.05, so epsilon = logit(0.05^(1/r)) (Steinke et al. 2023, pure case)."""
    p = 0.05 ** (1 / 100)
    members = np.arange(100) < 50
    found = epsilon_one_run(members.astype(float), members, delta=1e-12, fractions=(1.0,))
    assert found == pytest.approx(math.log(p / (1 - p)), abs=2e-3)


@pytest.mark.parametrize("alpha", [0.001, 0.01, 0.1, 0.3, 0.5, 0.9])
def test_the_claimed_curve_of_a_gaussian(alpha: float) -> None:
    exact = float(ndtr(ndtri(1 - alpha) - 0.5))
    found = float(ClaimedCurve(Gaussian(2.0))(alpha))
    assert exact - 2e-3 <= found <= exact + 1e-9


def test_the_claimed_curve_of_pure_privacy() -> None:
    """f(a) = max(1 - e^epsilon a, e^-epsilon (1 - a)) (Wasserman and Zhou 2010)."""
    alphas = np.linspace(0, 1, 21)
    exact = np.maximum(0, np.maximum(1 - math.e * alphas, (1 - alphas) / math.e))
    np.testing.assert_allclose(ClaimedCurve(PureDP(1.0))(alphas), exact, atol=1e-6)
