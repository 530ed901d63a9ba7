"""Random allocation: against simulation, quadrature and enumeration that share no code with it, and with planted defects."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from hushgrad.accounting import delta, epsilon, epsilon_interval
from hushgrad.accounting.pld.bounds import allocation, convex_order, replace_one_allocation
from hushgrad.accounting.pld.bounds.allocation import AllocatedAbove, AllocatedBelow
from hushgrad.accounting.pld.bounds.replace_one_allocation import AllocatedReplace
from hushgrad.accounting.pld.profiles.curve import Curve, GaussianCurve, Mirror
from hushgrad.events import BallsInBins, DiscreteLaplace, Event, Gaussian, Laplace, PureDP, Sampled
from hushgrad.noise import Banded

ALARM = 4.5  # standard errors: a false alarm in 3e5 comparisons


def _simulated(bins: int, mu: float, at: float, count: int = 40_000) -> list[tuple[float, float]]:
    """Mean and standard error of delta for removals, additions and replacements, by sampling the pair itself."""
    x = np.random.default_rng(7).standard_normal((count, bins))
    added = np.maximum(1 - np.exp(at) * np.exp(mu * x - mu * mu / 2).mean(axis=1), 0)
    x[:, 0] += mu
    with_it, opposite = (np.exp(side * mu * x - mu * mu / 2).mean(axis=1) for side in (1, -1))
    removed, replaced = (np.maximum(1 - np.exp(at) * other / with_it, 0) for other in (1.0, opposite))
    return [(float(d.mean()), float(d.std()) / math.sqrt(count)) for d in (removed, added, replaced)]


@pytest.mark.parametrize(
    ("bins", "mu", "at"), [(2, 1.0, 0.5), (10, 0.5, 0.2), (50, 1.2, 0.3), (40, 0.05, 0.005), (37, 2.5, 4.0), (5, 4.0, 14.0)]
)
def test_agrees_with_simulation(bins: int, mu: float, at: float) -> None:
    above, below = AllocatedAbove(GaussianCurve(mu), bins), AllocatedBelow(mu, bins)
    pairs: list[tuple[Curve, Curve | None]] = [(above, below), (Mirror(above), Mirror(below)), (AllocatedReplace(mu, bins), None)]
    for (upper, lower), (mean, error) in zip(pairs, _simulated(bins, mu, at), strict=True):
        if mean < 1e-3:  # too rare for so few samples
            continue
        most = upper.delta(at)
        least = most if lower is None else lower.delta(at)
        assert least <= most
        assert mean - ALARM * error - 1e-3 * mean <= most
        assert least <= mean + ALARM * error + (0.03 if lower is None else 1e-3) * mean
        assert lower is None or most - least <= 5e-3 * most


def test_planted_defects_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bins too many in the sum; a split that loses the mean: the simulation notices both."""
    bins, mu, at = 10, 0.5, 0.2
    (mean, error), _, (replaced, its_error) = _simulated(bins, mu, at, count=200_000)
    assert abs(AllocatedAbove(GaussianCurve(mu), bins + 2).delta(at) - mean) > ALARM * error + 1e-3 * mean
    assert abs(AllocatedReplace(mu, bins + 2).delta(at) - replaced) > ALARM * its_error + 0.03 * replaced
    honest = convex_order.summed_above
    for room in (allocation, replace_one_allocation):
        monkeypatch.setattr(
            room, "summed_above", lambda a, b, w, places, **more: honest(a, b, (w[0] * 0.98, w[1]), places, **more)
        )
    allocation._above.cache_clear()
    replace_one_allocation._value.cache_clear()
    assert AllocatedAbove(GaussianCurve(mu), bins).delta(at) < mean - ALARM * error
    assert AllocatedReplace(mu, bins).delta(at) < replaced - ALARM * its_error
    allocation._above.cache_clear()
    replace_one_allocation._value.cache_clear()


