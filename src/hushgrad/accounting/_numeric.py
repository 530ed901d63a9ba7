"""Numerical tools of the accountants: rounding to the safe side, monotone searches, and a search over Rényi orders."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from fractions import Fraction

from hushgrad._printed import above
from hushgrad.errors import NumericalLimit

Shares = tuple[tuple[float, int], ...]  # (probability to reveal everything, times)

_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
_FEW = 64  # up to this many different numbers are added exactly
_MARGIN = 1e-12  # a few thousand roundings of float64: closed forms are rounded up by it


def up(x: float) -> float:
    """``x`` rounded up by more than the rounding errors of a closed form, so that it is never below the truth."""
    return x + _MARGIN * abs(x)


def positive_up(x: float) -> float:
    """:func:`up` of a number known to be positive: if it underflows, the smallest normal double."""
    return max(up(x), sys.float_info.min)


def ratio_up(a: float, b: float) -> float:
    """The least double that is not below a / b; for largest losses, beyond which delta is 0.

    >>> ratio_up(1, 2.0), ratio_up(1, 3.0) > 1 / 3
    (0.5, True)
    """
    return above(Fraction(a) / Fraction(b))


def product_up(rate: float, share: float) -> float:
    """The least normal double that is not below rate x share, share > 0: the probability that a sample reveals everything.

    >>> product_up(0.5, 1e-6), product_up(0.1, 1e-6) > 1e-7  # as doubles a tenth and 1e-6 are a little more than 1e-7
    (5e-07, True)
    """
    return max(above(Fraction(rate) * Fraction(share)), sys.float_info.min)


def revealed(shares: Iterable[tuple[float, int]]) -> float:
    """1 - prod (1 - d)^n over ``shares`` (d, n): the probability that something is revealed outright, rounded up.

    For a few shares it is the least double that is not below the exact value; it never exceeds the sum of all.

    >>> revealed([(1e-6, 1)]), revealed([(0.5, 2)]), revealed([(1e-9, 10**6)]) < 1e-3
    (1e-06, 0.75, True)
    """
    parts = [(d, n) for d, n in shares if d > 0.0 and n > 0]
    if sum(n for _, n in parts) <= _FEW:
        return above(1 - math.prod(((1 - Fraction(d)) ** n for d, n in parts), start=Fraction(1)))
    if any(d >= 1.0 for d, _ in parts):
        return 1.0
    # the product of n and a logarithm, their sum and the exponential are each off by a last digit or two
    found = min(1.0, -math.expm1(math.fsum(n * math.log1p(-d) for d, n in parts)) * (1.0 + 2.0**-49))
    return found if len(parts) > _FEW else min(found, above(sum((n * Fraction(d) for d, n in parts), Fraction(0))))


def total_loss(losses: Iterable[tuple[float, int]]) -> float:
    """The sum of the largest losses, exact for the decimals that they are written as: ten steps of 0.1 lose exactly 1."""
    found = [(loss, n) for loss, n in losses if loss > 0.0]
    if any(math.isinf(loss) for loss, _ in found) or len(found) > _FEW:
        return up(math.fsum(n * loss for loss, n in found))
    exact = sum((n * Fraction(repr(float(loss))) for loss, n in found), Fraction(0))
    return float(exact) if exact <= sys.float_info.max else math.inf


def reached(what: str, *numbers: float) -> None:
    """Raise ``NumericalLimit``, naming ``what`` cannot be computed, if one of ``numbers`` left the range of doubles."""
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
