"""Workloads: what the optimizer does with the noisy gradients, as a lower-triangular matrix A.

The parameters after step t are theta_0 - (A G)_t. For SGD at learning rate 1 A is all ones below the diagonal (prefix sums);
a schedule, momentum and weight decay give other matrices, and a mechanism's error should be judged by the real one.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from hushgrad import _check
from hushgrad._value import LATER, Value


class Workload(Value, family="workload"):
    """A linear map from gradients to iterates, known before the run.

    >>> from hushgrad.noise.workload import SGDWorkload
    >>> SGDWorkload(momentum=0.9)
    SGDWorkload(learning_rate=1.0, momentum=0.9, weight_decay=0.0, schedule='constant')
    """

    @abstractmethod
    def matrix(self, steps: int) -> np.ndarray:
        """A, dense: (steps, steps), lower-triangular."""

    @abstractmethod
    def coefficients(self, steps: int) -> np.ndarray | None:
        """A's first column if A is Toeplitz (the same rule in every step), else None."""


@dataclass(frozen=True)
class PrefixSums(Workload):
    """A_ts = 1 for s <= t: SGD with learning rate 1.

    >>> PrefixSums().matrix(2).tolist()
    [[1.0, 0.0], [1.0, 1.0]]
    """

    def matrix(self, steps: int) -> np.ndarray:
        return np.tri(steps)

    def coefficients(self, steps: int) -> np.ndarray:
        return np.ones(steps)


@dataclass(frozen=True, kw_only=True)
class SGDWorkload(Workload):
    """torch.optim.SGD: v_t = momentum v_{t-1} + g_t + weight_decay theta_{t-1}; theta_t = theta_{t-1} - lr_t v_t.

    ``learning_rate`` is a number or one number per step; ``schedule`` multiplies it by 1, or lets it fall to 0 over the run, "linear" or
    "cosine", as a recipe's ``[optimizer]`` does.

    >>> SGDWorkload(learning_rate=0.1, momentum=0.9).matrix(3)[:, 0].round(4).tolist()
    [0.1, 0.19, 0.271]
    """

    learning_rate: float | tuple[float, ...] = 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: str = field(default="constant", metadata=LATER)

    def __post_init__(self) -> None:
        rate: Any = self.learning_rate
        if isinstance(rate, (tuple, list, np.ndarray)) and np.ndim(rate):
            rate = tuple(_check.non_negative(learning_rate=r) for r in rate)
        else:
            rate = _check.positive(learning_rate=rate)
        self._keep(learning_rate=rate, momentum=_check.between(0, 1, closed="left", momentum=self.momentum))
        self._keep(weight_decay=_check.non_negative(weight_decay=self.weight_decay))
        _check.one_of(("constant", "linear", "cosine"), schedule=self.schedule)

    def matrix(self, steps: int) -> np.ndarray:
        """Row t by the optimizer's own recursion on unit impulses."""
        rates = self._rates(steps)
        A = np.zeros((steps, steps))
        velocity, iterate = np.zeros(steps), np.zeros(steps)
        for t in range(steps):
            velocity = self.momentum * velocity - self.weight_decay * iterate
            velocity[t] += 1.0
            iterate = A[t] = iterate + rates[t] * velocity
        return A

    def coefficients(self, steps: int) -> np.ndarray | None:
        """The response to one impulse, if the learning rate is constant."""
        rates = self._rates(steps)
        if np.any(rates != rates[0]):
            return None
        a, velocity, iterate = np.zeros(steps), 1.0, 0.0
        for t in range(steps):
            if t:
                velocity = self.momentum * velocity - self.weight_decay * iterate
            iterate = a[t] = iterate + rates[0] * velocity
        return a

    def _rates(self, steps: int) -> np.ndarray:
        done = np.arange(steps) / steps
        falls = {"constant": np.ones(steps), "linear": 1 - done, "cosine": (1 + np.cos(np.pi * done)) / 2}[self.schedule]
        if isinstance(self.learning_rate, float):
            return self.learning_rate * falls
        if len(self.learning_rate) < steps:
            _check.fail(
                "learning_rate", self.learning_rate, f"to have one rate for each of steps={steps}", "Give the whole schedule."
            )
        return np.array(self.learning_rate[:steps]) * falls


@dataclass(frozen=True)
class _Given(Workload):
    """A matrix given by the caller."""

    rows: tuple[tuple[float, ...], ...]

    def matrix(self, steps: int) -> np.ndarray:
        return np.array(self.rows)

    def coefficients(self, steps: int) -> np.ndarray | None:
        A = self.matrix(steps)
        return A[:, 0] if np.array_equal(A[1:, 1:], A[:-1, :-1]) else None


AnyWorkload: TypeAlias = "Workload | np.ndarray | None"


def as_workload(workload: AnyWorkload, steps: int) -> Workload:
    """The workload given by the argument: None means prefix sums, an array is taken as A."""
    if workload is None:
        return PrefixSums()
    if isinstance(workload, Workload):
        return workload
    try:
        A = np.asarray(workload, dtype=float)
    except (TypeError, ValueError):
        _check.fail("workload", workload, "to be a Workload or a matrix", "SGDWorkload(...) is torch.optim.SGD.")
    if A.shape != (steps, steps) or not np.isfinite(A).all() or np.triu(A, 1).any():
        _check.fail("workload", A.shape, f"to be finite and lower-triangular of shape ({steps}, {steps})")
    return _Given(tuple(map(tuple, A.tolist())))


def checked_workload(workload: Workload | None, *, fixed: bool) -> None:
    """Raise if it is not a workload, or if the noise is ``fixed`` already, so that a workload would have no effect."""
    _check.instance((Workload, type(None)), workload=workload, remedy="SGDWorkload(...) is torch.optim.SGD.")
    if workload is not None and fixed:
        _check.fail(
            "workload", workload, "to be left out where the coefficients are given", "They are not optimised for anything."
        )
