"""The price of a search against the exact distribution of what it releases, on cases small enough to enumerate."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr

from hushgrad.accounting import epsilon
from hushgrad.accounting.trial_counts import probabilities
from hushgrad.errors import ArgumentError
from hushgrad.events import Compose, Event, Gaussian, NonPrivate, OneOf, PureDP, RandomizedResponse, RepeatAndSelect
from hushgrad.tuning import Draws, Stopping, calibrated_noise, number_of_trials, tuning_cost
from hushgrad.tuning.cost import _poisson

SHAPES = (-0.5, 0.0, 0.5, 1.0, 3.0)


def trial_numbers(stopping: Stopping) -> tuple[np.ndarray, np.ndarray]:
    """K and P(K = k), as the search draws it."""
    if math.isinf(stopping.shape):
        cumulative = _poisson(stopping.mean)
        return np.arange(cumulative.size), np.diff(cumulative, prepend=0.0)
    mass = np.concatenate(list(probabilities(stopping.mean, stopping.shape)))
    return 1 + np.arange(mass.size), mass


def released(trial: np.ndarray, numbers: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """The exact distribution of the best of K outputs, where outputs are listed from worst to best; last: no output (K = 0).

    P(best <= y) = E[P(trial <= y)^K].
    """
    k, probability = numbers
    below = np.concatenate([[0.0], np.minimum(np.cumsum(trial), 1.0)])
    best = np.array([(probability * below_y**k).sum() - probability[k == 0].sum() for below_y in below[1:]])
    return np.append(np.diff(best, prepend=0.0), probability[k == 0].sum())


def exact_delta(p: np.ndarray, q: np.ndarray, eps: float) -> float:
    return max(np.maximum(p - math.exp(eps) * q, 0).sum(), np.maximum(q - math.exp(eps) * p, 0).sum())


def exact_epsilon(p: np.ndarray, q: np.ndarray) -> float:
    seen = (p > 1e-300) & (q > 1e-300)
    return float(np.abs(np.log(p[seen] / q[seen])).max())


def responses(eps: float) -> tuple[np.ndarray, np.ndarray]:
    """Randomised response about one bit, which is scored by its answer: the two neighbours' output distributions."""
    high = math.exp(eps) / (1 + math.exp(eps))
    return np.array([1 - high, high]), np.array([high, 1 - high])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mean", [1.5, 4.0, 20.0])
@pytest.mark.parametrize("eps", [0.1, 0.7, 2.0])
def test_randomised_response_as_the_trial(shape: float, mean: float, eps: float) -> None:
    stopping = Stopping(mean=mean, shape=shape)
    p, q = (released(trial, trial_numbers(stopping)) for trial in responses(eps))
    event = stopping.event(PureDP(eps))
    assert exact_epsilon(p, q) <= epsilon(event, delta=0.0, accountant="rdp") + 1e-9 <= (2 + shape) * eps + 1e-6
    for delta in (1e-3, 1e-2):
        claimed = epsilon(event, delta=delta, accountant="rdp")
        assert exact_delta(p, q, claimed) <= delta
    noise = 2 / (math.exp(eps) + 1)  # the same trial by its own event
    own = epsilon(stopping.event(RandomizedResponse(noise)), delta=1e-3, accountant="rdp", relation="replace_one")
    assert exact_delta(p, q, own) <= 1e-3


@pytest.mark.parametrize("shape", SHAPES)
def test_the_naive_claim_is_refuted(shape: float) -> None:
    """The planted defect: quoting the winner's own epsilon. The enumeration above rejects it."""
    stopping = Stopping(mean=10.0, shape=shape)
    p, q = (released(trial, trial_numbers(stopping)) for trial in responses(0.5))
    assert exact_epsilon(p, q) > 1.2 * 0.5
    assert exact_delta(p, q, 0.5) > 1e-3


