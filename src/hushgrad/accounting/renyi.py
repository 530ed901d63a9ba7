r"""Rényi divergences of single mechanisms: functions of the order alpha in (1, inf], for every real order.

All are worst cases over neighbours and over both directions. ``inf`` as an order asks for the largest privacy loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from hushgrad.accounting._numeric import log_add, ratio_up, up

Curve = Callable[[float], float]


def concentrated(rho: float) -> Curve:
    """Alpha rho: zCDP, and with rho = distance²/(2 sigma²) the Gaussian and the discrete Gaussian (an upper bound there)."""
    return lambda alpha: alpha * rho if rho > 0.0 else 0.0


def response(truth: float, lie: float, others: int = 0, *, largest: float) -> Curve:
    """k-ary randomised response: the log probabilities ``truth`` and ``lie`` of two answers, the others alike.

    ``largest`` is truth - lie, the largest loss, which the caller knows without the cancellation.

    Reference: Mironov 2017, proposition 5 (two answers).
    """

    def curve(alpha: float) -> float:
        if math.isinf(alpha):
            return largest
        terms = log_add(lie + alpha * largest, truth - alpha * largest)  # alpha truth + (1 - alpha) lie would cancel
        if others:
            terms = log_add(terms, math.log(others) + lie)
        return max(0.0, terms / (alpha - 1.0))

    return _safe_near_one(curve, largest, size=abs(lie))


def pure(epsilon: float) -> Curve:
    """Any epsilon-DP mechanism: at most what randomised response at epsilon has.

    >>> round(pure(1.0)(2.0), 6), pure(1.0)(float("inf"))
    (0.735326, 1.0)

    Reference: Bun and Steinke 2016, proposition 3.3 (proof); Kairouz, Oh and Viswanath 2015, theorem 2.
    """
    lie = -log_add(0.0, epsilon)
    return response(lie + epsilon, lie, largest=epsilon)


def laplace(epsilon: float) -> Curve:
    """The Laplace mechanism with distance / scale = ``epsilon``.

    >>> round(laplace(1.0)(2.0), 6)
    0.619124

    Reference: Mironov 2017, proposition 6.
    """

    def curve(alpha: float) -> float:
        if math.isinf(alpha):
            return epsilon
        spread = 2.0 * alpha - 1.0
        terms = log_add(math.log(alpha / spread) + (alpha - 1.0) * epsilon, math.log((alpha - 1.0) / spread) - alpha * epsilon)
        return max(0.0, terms / (alpha - 1.0))

    return _safe_near_one(curve, epsilon)


def discrete_laplace(scale: float, distance: int) -> Curve:
    """The discrete Laplace mechanism (P(k) proportional to e^{-|k|/scale}) at an integer distance: the exact sum."""
    t = -1.0 / scale  # ln of the ratio of neighbouring probabilities
    log_norm = math.log(-math.expm1(t)) - math.log1p(math.exp(t))
    log_tail = -math.log(-math.expm1(t))

    def curve(alpha: float) -> float:
        if math.isinf(alpha):
            return ratio_up(distance, scale)
        left = (1.0 - alpha) * distance * t
        terms = log_add(left + log_tail, alpha * distance * t + log_tail)
        if distance > 1:  # the integers strictly between: a geometric sum with ratio e^{(2 alpha - 1) t}
            ratio = (2.0 * alpha - 1.0) * t
            inside = math.log(-math.expm1(ratio * (distance - 1))) - math.log(-math.expm1(ratio))
            terms = log_add(terms, left + ratio + inside)
        return max(0.0, (log_norm + terms) / (alpha - 1.0))

    return _safe_near_one(curve, distance / scale, size=abs(log_norm) + abs(log_tail))


def _safe_near_one(curve: Curve, largest: float, size: float = 0.0) -> Curve:
    """``curve`` at a larger order, where near order 1 it would divide rounding errors by alpha - 1: divergences grow with the order.

    Args:
        curve: the closed form.
        largest: the largest loss, epsilon.
        size: of the other logarithms in it.
    """

    def safe(alpha: float) -> float:
        # The log-sum carries an error of about 1e-16 (1 + size + alpha epsilon); it must be small against the answer.
        value = curve(max(alpha, 1.0 + 1e-4))
        if math.isinf(alpha):
            return value
        noise = 1e-15 * (1.0 + size + alpha * largest) / max(alpha - 1.0, 1e-4)
        return min(up(value) + noise, largest)

    return safe
