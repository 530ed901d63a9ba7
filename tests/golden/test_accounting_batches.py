"""Batches that depend on each other, noise under replace-one, adaptive choices: against enumeration and quadrature that share no code."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from hushgrad.accounting import delta, epsilon_interval
from hushgrad.accounting.pld import batch_schemes
from hushgrad.accounting.pld.batch_schemes import Cuts
from hushgrad.accounting.pld.profiles.continuous import BoundedRange, HalfRange, LaplaceCurve
from hushgrad.accounting.pld.profiles.discrete import DiscreteLaplaceCurve
from hushgrad.accounting.pld.profiles.replace_one import DiscreteReplace, LaplaceReplace, TwoDistances
from hushgrad.accounting.pld.search.exponential_composition import choice_delta
from hushgrad.events import (
    DiscreteGaussian,
    DiscreteLaplace,
    Event,
    Exponential,
    FixedSize,
    Gaussian,
    Laplace,
    Sampled,
    TruncatedPoisson,
)

Z = np.linspace(-12.0, 12.0, 3001)
STEP = Z[1] - Z[0]
QUADRATURE = 3e-6  # its error, at the kinks of the integrand


def _poisson_batches(n: int, q: float, most: int) -> dict[tuple[int, ...], float]:
    """Every batch of at most ``most`` of n records with its probability, by drawing all subsets and cutting them in all ways."""
    found: dict[tuple[int, ...], float] = {}
    for size in range(n + 1):
        for drawn in itertools.combinations(range(n), size):
            cuts = list(itertools.combinations(drawn, min(size, most)))
            for cut in cuts:
                found[cut] = found.get(cut, 0.0) + q**size * (1 - q) ** (n - size) / len(cuts)
    return found


def _density(batches_: dict[tuple[int, ...], float], values: Sequence[float], sigma: float) -> np.ndarray:
    """Of the noisy sum of a batch, on the line."""
    out = np.zeros_like(Z)
    for batch, p in batches_.items():
        out += p * np.exp(-0.5 * ((Z - sum(values[i] for i in batch)) / sigma) ** 2)
    return out / (sigma * math.sqrt(2 * math.pi))


def _hockey(p: np.ndarray, q: np.ndarray, at: float) -> float:
    return float(np.sum(np.maximum(p - math.exp(at) * q, 0.0))) * STEP


def _worlds(
    draw: dict[tuple[int, ...], float],
    without: dict[tuple[int, ...], float] | None,
    others: Sequence[float],
    sigma: float,
    relation: str,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """All pairs of neighbours: the last record is 1 or -1, and gone, null or its opposite in the other world."""
    pairs = []
    for mine in (1.0, -1.0):
        here = _density(draw, [*others, mine], sigma)
        other = (
            _density(without, others, sigma)
            if without is not None
            else _density(draw, [*others, 0.0 if relation == "zero_out" else -mine], sigma)
        )
        pairs += [(here, other), (other, here)]
    return pairs


@pytest.mark.parametrize("relation", ["add_remove", "zero_out", "replace_one"])
def test_truncated_batches_by_enumeration(relation: str) -> None:
    """Three to five records on the line, all their batches: never above the bound, and a bound that forgets survivors is caught."""
    rng, caught, honest = np.random.default_rng(11), 0, Cuts.of
    for n, most, q, sigma in (
        (3, 1, 0.5, 1.0),
        (3, 2, 0.4, 0.7),
        (4, 2, 0.6, 1.0),
        (5, 2, 0.3, 0.8),
        (5, 3, 0.5, 1.3),
        (4, 1, 0.9, 1.0),
    ):
        run = Sampled(TruncatedPoisson(rate=q, dataset_size=n, size=most), Gaussian(sigma))
        draw = _poisson_batches(n, q, most)
        without = _poisson_batches(n - 1, q, most) if relation == "add_remove" else None
        for at in (0.0, 0.05, 0.3, 1.0, 2.5):
            bound = delta(run, epsilon=at, relation=relation)
            worst = 0.0
            for others in ((-1.0,) * (n - 1), (1.0,) * (n - 1), (0.0,) * (n - 1), tuple(rng.uniform(-1, 1, n - 1))):
                worst = max(worst, *(_hockey(p, q_, at) for p, q_ in _worlds(draw, without, others, sigma, relation)))
            assert worst <= bound + QUADRATURE
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(batch_schemes.Cuts, "of", lambda *a: replace(honest(*a), survives=honest(*a).survives * 1e-3))
                caught += worst > delta(run, epsilon=at, relation=relation) + QUADRATURE
    assert caught > 3


def test_cuts_by_enumeration() -> None:
    for n, q, most in ((4, 0.6, 2), (5, 0.3, 2), (6, 0.5, 4), (3, 0.5, 1)):
        cut = Cuts.of(n, q, most)
        others = [math.comb(n - 1, k) * q**k * (1 - q) ** (n - 1 - k) for k in range(n)]
        assert cut.free == pytest.approx(sum(others[: most - 1]), rel=1e-12)
        assert cut.last == pytest.approx(others[most - 1], rel=1e-12)
        assert cut.full == pytest.approx(sum(others[most:]), rel=1e-12)
        assert cut.survives == pytest.approx(sum(others[k] * q * most / (k + 1) for k in range(most, n)), rel=1e-12)
    assert Cuts.of(10**9, 0.01, 10**7).error < 1e-4


def test_a_fixed_size_under_zero_out_by_enumeration() -> None:
    """All samples of two of five records: attained in both directions, never exceeded by other data."""
    n, size, sigma = 5, 2, 0.9
    run = Sampled(FixedSize(dataset_size=n, size=size), Gaussian(sigma))
    draw = {batch: 1 / math.comb(n, size) for batch in itertools.combinations(range(n), size)}
    rng = np.random.default_rng(2)
    data = [(-1.0,) * 4, (1.0,) * 4, (0.0,) * 4, *(tuple(rng.uniform(-1, 1, 4)) for _ in range(6))]
    for at in (0.0, 0.1, 0.4, 1.5, 3.0):
        truths = [_hockey(p, q, at) for others in data for p, q in _worlds(draw, None, others, sigma, "zero_out")]
        assert max(truths) <= delta(run, epsilon=at, relation="zero_out") + QUADRATURE
        assert max(truths) >= delta(run, epsilon=at, relation="zero_out") - QUADRATURE
        assert delta(run, epsilon=at, relation="zero_out") <= delta(run, epsilon=at, relation="replace_one") * (1 + 1e-9)


def test_laplace_numbers_by_quadrature() -> None:
    """No two contributions are worse than opposite ones; the bound for any noise is above it, and so is every profile of vectors."""
    q, r = 0.3, 0.8
    z = np.linspace(-30, 30, 60_001)
    step = z[1] - z[0]
    density = {u: 0.5 * np.exp(-np.abs(z - u)) for u in np.linspace(-r, r, 9)}
    still = density[min(density, key=abs)]
    exact, anything = LaplaceReplace(r, q), TwoDistances(LaplaceCurve(r), LaplaceCurve(2 * r), q)
    for at in (0.0, 0.05, 0.2, 0.35, 0.39):
        found = {
            (u, v): float(np.sum(np.maximum((1 - q) * still + q * f - math.exp(at) * ((1 - q) * still + q * g), 0))) * step
            for (u, f), (v, g) in itertools.product(density.items(), repeat=2)
        }
        assert max(found.values()) == pytest.approx(found[r, -r], abs=1e-7) == pytest.approx(exact.delta(at), abs=3e-7)
        assert exact.delta(at) <= anything.right(np.array([at]))[0][0] * (1 + 1e-12)
        assert exact.delta(-at) == pytest.approx(exact.delta(at) * math.exp(-at) + 1 - math.exp(-at), rel=1e-12)
    losses, masses = exact.atoms()
    ratio = ((1 - q) * still + q * density[r]) / ((1 - q) * still + q * density[-r])
    assert math.log(ratio.max()) == pytest.approx(losses[1], rel=1e-9)
    assert float(np.sum(((1 - q) * still + q * density[r])[z >= r])) * step == pytest.approx(masses[1], rel=1e-3)


@pytest.mark.parametrize("noise", [DiscreteLaplace(0.7, 2), DiscreteGaussian(1.3, 2), DiscreteGaussian(0.4, 3)], ids=str)
def test_integer_noise_by_enumeration(noise: DiscreteLaplace | DiscreteGaussian) -> None:
    q, k = 0.2, np.arange(-150, 151)
    weights = np.exp(-np.abs(k) / noise.scale) if isinstance(noise, DiscreteLaplace) else np.exp(-0.5 * (k / noise.sigma) ** 2)
    f = weights / weights.sum()
    d = noise.sensitivity
    for at in (0.0, 0.1, 0.5, 1.0):
        found = {
            (u, v): float(
                np.sum(np.maximum((1 - q) * f + q * np.roll(f, u) - math.exp(at) * ((1 - q) * f + q * np.roll(f, v)), 0))
            )
            for u, v in itertools.product(range(-d, d + 1), repeat=2)
        }
        ours = delta(noise.sampled(rate=q), epsilon=at, relation="replace_one")
        assert max(found.values()) == pytest.approx(found[d, -d], rel=1e-12) == pytest.approx(ours, rel=1e-8, abs=1e-14)


@pytest.mark.parametrize(("sigma", "distance"), [(0.9, 33), (0.06, 16), (1.0, 37), (1.0, 36)])
def test_integer_noise_at_distances_beyond_its_table(sigma: float, distance: int) -> None:
    """What a table leaves out counts as infinite from above only: the two ends never exclude each other."""
    lower, upper = epsilon_interval(DiscreteGaussian(sigma, distance).sampled(rate=0.3) * 2, delta=1e-9, relation="replace_one")
    assert 0 <= lower <= upper < math.inf


def test_a_planted_defect_of_integer_noise_is_seen() -> None:
    """One contribution in the wrong place."""
    honest, wrong = (DiscreteReplace(DiscreteLaplaceCurve(0.7, d), 0.2) for d in (2, 1))
    assert wrong.delta(0.3) < honest.delta(0.3) * 0.9


def test_choices_by_enumeration() -> None:
    """Two exponential mechanisms, the second chosen after the first answer: all choices on a grid; random ones for three."""
    eta, per = 1.2, 600
    t = np.linspace(0.0, eta, per + 1)
    p = np.expm1(t - eta) / math.expm1(-eta)

    def one(at: np.ndarray) -> np.ndarray:  # the best single step
        tails = [np.maximum(-np.expm1(np.minimum(at[:, None] - loss, 0)), 0) for loss in (t, t - eta)]
        return np.max(p * tails[0] + (1 - p) * tails[1], axis=1)

    rng = np.random.default_rng(1)
    for at in (0.1, 0.7, 1.5, 2.2):
        two = float(np.max(p * one(at - t) + (1 - p) * one(at - t + eta)))
        upper, lower = (
            choice_delta([(BoundedRange(eta), 2)], at, upper=True),
            choice_delta([(HalfRange.of(eta), 2)], at, upper=False),
        )
        assert lower <= two * (1 + 1e-3) and two <= upper <= two * (1 + 3e-3)
        three = choice_delta([(BoundedRange(eta), 3)], at, upper=True)
        for _ in range(50):
            total = 0.0
            tree = rng.integers(0, per + 1, 7)  # a choice for each history
            for answers in itertools.product((0, 1), repeat=3):
                mass, loss, node = 1.0, 0.0, 0
                for answer in answers:
                    k = tree[node]
                    mass *= (1 - p[k]) if answer else p[k]
                    loss += t[k] - eta * answer
                    node = 2 * node + 1 + answer
                total += mass * max(0.0, -math.expm1(at - loss))
            assert total <= three


@pytest.mark.parametrize(
    ("event", "relation", "most", "share"),
    [
        (Sampled(TruncatedPoisson(rate=0.01, dataset_size=10_000, size=120), Gaussian(1.0)) * 1000, "add_remove", 2.67, 0.7),
        (Sampled(TruncatedPoisson(rate=0.01, dataset_size=10_000, size=130), Gaussian(1.0)) * 1000, "add_remove", 2.19, 0.95),
        (Sampled(TruncatedPoisson(rate=0.01, dataset_size=10_000, size=140), Gaussian(1.0)) * 1000, "add_remove", 2.15, 0.99),
        (Laplace(1.0).sampled(rate=0.1) * 100, "replace_one", 9.6, 0.8),
        (Laplace(1.0, scalar=True).sampled(rate=0.1) * 100, "replace_one", 8.1, 0.999),
        (Sampled(FixedSize(dataset_size=1000, size=10), Gaussian(1.0)) * 1000, "zero_out", 12.3, 0.95),
        (Exponential(1.0), "add_remove", 0.9985, 0.999),
        (Exponential(1.0) * 10, "add_remove", 7.75, 0.999),
        (Exponential(0.5) * 100, "replace_one", 14.35, 0.999),
    ],
    ids=str,
)
def test_values(event: Event, relation: str, most: float, share: float) -> None:
    lower, upper = epsilon_interval(event, delta=1e-6, relation=relation)
    assert share * upper <= lower <= upper <= most
