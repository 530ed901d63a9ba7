"""Banded noise: C has a few diagonals, so sampling amplifies it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from hushgrad import _check, _papers
from hushgrad._value import LATER
from hushgrad.events import BallsInBins, CyclicPoisson, Event, Gaussian, Once, Participation, Sampled
from hushgrad.noise.base import Mechanism, NoiseStream
from hushgrad.noise.lower_toeplitz import LowerToeplitz, known_steps
from hushgrad.noise.optimise_banded import optimise_banded
from hushgrad.noise.participation import pattern_of
from hushgrad.noise.power_series import binomial, inverse
from hushgrad.noise.suggestions import Run, Skipped, Suggestion
from hushgrad.noise.workload import SGDWorkload, Workload, as_workload, checked_workload

_MOST_BANDS = 64


@dataclass(frozen=True, kw_only=True)
class Banded(LowerToeplitz):
    """C is Toeplitz with ``bands`` diagonals; optimised for a run (``resolved``), or the cut square root (``square_root``).

    The noise solves C X = Z row by row and so keeps ``bands`` - 1 past rows. With a ``workload`` (momentum, a schedule) it is
    optimised for that workload's error, by default for prefix sums. Optimised coefficients no longer depend on it.

    **Formal guarantee.** Without sampling one Gaussian event; the sensitivity is exact where the bands end within the gap
    (participations do not overlap) and for non-increasing coefficients, else an upper bound. Under cyclic Poisson sampling
    with ``period`` >= ``bands`` the run is amplified: ceil(steps / period) adaptive Gaussians of multiplier s / ||c||, each
    on a Poisson sample at ``rate``, because the steps of one cycle that a record may meet have disjoint columns of C. Under balls
    in bins, with d the least divisor of the number of bins that is at least ``bands``: an allocation to bins / d bins, because
    bins that are d apart have disjoint columns, also across epochs, and an observer may be told the bin modulo d.

    >>> from hushgrad.events import BallsInBins, CyclicPoisson
    >>> print(Banded.square_root(bands=2).event(1.0, CyclicPoisson(period=2, rate=0.1), 100))
    50 x Poisson(0.1) Gaussian(0.894427)
    >>> print(Banded.square_root(bands=2).event(1.0, BallsInBins(bins=100, epochs=3), 300))
    BallsInBins(50, 3) Gaussian(0.894427)

    References: Choquette-Choo et al. 2023 (arXiv:2306.08153), Theorem 4; Kalinin and Lampert 2024 (arXiv:2405.13763) for the
    square root.
    """

    papers = (
        _papers.CHOQUETTE_2023_AMPLIFIED,
        _papers.Paper(
            "kalinin2024banded",
            "Kalinin, Nikita P. and Lampert, Christoph H.",
            "Banded Square Root Matrix Factorization for Differentially Private Model Training",
            "NeurIPS",
            arxiv="2405.13763",
        ),
    )

    _open = "coefficients"

    bands: int = field(default=64, kw_only=False)  # plans print Banded(4)
    loss: str = "mean"
    coefficients: tuple[float, ...] | None = None
    workload: Workload | None = field(default=None, metadata=LATER)

    @classmethod
    def examples(cls) -> tuple[Mechanism, ...]:
        return (
            cls(bands=3),
            cls.square_root(bands=4),
            cls(bands=3, coefficients=(1.0, -0.4, 0.5)),
            cls(bands=3, workload=SGDWorkload(momentum=0.9, schedule="linear")),
        )

    @classmethod
    def suggestions(cls, run: Run) -> Iterator[Suggestion | Skipped]:
        """Suggested with 2, 4, 8, ... bands: the data are split into as many groups, each sampled at that many times the rate."""
        rate, most = run.rate or math.inf, min(_MOST_BANDS, run.steps)
        if run.rate is not None and (most < 2 or 2 * rate > 1):
            yield Skipped("Banded", f"Two groups of the data cannot fill batches at rate {rate:.3g}, or there is one step only.")
        for bands in (2**k for k in range(1, most.bit_length()) if 2**k * rate <= 1):
            why = f"{bands} bands cancel noise between neighbouring steps; sampling still amplifies, but at rate {bands * rate:.3g}."
            make = partial(cls.square_root, bands=bands)
            if run.workload is not None:
                make = partial(cls, bands=bands, workload=as_workload(run.workload, run.steps))
            elif run.tune:
                make = partial(cls, bands=bands)
            yield Suggestion(name=f"Banded({bands})", make=make, why=why, work=bands, groups=bands)

    def __post_init__(self) -> None:
        bands = _check.positive_int(bands=self.bands)
        self._keep(bands=bands)
        _check.one_of(["mean", "max"], loss=self.loss)
        checked_workload(self.workload, fixed=self.coefficients is not None)
        if self.coefficients is None:
            return
        c = tuple(_check.number(coefficients=x) for x in _check.several(coefficients=self.coefficients))
        if len(c) != bands or c[0] <= 0:
            _check.fail("coefficients", c, f"to be bands={bands} numbers, the first greater than 0", "C is singular otherwise.")
        self._keep(coefficients=c)

    @classmethod
    def square_root(cls, *, bands: int) -> Banded:
        """BSR: the square root of prefix sums, cut after ``bands`` coefficients; no optimisation."""
        bands = _check.positive_int(bands=bands)
        return cls(bands=bands, coefficients=tuple(map(float, binomial(-0.5, bands))))

    @classmethod
    def optimal(
        cls,
        *,
        steps: int,
        bands: int,
        loss: str = "mean",
        participation: Participation | None = None,
        workload: Workload | None = None,
    ) -> Banded:
        """The banded Toeplitz strategy of least mean or max error; one participation within ``bands`` unless told otherwise.

        Args:
            steps: number of rows.
            bands: number of non-zero diagonals.
            loss: what is least: "mean" (the root of the mean squared error) or "max".
            participation: when a record may take part; once by default.
            workload: what the optimizer makes of the gradients; prefix sums by default.
        """
        participation = Once() if participation is None else participation
        return cls(bands=bands, loss=loss, workload=workload).resolved(steps=steps, participation=participation)

    def following(self, workload: Workload) -> Banded | None:
        return replace(self, workload=workload) if self.coefficients is None and self.workload is None else None

    def resolved(self, *, steps: int, participation: Participation) -> Banded:
        steps = _check.positive_int(steps=steps)
        if self.bands > steps:
            _check.fail("bands", self.bands, f"to be at most steps={steps}", "Use fewer bands.")
        if self.coefficients is not None:
            return self
        pattern = pattern_of(participation, steps)
        found = optimise_banded(steps, self.bands, self.loss, pattern.gap, pattern.times, self.workload)
        return replace(self, coefficients=found, workload=None)

    def strategy_coefficients(self, steps: int) -> np.ndarray:
        c = np.zeros(_check.positive_int(steps=steps))
        c[: self.bands] = self._value()[:steps]
        return c

    def noising_coefficients(self, steps: int) -> np.ndarray:
        return inverse(np.array(self._value()), _check.positive_int(steps=steps))

    def stream(self, source: Any, *, steps: int | None = None) -> NoiseStream:
        """x_t = (z_t - sum_{j >= 1} c_j x_{t-j}) / c_0."""
        from hushgrad.noise.streams import BandedStream

        c = self._value()
        return BandedStream(source, lambda t: c, steps=known_steps(steps))

    def state_size(self, *, steps: int) -> int:
        return self.bands - 1

    def _amplified(self, noise_multiplier: float, participation: Participation, steps: int) -> Event | None:
        if isinstance(participation, CyclicPoisson) and participation.period >= self.bands:
            step = self._column(noise_multiplier, participation, steps)
            return step.sampled(rate=participation.rate) * -(-steps // participation.period)
        if isinstance(participation, BallsInBins) and not participation.fresh:
            pattern = pattern_of(participation, steps)  # refuses more steps than there are batches
            apart = next((d for d in range(self.bands, participation.bins) if participation.bins % d == 0), None)
            if apart is not None:
                few = BallsInBins(bins=participation.bins // apart, epochs=pattern.times)
                return Sampled(few, self._column(noise_multiplier, participation, steps))
        return None

    def _column(self, noise_multiplier: float, participation: Participation, steps: int) -> Gaussian:
        """The Gaussian of one participation whose column of C overlaps no other's."""
        column = self._fixed(steps, participation).strategy_coefficients(self.bands)
        return Gaussian(noise_multiplier / float(np.linalg.norm(column)))
