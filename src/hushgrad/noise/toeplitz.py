"""Toeplitz noise: the square root of the workload, or any series that you give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hushgrad import _check, _papers
from hushgrad.noise.base import Mechanism
from hushgrad.noise.lower_toeplitz import LongFilter
from hushgrad.noise.power_series import binomial, inverse
from hushgrad.noise.suggestions import Run, Skipped, Suggestion, regenerating


@dataclass(frozen=True, kw_only=True)
class Toeplitz(LongFilter):
    """C is Toeplitz with first column ``coefficients``; by default the square root of prefix sums, c_t = binom(2t, t) / 4^t.

    C(x) = (1 - x)^(-1/2), so B = C: among all mechanisms with max error within a constant, this one needs no optimisation;
    its max error is 1.066 + ln(n) / pi for large n. Each row needs all earlier draws: use ``BLT`` for long runs.
    A given series is 0 after its end.

    **Formal guarantee.** One Gaussian event; exact sensitivity for non-negative, non-increasing coefficients.

    >>> from hushgrad.events import Once
    >>> round(Toeplitz().error(steps=1024, participation=Once()).rmse, 3)
    3.11

    Reference: Fichtenberger, Henzinger, Upadhyay 2023 (arXiv:2202.11205), Theorem 1.
    """

    papers = (
        _papers.Paper(
            "fichtenberger2023constant",
            "Fichtenberger, Hendrik and Henzinger, Monika and Upadhyay, Jalaj",
            "Constant Matters: Fine-grained Error Bound on Differentially Private Continual Observation",
            "ICML",
            arxiv="2202.11205",
        ),
    )

    coefficients: tuple[float, ...] | None = None

    @classmethod
    def examples(cls) -> tuple[Mechanism, ...]:
        return (cls(), cls(coefficients=(1.0, 0.5, -0.3, 0.2)))

    @classmethod
    def suggestions(cls, run: Run) -> Iterator[Suggestion | Skipped]:
        if run.rate is None:
            yield regenerating(cls, "Toeplitz", "The square root of prefix sums", run)

    def __post_init__(self) -> None:
        if self.coefficients is None:
            return
        c = tuple(_check.number(coefficients=x) for x in _check.several(coefficients=self.coefficients))
        if not c or c[0] <= 0:
            _check.fail("coefficients", c, "to start with a number greater than 0", "C is singular otherwise.")
        self._keep(coefficients=c)

    def strategy_coefficients(self, steps: int) -> np.ndarray:
        """The given series, or that of (1 - x)^(-1/2)."""
        if self.coefficients is None:
            return binomial(-0.5, steps)
        c = np.zeros(steps)
        given = self.coefficients[:steps]
        c[: len(given)] = given
        return c

    def noising_coefficients(self, steps: int) -> np.ndarray:
        """The inverse series; (1 - x)^(1/2) for the square root."""
        if self.coefficients is None:
            return binomial(0.5, steps)
        beta = inverse(self.strategy_coefficients(steps), steps)
        if not np.isfinite(beta).all():
            remedy = "The inverse series overflows: C(x) has a zero inside the unit circle. Use a series without one."
            _check.fail("coefficients", self.coefficients, f"to have a finite inverse over steps={steps}", remedy)
        return beta