@pytest.mark.parametrize(("bins", "mu"), [(2, 1.0), (10, 0.5), (300, 0.9), (300, 0.01), (6, 9.0)])
def test_the_masses_are_a_pair(bins: int, mu: float) -> None:
    for curve, low, high in ((AllocatedAbove(GaussianCurve(mu), bins), 1.0, 1 + 1e-6), (AllocatedBelow(mu, bins), 1 - 1e-6, 1.0)):
        losses, p = curve.losses()
        assert low - 1e-13 <= float(p.sum()) + curve.infinite <= high + 1e-13
        assert low - 1e-9 <= float((p * np.exp(-losses)).sum()) + curve.impossible <= high + 1e-9
        assert curve.infinite < 1e-26


def _two_bins(mu: float, at: float) -> float:
    """Two bins, in closed form over one coordinate: E[(w1 + w2)/2 - x]_+ is an integral of Gaussian profiles."""
    z, step = np.linspace(-12, 12 + 2 * mu, 48_001, retstep=True)
    other = np.exp(mu * z - mu * mu / 2)
    need = 2 * math.exp(at) - other  # the other weight must exceed this
    inside = need > 0
    call = np.where(inside, 0.0, 1 - need)
    call[inside] = [GaussianCurve(mu).delta(float(e)) for e in np.log(need[inside])]
    return float(np.sum(call * np.exp(-z * z / 2)) * step / math.sqrt(2 * math.pi)) / 2


@pytest.mark.parametrize(("mu", "at"), [(0.8, 0.4), (0.8, 3.0), (2.5, 6.0)])
def test_two_bins_by_quadrature(mu: float, at: float) -> None:
    truth = _two_bins(mu, at)
    assert AllocatedBelow(mu, 2).delta(at) <= truth * (1 + 1e-6)
    assert truth * (1 - 1e-6) <= AllocatedAbove(GaussianCurve(mu), 2).delta(at) <= truth * (1 + 1e-3)


def test_discrete_noise_by_enumeration() -> None:
    """Three bins of discrete Laplace noise: all outputs, record in each bin, as they are."""
    ratio, reach, bins = math.exp(-1.0), 40, 3
    f = (1 - ratio) / (1 + ratio) * ratio ** np.abs(np.arange(-reach, reach + 1))
    moved = np.append(0.0, f[:-1])
    q = f[:, None, None] * f[None, :, None] * f[None, None, :]
    w = moved / f
    p = q * (w[:, None, None] + w[None, :, None] + w[None, None, :]) / bins
    run = Sampled(BallsInBins(bins=bins), DiscreteLaplace(1.0))
    for at in (0.1, 0.3, 0.6, 0.8):
        truth = max(float(np.sum(np.maximum(a - math.exp(at) * b, 0))) for a, b in ((p, q), (q, p)))
        assert truth - 1e-12 <= delta(run, epsilon=at) <= truth * 1.003 + 1e-9


def test_no_adaptive_replacement_is_worse() -> None:
    """Two bins, the second step's vectors chosen at random for each answer to the first: the opposite pair is above all of them."""
    mu, rng = 0.9, np.random.default_rng(5)
    z, step = np.linspace(-8, 8, 161, retstep=True)
    density = np.exp(-z * z / 2) * step / math.sqrt(2 * math.pi)
    for at in (0.2, 1.0):
        worst = replace_one_allocation._value(mu, 2, at)
        for _ in range(40):
            u, v = rng.uniform(-mu, mu, 2)  # of the first step
            us, vs = rng.choice([-mu, mu], (2, len(z), 1)) * rng.choice([1.0, rng.uniform()])
            first = [np.exp(m * z - m * m / 2)[:, None] for m in (u, v)]
            second = [np.exp(m * z[None, :] - m * m / 2) for m in (us, vs)]
            excess = (first[0] + second[0] - math.exp(at) * (first[1] + second[1])) / 2
            assert float(density @ np.maximum(excess, 0) @ density) <= worst * (1 + 1e-3)


