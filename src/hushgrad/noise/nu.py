"""nu-DP-FTRL: the square-root mechanism with a damping chosen by learning rate and curvature."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from hushgrad import _check, _papers
from hushgrad.events import Participation
from hushgrad.noise.base import Mechanism
from hushgrad.noise.lower_toeplitz import LongFilter, tuned
from hushgrad.noise.power_series import binomial
from hushgrad.noise.suggestions import Run, Skipped, Suggestion, regenerating

_SLIDE = (
    "The series beta_t = -t^(-3/2) (1 - nu)^t lacks the factor 1 / (2 sqrt(pi)) and, for nu < 0.3014, is no mechanism: "
    "its inverse grows exponentially (sensitivity 8e58 at nu=0.2, 1000 steps). Use the binomial series."
)


@dataclass(frozen=True, kw_only=True)
class Nu(LongFilter):
    """beta_t = (-1)^t binom(1/2, t) (1 - nu)^t, that is N(x) = (1 - (1 - nu) x)^(1/2); about -t^(-3/2) (1-nu)^t / (2 sqrt(pi)).

    nu = 0 is the square-root mechanism. For quadratic losses nu = learning rate x smallest curvature is optimal up to a
    logarithm, at an error that grows with the effective dimension instead of the dimension. ``nu=None`` is tuned for the
    prefix-sum rmse when the run is known (about 0.75 / steps for one participation).

    **Formal guarantee.** One Gaussian event with exact sensitivity: C's coefficients (-1)^t binom(-1/2, t) (1-nu)^t decrease.

    >>> Nu(nu=0.1).noising_coefficients(4).round(3).tolist()
    [1.0, -0.45, -0.101, -0.046]
    >>> Nu(nu=0.1, series="slide")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    hushgrad.errors.ArgumentError: Expected series='slide' to be 'binomial'. The series beta_t = -t^(-3/2) (1 - nu)^t ...

    Reference: Choquette-Choo, Dvijotham, Pillutla et al. 2024 (arXiv:2310.06771), section 2.
    """

    papers = (_papers.CHOQUETTE_2024_CORRELATED,)

    _open = "nu"

    nu: float | None = None
    series: str = "binomial"

    @classmethod
    def examples(cls) -> tuple[Mechanism, ...]:
        return (cls(), cls(nu=0.1), cls(nu=0.0))

    @classmethod
    def suggestions(cls, run: Run) -> Iterator[Suggestion | Skipped]:
        if run.rate is None:
            yield regenerating(cls, "Nu", "The damped square root", run)

    def __post_init__(self) -> None:
        if isinstance(self.series, str) and self.series == "slide":
            _check.fail("series", self.series, "to be 'binomial'", _SLIDE)
        _check.one_of(["binomial"], series=self.series)
        if self.nu is not None:
            object.__setattr__(self, "nu", _check.between(0, 1, closed="left", nu=self.nu))

    def strategy_coefficients(self, steps: int) -> np.ndarray:
        return binomial(-0.5, steps, 1 - self._value())

    def noising_coefficients(self, steps: int) -> np.ndarray:
        return binomial(0.5, steps, 1 - self._value())

    def resolved(self, *, steps: int, participation: Participation) -> Nu:
        if self.nu is not None:
            return self
        return replace(self, nu=tuned(lambda nu: Nu(nu=nu), steps, participation, low=1e-2 / steps, high=0.9))