def test_a_number_of_trials_that_is_known_is_refuted() -> None:
    """Another planted defect: always ten trials, which costs up to ten times as much, at the price of a random number."""
    fixed = (np.array([10]), np.array([1.0]))
    p, q = (released(trial, fixed) for trial in responses(0.5))
    assert exact_epsilon(p, q) == pytest.approx(5.0)
    assert exact_epsilon(p, q) > epsilon(Stopping(mean=10.0).event(PureDP(0.5)), delta=0.0, accountant="rdp")
    claimed = epsilon(Stopping(mean=10.0).event(PureDP(0.5)), delta=1e-4, accountant="rdp")
    assert exact_delta(p, q, claimed) > 1e-4


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.tuples(st.floats(0.05, 1.0), st.floats(-1.0, 1.0)), min_size=2, max_size=6),
    eps=st.floats(0.05, 2.0),
    mean=st.floats(1.0, 30.0),
    shape=st.sampled_from(SHAPES),
)
def test_any_pure_trial(weights, eps, mean, shape) -> None:
    p = np.array([w for w, _ in weights])
    p /= p.sum()
    tilt = p * np.exp(eps * np.array([t for _, t in weights]) / 2)
    q = tilt / tilt.sum()
    trial = exact_epsilon(p, q)
    stopping = Stopping(mean=mean, shape=shape)
    best_p, best_q = (released(x, trial_numbers(stopping)) for x in (p, q))
    assert exact_epsilon(best_p, best_q) <= epsilon(stopping.event(PureDP(trial)), delta=0.0, accountant="rdp") + 1e-7


# Candidates that cost different amounts ------------------------------------------------------------------------------------


def drawn_candidates(draw: np.random.Generator, order: str) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """Output distributions (candidate and its output, by score) under two neighbours where candidates have their own epsilon."""
    sizes, strengths = draw.integers(2, 5, draw.integers(2, 5)), draw.uniform(0.05, 2.0, 4)
    parts = []
    for size, strength in zip(sizes, strengths, strict=False):
        p = draw.dirichlet(np.ones(size)) + 0.02
        q = p * np.exp(strength * draw.uniform(-0.5, 0.5, size))
        parts.append((p / p.sum(), q / q.sum()))
    p, q = (np.concatenate([part[side] for part in parts]) / len(parts) for side in (0, 1))
    places = draw.permutation(p.size) if order == "mixed" else np.argsort(p / q)
    return p[places], q[places], [exact_epsilon(*part) for part in parts]


@pytest.mark.parametrize("order", ["mixed", "worst"])
def test_a_search_over_candidates_of_different_cost(order: str) -> None:
    """Enumerated: never above the price of "one of"; the price of the cheapest candidate is refuted again and again."""
    draw, refuted = np.random.default_rng(27), 0
    for _ in range(60):
        p, q, alone = drawn_candidates(draw, order)
        stopping = Stopping(mean=float(draw.uniform(1.0, 20.0)), shape=float(draw.choice(SHAPES)))
        best = [released(x, trial_numbers(stopping)) for x in (p, q)]
        for delta in (0.0, 1e-3):
            claims = [
                epsilon(stopping.event(trial), delta=delta, accountant="rdp")
                for trial in (OneOf(map(PureDP, alone)), PureDP(min(alone)))
            ]
            assert exact_delta(*best, claims[0] + 1e-9) <= delta + 1e-12
            refuted += exact_delta(*best, claims[1]) > delta + 1e-12
    assert refuted > 20


