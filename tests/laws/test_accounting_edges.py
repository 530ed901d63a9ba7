"""Numbers at the edge, drawn over the whole range: an upper bound that tests made without the accountant cannot refute.

The oracle knows nothing of privacy-loss distributions. Every test (a set of outputs) proves delta >= P[test] - e^epsilon Q[test], and
three families of tests of a Poisson-sampled Gaussian have closed forms: one step's output above a threshold, the largest of all
outputs above it, and their sum above it. For one step the first family is optimal, so there the oracle is exact.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from patience import easily
from scipy.special import log_ndtr
from scipy.stats import binom

from hushgrad.accounting import PLD, gaussian_epsilon
from hushgrad.accounting.pld.bounds.compose import Composed
from hushgrad.accounting.pld.loss import PrivacyLoss
from hushgrad.events import BallsInBins, DiscreteGaussian, Event, Gaussian, Laplace, PureDP, Relation, Sampled, TruncatedPoisson


def _mixture(z: np.ndarray, mu: float, rate: float) -> np.ndarray:
    """The logarithm of P[output > z] for one step that may contain the record."""
    with np.errstate(divide="ignore"):
        return np.logaddexp(np.log1p(-rate) + log_ndtr(-z), math.log(rate) + log_ndtr(mu - z))


def _any(log_p: np.ndarray, steps: int) -> np.ndarray:
    """P[at least one of the steps], from ln P[one]."""
    return -np.expm1(steps * np.log1p(-np.minimum(np.exp(log_p), 1 - 1e-16)))


def proved_delta(sigma: float, rate: float, steps: int, epsilon: float) -> float:
    """A lower bound on delta at ``epsilon`` by the three families of tests, both directions."""
    mu, x = 1 / sigma, math.exp(min(epsilon, 700.0))
    z = np.concatenate([np.linspace(-12, 38, 4001), mu + np.linspace(-12, 38, 4001)])
    found = [0.0]
    for log_p, log_q, n in ((_mixture(z, mu, rate), log_ndtr(-z), 1), (_mixture(z, mu, rate), log_ndtr(-z), steps)):
        found.append(float(np.max(_any(log_p, n) - x * _any(log_q, n))))
    below_p = np.logaddexp(np.log1p(-rate) + log_ndtr(z), math.log(rate) + log_ndtr(z - mu)) if rate < 1 else log_ndtr(z - mu)
    found.append(float(np.max(np.exp(steps * log_ndtr(z)) - x * np.exp(steps * below_p))))  # additions: no output is large
    count = rate * steps
    k = np.unique(np.round(np.linspace(max(0, count - 9 * math.sqrt(count)), min(steps, count + 9 * math.sqrt(count) + 9), 400)))
    if len(k) < 390:  # all counts, not a sample of them
        root = math.sqrt(steps)
        sums = binom.pmf(k, steps, rate)[:, None] * np.exp(log_ndtr(k[:, None] * mu / root - z[None, :4001]))
        found.append(float(np.max(np.sum(sums, axis=0) - x * np.exp(log_ndtr(-z[:4001])))))
    return max(found)


def _event(sigma: float, rate: float, steps: int) -> Event:
    return (Gaussian(sigma) if rate == 1 else Gaussian(sigma).sampled(rate=rate)) * steps


def _cases(seed: int, count: int) -> list[tuple[float, float, int, float]]:
    rng = np.random.default_rng(seed)
    cases = []
    for _ in range(count):
        sigma, rate = 10 ** rng.uniform(-1, 4), min(1.0, 10 ** rng.uniform(-9, 0.3))
        steps = round(10 ** rng.choice([0.0, rng.uniform(0, 2), rng.uniform(0, 8)]))
        cases.append((sigma, rate, steps, 10 ** rng.uniform(-15, -1)))
    return cases


def _ask(event: Event, delta: float) -> tuple[PrivacyLoss, float, float]:
    loss = PLD().loss(event)
    assert isinstance(loss, PrivacyLoss)
    low, high = easily(lambda: loss.epsilon_interval(delta))
    assert 0 <= low <= high  # NaN fails too
    return loss, low, high


def _check(sigma: float, rate: float, steps: int, delta: float) -> None:
    loss, low, high = _ask(_event(sigma, rate, steps), delta)
    if rate == 1:
        truth = gaussian_epsilon(math.sqrt(steps) / sigma, delta)
        assert low <= truth * (1 + 1e-9) and truth <= high * (1 + 1e-9)
    if math.isfinite(high):
        assert proved_delta(sigma, rate, steps, high) <= delta * (1 + 1e-6) + 1e-15
        least, most = loss.delta_interval(high)
        assert 0 <= least <= delta * (1 + 1e-6) and least <= most <= 1
        assert proved_delta(sigma, rate, steps, high) <= most * (1 + 1e-6) + 1e-15
    if steps == 1 and low > 0:
        assert proved_delta(sigma, rate, 1, low) <= delta * (1 + 1e-3) + 1e-15


@pytest.mark.parametrize(("sigma", "rate", "steps", "delta"), _cases(1, 20))
def test_the_range(sigma: float, rate: float, steps: int, delta: float) -> None:
    _check(sigma, rate, steps, delta)


@pytest.mark.slow
@pytest.mark.parametrize(("sigma", "rate", "steps", "delta"), _cases(2, 500))
def test_more_of_the_range(sigma: float, rate: float, steps: int, delta: float) -> None:
    _check(sigma, rate, steps, delta)


@pytest.mark.parametrize(("sigma", "rate", "steps"), [(1.0, 0.01, 1), (0.5, 1e-6, 10**5), (0.7, 1e-4, 1000), (2.0, 0.3, 5)])
def test_the_oracle_refutes_an_accountant_that_assumes_more_noise(sigma: float, rate: float, steps: int) -> None:
    """The planted defect: a fifth more noise than was added."""
    honest = _ask(_event(sigma, rate, steps), 1e-7)[2]
    assert proved_delta(sigma, rate, steps, honest) <= 1e-7 * (1 + 1e-6)
    wrong = _ask(_event(1.2 * sigma, rate, steps), 1e-7)[2]
    assert proved_delta(sigma, rate, steps, wrong) > 1e-7


@pytest.mark.parametrize(("relation", "limit"), [(Relation.ADD_REMOVE, 1e-2), (Relation.REPLACE_ONE, 1e-2)])
def test_other_relations_at_the_edge(relation: Relation, limit: float) -> None:
    for sigma, rate, steps, delta in ((0.70859, 0.00023331, 11, 4.43e-5), (0.3, 1e-3, 10**4, 1e-12), (30.0, 0.5, 10**6, 1e-9)):
        loss = PLD().loss(_event(sigma, rate, steps), relation)
        assert isinstance(loss, PrivacyLoss)
        low, high = loss.epsilon_interval(delta)
        assert 0 < low <= high <= low * (1 + limit)


def test_rare_large_losses_over_millions_of_steps() -> None:
    """Here rounding dominates the plain composition: its upper bound was 20 times too large, and its lower bound above the truth.

    With tiny rates and no other leak delta is about steps times that of one step, which gives epsilon = 0.0048.
    """
    sigma, rate, steps, delta = 0.4335258967458573, 4.832090054996114e-09, 8_929_648, 8.953724208812193e-09
    loss, low, high = _ask(_event(sigma, rate, steps), delta)
    assert 0.0035 < low <= 0.00482 and 0.0048 <= high < 0.0055
    assert proved_delta(sigma, rate, steps, high) <= delta
    assert loss.delta_interval(0.02)[1] < 1e-6


def test_a_window_above_the_answer_does_not_prove_epsilon_zero() -> None:
    """The estimate is far off for such losses, so the first window lies above the answer: what is below it has to count."""
    event = DiscreteGaussian(1.0, 38) * 1000
    gaussian = PLD().loss(Gaussian(1 / 38) * 1000).epsilon(1e-5)
    assert PLD().loss(event).epsilon(1e-5) == pytest.approx(gaussian, rel=2e-3)
    assert PLD().loss(event).delta(0.9 * gaussian) > 0.99


def _opposite_records(bins: int, mu: float, at: float, count: int = 1_000_000) -> tuple[float, float]:
    """Mean and standard error of delta for two records with opposite gradients in one secret bin, by importance sampling.

    Proposals: all coordinates moved by t and a random one by s more, for some t and s; weighted by the density of their mixture.
    """
    rng = np.random.default_rng(1)
    moves = np.array([(t, s) for t in (0.0, 0.4, 0.8, 1.2) for s in (1.0, 2.0, 3.0)])
    t, s = moves[rng.integers(len(moves), size=count)].T
    z = rng.standard_normal((count, bins)) + t[:, None]
    z[np.arange(count), rng.integers(bins, size=count)] += s
    sums, once = z.sum(axis=1), np.exp(z)
    mean = {s: power.mean(axis=1) for s, power in ((1, once), (2, once * once), (3, once * once * once))}  # of e^(s z)
    density = np.zeros(count)  # all densities relative to N(0, I)
    for t, s in moves:
        density += np.exp(t * (sums - s) - (bins * t * t + s * s) / 2) * mean[int(s)] / len(moves)
    mine, opposite = (math.exp(-mu * mu / 2) * power.mean(axis=1) for power in (once**mu, once**-mu))
    found = np.maximum(mine - math.exp(at) * opposite, 0) / density
    return float(found.mean()), float(found.std()) / math.sqrt(count)


def test_lower_ends_where_the_analysis_is_not_tight() -> None:
    """A lower end is attained by some data, or it is 0; it is never the upper bound of a run without its amplification."""
    balls = Sampled(BallsInBins(bins=10, epochs=4), Gaussian(2.0))
    low, high = PLD().loss(balls, Relation.REPLACE_ONE).epsilon_interval(1e-6)
    mean, error = _opposite_records(bins=10, mu=1.0, at=low)
    assert 0.999 * high < low < high and error < 0.01e-6
    assert 1e-6 - 4.5 * error < mean < 1.01e-6 + 4.5 * error  # the truth at the lower end is 1e-6 at least
    # Composed, the lower end is that of an observer of one bin.
    one_bin = PLD().loss(Gaussian(1.0).sampled(rate=0.1) * 2, Relation.REPLACE_ONE).epsilon(1e-6)
    low, high = PLD().loss(balls * 2, Relation.REPLACE_ONE).epsilon_interval(1e-6)
    assert 0.999 * one_bin < low <= one_bin < high
    one_bin = PLD().loss(Laplace(1.0).sampled(rate=0.1)).epsilon(1e-6)
    low, high = PLD().loss(Sampled(BallsInBins(bins=10), Laplace(1.0))).epsilon_interval(1e-6)
    assert 0.999 * one_bin < low <= one_bin < high
    assert PLD().loss(Sampled(BallsInBins(bins=10), PureDP(1.0))).epsilon_interval(1e-6)[0] == 0
    poisson = PLD().loss(Gaussian(1.0).sampled(rate=0.01) * 1000).epsilon(1e-6)
    roomy, tight = (Sampled(TruncatedPoisson(rate=0.01, dataset_size=10_000, size=size), Gaussian(1.0)) for size in (160, 100))
    low, high = PLD().loss(roomy * 1000).epsilon_interval(1e-6)
    assert high * (1 - 1e-3) < low <= poisson <= high * (1 + 1e-4)  # each is an upper bound of that width
    low, high = PLD().loss(tight * 1000).epsilon_interval(1e-6)
    assert 0 < low < poisson < high  # half of the batches are cut: the record is seen more rarely, and competes


def test_a_wrapped_window_proves_nothing() -> None:
    """All mass re-entered the window, and the weights overflow: the subtraction must not be cut off before them."""
    composed = Composed(0.0, 1.0, np.full(16, 1 / 16), 1e6, 50.0, 0.0, 0.0, (1e6, 50.0), 0.0, 0.0, 0.0)
    with np.errstate(all="ignore"):
        assert composed.delta(1.0, upper=False) == 0.0
        assert composed.epsilon(1e-6, upper=False) is None
