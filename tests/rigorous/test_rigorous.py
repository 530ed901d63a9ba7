"""A short part of ``make rigorous``: fixed questions of every kind, and planted defects that the adversary must see."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import adversary
import ball_arithmetic as balls
import cut_samples
import enumeration
import pytest
import questions
from flint import arb

from hushgrad.accounting import epsilon_interval, gaussian_delta
from hushgrad.accounting.pld import loss as losses
from hushgrad.accounting.pld.search import epsilon_bounds
from hushgrad.events import (
    ApproxDP,
    BallsInBins,
    DiscreteLaplace,
    Event,
    FixedSize,
    Gaussian,
    Laplace,
    PureDP,
    Sampled,
    TruncatedPoisson,
)

# (questions, whether they take seconds each); all kinds together and for longer: make rigorous.
COUNTS = {
    "one step": (40, False),
    "two steps": (2, True),
    "three steps": (1, True),
    "discrete": (25, False),
    "fixed size": (4, True),
    "two bins (": (1, False),
    "two bins, replaced": (1, True),
    "many bins": (2, False),
    "truncated": (6, False),
    "many steps": (3, True),
    "passes": (3, True),
}


def _marked(kind: str) -> object:
    _, slow = next(value for name, value in COUNTS.items() if kind.startswith(name))
    return pytest.param(kind, marks=pytest.mark.slow) if slow else kind


@pytest.mark.parametrize("kind", [_marked(kind) for kind in questions.KINDS])
def test_no_end_is_refuted(kind: str) -> None:
    rng, found = random.Random(8), adversary.Found()
    for _ in range(next(count for name, (count, _) in COUNTS.items() if kind.startswith(name))):
        adversary.compare(questions.KINDS[kind](rng), found)
    assert not found.violations


# Ends that the adversary refuted once.
REFUTED: list[tuple[Event, float, str]] = [
    (Laplace(0.10624022783333509).sampled(rate=2.3503703101775894e-07), 3.736216441862848e-17, "zero_out"),
    (PureDP(0.00018415882865320602).sampled(rate=0.029621242514025484) * 8, 1.0774961150495608e-268, "add_remove"),
    (
        ApproxDP(1.5188428592844723e-06, 7.586245643318824e-268).sampled(rate=0.0012385669596913246) * 8,
        3.4593749582633395e-264,
        "replace_one",
    ),
    (PureDP(1.9792082224635934e-06) * 8, 1.944451106116477e-104, "add_remove"),
    (DiscreteLaplace(63.85502662796978, 3).sampled(rate=3.1079231831465315e-06) * 2, 3.933205741931436e-18, "add_remove"),
]


@pytest.mark.parametrize(("event", "delta", "relation"), REFUTED)
def test_what_was_refuted_once(event: Event, delta: float, relation: str) -> None:
    low, high = epsilon_interval(event, delta=delta, relation=relation)  # the last three contradicted themselves
    assert 0 <= low <= high
    if isinstance(event, type(Laplace(1.0).sampled(rate=0.5))):
        balls.precision(delta, 1e3)
        pair = balls.Sampled(balls.Laplace(1 / arb(0.10624022783333509)), arb(2.3503703101775894e-07))
        assert pair.delta(arb(high).exp()) <= arb(delta)


def test_an_epsilon_next_to_the_largest_loss() -> None:
    """Between two grid points delta is read without differences of large numbers: losses of 1e-6, deltas of 1e-18."""
    rng = random.Random(8)
    for _ in range(20):
        loss, rate = 10 ** rng.uniform(-7, -5), 10 ** rng.uniform(-7, -5)
        delta = loss * rate * 10 ** rng.uniform(-6, -1)
        balls.precision(delta, 1e8)
        relation = rng.choice(["zero_out", "add_remove"])  # with the participation visible, and without
        way = enumeration.shown if relation == "zero_out" else enumeration.sampled
        rate, delta = (rate, delta) if rng.random() < 0.5 else (1.0, delta / rate)
        masses = way(enumeration.approximate(arb(loss), arb(0))[:2], arb(rate))
        low, high = epsilon_interval(PureDP(loss).sampled(rate=rate) * 2, delta=delta, relation=relation)
        both = [enumeration.composed(m, 2).delta for m in (masses, enumeration.mirrored(masses))]
        assert max(float(f(arb(high).exp()).mid()) for f in both) <= delta <= max(float(f(arb(low).exp()).mid()) for f in both)


def test_few_bins_replaced_from_both_sides() -> None:
    for bins, sigma, delta in [(3, 1.0, 1e-4), (10, 2.0, 1e-6)]:
        low, high = epsilon_interval(Sampled(BallsInBins(bins=bins), Gaussian(sigma)), delta=delta, relation="replace_one")
        one_bin = epsilon_interval(Gaussian(sigma).sampled(rate=1 / bins), delta=delta, relation="replace_one")[0]
        assert one_bin < 0.98 * high < low <= high


def test_a_record_that_is_added_competes_too() -> None:
    balls.precision(1e-3, 1e6)
    for n, size, rate, sigma in [(1, 1, 0.5, 1.0), (2, 2, 0.9, 2.0), (4, 2, 0.5, 1.0)]:
        upper = epsilon_interval(
            Sampled(TruncatedPoisson(rate=rate, dataset_size=n, size=size), Gaussian(sigma)), delta=1e-3, relation="add_remove"
        )[1]
        for others in ([-1.0] * n, [-1.0] * (n - 1)):  # opposite records, one more or one fewer than the public number in all
            pair = cut_samples.Mixtures.of(arb(rate), size, others, sigma, "add_remove")
            assert all(way.at_least(upper) <= 1e-3 for way in (pair, pair.mirrored()))


@pytest.mark.parametrize(("sigma", "delta"), [(0.0401, 1e-6), (0.05, 1e-100), (0.1, 1e-200), (1.0, 1e-6)])
def test_a_null_record_beside_little_noise(sigma: float, delta: float) -> None:
    """Losses of hundreds: e^eps squared is no double."""
    balls.precision(delta, 1e6)
    low, high = epsilon_interval(Sampled(FixedSize(dataset_size=10, size=1), Gaussian(sigma)), delta=delta, relation="zero_out")
    one = arb(1) / 10
    attained = [max(way.at_least(e) for way in cut_samples.opposite_to_all(one, sigma)) for e in (0.99 * high, high)]
    assert attained[1] <= delta <= attained[0] and high < low * (1 + 1e-6)


def test_a_smaller_upper_end_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    real = losses.epsilon_bound

    def short(*arguments: object, upper: bool, **options: object) -> epsilon_bounds.Answer:
        answer = real(*arguments, upper=upper, **options)  # type: ignore[arg-type]
        return replace(answer, epsilon=answer.epsilon * (1 - 1e-5)) if upper else replace(answer, epsilon=answer.epsilon * 0.9)

    monkeypatch.setattr(losses, "epsilon_bound", short)
    rng, found = random.Random(8), adversary.Found()
    for _ in range(10):
        adversary.compare(questions.few_steps(rng, 1), found)
    assert len(found.violations) > 5


def test_the_truth_of_gaussians_composes() -> None:
    """Two Gaussians are one, and two bins at a great distance are one Gaussian: the enclosures hold what is known in closed form."""
    balls.precision(1e-10, 1e3)
    for mu, nu, eps in [(1.0, 2.0, 3.0), (0.1, 0.3, 0.5)]:
        low, high = balls.profile([balls.Gaussian(arb(mu)), balls.Gaussian(arb(nu))], arb(eps).exp(), 1e-4)
        known = gaussian_delta(math.hypot(mu, nu), eps)
        assert (
            float(low.mid()) * (1 - 1e-9) <= known <= float(high.mid()) * (1 + 1e-9)
            and float(high.mid()) < float(low.mid()) * 1.001
        )
    low, high = balls.two_bins(arb(0.5), arb(0.2).exp(), 1e-3, remove=True)
    alone = Gaussian(2.0)
    assert alone.noise_multiplier == 2.0 and 0 < float(low.mid()) <= float(high.mid()) < gaussian_delta(0.5, 0.2)