def test_the_two_forms_of_a_sum_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C library and numpy, on random laws; and both keep mass and mean."""
    rng = np.random.default_rng(3)
    for raised, shift in itertools.product((False, True), (0.0, -3.0)):
        a, b = (convex_order.Law(np.sort(rng.gamma(0.5, size=n)) + shift, rng.dirichlet(np.ones(n))) for n in (30, 50))
        places = np.linspace(-1.0, 1.5, 40)  # some sums are outside
        made = [
            convex_order.summed_above(a, b, (0.3, 0.7), places, raised=raised),
            convex_order.summed_below(a, b, (0.3, 0.7), places),
        ]
        monkeypatch.setattr(convex_order, "KERNEL", None)
        again = [
            convex_order.summed_above(a, b, (0.3, 0.7), places, raised=raised),
            convex_order.summed_below(a, b, (0.3, 0.7), places),
        ]
        monkeypatch.undo()
        for one, other in zip(made, again, strict=True):
            np.testing.assert_allclose(one[0].mass, other[0].mass, rtol=1e-12)
            np.testing.assert_allclose(one[0].places, other[0].places, rtol=1e-12)
        (law, outside), (cells, _) = made
        mean = float(0.3 * a.places @ a.mass + 0.7 * b.places @ b.mass)
        assert float(law.mass.sum()) + outside.below + outside.above == pytest.approx(1, rel=1e-12)
        assert float(law.mass @ places) + outside.below_moment + outside.above_moment == pytest.approx(mean, rel=1e-11)
        assert float(cells.mass @ cells.places) == pytest.approx(mean, rel=1e-11)
        for k in np.linspace(-1.0, 1.5, 7):  # smaller and larger in the convex order
            truth = float(a.mass @ np.maximum(0.3 * a.places[:, None] + 0.7 * b.places - k, 0) @ b.mass)
            over = outside.above_moment - k * outside.above
            assert float(cells.mass @ np.maximum(cells.places - k, 0)) <= truth * (1 + 1e-12)
            assert truth <= (float(law.mass @ np.maximum(places - k, 0)) + over) * (1 + 1e-12)


def test_never_above_the_run_without_amplification() -> None:
    for bins, epochs, sigma, delta_ in ((1, 3, 2.0, 1e-5), (100, 1, 1.0, 1e-15), (9, 4, 1.5, 1e-6), (9, 1, 0.01, 1e-6)):
        run = Sampled(BallsInBins(bins=bins, epochs=epochs), Gaussian(sigma))
        for relation in ("add_remove", "replace_one") if bins < 10 else ("add_remove",):
            ours = epsilon(run, delta=delta_, relation=relation)
            assert ours <= epsilon(Gaussian(sigma) * epochs, delta=delta_, accountant="rdp", relation=relation) * (1 + 1e-9)
            assert delta(run, epsilon=ours, relation=relation) <= delta_ * 1.001


@pytest.mark.parametrize(
    ("event", "relation", "most", "share"),
    [
        (Sampled(BallsInBins(bins=100), Gaussian(0.6)), "add_remove", 4.2505, 0.999),
        (Sampled(BallsInBins(bins=1000, epochs=10), Gaussian(1.0)), "add_remove", 12.52, 0.999),
        (Sampled(BallsInBins(bins=100, epochs=10), Gaussian(2.0)), "zero_out", 3.7267, 0.999),
        (Sampled(BallsInBins(bins=100), Gaussian(1.0)), "replace_one", 1.02, 0.3),
        (Sampled(BallsInBins(bins=100, epochs=10, fresh=True), Gaussian(1.0)), "add_remove", 1.966, 0.99),
        (Sampled(BallsInBins(bins=1000, epochs=10, fresh=True), Gaussian(1.0)), "add_remove", 0.5405, 0.99),
        (Sampled(BallsInBins(bins=100), Laplace(1.0)), "add_remove", 0.41, 0.0),
    ],
    ids=str,
)
def test_values(event: Event, relation: str, most: float, share: float) -> None:
    lower, upper = epsilon_interval(event, delta=1e-6, relation=relation)
    assert share * upper <= lower <= upper <= most


def test_composes_with_other_events() -> None:
    run = Sampled(BallsInBins(bins=20, epochs=2), Gaussian(2.0))
    alone, more = epsilon(run, delta=1e-6), epsilon(run + PureDP(0.1), delta=1e-6)
    assert alone < more <= alone + 0.1 + 1e-3
    lower, upper = epsilon_interval(run + Gaussian(5.0), delta=1e-6)
    assert epsilon(Gaussian(5.0), delta=1e-6) * (1 - 1e-3) <= lower < upper < 1.001 * lower
    pure = Sampled(BallsInBins(bins=20, epochs=3), PureDP(0.1))
    assert epsilon(pure, delta=1e-9) == pytest.approx(0.3, rel=1e-6)


def test_fresh_bins_are_passes_composed() -> None:
    fresh = Sampled(BallsInBins(bins=8, epochs=4, fresh=True), Gaussian(1.5))
    assert epsilon(fresh, delta=1e-6) == epsilon(Sampled(BallsInBins(bins=8), Gaussian(1.5)) * 4, delta=1e-6)
    assert epsilon(fresh, delta=1e-6) < epsilon(Sampled(BallsInBins(bins=8, epochs=4), Gaussian(1.5)), delta=1e-6)
    assert str(fresh) == "BallsInBins(8, 4, fresh) Gaussian(1.5)"
    assert Event.from_json(
        '{"event": "Sampled", "how": {"participation": "BallsInBins", "bins": 3, "epochs": 2}, "of": {"event": "NonPrivate"}}'
    )


@pytest.mark.parametrize(("bins", "bands", "apart"), [(12, 3, 3), (10, 3, 5), (11, 3, 11)])
def test_banded_noise_against_simulation(bins: int, bands: int, apart: int) -> None:
    """The run itself: shifts of all columns of the record's bin, mixed over bins. It costs at most the allocation to every d-th bin."""
    epochs, sigma, at = 3, 4.0, 0.3
    mechanism = Banded(bands=bands, coefficients=(1.0, -0.5, 0.25))
    event = mechanism.event(sigma, BallsInBins(bins=bins, epochs=epochs), bins * epochs)
    column = math.sqrt(1 + 0.25 + 0.0625)
    if apart < bins:
        assert event == Sampled(BallsInBins(bins=bins // apart, epochs=epochs), Gaussian(sigma / column))
        assert event == Event.from_json(event.to_json())
    c = np.zeros((bins * epochs + bands, bins * epochs))
    for j in range(bins * epochs):
        c[j : j + bands, j] = (1.0, -0.5, 0.25)
    shifts = np.stack([c[:, j::bins].sum(axis=1) for j in range(bins)]) / sigma
    z = np.random.default_rng(4).standard_normal((40_000, c.shape[0]))
    where = np.random.default_rng(5).integers(bins, size=len(z))
    ratio = np.exp((z + shifts[where]) @ shifts.T - 0.5 * (shifts**2).sum(axis=1)).mean(axis=1)
    removed = np.maximum(1 - math.exp(at) / ratio, 0)
    error = float(removed.std()) / math.sqrt(len(z))
    assert float(removed.mean()) <= delta(event, epsilon=at) + ALARM * error
    if bands < apart:  # a divisor too small for the bands would claim too little
        wrong = Sampled(BallsInBins(bins=bins, epochs=epochs), Gaussian(2 * sigma / column))
        assert float(removed.mean()) > delta(wrong, epsilon=at) + ALARM * error


@pytest.mark.parametrize(
    ("event", "truth"),
    [
        (Sampled(BallsInBins(bins=2), Gaussian(5.0)) + PureDP(0.3), 0.78028),
        (Sampled(BallsInBins(bins=2), Gaussian(5.0)) * 2, 0.73054),
    ],
    ids=str,
)
def test_rounding_far_out_does_not_matter_to_a_composition(event: Event, truth: float) -> None:
    """Truth: a grid of 600 x 600 outputs, composed without windows or tilts. It was 37 and 58 per cent above."""
    assert truth <= epsilon(event, delta=1e-5) < truth * 1.001
