"""Defects of the batches: others than the accountant was told of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial

import numpy as np

from hushgrad import events
from hushgrad.sampling import Draws, FixedSize, Poisson, RoundRobin
from hushgrad.sampling.dealing import _Hands
from hushgrad.sampling.poisson import poisson_subset
from hushgrad.testing.defects.base import defect, patched

_RATE = "every record takes part independently with the accounted rate"


def _dealt(deal: Callable[[Poisson, int, Draws, int], np.ndarray]) -> AbstractContextManager[None]:
    """A Poisson sampler whose batch of a step is what ``deal`` gives."""
    return patched(Poisson, "dealer", lambda self, n, draws: lambda step: deal(self, n, draws, step))


def _drawn(sampler: Poisson, n: int, draws: Draws, step: int, factor: float = 1.0) -> np.ndarray:
    return poisson_subset(n, min(1.0, factor * sampler.rate), draws.at(step))


@defect("twice the rate", law=_RATE)
def _() -> Iterator[None]:
    with _dealt(partial(_drawn, factor=2.0)):
        yield


@defect("1.2 times a small rate", law=_RATE, bed="rare")
def _() -> Iterator[None]:
    with _dealt(partial(_drawn, factor=1.2)):
        yield


@defect("the accountant is told half the rate", law=_RATE)
def _() -> Iterator[None]:
    with patched(Poisson, "participation", lambda self: events.Poisson(self.rate / 2)):
        yield


@defect("the same batch in every step", law=_RATE)
def _() -> Iterator[None]:
    with _dealt(lambda sampler, n, draws, step: _drawn(sampler, n, draws, 0)):
        yield


@defect("every batch twice", law=_RATE)
def _() -> Iterator[None]:
    with _dealt(lambda sampler, n, draws, step: _drawn(sampler, n, draws, step // 2)):
        yield


@defect("shuffled batches accounted as Poisson", law=_RATE)
def _() -> Iterator[None]:
    def shuffled(self: Poisson, n: int, draws: Draws) -> Callable[[int], np.ndarray]:
        return RoundRobin(batch_size=round(self.rate * n), dataset_size=n, epochs=100).dealer(n, draws)

    with patched(Poisson, "dealer", shuffled):
        yield


@defect("batches of one size accounted as Poisson", law=_RATE)
def _() -> Iterator[None]:
    def fixed(self: Poisson, n: int, draws: Draws) -> Callable[[int], np.ndarray]:
        return FixedSize(size=round(self.rate * n), dataset_size=n, steps=self.steps).dealer(n, draws)

    with patched(Poisson, "dealer", fixed):
        yield


@defect("one record in every batch", law=_RATE)
def _() -> Iterator[None]:
    with _dealt(lambda sampler, n, draws, step: np.union1d(_drawn(sampler, n, draws, step), [7])):
        yield


@defect("twice the rate after step 50", law=_RATE)
def _() -> Iterator[None]:
    with _dealt(lambda sampler, n, draws, step: _drawn(sampler, n, draws, step, factor=2.0 if step >= 50 else 1.0)):
        yield


@defect("neighbours are dealt together", law=_RATE)
def _() -> Iterator[None]:
    def pairs(sampler: Poisson, n: int, draws: Draws, step: int) -> np.ndarray:
        chosen = poisson_subset(n // 2, sampler.rate, draws.at(step))
        return np.sort(np.concatenate([2 * chosen, 2 * chosen + 1]))

    with _dealt(pairs):
        yield


@defect("other records are fetched than were drawn", law=_RATE)
def _() -> Iterator[None]:
    fetch = _Hands._fetch
    with patched(_Hands, "_fetch", lambda self, step, indices: fetch(self, step, np.arange(len(indices)))):
        yield
