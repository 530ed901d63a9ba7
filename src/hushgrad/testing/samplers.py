"""Conformance of samplers: does a sampler keep the promise of its own ``participation()``?

Each promise is tested by z-scores whose statistics are exact in mean and variance under the promise. The bar is |z| < 6: a
conforming sampler is rejected with probability below 2e-9 per score (normal tail; a few dozen scores in all).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from hushgrad import events
from hushgrad.sampling import Sampler
from hushgrad.sampling.draws import Draws

_BAR = 6.0
_RUNS = 1500


def check_sampler(sampler: Sampler, *, n: int = 30, seed: int = 0) -> None:
    """Raise AssertionError unless ``sampler`` is a pure function of its key and keeps its promise.

    Args:
        sampler: any sampler; its ``steps`` should be few (a dozen), and its public size, if it has one, ``n``.
        n: number of records to deal.
        seed: seed of the test.

        >>> from hushgrad.sampling import Poisson
        >>> check_sampler(Poisson(rate=0.5, steps=6))
    """
    _check_value(sampler)
    _check_deals(sampler, n, seed)
    promise = sampler.participation()
    test = _PROMISES.get(type(promise))
    assert test is not None, f"{promise} has no statistical test here; promise a known participation"
    test(promise, _tables(sampler, n, seed))


def _check_value(sampler: Sampler) -> None:
    assert isinstance(sampler.participation(), events.Participation), "participation() must return a Participation"
    assert Sampler.from_json(sampler.to_json()) == sampler, "a sampler must survive JSON"
    assert sampler.steps >= 1, "a sampler deals at least one step"


def _check_deals(sampler: Sampler, n: int, seed: int) -> None:
    key = np.random.default_rng(seed).bytes(32)
    deal = sampler.dealer(n, Draws(key))
    batches = [deal(step) for step in range(sampler.steps)]
    for batch in batches:
        assert batch.dtype.kind == "i" and batch.ndim == 1, "a batch is a 1-d integer array"
        assert np.array_equal(batch, np.unique(batch)), "record numbers are sorted and none is dealt twice"
        assert batch.size == 0 or (batch[0] >= 0 and batch[-1] < n), "record numbers lie in 0..n-1"
    again = sampler.dealer(n, Draws(key))
    for step in reversed(range(sampler.steps)):  # out of order, from a fresh dealer: no state may pass between the steps
        assert np.array_equal(again(step), batches[step]), "a step's batch must be a pure function of key and step"
    in_order = list(sampler.batches(n, np.random.default_rng(seed)))
    assert len(in_order) == sampler.steps, "batches() deals every step"
    assert all(map(np.array_equal, in_order, batches)), "batches() and dealer() must agree"


def _tables(sampler: Sampler, n: int, seed: int) -> np.ndarray:
    """(runs, steps, n): who took part, in many independent runs."""
    rng = np.random.default_rng(seed + 1)
    table = np.zeros((_RUNS, sampler.steps, n), dtype=bool)
    for run in range(_RUNS):
        for step, batch in enumerate(sampler.batches(n, rng)):
            table[run, step, batch] = True
    return table


# One test per promise ------------------------------------------------------------------------------------------------


def _score(what: str, sample: np.ndarray, mean: float, variance: float) -> None:
    """``sample`` has independent entries of this mean and variance; their average must agree, and so must their spread."""
    if variance <= 1e-12:
        assert np.allclose(sample, mean), f"{what} must always be {mean:g}"
        return
    z = (sample.mean() - mean) / math.sqrt(variance / sample.size)
    assert abs(z) < _BAR, f"{what} is {sample.mean():.4f} on average, not {mean:.4f} (z = {z:.1f})"


def _score_pairs(what: str, left: np.ndarray, right: np.ndarray, chance: float) -> None:
    """Two indicator tables that should be independent: coincidences happen with probability ``chance``.

    Coincidences in one run may share a record, so the runs, which are independent, are the sample.
    """
    per_run = (left & right).reshape(len(left), -1).mean(axis=1)
    spread = per_run.std(ddof=1)
    if spread <= 1e-12:
        assert math.isclose(per_run[0], chance, abs_tol=1e-9), f"{what} coincide always alike"
        return
    z = (per_run.mean() - chance) / (spread / math.sqrt(len(per_run)))
    assert abs(z) < _BAR, f"{what} coincide with frequency {per_run.mean():.4f}, not {chance:.4f} (z = {z:.1f})"


def _score_spread(what: str, sizes: np.ndarray, mean: float, variance: float, fourth: float) -> None:
    """Mean of (size - mean)² against the variance; ``fourth`` is the fourth central moment."""
    _score(what + " (spread)", (sizes - mean) ** 2, variance, fourth - variance**2)


def _binomial_sizes(what: str, sizes: np.ndarray, n: int, rate: float) -> None:
    variance = n * rate * (1 - rate)
    fourth = variance * (1 + 3 * (n - 2) * rate * (1 - rate))
    _score(what, sizes.astype(float), n * rate, variance)
    _score_spread(what, sizes.astype(float), n * rate, variance, fourth)


def _poisson(promise: events.Poisson, table: np.ndarray) -> None:
    q, n = promise.rate, table.shape[2]
    for record in (0, n // 2, n - 1):
        _score(f"the rate of record {record}", table[:, :, record].ravel().astype(float), q, q * (1 - q))
    for step in (0, table.shape[1] - 1):
        _score(f"the rate of step {step}", table[:, step].ravel().astype(float), q, q * (1 - q))
    _binomial_sizes("the batch size", table.sum(axis=2).ravel(), n, q)
    _score_pairs("neighbouring records", table[:, :, :-1], table[:, :, 1:], q * q)
    _score_pairs("a record's successive steps", table[:, :-1], table[:, 1:], q * q)
    _score_pairs("a record's first and last step", table[:, :1], table[:, -1:], q * q)


def _truncated(promise: events.TruncatedPoisson, table: np.ndarray) -> None:
    from scipy.stats import binom

    n, cap = table.shape[2], promise.size
    support = np.arange(n + 1)
    kept = np.minimum(support, cap)
    law = binom.pmf(support, n, promise.rate)
    sizes = table.sum(axis=2).ravel().astype(float)
    assert sizes.max() <= cap, f"a batch has {sizes.max():.0f} records, more than size={cap}"
    mean = float(law @ kept)
    variance = float(law @ (kept - mean) ** 2)
    _score("the batch size", sizes, mean, variance)
    _score_spread("the batch size", sizes, mean, variance, float(law @ (kept - mean) ** 4))
    together = float(law @ (kept * (kept - 1))) / (n * (n - 1))
    _exchangeable(table, mean / n, together)


def _fixed_size(promise: events.FixedSize, table: np.ndarray) -> None:
    n, size = promise.dataset_size, promise.size
    assert (table.sum(axis=2) == size).all(), f"every batch must have exactly {size} records"
    _exchangeable(table, size / n, size * (size - 1) / (n * (n - 1)))


def _exchangeable(table: np.ndarray, rate: float, together: float) -> None:
    for record in (0, table.shape[2] // 2, table.shape[2] - 1):
        _score(f"the rate of record {record}", table[:, :, record].ravel().astype(float), rate, rate * (1 - rate))
    _score_pairs("neighbouring records", table[:, :, :-1], table[:, :, 1:], together)
    _score_pairs("a record's successive steps", table[:, :-1], table[:, 1:], rate**2)


def _cyclic(promise: events.CyclicPoisson, table: np.ndarray) -> None:
    period, q, n = promise.period, promise.rate, table.shape[2]
    took_part = np.stack([table[:, g::period].any(axis=1) for g in range(period)])
    assert took_part.sum(axis=0).max() <= 1, f"a record took part in steps that are not a multiple of {period} apart"
    chance = q / period
    for step in (0, min(period, table.shape[1]) - 1):
        _binomial_sizes(f"the batch of step {step}", table[:, step].sum(axis=1), n, chance)
    if table.shape[1] > period:
        _score_pairs("a record's successive turns", table[:, :-period], table[:, period:], q * q / period)
    _score_pairs("neighbouring records", table[:, :, :-1], table[:, :, 1:], chance**2)


def _min_sep(promise: events.MinSep, table: np.ndarray) -> None:
    assert table.sum(axis=1).max() <= promise.times, f"a record took part more than {promise.times} times"
    # In any window of `gap` successive steps a record takes part at most once.
    ends = np.cumsum(np.pad(table.astype(np.int32), ((0, 0), (1, 0), (0, 0))), axis=1)
    window = min(promise.gap, table.shape[1])
    assert (ends[:, window:] - ends[:, :-window]).max() <= 1, f"two participations are less than {promise.gap} steps apart"


def _balls(promise: events.BallsInBins, table: np.ndarray) -> None:
    runs, steps, n = table.shape
    assert steps == promise.bins * promise.epochs, "the run has bins x epochs steps"
    epochs = table.reshape(runs, promise.epochs, promise.bins, n)
    assert (epochs.sum(axis=2) == 1).all(), "a record takes part exactly once per epoch"
    chance = 1 / promise.bins
    if promise.fresh:
        for first, second in zip(range(promise.epochs - 1), range(1, promise.epochs), strict=True):
            _score_pairs(f"epochs {first} and {second}", epochs[:, first], epochs[:, second], chance**2)
    else:
        assert (epochs == epochs[:, :1]).all(), "a record keeps its bin in all epochs"
    for number in (0, promise.bins - 1):
        _binomial_sizes(f"bin {number}", epochs[:, 0, number].sum(axis=1), n, chance)
    _score_pairs("neighbouring records", table[:, :, :-1], table[:, :, 1:], chance**2)


def _everyone(promise: events.Everyone, table: np.ndarray) -> None:
    assert table.all(), "everyone takes part in every step"


_PROMISES: dict[type[events.Participation], Callable[..., None]] = {
    events.Poisson: _poisson,
    events.TruncatedPoisson: _truncated,
    events.FixedSize: _fixed_size,
    events.CyclicPoisson: _cyclic,
    events.MinSep: _min_sep,
    events.BallsInBins: _balls,
    events.Everyone: _everyone,
}
