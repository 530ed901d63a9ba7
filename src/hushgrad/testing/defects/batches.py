"""Defects of the batches: they differ from what the accountant was told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hushgrad import events
from hushgrad.sampling import Draws, FixedSize, Poisson, RoundRobin
from hushgrad.sampling.batch_loader import Hands
from hushgrad.sampling.draws import poisson_subset
from hushgrad.testing.defects.base import defect, patched, wrong

Dealer = Callable[[int], np.ndarray]
RATE = "every record takes part independently with the accounted rate"


def dealt(
    name: str, *, law: str = RATE, bed: str = "layers"
) -> Callable[[Callable[[Poisson, int, Draws, int], np.ndarray]], None]:
    """Register a function that gives the batch of a step of a Poisson sampler."""

    def register(deal: Callable[[Poisson, int, Draws, int], np.ndarray]) -> None:
        defect(name, law=law, bed=bed)(
            lambda: patched(Poisson, "dealer", lambda self, n, draws: lambda step: deal(self, n, draws, step))
        )

    return register


def drawn(sampler: Poisson, n: int, draws: Draws, step: int, factor: float = 1.0) -> np.ndarray:
    """The right batch, or one with ``factor`` times the rate."""
    return poisson_subset(n, min(1.0, factor * sampler.rate), draws.at(step))


def rated(name: str, factor: Callable[[Poisson, int], float], *, bed: str = "layers") -> None:
    """Register batches with ``factor`` times the rate, which may depend on the step."""
    dealt(name, bed=bed)(lambda sampler, n, draws, step: drawn(sampler, n, draws, step, factor(sampler, step)))


def repeated(name: str, source: Callable[[int], int]) -> None:
    """Register batches that are those of step ``source`` of their own step."""
    dealt(name)(lambda sampler, n, draws, step: drawn(sampler, n, draws, source(step)))


rated("twice the rate", lambda sampler, step: 2.0)
rated("1.2 times a small rate", lambda sampler, step: 1.2, bed="rare")


@wrong(Poisson, "participation", "the accountant is told half the rate", law=RATE)
def _(participation: Any, self: Poisson) -> events.Poisson:
    return events.Poisson(self.rate / 2)


repeated("the same batch in every step", lambda step: 0)
repeated("every batch twice", lambda step: step // 2)


@wrong(Poisson, "dealer", "shuffled batches accounted as Poisson", law=RATE)
def _(dealer: Any, self: Poisson, n: int, draws: Draws) -> Dealer:
    return RoundRobin(batch_size=round(self.rate * n), dataset_size=n, epochs=100).dealer(n, draws)


@wrong(Poisson, "dealer", "batches of one size accounted as Poisson", law=RATE)
def _(dealer: Any, self: Poisson, n: int, draws: Draws) -> Dealer:
    return FixedSize(size=round(self.rate * n), dataset_size=n, steps=self.steps).dealer(n, draws)


@dealt("one record in every batch")
def _(sampler: Poisson, n: int, draws: Draws, step: int) -> np.ndarray:
    return np.union1d(drawn(sampler, n, draws, step), [7])


rated("twice the rate after step 50", lambda sampler, step: 2.0 if step >= 50 else 1.0)


@dealt("neighbours are dealt together")
def _(sampler: Poisson, n: int, draws: Draws, step: int) -> np.ndarray:
    chosen = poisson_subset(n // 2, sampler.rate, draws.at(step))
    return np.sort(np.concatenate([2 * chosen, 2 * chosen + 1]))


@wrong(Hands, "_fetch", "other records are fetched than were drawn", law=RATE)
def _(fetch: Any, self: Hands, step: int, indices: np.ndarray) -> Any:
    return fetch(self, step, np.arange(len(indices)))
