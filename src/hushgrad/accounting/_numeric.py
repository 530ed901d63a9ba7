"""Small numerical tools of the room: searches that end on the safe side, and a search over Rényi orders."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

from hushgrad.errors import NumericalLimit

__all__ = ["least_over_orders", "log_add", "positive_up", "reached", "smallest_true", "up"]

_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
_MARGIN = 1e-12  # a few thousand roundings of float64: closed forms are rounded up by it


def up(x: float) -> float:
    """``x`` rounded up by more than the rounding errors of a closed form, so that it is never below the truth."""
    return x + _MARGIN * abs(x)


def positive_up(x: float) -> float:
    """:func:`up` of what is known to be above 0: where it left the range of doubles, the least of them that has all its digits."""
    return max(up(x), sys.float_info.min)


def reached(what: str, *numbers: float) -> None:
    """Raise ``NumericalLimit`` where one of ``numbers`` left the range of doubles: ``what`` cannot be computed here."""
    if not all(math.isfinite(x) for x in numbers):
        raise NumericalLimit(f"Doubles do not reach {what}.")


def log_add(a: float, b: float) -> float:
    """log(e^a + e^b) without overflow."""
    high, low = max(a, b), min(a, b)
    if high == -math.inf:
        return high
    return high + math.log1p(math.exp(low - high))


def smallest_true(
    holds: Callable[[float], bool], low: float, high: float, *, tolerance: float = 1e-12, absolute: float = 1e-300
) -> float:
    """The smallest x in [low, high] at which the monotone ``holds`` is true, rounded up: the answer itself holds.

    ``holds(high)`` must be true. The error is at most ``tolerance`` relative to the answer, or ``absolute``.
    """
    if holds(low):
        return low
    while high - low > max(tolerance * abs(high), absolute):
        middle = 0.5 * (low + high)
        if middle <= low or middle >= high:
            break
        if holds(middle):
            high = middle
        else:
            low = middle
    return high


def least_over_orders(objective: Callable[[float], float], *, hopeless: Callable[[float, float], bool], steps: int = 24) -> float:
    """The least value of ``objective(order)`` that a scan over orders > 1 and a golden-section search find.

    Every order gives a valid bound, so a search that misses the optimum costs tightness and never correctness.
    ``hopeless(order, best)`` ends the scan when no larger order can improve on ``best``.
    """
    step, x, best_x = 0.4, -9.0, -9.0
    best = math.inf
    while x < 25.0:
        order = 1.0 + math.exp(x)
        value = objective(order)
        if value < best:
            best, best_x = value, x
        if hopeless(order, best):
            break
        x += step
    low, high = best_x - step, best_x + step
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = objective(1.0 + math.exp(left)), objective(1.0 + math.exp(right))
    for _ in range(steps):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = objective(1.0 + math.exp(left))
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = objective(1.0 + math.exp(right))
    return min(best, at_left, at_right)
