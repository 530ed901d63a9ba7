"""Every sampler keeps its promise, and samplers that do not are rejected.

False alarms: each score has a bar of six standard deviations (2e-9), and the seeds are fixed, so a conforming sampler passes
for ever once it passes. Power: the mutants below are each rejected.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from hushgrad import events, sampling
from hushgrad.sampling.base import Sampler
from hushgrad.sampling.draws import poisson_subset, uniform_subset
from hushgrad.testing import members
from hushgrad.testing.samplers import check_sampler

SAMPLERS = [sampler for kind in members(sampling, Sampler).values() for sampler in kind.examples()]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_sampler_keeps_its_promise(sampler):
    check_sampler(sampler)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_the_number_of_records_that_batches_are_meant_for(sampler):
    rng = np.random.default_rng(7)
    sizes = [len(batch) for _ in range(200) for batch in sampler.batches(30, rng)]
    assert sampler.meant_for(float(np.mean(sizes))) == pytest.approx(30, rel=0.05)


def rejected(sampler, match):
    with pytest.raises(AssertionError, match=match):
        check_sampler(sampler)


# Mutants: each deals otherwise than it promises. Names begin with "_" so that they do not join the family.


@dataclass(frozen=True, kw_only=True)
class _Claims(Sampler):
    """Promises Poisson(rate) and deals something else."""

    rate: float = 0.2
    steps: int = 12

    def participation(self):
        return events.Poisson(self.rate)

    def to_json(self):
        return sampling.Poisson(rate=self.rate, steps=self.steps).to_json()

    def __eq__(self, other):
        return True

    __hash__ = None


class _WrongRate(_Claims):
    def dealer(self, n, draws):
        return lambda step: poisson_subset(n, 1.05 * self.rate, draws.at(step))


class _Shuffled(_Claims):
    """The usual substitute: epochs over a shuffled order, batches of fixed size."""

    def dealer(self, n, draws):
        per_epoch = round(1 / self.rate)
        return lambda step: np.sort(
            np.array_split(draws.at(10_000 + step // per_epoch).permutation(n), per_epoch)[step % per_epoch]
        )


class _FixedSizes(_Claims):
    def dealer(self, n, draws):
        return lambda step: uniform_subset(n, round(self.rate * n), draws.at(step))


class _SameBatch(_Claims):
    """Each batch alone is perfect, but all steps draw the same one."""

    def dealer(self, n, draws):
        return lambda step: poisson_subset(n, self.rate, draws.once())


class _RarelyRepeats(_Claims):
    """Dependent draws: one step in three copies the step before it."""

    def dealer(self, n, draws):
        def deal(step):
            source = step - 1 if step and draws.at(10_000 + step).random() < 1 / 3 else step
            return poisson_subset(n, self.rate, draws.at(source))

        return deal


class _Pairs(_Claims):
    """Neighbouring records take part together."""

    def dealer(self, n, draws):
        return lambda step: np.sort(
            np.concatenate([2 * (half := poisson_subset(n // 2, self.rate, draws.at(step))), 2 * half + 1])
        )


class _KeepsState(_Claims):
    """Draws from one generator that runs on: step t depends on how many steps were dealt before it."""

    def dealer(self, n, draws):
        rng = draws.once()
        return lambda step: poisson_subset(n, self.rate, rng)


class _Repeats(_Claims):
    def dealer(self, n, draws):
        return lambda step: draws.at(step).integers(n, size=round(self.rate * n))


@pytest.mark.parametrize(
    "mutant, match",
    [
        (_WrongRate(), "on average"),
        (_Shuffled(), "batch size|coincide"),
        (_FixedSizes(), "batch size"),
        (_SameBatch(), "average|coincide"),
        (_RarelyRepeats(), "successive steps"),
        (_Pairs(), "spread|neighbouring"),
        (_KeepsState(), "pure function"),
        (_Repeats(), "none is dealt twice"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Sampler) else "",
)
def test_broken_poisson_samplers_are_rejected(mutant, match):
    rejected(mutant, match)


@dataclass(frozen=True, kw_only=True)
class _Relabelled(Sampler):
    """Deals as ``inner`` and promises what ``promise`` says."""

    inner: Sampler
    promise: events.Participation
    steps: int = 12

    def participation(self):
        return self.promise

    def dealer(self, n, draws):
        return self.inner.dealer(n, draws)

    def to_json(self):
        return self.inner.to_json()

    def __eq__(self, other):
        return True

    __hash__ = None


ROBIN = sampling.RoundRobin(batch_size=8, dataset_size=30, epochs=3)


@pytest.mark.parametrize(
    "inner, promise, match",
    [
        (ROBIN, events.Poisson(8 / 30), "step 11 is 0.2000"),
        (ROBIN, events.MinSep(gap=5, times=3), "apart"),
        (ROBIN, events.MinSep(gap=4, times=2), "more than 2 times"),
        (ROBIN, events.BallsInBins(bins=4, epochs=3), "bin"),  # an even split is not balls in bins
        (sampling.Poisson(rate=0.25, steps=12), events.CyclicPoisson(period=4, rate=0.25), "multiple of 4"),
        (sampling.CyclicPoisson(period=4, rate=0.4, steps=12), events.CyclicPoisson(period=4, rate=0.45), "average|coincide"),
        (sampling.FixedSize(size=7, dataset_size=30, steps=12), events.FixedSize(dataset_size=30, size=8), "exactly 8"),
        (sampling.Poisson(rate=0.25, steps=12), events.TruncatedPoisson(rate=0.25, dataset_size=30, size=9), "more than size=9"),
        (
            sampling.FixedSize(size=7, dataset_size=30, steps=12),
            events.TruncatedPoisson(rate=0.25, dataset_size=30, size=9),
            "batch size",
        ),
        (sampling.BallsInBins(bins=4, epochs=3), events.Poisson(0.25), "successive|first and last"),
        (sampling.Poisson(rate=0.9, steps=12), events.Everyone(), "everyone"),
    ],
)
def test_a_sampler_with_another_promise_is_rejected(inner, promise, match):
    rejected(_Relabelled(inner=inner, promise=promise), match)


def test_truncated_poisson_cuts_uniformly_and_not_by_position():
    """The cut must not favour early records: a sampler that keeps the first ``size`` of a Poisson draw is rejected."""

    class _KeepsFirst(_Relabelled):
        def dealer(self, n, draws):
            return lambda step: poisson_subset(n, 0.25, draws.at(step))[:9]

    inner = sampling.TruncatedPoisson(rate=0.25, size=9, dataset_size=30, steps=12)
    rejected(_KeepsFirst(inner=inner, promise=inner.participation()), "rate of record")
