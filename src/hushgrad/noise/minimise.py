"""The least value of a smooth function: of one variable by golden sections, of a few by BFGS in plain numpy.

scipy has them too: its package takes a fifth of a second to import, and its line search as long as the small functions that are asked here.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_ENOUGH, _FLAT = 1e-4, 0.9  # Wolfe's constants: of the promised descent, and of the slope that may be left
_HALVINGS = 60  # of a step, before rounding is believed to be all that is left

Objective = Callable[[np.ndarray], tuple[float, np.ndarray]]


def bfgs(objective: Objective, start: np.ndarray, *, tolerance: float = 1e-6, most: int = 300) -> tuple[np.ndarray, float]:
    """Where ``objective`` (a value and its gradient) is least, seen from ``start``, and its value there.

    It ends where no slope is above ``tolerance``, where rounding hides any further descent, or after ``most`` steps.

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
    """Where ``loss`` is least between ``low`` and ``high``, to within ``width``; it has one valley there.

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
    """A length of the step that descends enough and has passed enough of the slope, so that the curvature is positive."""
    low, high, length = 0.0, np.inf, 1.0
    for _ in range(_HALVINGS):
        after, slope = objective(x + length * move)
        if not after <= value + _ENOUGH * length * falls:  # not a number, too
            high = length
        elif slope @ move < _FLAT * falls:
            low = length
        else:
            return length, after, slope
        length = 2 * length if high == np.inf else (low + high) / 2
    return None
