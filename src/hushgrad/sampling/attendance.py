"""Attendance: counts which records took part in which steps, and compares the counts with what the sampler promises."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hushgrad.errors import CaptureError
from hushgrad.events import (
    BallsInBins,
    CyclicPoisson,
    Everyone,
    FixedSize,
    MinSep,
    Once,
    Participation,
    Poisson,
    TruncatedPoisson,
)

_MOST = 255  # counts are single bytes and saturate here
_MANY = 1 << 40
TOGETHER = 4096  # participations that are written in one go, roughly
_ALARM = 1e-12  # false-alarm probability of the test of the sampling rate


class Attendance:
    """How often each record (or unit) took part, and its smallest gap between two participations. As secret as the key; never released.

    A promise about single records (how often, how far apart) is checked when a batch is drawn, before its step is taken. A promised
    sampling rate is tested at the end of the run, with a false-alarm probability of 1e-12.

        >>> book = Attendance(MinSep(gap=3, times=2), units=4)
        >>> book.enter(0, np.array([0, 1])); book.enter(3, np.array([0]))
        >>> book.enter(4, np.array([0]))
        Traceback (most recent call last):
            ...
        hushgrad.errors.CaptureError: A record took part 1 steps after its last time, in step 4, ...
    """

    def __init__(self, promise: Participation, *, units: int) -> None:
        self._promise, self._units = promise, units
        self._size, (self._least, self._most) = _size(promise), _bounds(promise)
        # Whether the promise restricts single steps, so that each must be checked before it is taken.
        self.asks = self._size is not None or self._least > 1 or self._most <= _MOST
        self._count = np.zeros(units, np.uint8)
        self._gap = np.full(units, _MOST, np.uint8)
        self._last = np.full(units, -1, np.int32)
        self._total = self._steps = 0
        self.noted: dict[int, np.ndarray] = {}  # by step: records that passed the check but are not counted yet

    def require(self, step: int, chosen: np.ndarray) -> None:
        """Check that the records ``chosen`` may take part in ``step``, without counting them.

        Raises:
            CaptureError: where one of them may not; the step has not been taken.
        """
        if self._size is not None and not self._size[0] <= len(chosen) <= self._size[1]:
            raise self._broken(f"{len(chosen)} records took part in step {step},")
        if self._least > 1 or self._most <= _MOST:  # else the promise does not restrict single records
            self.enter_noted()
            self._require(step, self._gaps(step, chosen), self._count[chosen])

    def _gaps(self, step: int, chosen: np.ndarray) -> np.ndarray:
        last = self._last[chosen]
        gaps = step - last
        gaps[last < 0] = _MOST
        return gaps

    def enter(self, step: int, chosen: np.ndarray) -> None:
        """Check and count: the records ``chosen`` take part in ``step``.

        Raises:
            CaptureError: where one of them may not; the step has not been taken.
        """
        self.require(step, chosen)
        self.noted[step] = chosen
        self.enter_noted()

    def enter_noted(self) -> None:
        """Count the participations in ``noted``, many steps at once, which is faster than in each step. They have been checked already."""
        for step, chosen in [*self.noted.items()]:
            gap, count, added = np.minimum(self._gap[chosen], self._gaps(step, chosen)), self._count[chosen], len(chosen)
            count[count < _MOST] += 1
            # No calls from here on, so that no interrupt can leave a step counted in part or twice.
            self._gap[chosen], self._count[chosen], self._last[chosen] = gap, count, step
            self._total += added
            self._steps += 1
            del self.noted[step]

    def _require(self, step: int, gap: np.ndarray, count: np.ndarray) -> None:
        if self._least > 1 and len(gap) and int(gap.min()) < min(self._least, _MOST):
            raise self._broken(f"A record took part {int(gap.min())} steps after its last time, in step {step},")
        if self._most <= _MOST and len(count) and int(count.max()) >= self._most:
            raise self._broken(f"A record took part more than {self._most} times, in step {step},")

    def _broken(self, what: str) -> CaptureError:
        return CaptureError(
            f"{what} where the plan promises {self._promise}. The step was not taken. This is a defect of the sampler, or of "
            "the groups that it was given."
        )

    def check(self) -> str:
        """At the end of a run: how the sampling rate differed from the promised one, in words; empty if it agrees or none is promised."""
        self.enter_noted()
        rate = _rate(self._promise)
        if rate is None or not self._steps:
            return ""
        draws = float(self._units) * self._steps
        # Bernstein's inequality for a sum of independent Bernoulli variables.
        log = math.log(2 / _ALARM)
        slack = math.sqrt(2 * draws * rate * (1 - rate) * log) + 2 / 3 * log
        if abs(self._total - rate * draws) <= slack:
            return ""
        return f"{self._total} participations in {self._steps} steps, where {self._promise} promises about {rate * draws:.0f}"

    # Saving --------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The counts as tensors. Sensitive."""
        import torch

        self.enter_noted()
        arrays: dict[str, np.ndarray] = {"count": self._count, "gap": self._gap, "last": self._last}
        tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        return {**tensors, "total": self._total, "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the counts of an interrupted run."""
        self.noted = {}
        self._count, self._gap, self._last = (np.array(state[name].numpy()) for name in ("count", "gap", "last"))
        self._total, self._steps = int(state["total"]), int(state["steps"])


def _bounds(promise: Participation) -> tuple[int, int]:
    """(smallest gap, largest number of participations) promised for every record."""
    if isinstance(promise, MinSep):
        return promise.gap, promise.times
    if isinstance(promise, CyclicPoisson):
        return promise.period, _MANY
    if isinstance(promise, Once):
        return 1, 1
    return 1, promise.epochs if isinstance(promise, BallsInBins) else _MANY


def _size(promise: Participation) -> tuple[int, int] | None:
    """(smallest, largest) promised batch size, or None."""
    if isinstance(promise, FixedSize):
        return promise.size, promise.size
    return (0, promise.size) if isinstance(promise, TruncatedPoisson) else None


def _rate(promise: Participation) -> float | None:
    """The sampling rate, if records take part independently in every step; else None."""
    if isinstance(promise, Poisson):
        return promise.rate
    return 1.0 if isinstance(promise, Everyone) else None
