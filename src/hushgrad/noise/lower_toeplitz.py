"""``LowerToeplitz``: the base of all mechanisms whose C is lower-triangular Toeplitz, with the same rule in every step.

A subclass gives the first columns of C and of N = C⁻¹ as power series; sensitivity, error and row norms follow.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, cast

import numpy as np

from hushgrad import _check
from hushgrad.errors import ArgumentError
from hushgrad.events import Participation
from hushgrad.noise.base import Mechanism, NoiseStream
from hushgrad.noise.error import toeplitz_unit_error
from hushgrad.noise.minimise import golden_section
from hushgrad.noise.participation import pattern_of
from hushgrad.noise.power_series import lower_toeplitz
from hushgrad.noise.sensitivity import toeplitz_sensitivity
from hushgrad.noise.workload import AnyWorkload

# Rows that a regenerating stream may keep per parameter. With m of them, m rows share one regeneration of the past.
MEMORY = 8


@dataclass(frozen=True)
class LowerToeplitz(Mechanism):
    """Noise that is a causal filter of independent noise: row t is sum_j beta_j z_{t-j}."""

    _open: ClassVar[str] = ""  # the parameter that is tuned for a run where it is None

    @abstractmethod
    def strategy_coefficients(self, steps: int) -> np.ndarray:
        """The first column of C: c_0 = 1, c_1, ..., c_{steps-1}."""

    @abstractmethod
    def noising_coefficients(self, steps: int) -> np.ndarray:
        """The first column of N = C⁻¹: beta_0 = 1, beta_1, ..., beta_{steps-1}."""

    def strategy(self, steps: int) -> np.ndarray:
        return lower_toeplitz(self.strategy_coefficients(_check.positive_int(steps=steps)))

    def noising(self, steps: int) -> np.ndarray:
        return lower_toeplitz(self.noising_coefficients(_check.positive_int(steps=steps)))

    def sensitivity(self, *, steps: int, participation: Participation) -> float:
        """Exact for non-increasing coefficients and for one participation; else an upper bound (see sensitivity.py)."""
        steps = _check.positive_int(steps=steps)
        pattern = pattern_of(participation, steps)
        fixed = self._fixed(steps, participation)
        return toeplitz_sensitivity(fixed.strategy_coefficients(steps), pattern)

    def unit_error(self, *, steps: int, workload: AnyWorkload = None) -> tuple[float, float]:
        return toeplitz_unit_error(self.noising_coefficients(_check.positive_int(steps=steps)), workload)

    def row_std(self, step: int, *, steps: int) -> float:
        step, steps = _check.integer(0, step=step), _check.positive_int(steps=steps)
        if step >= steps:
            _check.fail("step", step, f"to be less than steps={steps}", "Ask for a row of the run.")
        return float(_row_stds(self, steps)[step])

    def _is_open(self) -> bool:
        """Whether a parameter is still to be tuned; answers are then those of the mechanism tuned for the steps and participation asked."""
        return bool(self._open) and getattr(self, self._open) is None

    def _value(self) -> Any:
        """The parameter that may be tuned; without it there is no noise and no matrix."""
        if self._is_open():
            remedy = "Call resolved(steps=, participation=) to tune it, or give a value."
            raise ArgumentError(f"Expected {self._open} to be fixed. {remedy}")
        return getattr(self, self._open)

    def _fixed(self, steps: int, participation: Participation) -> LowerToeplitz:
        # A fixed mechanism may be asked about the first steps of its run, and must not be tuned for these.
        return cast("LowerToeplitz", self.resolved(steps=steps, participation=participation)) if self._is_open() else self


class LongFilter(LowerToeplitz):
    """A filter that is as long as the run."""

    def stream(self, source: Any, *, steps: int | None = None) -> NoiseStream:
        """The filter of all past z, which are regenerated once for several rows."""
        return filter_stream(self, source, steps)

    def state_size(self, *, steps: int) -> int:
        return filter_state(_check.positive_int(steps=steps))


@lru_cache(maxsize=8)
def _row_stds(mechanism: LowerToeplitz, steps: int) -> np.ndarray:
    # Cached: a training run asks for every row in turn.
    return np.asarray(np.sqrt(np.cumsum(np.square(mechanism.noising_coefficients(steps)))))


def filter_stream(
    mechanism: LowerToeplitz, source: Any, steps: int | None, memory: int = MEMORY, taps: int | None = None
) -> NoiseStream:
    """The live rows sum_j beta_j z_{t-j} of a mechanism; only the first ``taps`` coefficients are not 0."""
    from hushgrad.noise.streams import FilterStream

    steps = known_steps(steps)
    return FilterStream(source, mechanism.noising_coefficients(steps)[:taps].tolist(), steps=steps, memory=memory)


def filter_state(taps: int) -> int:
    """How many numbers per parameter such a stream keeps: rows that are computed together ahead of their step."""
    together = min(MEMORY, taps - 1)
    return together if together > 1 else 0


def known_steps(steps: int | None) -> int:
    """The checked number of steps, which correlated streams need; raises for None."""
    if steps is None:
        _check.fail("steps", steps, "to be given", "Correlated noise is made for a number of steps: pass steps=.")
    return _check.positive_int(steps=steps)


def tuned(make: Callable[[float], LowerToeplitz], steps: int, participation: Participation, *, low: float, high: float) -> float:
    """The parameter in [low, high] (searched on a logarithmic scale) whose mechanism has the least prefix-sum rmse."""

    def loss(log_value: float) -> float:
        mechanism = make(float(np.exp(log_value)))
        return mechanism.sensitivity(steps=steps, participation=participation) * mechanism.unit_error(steps=steps)[0]

    grid = np.linspace(np.log(low), np.log(high), 25)
    values = [loss(x) for x in grid]
    i = int(np.clip(np.argmin(values), 1, len(grid) - 2))
    return float(np.exp(golden_section(loss, grid[i - 1], grid[i + 1], width=1e-4)))
