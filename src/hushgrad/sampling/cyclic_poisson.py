"""Cyclic Poisson sampling, under which banded noise is amplified."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hushgrad import _check, _papers, events
from hushgrad.sampling.base import Deal, Sampler
from hushgrad.sampling.draws import Draws, poisson_subset


def parts(n: int, count: int, rng: np.random.Generator) -> list[np.ndarray]:
    """0..n-1 thrown independently and uniformly into ``count`` parts; each part is sorted.

    Independent throws, not an even split: under add/remove, removing a record must not move any other one. In an even split
    (a shuffle cut into pieces) it does, and the theorems about the groups do not hold.
    """
    part = rng.integers(count, size=n, dtype=np.int64)
    order = np.argsort(part, kind="stable")
    return np.split(order, np.searchsorted(part[order], np.arange(1, count)))


@dataclass(frozen=True, kw_only=True)
class CyclicPoisson(Sampler):
    """Records are thrown once into ``period`` groups; step t takes a Poisson sample at ``rate`` of group t mod ``period``.

    **Formal guarantee.** A record can take part only in the steps t = g, g + period, g + 2 period, ... of its own group g, in
    each independently with probability ``rate``. The expected batch is rate x n / period records.

        >>> sampler = CyclicPoisson(period=2, rate=0.5, steps=4)
        >>> [batch.tolist() for batch in sampler.batches(6, np.random.default_rng(1))]
        [[0, 5], [1], [0, 2, 4], []]

    Reference: Choquette-Choo et al. 2023, "(Amplified) banded matrix factorization", algorithm 2 and theorem 4.
    """

    papers = (_papers.CHOQUETTE_2023_AMPLIFIED,)

    period: int
    rate: float
    steps: int
    expected = _check.each(period=_check.positive_int, rate=_check.rate, steps=_check.positive_int)

    @classmethod
    def examples(cls) -> tuple[Sampler, ...]:
        return (cls(period=4, rate=0.4, steps=12),)

    def participation(self) -> events.CyclicPoisson:
        return events.CyclicPoisson(period=self.period, rate=self.rate)

    def meant_for(self, batch_size: float) -> float:
        """``period`` x ``batch_size`` / ``rate``: a batch is drawn from one of ``period`` groups."""
        return self.period * batch_size / self.rate

    def dealer(self, n: int, draws: Draws) -> Deal:
        """The groups are thrown once; step t draws from its group, from its own generator."""
        groups = parts(n, self.period, draws.once())

        def deal(step: int) -> np.ndarray:
            group = groups[step % self.period]
            return group.take(poisson_subset(len(group), self.rate, draws.at(step)))

        return deal
