"""Lower bounds for losses with atoms: they lie below, they come close, and planted defects are caught."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushgrad.accounting.pld import PLD, from_above, from_below
from hushgrad.accounting.pld.atoms import Atoms, DiscreteGaussianCurve, DiscreteLaplaceCurve, Response
from hushgrad.accounting.pld.continuous import LaplaceCurve
from hushgrad.accounting.pld.curve import Array, Curve, GaussianCurve, Mirror
from hushgrad.accounting.pld.grid import Masses, both_sides
from hushgrad.accounting.pld.poisson import PoissonRemove, Symmetrised
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
    return masses.infinite + np.maximum(-np.expm1(epsilon[:, None] - masses.losses[None, :]), 0.0) @ masses.p


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
