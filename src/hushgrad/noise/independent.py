"""Independent noise: fresh in every step, as in DP-SGD."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hushgrad import _papers, events
from hushgrad.noise.base import NoiseStream
from hushgrad.noise.lower_toeplitz import LowerToeplitz
from hushgrad.noise.participation import pattern_of
from hushgrad.noise.suggestions import Run, Skipped, Suggestion


@dataclass(frozen=True)
class Independent(LowerToeplitz):
    """C = I: row t is z_t. The only mechanism that every sampling scheme amplifies.

    **Formal guarantee.** Each step is a Gaussian mechanism on the sampled records, and steps compose adaptively:

    | participation | event |
    |---|---|
    | ``Poisson``, ``FixedSize``, ``TruncatedPoisson`` | steps x the sampled Gaussian |
    | ``CyclicPoisson(period, rate)`` | ceil(steps / period) x Gaussian sampled at ``rate`` (a record meets one step of a cycle) |
    | ``BallsInBins`` | one event for all passes that have begun |
    | ``Everyone`` | steps x Gaussian |
    | ``Once``, ``MinSep`` | one Gaussian of multiplier s / sqrt(times) |

    >>> from hushgrad.events import Once, Poisson
    >>> print(Independent().event(1.1, Poisson(0.01), 1000))
    1000 x Poisson(0.01) Gaussian(1.1)
    >>> print(Independent().event(1.1, Once(), 1000))
    Gaussian(1.1)

    Reference: Abadi et al. 2016 (arXiv:1607.00133), algorithm 1.
    """

    papers = (_papers.ABADI_2016_DEEP,)

    @classmethod
    def suggestions(cls, run: Run) -> Iterator[Suggestion | Skipped]:
        """Suggested with random batches always; with a fixed order only if random batches are not allowed."""
        if run.rate is not None:
            why = f"Every step is amplified by sampling at rate {run.rate:.3g}; its noise adds up over the steps."
            yield Suggestion(name="DP-SGD", make=cls, why=why, work=1)
        elif run.alone:
            yield Suggestion(name="Independent", make=cls, why="Needs no sampling and no state, and cancels no noise.", work=1)

    def strategy_coefficients(self, steps: int) -> np.ndarray:
        return np.asarray(np.eye(1, steps)[0])

    def noising_coefficients(self, steps: int) -> np.ndarray:
        return np.asarray(np.eye(1, steps)[0])

    def stream(self, source: Any, *, steps: int | None = None) -> NoiseStream:
        from hushgrad.noise.streams import IndependentStream

        return IndependentStream(source, steps=steps)

    def state_size(self, *, steps: int) -> int:
        return 0

    def _amplified(self, noise_multiplier: float, participation: events.Participation, steps: int) -> events.Event | None:
        step = events.Gaussian(noise_multiplier)
        if isinstance(participation, (events.Poisson, events.FixedSize, events.TruncatedPoisson)):
            return events.Sampled(participation, step) * steps
        if isinstance(participation, events.CyclicPoisson):
            return step.sampled(rate=participation.rate) * -(-steps // participation.period)
        if isinstance(participation, events.BallsInBins):
            pattern = pattern_of(participation, steps)  # refuses more steps than there are batches
            return events.Sampled(replace(participation, epochs=pattern.times), step)  # a pass that has begun counts whole
        if isinstance(participation, events.Everyone):
            return step * steps
        return None
