"""Balls in bins: one random batch per record and epoch, the same in every epoch or a fresh one."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from hushgrad import _papers, events
from hushgrad.sampling.base import Deal, Sampler
from hushgrad.sampling.cyclic_poisson import parts
from hushgrad.sampling.draws import Draws


@dataclass(frozen=True, kw_only=True)
class BallsInBins(Sampler):
    """Each record is thrown, uniformly and independently, into one of ``bins`` batches: once for all epochs, or ``fresh`` for each.

    **Formal guarantee.** Each record takes part exactly once per epoch, and its bin is uniform and independent of all others:
    the same in every epoch, always ``bins`` steps apart, or with ``fresh`` independent of its bins in other epochs, which costs
    far less privacy over several epochs. Bin sizes vary (a shuffle cut into equal pieces is another, less private scheme).

        >>> deal = BallsInBins(bins=2, epochs=2, fresh=True).dealer(6, Draws(bytes(32)))
        >>> sorted([*deal(0), *deal(1)]) == sorted([*deal(2), *deal(3)]) == [0, 1, 2, 3, 4, 5]
        True

    Reference: Chua et al. 2024, "Balls-and-bins sampling for DP-SGD"; Choquette-Choo et al. 2024 (matrix mechanisms).
    """

    papers = (
        _papers.Paper(
            "chua2025balls", "Chua, Lynn and others", "Balls-and-Bins Sampling for {DP-SGD}", "AISTATS", arxiv="2412.16802"
        ),
    )

    bins: int
    epochs: int = 1
    fresh: bool = False
    steps: int = field(init=False)

    @classmethod
    def examples(cls) -> tuple[Sampler, ...]:
        return (cls(bins=4, epochs=3), cls(bins=4, epochs=3, fresh=True))

    def __post_init__(self) -> None:
        promise = self.participation()  # checks all fields
        self._keep(bins=promise.bins, epochs=promise.epochs, steps=promise.bins * promise.epochs)

    def participation(self) -> events.BallsInBins:
        return events.BallsInBins(bins=self.bins, epochs=self.epochs, fresh=self.fresh)

    def meant_for(self, batch_size: float) -> float:
        return self.bins * batch_size

    def dealer(self, n: int, draws: Draws) -> Deal:
        """All balls are thrown once, or by the generator of each epoch's first step; step t takes bin t mod ``bins``."""
        if not self.fresh:
            thrown = parts(n, self.bins, draws.once())
            return lambda step: thrown[step % self.bins]
        of_epoch = lru_cache(maxsize=2)(lambda epoch: parts(n, self.bins, draws.at(epoch * self.bins)))
        return lambda step: of_epoch(step // self.bins)[step % self.bins]
