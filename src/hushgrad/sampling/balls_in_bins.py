"""Balls in bins: one random batch per record, the same in every epoch."""

from __future__ import annotations

from dataclasses import dataclass, field

from hushgrad import _check, events
from hushgrad.sampling.base import Deal, Sampler
from hushgrad.sampling.cyclic import parts
from hushgrad.sampling.draws import Draws

__all__ = ["BallsInBins"]


@dataclass(frozen=True, kw_only=True)
class BallsInBins(Sampler):
    """Each record is thrown once, uniformly and independently, into one of ``bins`` batches; every epoch uses the same bins.

    **Formal guarantee.** Each record takes part exactly once per epoch, always ``bins`` steps apart, and its bin is uniform
    and independent of all others. Bin sizes vary (a shuffle cut into equal pieces is another, less private scheme).

    Reference: Chua et al. 2024, "Balls-and-bins sampling for DP-SGD"; Choquette-Choo et al. 2024 (matrix mechanisms).
    """

    bins: int
    epochs: int = 1
    steps: int = field(init=False)

    def __post_init__(self) -> None:
        bins, epochs = _check.positive_int(bins=self.bins), _check.positive_int(epochs=self.epochs)
        object.__setattr__(self, "steps", bins * epochs)

    def participation(self) -> events.BallsInBins:
        """BallsInBins(bins, epochs)."""
        return events.BallsInBins(bins=self.bins, epochs=self.epochs)

    def dealer(self, n: int, draws: Draws) -> Deal:
        """All balls are thrown once; step t takes bin t mod ``bins``."""
        thrown = parts(n, self.bins, draws.once())
        return lambda step: thrown[step % self.bins]
