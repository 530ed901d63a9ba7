"""Batches of one fixed size, drawn without replacement."""

from __future__ import annotations

from dataclasses import dataclass

from hushgrad import _check, _papers, events
from hushgrad.sampling.base import Deal, Sampler
from hushgrad.sampling.draws import Draws, uniform_subset
from hushgrad.sampling.poisson import _check_size


@dataclass(frozen=True, kw_only=True)
class FixedSize(Sampler):
    """In each step a uniformly random subset of exactly ``size`` of the ``dataset_size`` records, anew for each step.

    **Formal guarantee.** The subsets of different steps are independent and uniform. ``dataset_size`` is public, so the
    natural relation is replace-one. This is *not* shuffling: a record may be drawn in two steps that follow each other.

        >>> next(FixedSize(size=3, dataset_size=10, steps=1).batches(10, __import__("numpy").random.default_rng(0))).size
        3

    Reference: Balle, Barthe and Gaboardi 2018, "Privacy amplification by subsampling", theorem 9.
    """

    papers = (
        _papers.Paper(
            "balle2018subsampling",
            "Balle, Borja and Barthe, Gilles and Gaboardi, Marco",
            "Privacy Amplification by Subsampling: Tight Analyses via Couplings and Divergences",
            "NeurIPS",
            arxiv="1807.01647",
        ),
    )

    size: int
    dataset_size: int
    steps: int

    @classmethod
    def examples(cls) -> tuple[Sampler, ...]:
        return (cls(size=7, dataset_size=30, steps=12),)

    def __post_init__(self) -> None:
        promise = self.participation()  # checks all but the steps
        self._keep(size=promise.size, dataset_size=promise.dataset_size, steps=_check.positive_int(steps=self.steps))

    @property
    def most(self) -> int:
        return self.size

    def participation(self) -> events.FixedSize:
        return events.FixedSize(dataset_size=self.dataset_size, size=self.size)

    def meant_for(self, batch_size: float) -> float:
        return float(self.dataset_size)

    def dealer(self, n: int, draws: Draws) -> Deal:
        _check_size(n, self.dataset_size)
        return lambda step: uniform_subset(n, self.size, draws.at(step))
