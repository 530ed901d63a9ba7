"""Samplers: which records take part in which step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator

import numpy as np

from hushgrad._value import Value
from hushgrad.events import Participation
from hushgrad.sampling.draws import Draws

Deal = Callable[[int], np.ndarray]
"""From a step to the record numbers of its batch: sorted, no number twice."""


class Sampler(Value, family="sampler"):
    """A frozen, public description of how batches are drawn.

    Every *field* is public. The *arguments* of :meth:`dealer` and :meth:`batches` are sensitive: ``n`` is the true number of
    records (secret under add/remove), and the draws decide who takes part.

    A subclass is a frozen dataclass with a field ``steps`` and two methods: what it promises (:meth:`participation`) and how
    it draws batches (:meth:`dealer`). ``hushgrad.testing.check_sampler`` tests the second against the first.

        >>> import numpy as np
        >>> from hushgrad.sampling import RoundRobin
        >>> sampler = RoundRobin(batch_size=2, dataset_size=6, epochs=1)
        >>> print(sampler.participation(), sampler.steps)
        MinSep(3, 1) 3
        >>> sorted(np.concatenate(list(sampler.batches(6, np.random.default_rng(1)))).tolist())
        [0, 1, 2, 3, 4, 5]
    """

    steps: int
    """For how many steps it deals; public."""

    @classmethod
    def examples(cls) -> tuple[Sampler, ...]:
        """Small instances for the conformance tests; where the number of records is public, it is 30."""
        return (cls(),)

    @property
    def most(self) -> int | None:
        """The largest possible batch, where that is public; None (the default) if there is no public bound."""
        return None

    def meant_for(self, batch_size: float) -> float | None:
        """The public data set size at which the expected batch has ``batch_size`` records; None (the default) if it is not determined."""
        return None

    @abstractmethod
    def participation(self) -> Participation:
        """What this sampler promises about any one record; the mechanism's theorem is chosen by it."""

    @abstractmethod
    def dealer(self, n: int, draws: Draws) -> Deal:
        """A function from a step to the record numbers in its batch, for ``n`` records; it depends on the key of ``draws`` alone.

        No state passes from one step to the next, so a resumed run draws step t again without the steps before it.
        """

    def batches(self, n: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
        """The record numbers of each step's batch, one array per step; empty batches are steps too."""
        deal = self.dealer(n, Draws(rng.bytes(32)))
        return (deal(step) for step in range(self.steps))
