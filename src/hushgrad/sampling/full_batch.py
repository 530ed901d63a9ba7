"""Full batches: every record in every step (DP-GD)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hushgrad import _check, _papers, events
from hushgrad.sampling.base import Deal, Sampler
from hushgrad.sampling.draws import Draws


@dataclass(frozen=True, kw_only=True)
class FullBatch(Sampler):
    """Every record takes part in every step; no randomness, no amplification.

    >>> import numpy as np
    >>> [batch.tolist() for batch in FullBatch(steps=2).batches(3, np.random.default_rng(1))]
    [[0, 1, 2], [0, 1, 2]]
    """

    papers = (_papers.BASSILY_2014_PRIVATE,)

    steps: int
    expected = _check.each(steps=_check.positive_int)

    @classmethod
    def examples(cls) -> tuple[Sampler, ...]:
        return (cls(steps=5),)

    def participation(self) -> events.Everyone:
        return events.Everyone()

    def meant_for(self, batch_size: float) -> float:
        return batch_size

    def dealer(self, n: int, draws: Draws) -> Deal:
        everyone = np.arange(n)
        return lambda step: everyone