def sampled_outputs(noise: float, rate: float, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """A sampled Gaussian of one or two steps under two neighbours, its outputs in cells (which is post-processing)."""
    edges = np.concatenate([[-np.inf], np.linspace(-6 * noise, 1 + 6 * noise, 150 if steps == 1 else 14), [np.inf]])
    p = np.diff(ndtr(edges / noise))
    q = (1 - rate) * p + rate * np.diff(ndtr((edges - 1) / noise))
    return (p, q) if steps == 1 else (np.outer(p, p).ravel(), np.outer(q, q).ravel())


@pytest.mark.parametrize("order", ["mixed", "worst"])
def test_a_search_over_sampled_trials_of_different_batches_and_steps(order: str) -> None:
    """Enumerated: noise, rate and number of steps differ between candidates; the price of the winner's own run is refuted."""
    draw, refuted = np.random.default_rng(2727), 0
    for _ in range(12):
        many = int(draw.integers(1, 4))
        options = list(zip(draw.uniform(0.6, 3.0, many), draw.uniform(0.05, 1.0, many), draw.integers(1, 3, many), strict=True))
        parts = [sampled_outputs(float(noise), float(rate), int(steps)) for noise, rate, steps in options]
        p, q = (np.concatenate([part[side] for part in parts]) / many for side in (0, 1))
        places = (
            draw.permutation(p.size) if order == "mixed" else np.argsort(np.log(np.maximum(p, 1e-300) / np.maximum(q, 1e-300)))
        )
        places = places[:: int(draw.choice([-1, 1]))]  # a removed record may look better, or worse
        stopping = Stopping(mean=float(draw.uniform(1.0, 20.0)), shape=float(draw.choice(SHAPES)))
        best = [released(x[places], trial_numbers(stopping)) for x in (p, q)]
        trials = [Gaussian(float(noise)).sampled(rate=float(rate)) * int(steps) for noise, rate, steps in options]
        delta = float(draw.choice([1e-2, 1e-4]))
        claimed = epsilon(stopping.event(OneOf(trials)), delta=delta, accountant="rdp")
        assert exact_delta(*best, claimed) <= delta + 1e-12
        refuted += exact_delta(*best, max(epsilon(trial, delta=delta) for trial in trials)) > delta
    assert order == "mixed" or refuted > 4


def trials_of(draw: np.random.Generator) -> list[Event]:
    steps, rates, noises = draw.integers(1, 400, 3), draw.uniform(0.01, 1.0, 3), draw.uniform(0.8, 20.0, 3)
    return [Gaussian(float(s)).sampled(rate=float(q)) * int(t) for s, q, t in zip(noises, rates, steps, strict=True)]


def test_one_of_several_costs_what_the_dearest_costs_at_each_order() -> None:
    from hushgrad.accounting import RDP

    draw = np.random.default_rng(5)
    for _ in range(10):
        trials = trials_of(draw)
        one, parts = RDP().loss(OneOf(trials)), [RDP().loss(trial) for trial in trials]
        for order in (1.5, 3.0, 17.0, 200.0):
            assert one.renyi(order) == max(part.renyi(order) for part in parts)
        for delta in (1e-8, 1e-3):
            assert one.epsilon(delta) >= max(part.epsilon(delta) for part in parts)
            twice = RDP().loss(OneOf(trials) * 2).epsilon(delta)
            assert twice >= max(RDP().loss(Compose((a, b))).epsilon(delta) for a in trials for b in trials) - 1e-12
        stopping = Stopping(mean=5.0)
        cost = tuning_cost(OneOf(trials), delta=1e-5, stopping=stopping)
        assert cost.epsilon >= max(tuning_cost(trial, delta=1e-5, stopping=stopping).epsilon for trial in trials)
        assert cost.naive == max(tuning_cost(trial, delta=1e-5, stopping=stopping).naive for trial in trials)
    assert math.isinf(epsilon(OneOf((Gaussian(1.0), NonPrivate())), delta=1e-3, accountant="rdp"))
    assert epsilon(OneOf((Compose(()), Gaussian(1.0) * 0)), delta=1e-3, accountant="rdp") == 0.0
    assert OneOf.of([Gaussian(2.0), Gaussian(2.0)]) == Gaussian(2.0)
    with pytest.raises(ArgumentError, match="at least one event"):
        OneOf(())


@pytest.mark.parametrize("mean", [0.5, 3.0, 15.0])
def test_a_poisson_number_of_trials(mean: float) -> None:
    stopping = Stopping(mean=mean, shape=math.inf)
    for eps in (0.2, 1.0):
        p, q = (released(trial, trial_numbers(stopping)) for trial in responses(eps))
        assert p.sum() == pytest.approx(1) and p[-1] == pytest.approx(math.exp(-mean))
        for delta in (1e-4, 1e-2):
            assert exact_delta(p, q, epsilon(stopping.event(PureDP(eps)), delta=delta, accountant="rdp")) <= delta


# K ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [*SHAPES, math.inf])
@pytest.mark.parametrize("mean", [1.0, 2.5, 10.0, 200.0])
def test_k_has_the_distribution_of_the_theorem(shape: float, mean: float) -> None:
    k, probability = trial_numbers(Stopping(mean=mean, shape=shape))
    assert probability.sum() == pytest.approx(1.0) and (k * probability).sum() == pytest.approx(mean, rel=1e-6)
    if shape == 1.0:
        np.testing.assert_allclose(probability[:20], ((1 - 1 / mean) ** (k - 1) / mean)[:20], atol=1e-12)
    if math.isinf(shape):
        np.testing.assert_allclose(probability[:5], [math.exp(-mean) * mean**n / math.factorial(n) for n in range(5)], atol=1e-12)


@pytest.mark.parametrize(("mean", "shape"), [(10.0, -0.9), (1000.0, -0.5)])
def test_a_long_tail_is_followed_without_a_table_of_it(mean: float, shape: float) -> None:
    """Up to 2^-60 of them there are 10^12 numbers of trials."""
    stopping = Stopping(mean=mean, shape=shape)
    drawn = [number_of_trials(u, stopping) for u in (0.0, 0.5, 0.9, 0.999)]
    assert drawn == sorted(drawn) and drawn[0] == 1 and drawn[-1] > 20


def test_logarithmic_k_is_the_limit_of_small_shapes() -> None:
    _, exact = trial_numbers(Stopping(mean=5.0, shape=0.0))
    _, near = trial_numbers(Stopping(mean=5.0, shape=1e-7))
    np.testing.assert_allclose(near[:50], exact[:50], rtol=1e-4)


def test_draws_follow_from_the_key_alone_and_do_not_share_bits() -> None:
    one, again, other = Draws(b"1" * 32), Draws(b"1" * 32), Draws(b"2" * 32)
    stopping = Stopping(mean=50.0)
    assert one.trials(stopping) == again.trials(stopping)
    assert [one.candidate(t, 7) for t in range(50)] == [again.candidate(t, 7) for t in range(50)]
    secrets = [f(t) for d in (one, other) for f in (d.key, d.scoring) for t in range(20)]
    assert len(set(secrets)) == len(secrets) == 80
    assert "1111" not in repr(one)
    with pytest.raises(ArgumentError) as refusal:
        Draws(b"short secret")
    assert "secret" not in str(refusal.value)


def test_candidates_and_k_over_many_keys() -> None:
    """chi-squared at a false-alarm rate of 1e-6 each; a K that is one too small on average is rejected."""
    from scipy.stats import chisquare

    keys = [Draws(n.to_bytes(32, "little")) for n in range(4000)]
    counts = np.bincount([d.candidate(t, 5) for d in keys for t in range(3)], minlength=5)
    assert chisquare(counts).pvalue > 1e-6
    stopping = Stopping(mean=6.0, shape=0.0)
    k, probability = trial_numbers(stopping)
    drawn = np.array([d.trials(stopping) for d in keys])

    def pvalue(values: np.ndarray) -> float:
        cells = np.bincount(np.minimum(values, 12), minlength=13)[1:]
        expected = np.append(probability[k < 12], probability[k >= 12].sum())
        return float(chisquare(cells, expected * cells.sum()).pvalue)

    assert pvalue(drawn) > 1e-6
    assert pvalue(np.maximum(drawn - 1, 1)) < 1e-6  # the mutation
    assert pvalue(np.array([number_of_trials(d._uniform("trials"), Stopping(mean=6.0, shape=1.0)) for d in keys])) < 1e-6


# Prices -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [-0.5, 0.0, 1.0, math.inf])
def test_calibration_meets_the_true_epsilon_and_not_by_much(shape: float) -> None:
    stopping = Stopping(mean=8.0, shape=shape)

    def trial(noise: float):
        return Gaussian(noise).sampled(rate=0.02) * 300

    noise = calibrated_noise(trial, epsilon=2.0, delta=1e-5, stopping=stopping)
    cost = tuning_cost(trial(noise), delta=1e-5, stopping=stopping)
    assert cost.naive < 0.8 * cost.epsilon <= 1.6 and cost.epsilon > 1.98
    assert cost.event == RepeatAndSelect(of=trial(noise), mean=8.0, shape=shape)


def test_the_price_does_not_fall_with_more_trials_or_a_larger_shape() -> None:
    trial = Gaussian(5.0)
    by_mean = [tuning_cost(trial, delta=1e-6, stopping=Stopping(mean=m)).epsilon for m in (1.0, 2.0, 10.0, 100.0)]
    by_shape = [tuning_cost(trial, delta=1e-6, stopping=Stopping(mean=10.0, shape=s)).epsilon for s in SHAPES]
    assert by_mean == sorted(by_mean) and by_shape == sorted(by_shape)


def test_numbers_of_trials_that_make_no_sense_are_refused() -> None:
    for bad in ({"mean": 0.5}, {"mean": 0.0, "shape": math.inf}, {"shape": -1.0}, {"mean": math.nan}, {"mean": math.inf}):
        with pytest.raises(ArgumentError):
            Stopping(**bad)
    assert Stopping.from_json(Stopping(mean=3.0, shape=math.inf).to_json()) == Stopping(mean=3.0, shape=math.inf)
