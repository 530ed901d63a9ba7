"""Extremes: right or refused, never NaN, negative or below the truth, and never a hang."""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from patience import easily

from hushgrad.accounting import PLD, RDP, delta, delta_curve, epsilon, estimate, gaussian_epsilon
from hushgrad.accounting.heuristics import HEURISTICS
from hushgrad.accounting.pld.bounds import blend_steps, merge_steps
from hushgrad.accounting.pld.loss import PrivacyLoss
from hushgrad.accounting.pld.search.epsilon_bounds import epsilon_bound
from hushgrad.errors import NoTheorem
from hushgrad.events import Compose, Event, Exponential, Gaussian

SIGMAS, RATES, STEPS, DELTAS = (0.1, 1.0, 30.0, 1e4), (1e-9, 1e-4, 0.5, 1.0), (1, 100, 10**5, 10**8), (1e-15, 1e-6)
GRID = list(itertools.product(SIGMAS, RATES, STEPS, DELTAS))
QUICK = GRID[::9]


def _event(sigma: float, rate: float, steps: int) -> Event:
    return (Gaussian(sigma) if rate == 1 else Gaussian(sigma).sampled(rate=rate)) * steps


def _check(sigma: float, rate: float, steps: int, delta_: float) -> None:
    event = _event(sigma, rate, steps)
    upper = easily(lambda: epsilon(event, delta=delta_))
    assert upper >= 0  # NaN fails too
    if rate == 1:
        truth = gaussian_epsilon(math.sqrt(steps) / sigma, delta_)
        assert truth * (1 - 1e-9) <= upper <= truth * (1 + 1e-6) + 1e-12
    assert upper <= epsilon(event, delta=delta_, accountant="rdp") * (1 + 1e-3) + 1e-9
    with contextlib.suppress(NoTheorem):  # the contour needs too many points where steps are few
        assert upper >= estimate(event, delta=delta_).epsilon * (1 - 1e-6)
    if math.isfinite(upper):
        assert 0 <= easily(lambda: delta(event, epsilon=upper)) <= 1


@pytest.mark.parametrize(("sigma", "rate", "steps", "delta_"), QUICK)
def test_extremes(sigma: float, rate: float, steps: int, delta_: float) -> None:
    _check(sigma, rate, steps, delta_)


@pytest.mark.slow
@pytest.mark.parametrize(("sigma", "rate", "steps", "delta_"), [case for case in GRID if case not in QUICK])
def test_more_extremes(sigma: float, rate: float, steps: int, delta_: float) -> None:
    _check(sigma, rate, steps, delta_)


@pytest.mark.parametrize("name", ["basic", "advanced", "zcdp", "rdp"])
def test_the_other_accountants_end_too(name: str) -> None:
    for sigma, rate, steps, delta_ in GRID[::23]:
        event = _event(sigma, rate, steps)
        with contextlib.suppress(NoTheorem):
            upper = easily(lambda event=event, delta_=delta_: epsilon(event, delta=delta_, accountant=name))
            assert upper >= 0
            if math.isfinite(upper):
                half = 0.5 * upper
                assert 0 <= easily(lambda event=event, half=half: delta(event, epsilon=half, accountant=name)) <= 1


def _schedule(count: int) -> PrivacyLoss:
    loss = PLD().loss(Compose(Gaussian(float(s)).sampled(rate=0.01) for s in np.geomspace(1.0, 1.2, count)))
    assert isinstance(loss, PrivacyLoss)
    return loss


def test_merging_is_on_the_safe_side_and_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = _schedule(200)
    exact = loss.epsilon_interval(1e-5)
    monkeypatch.setattr(merge_steps, "HEURISTICS", replace(HEURISTICS, merged=10))
    merged = loss.epsilon_interval(1e-5, 1e-2)
    assert len(loss._direction(0, 1e-2, upper=True)) < 60
    assert merged[0] <= exact[0] * (1 + 1e-4)
    assert exact[1] * (1 - 1e-4) <= merged[1] <= exact[1] * (1 + 1.5e-2)


def _lowest(made: tuple[list[tuple[float, float]], np.ndarray]) -> tuple[list[tuple[float, float]], np.ndarray]:
    """All the weight on the smallest corner."""
    corners, weights = made
    return corners, np.eye(len(corners))[np.zeros(len(weights), dtype=int)]


def test_merging_in_the_wrong_direction_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two planted defects: lower bounds with rates and distances rounded up, and upper ones with all weight on the smallest."""
    honest_weights = blend_steps.corner_weights
    loss = _schedule(200)
    exact = loss.epsilon_interval(1e-5)
    honest = merge_steps._Steps._extremes
    monkeypatch.setattr(merge_steps, "HEURISTICS", replace(HEURISTICS, merged=10))
    monkeypatch.setattr(merge_steps._Steps, "_extremes", lambda steps, cells, *, upper: honest(steps, cells, upper=not upper))
    parts = loss._direction(0, 1e-2, upper=False)
    assert len(parts) < 60 and epsilon_bound(parts, 1e-5, 1e-4, upper=False).epsilon > exact[1]
    monkeypatch.setattr(merge_steps._Steps, "_extremes", honest)
    monkeypatch.setattr(blend_steps, "corner_weights", lambda rate, mu: _lowest(honest_weights(rate, mu)))
    parts = loss._direction(0, 1e-2, upper=True)
    assert len(parts) < 60 and epsilon_bound(parts, 1e-5, 1e-4, upper=True).epsilon < exact[0]


@pytest.mark.parametrize(("eta", "times"), [(0.5, 100), (0.01, 10_000), (0.0016, 1_000_000), (2.0, 30), (0.3, 2)])
def test_the_envelope_of_the_exponential_mechanism_is_never_above_its_renyi_bound(eta: float, times: int) -> None:
    """The envelope is at the worst mechanism for each epsilon; one order of Rényi's divergence sees one mechanism only."""
    event = Exponential(eta) * times
    loss, renyi = PLD().loss(event), RDP().loss(event)
    low, high = loss.epsilon_interval(1e-6)  # type: ignore[attr-defined]
    assert 0 < low <= high <= renyi.epsilon(1e-6)
    assert loss.delta(high) <= min(1e-6 * (1 + 1e-6), renyi.delta(high))
    assert delta_curve(event, [high])[0] <= renyi.delta(high)
