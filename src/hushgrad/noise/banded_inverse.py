"""Banded inverse square root: noise that looks back a fixed number of steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hushgrad import _check, _papers
from hushgrad.events import Participation
from hushgrad.noise.base import Mechanism, NoiseStream
from hushgrad.noise.lower_toeplitz import LowerToeplitz, filter_state, filter_stream
from hushgrad.noise.power_series import binomial, inverse


@dataclass(frozen=True, kw_only=True)
class BandedInverse(LowerToeplitz):
    """BISR: N is the inverse square root of prefix sums, (1 - x)^(1/2), cut after ``bands`` coefficients.

    Row t is a weighted sum of the last ``bands`` independent rows. With ``exponent`` other than 1/2 it is the cut series of
    (1 - x)^exponent (gamma-BIFR), which is better for many steps and few bands.

    **Formal guarantee.** One Gaussian event. The cut series is 1 minus positive terms whose sum is less than 1, so C = 1/N has
    positive coefficients; where they decrease the sensitivity is exact, else an upper bound.

    >>> from hushgrad.events import Once
    >>> round(BandedInverse(bands=64).error(steps=1024, participation=Once()).rmse, 3)
    3.448

    References: Kalinin et al. 2025 (arXiv:2505.12128) for 1/2; 2026 (arXiv:2605.18379) for other exponents.
    """

    papers = (
        _papers.Paper(
            "kalinin2026back",
            "Kalinin, Nikita P. and McKenna, Ryan and Upadhyay, Jalaj and Lampert, Christoph H.",
            "Back to Square Roots: An Optimal Bound on the Matrix Factorization Error for Multi-Epoch Differentially Private {SGD}",
            "ICLR",
            arxiv="2505.12128",
        ),
    )

    bands: int = 64
    exponent: float = 0.5
    expected = _check.each(bands=_check.positive_int, exponent=partial(_check.between, 0, 1, closed="right"))

    @classmethod
    def examples(cls) -> tuple[Mechanism, ...]:
        return (cls(bands=4), cls(bands=2, exponent=0.7))

    def strategy_coefficients(self, steps: int) -> np.ndarray:
        return inverse(binomial(self.exponent, self.bands), _check.positive_int(steps=steps))

    def noising_coefficients(self, steps: int) -> np.ndarray:
        beta = np.zeros(_check.positive_int(steps=steps))
        beta[: self.bands] = binomial(self.exponent, self.bands)[:steps]
        return beta

    def resolved(self, *, steps: int, participation: Participation) -> BandedInverse:
        """This mechanism; raises if it has more bands than the run has steps."""
        if self.bands > _check.positive_int(steps=steps):
            _check.fail("bands", self.bands, f"to be at most steps={steps}", "Use fewer bands, or Toeplitz() for all of them.")
        return self

    def stream(self, source: Any, *, steps: int | None = None) -> NoiseStream:
        """The filter of the last ``bands`` z, which are regenerated for several rows at a time."""
        return filter_stream(self, source, steps, taps=self.bands)

    def state_size(self, *, steps: int) -> int:
        return filter_state(min(self.bands, _check.positive_int(steps=steps)))
