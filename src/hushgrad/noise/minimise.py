"""Minimisation of smooth functions: golden-section search for one variable, BFGS for several, in plain numpy.

scipy has both, but takes a fifth of a second to import, and its line search takes as long as the small functions minimised here.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_ENOUGH, _FLAT = 1e-4, 0.9  # Wolfe's constants, for sufficient decrease and for the curvature condition
_HALVINGS = 60  # of a step, before the search stops because only rounding is left

Objective = Callable[[np.ndarray], tuple[float, np.ndarray]]


def bfgs(objective: Objective, start: np.ndarray, *, tolerance: float = 1e-6, most: int = 300) -> tuple[np.ndarray, float]:
    """A local minimum of ``objective`` (which returns a value and its gradient) from ``start``: (where, value).

    It stops when no component of the gradient exceeds ``tolerance``, when rounding prevents further descent, or after ``most`` steps.

    >>> x, value = bfgs(lambda x: (float(x @ x - x.sum()), 2 * x - 1), np.array([3.0, -1.0]))
    >>> x.round(6).tolist(), round(value, 6)
    ([0.5, 0.5], -0.5)

    Reference: Nocedal, Wright 2006, algorithm 6.1; the step by bisection after Lewis, Overton 2013.
    """
    x, unit = np.asarray(start, dtype=float), np.eye(len(start))
    value, slope = objective(x)
    inverse = unit / max(1.0, float(np.linalg.norm(slope)))
    for step in range(most):
        if np.abs(slope).max() <= tolerance:
            break
        move = -inverse @ slope
        found = _stepped(objective, x, move, value, float(slope @ move))
        if found is None:
            break
        length, after, after_slope = found
        s, y = length * move, after_slope - slope
        curvature = float(s @ y)
        if step == 0:
            inverse = unit * (curvature / float(y @ y))
        left = unit - np.outer(s, y) / curvature
        inverse = left @ inverse @ left.T + np.outer(s, s) / curvature
        x, value, slope = x + s, after, after_slope
    return x, value


def golden_section(loss: Callable[[float], float], low: float, high: float, *, width: float) -> float:
    """The minimum of a unimodal ``loss`` between ``low`` and ``high``, to within ``width``.

    >>> round(golden_section(lambda x: (x - 0.3) ** 2, 0.0, 1.0, width=1e-4), 3)
    0.3
    """
    share = (np.sqrt(5.0) - 1) / 2
    a, b = high - share * (high - low), low + share * (high - low)
    of_a, of_b = loss(a), loss(b)
    while high - low > width:
        if of_a < of_b:
            high, b, of_b = b, a, of_a
            a = high - share * (high - low)
            of_a = loss(a)
        else:
            low, a, of_a = a, b, of_b
            b = low + share * (high - low)
            of_b = loss(b)
    return float((low + high) / 2)


def _stepped(
    objective: Objective, x: np.ndarray, move: np.ndarray, value: float, falls: float
) -> tuple[float, float, np.ndarray] | None:
    """A step length that satisfies Wolfe's conditions, with the value and gradient there, or None; the curvature is then positive."""
    low, high, length = 0.0, np.inf, 1.0
    for _ in range(_HALVINGS):
        after, slope = objective(x + length * move)
        if not after <= value + _ENOUGH * length * falls:  # true for NaN, too
            high = length
        elif slope @ move < _FLAT * falls:
            low = length
        else:
            return length, after, slope
        length = 2 * length if high == np.inf else (low + high) / 2
    return None
