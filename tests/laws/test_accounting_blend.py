"""Very many different steps as mixtures: the lemma, the series behind it, and planted defects."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushgrad.accounting import PLD
from hushgrad.accounting.heuristics import HEURISTICS
from hushgrad.accounting.pld.bounds import blend_steps, compose, fft_powers, merge_steps
from hushgrad.accounting.pld.bounds.blend_steps import Blend, blended, corner_weights
from hushgrad.accounting.pld.bounds.compose import Window
from hushgrad.accounting.pld.bounds.grid import Masses, both_sides
from hushgrad.accounting.pld.loss import PrivacyLoss
from hushgrad.accounting.pld.profiles.curve import Array, GaussianCurve, Mirror
from hushgrad.accounting.pld.profiles.poisson import PoissonRemove
from hushgrad.events import Compose, Event, Gaussian

EPSILON = np.concatenate([np.linspace(-3, 3, 121), np.geomspace(3, 40, 20)])


def dominated(rate: Array, mu: Array) -> bool:
    """Whether every step's profile lies below its mixture's, in both directions."""
    corners, weights = corner_weights(rate, mu)
    for mirrored in (False, True):
        curves = [PoissonRemove(GaussianCurve(m), q) for q, m in corners]
        calls = np.stack([both_sides(Mirror(c) if mirrored else c, EPSILON)[0] for c in curves])
        for q, m, w in zip(rate, mu, weights, strict=True):
            step = PoissonRemove(GaussianCurve(float(m)), float(q))
            call = both_sides(Mirror(step) if mirrored else step, EPSILON)[0]
            if np.any(call > (w @ calls) * (1 + 1e-9) + 1e-15):
                return False
    return True


@given(
    rate=st.floats(1e-4, 0.5),
    mu=st.floats(0.05, 4.0),
    stretch=st.tuples(st.floats(1.0, 1.9), st.floats(1.0, 3.0)),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_every_step_of_a_cell_is_dominated_by_its_mixture(
    rate: float, mu: float, stretch: tuple[float, float], seed: int
) -> None:
    shares = np.random.default_rng(seed).uniform(0, 1, (2, 8))
    assert dominated(rate * stretch[0] ** shares[0], mu * stretch[1] ** shares[1])


def test_interpolation_in_the_distance_itself_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile is concave in mu near epsilon 0, so these weights are too small."""
    rate, mu = np.full(5, 0.5), np.linspace(1.0, 4.0, 5)
    assert dominated(rate, mu)
    monkeypatch.setattr(blend_steps, "erf", lambda x: x)
    assert not dominated(rate, mu)


RNG = np.random.default_rng(3)
RATE, MU, TIMES = RNG.uniform(0.02, 0.03, 40), RNG.uniform(0.8, 1.0, 40), RNG.integers(1, 4, 40)
WINDOW = Window(3.0, -6.0, 14.0, 3.0, 3.0, 3.0)


def composed_both_ways() -> tuple[compose.Composed, compose.Composed]:
    """The cell as a blend by the series, and step by step: each step's own mixture, composed as it is."""
    curve = blended(RATE, MU, TIMES.astype(float), mirrored=False)
    assert isinstance(curve, Blend)
    masses = curve.from_above(0.01, 1e-13, 3.0)
    weights = corner_weights(RATE, MU)[1]
    alone = [
        (Masses(masses.step, masses.shift, masses.index, w @ masses.corners, masses.infinite), int(n))
        for w, n in zip(weights, TIMES, strict=True)
    ]
    return compose.compose([(masses, int(np.sum(TIMES)))], WINDOW), compose.compose(alone, WINDOW)


def test_the_series_is_within_its_remainder() -> None:
    series, exact = composed_both_ways()
    scale = math.exp(series.log_mass - exact.log_mass)  # the two are normalised differently
    off = float(np.max(np.abs(series.c * scale - exact.c * 1.0)))
    assert off <= series.noise * scale + exact.noise
    assert series.noise < 1e-3 * float(np.max(series.c))  # and the remainder is small enough to be of use
    for epsilon in (0.5, 1.0, 2.0):
        assert exact.delta(epsilon, upper=False) <= series.delta(epsilon, upper=True)
    assert series.delta(0.5, upper=True) <= exact.delta(0.5, upper=True) * (1 + 1e-3)


def test_a_forgotten_variation_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the correction the mean mixture stands for all steps, which no theorem allows."""
    monkeypatch.setattr(fft_powers.Spectrum, "vary", lambda self, mean, masses, corners, index, times: None)
    series, exact = composed_both_ways()
    scale = math.exp(series.log_mass - exact.log_mass)
    assert float(np.max(np.abs(series.c * scale - exact.c))) > series.noise * scale + exact.noise


def plane(count: int) -> Event:
    rng = np.random.default_rng(0)
    return Compose(
        Gaussian(float(s)).sampled(rate=float(q))
        for q, s in zip(rng.uniform(1e-3, 1e-2, count), rng.uniform(0.8, 2.0, count), strict=True)
    )


def test_blended_bounds_hold_and_are_near(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = PLD().loss(plane(150))
    assert isinstance(loss, PrivacyLoss)
    low, high = loss.epsilon_interval(1e-5)  # so few are not merged
    for cells, near in ((20, 1.2), (100, 1.03)):
        monkeypatch.setattr(merge_steps, "HEURISTICS", replace(HEURISTICS, merged=10, merged_above=cells))
        monkeypatch.setattr(merge_steps, "_CORNERS", 1)
        assert any(isinstance(curve, Blend) for curve, _ in loss._direction(0, 1e-4, upper=True))
        assert low <= loss.epsilon(1e-5) <= high * near
