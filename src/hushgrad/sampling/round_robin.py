"""Round robin: a fixed order over the epochs, for noise that needs no sampling assumption."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hushgrad import _check, _papers, events
from hushgrad.sampling.base import Deal, Sampler
from hushgrad.sampling.draws import Draws


@dataclass(frozen=True, kw_only=True)
class RoundRobin(Sampler):
    """The records in one fixed order, ``batch_size`` at a time, the same order in every epoch.

    An epoch has ceil(dataset_size / batch_size) steps; its last batch may be smaller. Because the order never changes, a
    record's participations are exactly one epoch apart, whatever its place: a short last batch shortens no gap.

    **Formal guarantee.** At most ``epochs`` participations of a record, any two at least ceil(dataset_size / batch_size) steps
    apart. It holds for every order, and nothing about the order needs to be secret for it.

    | case | what happens |
    |---|---|
    | ``shuffle=True`` | random secret places among ``dataset_size`` ones, drawn once: the promise serves add/remove too |
    | ``shuffle=False`` | the data set's own order: a removed record must leave its place empty (zero-out) |
    | fewer records than ``dataset_size`` | some places stay empty |
    | more records | refused: the public size would be wrong |

    Why the shuffle serves add/remove: n records in uniformly random places, one of them removed, are distributed as n - 1
    records in uniformly random places. So a coupling of the two runs moves no other record, and joint convexity of the
    divergence carries the bound for fixed places over to the mixture.

        >>> sampler = RoundRobin(batch_size=2, dataset_size=5, epochs=2, shuffle=False)
        >>> [batch.tolist() for batch in sampler.batches(5, np.random.default_rng(0))]
        [[0, 1], [2, 3], [4], [0, 1], [2, 3], [4]]
        >>> print(sampler.participation())
        MinSep(3, 2)

    Reference: Kairouz et al. 2021, "Practical and private (deep) learning without sampling or shuffling".
    """

    papers = (_papers.KAIROUZ_2021_PRACTICAL,)

    batch_size: int
    dataset_size: int
    epochs: int = 1
    shuffle: bool = True
    steps: int = field(init=False)

    @classmethod
    def examples(cls) -> tuple[Sampler, ...]:
        return (cls(batch_size=8, dataset_size=30, epochs=3), cls(batch_size=8, dataset_size=30, epochs=3, shuffle=False))

    def __post_init__(self) -> None:
        size, n = _check.positive_int(batch_size=self.batch_size), _check.positive_int(dataset_size=self.dataset_size)
        if size > n:
            _check.fail("batch_size", size, f"to be at most dataset_size={n}")
        _check.instance(bool, shuffle=self.shuffle)
        self._keep(batch_size=size, dataset_size=n, epochs=_check.positive_int(epochs=self.epochs))
        self._keep(steps=self.steps_per_epoch * self.epochs)

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one pass over the data, including a short last one."""
        return -(-self.dataset_size // self.batch_size)

    @property
    def most(self) -> int:
        return self.batch_size

    def participation(self) -> events.MinSep:
        """MinSep(gap = steps per epoch, times = epochs)."""
        return events.MinSep(gap=self.steps_per_epoch, times=self.epochs)

    def meant_for(self, batch_size: float) -> float:
        return float(self.dataset_size)

    def dealer(self, n: int, draws: Draws) -> Deal:
        """Each record has one place; step t takes the records whose places lie in its window."""
        if n > self.dataset_size:
            remedy = "State the size of the data that you train on."
            _check.fail("n", n, f"to be at most the public dataset_size={self.dataset_size}", remedy)
        places = draws.once().permutation(self.dataset_size)[:n] if self.shuffle else np.arange(n)
        by_place = np.argsort(places, kind="stable")
        cuts = np.searchsorted(places[by_place], np.arange(1, self.steps_per_epoch) * self.batch_size)
        windows = [np.sort(window) for window in np.split(by_place, cuts)]
        return lambda step: windows[step % self.steps_per_epoch]
