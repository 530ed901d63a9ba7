"""Lower bounds for losses with atoms: they lie below, they come close, and planted defects are caught."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushgrad.accounting.pld import PLD
from hushgrad.accounting.pld.bounds import from_above, from_below
from hushgrad.accounting.pld.bounds.grid import Masses, both_sides
from hushgrad.accounting.pld.profiles.continuous import BoundedRange, GaussianMixtureCurve, LaplaceCurve
from hushgrad.accounting.pld.profiles.curve import Array, Curve, GaussianCurve, Mirror
from hushgrad.accounting.pld.profiles.discrete import Atoms, DiscreteGaussianCurve, DiscreteLaplaceCurve, Response
from hushgrad.accounting.pld.profiles.poisson import PoissonRemove, PoissonReplace, Symmetrised
from hushgrad.accounting.pld.profiles.stable_sums import discounted
from hushgrad.errors import NoTheorem
from hushgrad.events import (
    ApproxDP,
    DiscreteGaussian,
    DiscreteLaplace,
    Event,
    Gaussian,
    Laplace,
    PureDP,
    RandomizedResponse,
    Relation,
)

ROUNDING = 4e-13  # of a delta near one: the guard, and the hair by which grids miss atoms


@dataclass(frozen=True)
class Anywhere(Atoms):
    """A pair with any odds; with ``failure`` P has mass where Q has none, with ``slack`` Q where P has none."""

    odds: tuple[float, ...]
    masses: tuple[float, ...]
    failure: float
    slack: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "infinite", self.failure)
        object.__setattr__(self, "impossible", -math.expm1(-self.slack))

    def atoms(self) -> tuple[Array, Array]:
        losses = np.sort(np.log(np.array(self.odds)))
        p = np.array(self.masses) / sum(self.masses) * (1 - self.failure)
        return losses + math.log(float(np.sum(p * np.exp(-losses)))) + self.slack, p  # so that Q's masses sum to e^-slack


def profile(masses: Masses, epsilon: Array) -> Array:
    return masses.infinite + -np.expm1(np.minimum(epsilon[:, None] - masses.losses[None, :], 0.0)) @ masses.p


def places(curve: Curve, step: float) -> Array:
    """Epsilons around every atom, around zero, and far away."""
    atoms = curve.atoms()[0]
    near = (atoms[:, None] + step * np.linspace(-3, 3, 41)).ravel()
    return np.unique(np.concatenate([near, step * np.linspace(-6, 6, 97), np.linspace(-3, 3, 101)]))


def is_below(curve: Curve, masses: Masses, step: float) -> bool:
    epsilon = places(curve, step)
    return bool(np.all(profile(masses, epsilon) <= both_sides(curve, epsilon)[0] * (1 + 1e-12) + ROUNDING))


CURVES: list[Curve] = [
    LaplaceCurve(0.5),
    LaplaceCurve(0.03),
    PoissonRemove(LaplaceCurve(1.5), 0.02),
    Mirror(PoissonRemove(LaplaceCurve(1.5), 0.02)),
    Response(0.7, 0.0, 3.0),
    Response(0.3, 1e-4, 1.0),
    PoissonRemove(Response(0.7, 1e-5, 3.0), 0.3),
    Mirror(PoissonRemove(Response(0.7, 1e-5, 3.0), 0.3)),
    PoissonRemove(DiscreteLaplaceCurve(1.5, 4), 0.2),
    PoissonRemove(DiscreteGaussianCurve(3.0, 2), 0.2),
    Mirror(PoissonRemove(DiscreteGaussianCurve(3.0, 2), 0.2)),
    Symmetrised(PoissonRemove(GaussianCurve(0.8), 0.1)),
]


@pytest.mark.parametrize("curve", CURVES, ids=str)
@pytest.mark.parametrize("step", [0.0311, 0.0017, 0.000313])
@pytest.mark.parametrize("tilt", [0.0, 6.0])
def test_supporting_lines_stay_below(curve: Curve, step: float, tilt: float) -> None:
    touched = from_below.touch(curve, step, 1e-15, tilt)
    assert touched is None or is_below(curve, touched, step)
    assert is_below(curve, from_below.floor(curve, step, 1e-15, tilt), step)
    above = profile(from_above.connect_the_dots(curve, step, 1e-15, tilt), places(curve, step))
    assert np.all(above >= both_sides(curve, places(curve, step))[0] - 1e-15)


@given(
    odds=st.lists(st.floats(0.2, 5.0), min_size=2, max_size=7, unique=True),
    weights=st.lists(st.floats(0.01, 1.0), min_size=7, max_size=7),
    failure=st.sampled_from([0.0, 1e-6, 0.1]),
    slack=st.sampled_from([0.0, 1e-6, 0.1]),
    step=st.floats(1e-3, 0.3),
)
@settings(max_examples=150, deadline=None)
def test_any_discrete_pair_is_bounded_from_both_sides(
    odds: list[float], weights: list[float], failure: float, slack: float, step: float
) -> None:
    curve = Anywhere(tuple(odds), tuple(weights[: len(odds)]), failure, slack)
    for pair in (curve, Mirror(curve)):
        if pair.support[0] < 0 < pair.support[1]:
            assert is_below(pair, from_below.lower(pair, step, 1e-15, 1.0), step)
            above = profile(from_above.connect_the_dots(pair, step, 1e-15, 1.0), places(pair, step))
            assert np.all(above >= both_sides(pair, places(pair, step))[0] - 1e-15)


def mean_loss(masses: Masses, tilt: float) -> float:
    """The logarithm of E e^{tL}: what a lower bound loses of it is what it loses of epsilon."""
    return math.log(float(np.sum(masses.p * np.exp(tilt * masses.losses))))


@pytest.mark.parametrize(
    "curve", [LaplaceCurve(0.5), PoissonRemove(LaplaceCurve(1.5), 0.02), Mirror(PoissonRemove(LaplaceCurve(1.5), 0.1))]
)
def test_with_atoms_on_the_grid_the_error_is_of_second_order(curve: Curve) -> None:
    losses, errors = curve.atoms()[0], []
    exact = mean_loss(from_above.connect_the_dots(curve, (losses[1] - losses[0]) / 60_000, 1e-15, 5.0), 5.0)
    for cells in (100, 200, 400):
        step = (losses[1] - losses[0]) / cells * (1 - 2.0**-40)
        touched = from_below.touch(curve, step, 1e-15, 5.0)
        assert touched is not None
        errors.append(exact - mean_loss(touched, 5.0))
    assert errors[0] > 3.5 * errors[1] > 3.5**2 * errors[2] > 0


NON_SMOOTH: list[tuple[Event, Relation]] = [
    (Laplace(2.0) * 30, Relation.ADD_REMOVE),
    (Laplace(0.5) * 3000, Relation.ADD_REMOVE),
    (Laplace(0.5) * 2, Relation.ADD_REMOVE),
    (Laplace(20.0) * 300, Relation.REPLACE_ONE),
    (Laplace(0.5).sampled(rate=0.001) * 3000, Relation.ADD_REMOVE),
    (Laplace(2.0).sampled(rate=0.5) * 30, Relation.ADD_REMOVE),
    (Laplace(2.0) * 30 + Laplace(3.0) * 30, Relation.ADD_REMOVE),
    (Laplace(20.0) * 30 + Gaussian(1.1).sampled(rate=0.01) * 30, Relation.ADD_REMOVE),
    (RandomizedResponse(0.5, 3).sampled(rate=0.1) * 3000, Relation.ZERO_OUT),
    (DiscreteLaplace(2.0, sensitivity=5).sampled(rate=0.1) * 3000, Relation.ADD_REMOVE),
    (DiscreteGaussian(4.0).sampled(rate=0.1) * 300, Relation.ADD_REMOVE),
    (DiscreteGaussian(4.0) * 30, Relation.ADD_REMOVE),
    (DiscreteLaplace(2.0) * 30, Relation.ADD_REMOVE),
    (ApproxDP(0.3, 1e-10).sampled(rate=0.1) * 3000, Relation.ADD_REMOVE),
    (PureDP(0.3) * 30 + PureDP(0.2) * 30, Relation.ADD_REMOVE),
    (PureDP(0.3) * 300 + PureDP(math.sqrt(0.02)) * 300, Relation.ADD_REMOVE),
]


@pytest.mark.parametrize(("event", "relation"), NON_SMOOTH, ids=str)
def test_intervals_are_as_narrow_as_asked(event: Event, relation: Relation) -> None:
    low, high = PLD().loss(event, relation).epsilon_interval(1e-6)  # type: ignore[attr-defined]
    assert 0 < low <= high <= low * (1 + 1e-4)


RARE: list[tuple[Event, Relation, float, float]] = [  # found by fuzzing: each was far from the truth on one side
    (PureDP(4.24504).sampled(rate=0.838886) * 16, Relation.ADD_REMOVE, 1.9e-12, 1e-6),  # epsilon is next to the largest sum
    (
        DiscreteGaussian(1.95736, sensitivity=5).sampled(rate=3.28414e-05) * 13,
        Relation.ADD_REMOVE,
        2.9e-12,
        1e-4,
    ),  # tails of 1e-300
    (DiscreteGaussian(0.513471) * 22 + Gaussian(0.4).sampled(rate=0.003) * 2, Relation.ADD_REMOVE, 3.3e-9, 1e-4),
    (Gaussian(68.0).sampled(rate=8.6e-7) * 400_000 + RandomizedResponse(0.99, 5) * 2, Relation.REPLACE_ONE, 1.6e-12, 2e-3),
    (Laplace(770.0).sampled(rate=3e-5) * 13_000 + Gaussian(0.3).sampled(rate=0.05) * 7, Relation.ADD_REMOVE, 5e-3, 1e-3),
]


@pytest.mark.parametrize(("event", "relation", "delta", "width"), RARE, ids=str)
def test_extremes_that_were_loose_are_not(event: Event, relation: Relation, delta: float, width: float) -> None:
    low, high = PLD().loss(event, relation).epsilon_interval(delta)  # type: ignore[attr-defined]
    assert 0 < low <= high <= low * (1 + width)


def hits_only(distance: int, rate: float, steps: int, delta: float) -> float:
    """Epsilon of sampled discrete Gaussian noise of sigma 1 at a far distance: the output tells whether the record took part."""
    noise = np.exp(-0.5 * np.arange(-30.0, 31.0) ** 2)
    total, losses, masses = np.ones(1), [], []
    for hits in range(steps + 1):
        k = np.arange(len(total)) - len(total) // 2
        quiet = (steps - hits) * math.log1p(-rate)
        losses.append(hits * (distance**2 / 2 + math.log(rate)) + distance * k + quiet)
        masses.append(total * math.comb(steps, hits) * rate**hits * math.exp(quiet))
        total = np.convolve(total, noise / noise.sum())
    loss, mass = np.concatenate(losses), np.concatenate(masses)
    low, high = 0.0, float(loss.max())
    for _ in range(100):
        middle = 0.5 * (low + high)
        over = loss > middle
        low, high = (middle, high) if np.sum(mass[over] * -np.expm1(middle - loss[over])) > delta else (low, middle)
    return high


@pytest.mark.parametrize("distance", [38, 39, 50, 75])
def test_losses_beyond_all_doubles(distance: int) -> None:
    """Where P has less than 1e-308 and Q has a mass: it was lost, and the lower end came out above the truth."""
    event = DiscreteGaussian(1.0, distance).sampled(rate=0.01) * 10
    truth = hits_only(distance, 0.01, 10, 1e-5)
    low, high = PLD().loss(event).epsilon_interval(1e-5)  # type: ignore[attr-defined]
    assert high * (1 - 1e-4) < low <= truth <= high


@pytest.mark.parametrize(
    "event",
    [DiscreteGaussian(0.3, 100), DiscreteLaplace(0.001), DiscreteLaplace(0.1, 100), PureDP(800.0), Laplace(1e-3)],
    ids=str,
)
def test_losses_beyond_all_doubles_cause_no_warning(event: Event) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one = PLD().loss(event).epsilon(1e-5)
        assert PLD().loss(event * 3).epsilon(1e-5) <= 3 * one * (1 + 1e-4)
        low, high = PLD().loss(event.sampled(rate=0.01) * 10).epsilon_interval(1e-5)  # type: ignore[attr-defined]
    assert one + math.log(0.01) < low <= high < 10 * one


@pytest.mark.parametrize("length", [1.0, 2e3, 1e5, 1e8])
def test_discounted_sums_are_the_recursion(length: float) -> None:
    random = np.random.default_rng(5)
    losses, p = np.sort(random.uniform(0, length, 900)), 10.0 ** random.uniform(-250, 0, 900)
    plain = p.copy()
    for j in range(898, -1, -1):
        plain[j] += math.exp(losses[j] - losses[j + 1]) * plain[j + 1]
    assert np.allclose(discounted(p, losses), plain, rtol=1e-13, atol=0.0)


WIDE: list[Curve] = [  # losses of more than 709: e^loss is not a double
    GaussianCurve(60.0),
    PoissonRemove(GaussianCurve(60.0), 0.01),
    PoissonReplace(40.0, 0.01),
    PoissonReplace(60.0, 0.9),
    LaplaceCurve(1000.0),
    BoundedRange(900.0),
    GaussianMixtureCurve((0.0, 10.0, 45.0), (0.9, 0.09, 0.01)),
    DiscreteGaussianCurve(1.0, 50),
    PoissonRemove(DiscreteGaussianCurve(1.0, 50), 0.01),
    DiscreteLaplaceCurve(0.5, 1000),
    PoissonRemove(Response(800.0), 0.01),
    Mirror(PoissonRemove(Response(800.0), 0.01)),
    Symmetrised(PoissonRemove(LaplaceCurve(1000.0), 0.01)),
]


@pytest.mark.parametrize("curve", WIDE, ids=str)
@pytest.mark.parametrize("cells", [3000, 30])
def test_wide_losses_are_bounded_from_both_sides(curve: Curve, cells: int) -> None:
    far = max(1.0, *np.abs(curve.reach(1e-20)))
    epsilon = np.concatenate([np.linspace(0.0, 1.2 * far, 400), np.linspace(0.0, 30.0, 100)])
    with np.errstate(all="ignore"):
        call = curve.right(epsilon)[0]
        above = profile(from_above.connect_the_dots(curve, far / cells, 1e-20, 0.1), epsilon)
        below = profile(from_below.lower(curve, far / cells, 1e-20, 0.1), epsilon)
    assert np.all(np.diff(call[:400]) <= 1e-15) and call[0] > 1e-3
    assert np.all(above >= call - 1e-15) and np.all(below <= call * (1 + 1e-9) + ROUNDING)


@pytest.mark.parametrize("steps", [1, 2, 10])
@pytest.mark.parametrize("sigma", [0.3, 0.05, 0.03, 0.025, 0.01])
def test_a_replaced_record_costs_more_than_a_removed_one_with_any_noise(sigma: float, steps: int) -> None:
    """With little noise the threshold of the best test was lost, and epsilon came out as 0."""
    run = Gaussian(sigma).sampled(rate=0.5) * steps
    low, high = PLD().loss(run, Relation.REPLACE_ONE).epsilon_interval(1e-5)  # type: ignore[attr-defined]
    removed = PLD().loss(run).epsilon_interval(1e-5)  # type: ignore[attr-defined]
    assert removed[0] * (1 - 1e-3) <= low <= high < PLD().loss(Gaussian(sigma) * steps, Relation.REPLACE_ONE).epsilon(1e-5)
    assert PLD().loss(run, Relation.REPLACE_ONE).delta(0.0) == pytest.approx(1 - 0.5**steps, rel=0.1)


def test_a_wide_distribution_is_answered_in_blocks_and_a_wider_one_refused() -> None:
    low, high = PLD().loss(DiscreteLaplace(10.0, 10**15) * 10).epsilon_interval(1e-5)  # type: ignore[attr-defined]
    assert 0.99e15 < low <= high < 1.01e15
    with pytest.raises(NoTheorem, match="No table holds"):
        PLD().loss(DiscreteLaplace(1e9, 10**9))


# Planted defects -----------------------------------------------------------------------------------------------------------


def test_an_end_that_is_merely_raised_to_zero_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_below, "_ended", lambda curve, losses, values, split: np.maximum(values, 0.0))
    curve, step = LaplaceCurve(0.5), 0.01
    touched = from_below.touch(curve, step, 1e-15, 5.0)
    assert touched is not None and not is_below(curve, touched, step)


def test_chords_in_place_of_supporting_lines_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_the_curve(curve: Curve, losses: Array, split: int) -> Array:
        call, _, put, _ = both_sides(curve, losses)
        return np.where(np.arange(len(losses)) < split, put, call)

    monkeypatch.setattr(from_below, "_under_tangents", on_the_curve)
    curve, step = PoissonRemove(Response(0.7, 0.0, 3.0), 0.3), 0.0311
    touched = from_below.touch(curve, step, 1e-15, 5.0)
    assert touched is not None and not is_below(curve, touched, step)


def test_mass_at_infinity_that_counts_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = from_below._ended

    def twice(curve: Curve, losses: Array, values: Array, split: int) -> Array | None:
        finite = SimpleNamespace(infinite=0.0, impossible=curve.impossible, left=curve.left, right=curve.right)
        moved = honest(finite, losses, np.append(values[:-1], 0.0), split)  # type: ignore[arg-type]
        return None if moved is None else np.append(moved[:-1], 0.0)

    monkeypatch.setattr(from_below, "_ended", twice)
    curve, step = PoissonRemove(Response(0.7, 1e-2, 3.0), 0.3), 0.0311
    touched = from_below.touch(curve, step, 1e-15, 5.0)
    assert touched is not None and not is_below(curve, touched, step)
