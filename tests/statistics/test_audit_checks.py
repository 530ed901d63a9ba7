"""The white-box checks by themselves: each passes what it should, as often as it says, and rejects a mutated copy.

A check errs in at most 1e-4 of all cases; of the 200 draws made here for each sampler at most one may fail (probability 2e-4).
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom

from hushgrad.audit.checks import batches_check, binomial_tail, fresh_noise_check, meeting_tail, sum_tail
from hushgrad.events import Everyone, Once, Participation
from hushgrad.sampling import BallsInBins, CyclicPoisson, FixedSize, FullBatch, Poisson, RoundRobin, Sampler, TruncatedPoisson

N = 300
SAMPLERS = {
    "poisson": Poisson(rate=0.1, steps=20),
    "rare poisson": Poisson(rate=0.004, steps=50),
    "very rare poisson": Poisson(rate=1e-4, steps=50),
    "one rare step": Poisson(rate=0.001, steps=1),
    "one even step": Poisson(rate=0.5, steps=1),
    "full poisson": Poisson(rate=1.0, steps=3),
    "truncated": TruncatedPoisson(rate=0.1, size=40, dataset_size=N, steps=20),
    "fixed size": FixedSize(size=30, dataset_size=N, steps=20),
    "one half": FixedSize(size=150, dataset_size=N, steps=1),
    "rare cyclic": CyclicPoisson(period=10, rate=0.01, steps=20),
    "few balls": BallsInBins(bins=100, epochs=1),
    "cyclic": CyclicPoisson(period=5, rate=0.5, steps=20),
    "round robin": RoundRobin(batch_size=30, dataset_size=N, epochs=2),
    "bins": BallsInBins(bins=10, epochs=2),
    "all": FullBatch(steps=3),
}


def dealt(sampler: Sampler, seed: int) -> np.ndarray:
    present = np.zeros((sampler.steps, N), dtype=bool)
    for step, batch in enumerate(sampler.batches(N, np.random.default_rng(seed))):
        present[step, batch] = True
    return present


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_passes_its_own_check(name: str) -> None:
    sampler = SAMPLERS[name]
    failed = [seed for seed in range(200) if not batches_check(sampler.participation(), dealt(sampler, seed)).passed]
    assert len(failed) <= 1


@pytest.mark.parametrize(
    ("claimed", "done"),
    [
        ("poisson", RoundRobin(batch_size=30, dataset_size=N, epochs=2)),  # shuffled batches, accounted as Poisson
        ("poisson", FixedSize(size=30, dataset_size=N, steps=20)),  # sizes that do not vary
        ("poisson", BallsInBins(bins=10, epochs=2)),
        ("poisson", Poisson(rate=0.15, steps=20)),
        ("fixed size", RoundRobin(batch_size=30, dataset_size=N, epochs=2)),
        ("fixed size", Poisson(rate=0.1, steps=20)),
        ("truncated", Poisson(rate=0.3, steps=20)),
        ("cyclic", Poisson(rate=0.1, steps=20)),
        ("cyclic", CyclicPoisson(period=5, rate=0.9, steps=20)),
        ("round robin", Poisson(rate=0.1, steps=20)),
        ("round robin", RoundRobin(batch_size=30, dataset_size=N, epochs=4)),
        ("bins", Poisson(rate=0.1, steps=20)),
        ("all", Poisson(rate=0.99, steps=3)),
    ],
)
def test_other_batches_than_claimed_are_rejected(claimed: str, done: Sampler) -> None:
    how: Participation = SAMPLERS[claimed].participation()
    assert not batches_check(how, dealt(done, 0)).passed


@pytest.mark.parametrize("rate", [1e-4, 0.01, 0.3])
def test_the_bounds_on_batches_hold_and_are_not_far_above_the_truth(rate: float) -> None:
    """The share of draws that a bound calls improbable is at most that probability; of batches that repeat, nearly all are."""
    rng = np.random.default_rng(0)
    draws = [rng.random((8, 60)) < rate for _ in range(500)]
    law = binom.pmf(np.arange(61), 60, rate)
    meetings = np.array([meeting_tail(draw) for draw in draws])
    sums = np.array([sum_tail(draw.sum(), 8, np.arange(61), law) for draw in draws])
    for tails in (meetings, sums, np.array([binomial_tail(int(draw.sum()), draw.size, rate) for draw in draws])):
        for level in (0.3, 0.1, 0.02):
            assert (tails <= level).mean() <= level + 4 * np.sqrt(level / len(draws))
    again = np.tile(rng.random(60) < max(rate, 0.05), (8, 1))
    assert meeting_tail(again) < 1e-4
    assert sum_tail(480 * min(1.0, rate + 0.2), 8, np.arange(61), law) < 1e-4


def test_fixed_promises() -> None:
    assert batches_check(Once(), np.eye(4, dtype=bool)).passed
    assert not batches_check(Once(), np.ones((2, 4), dtype=bool)).passed
    assert not batches_check(Everyone(), np.eye(4, dtype=bool)).passed


def test_uneven_bins_are_rejected() -> None:
    present = dealt(SAMPLERS["bins"], 0)
    skewed = present.copy()
    skewed[:, :150] = False
    skewed[[0, 10], :150] = True
    assert not batches_check(SAMPLERS["bins"].participation(), skewed).passed


def test_related_noise_is_rejected() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 400))
    assert fresh_noise_check([a, b]).passed
    assert not fresh_noise_check([a, b, a]).passed
    assert not fresh_noise_check([a, 0.5 * a + b]).passed
