r"""Tilt, window and grid step for a question, from a cheap saddle-point estimate. Nothing here enters a bound.

From the curve alone, E_P e^{tL} = 1 + t (t+1) \int e^{t eps} otm(eps) d eps, where otm is ``call`` to the right of zero and ``put``
to the left (integrate (e^{-L})^{-t} twice by parts). The integrand is positive and small, so the cumulants of a million steps
that each leak 1e-6 keep full relative accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import erfcx

from hushgrad.accounting._numeric import reached
from hushgrad.accounting.heuristics import HEURISTICS
from hushgrad.accounting.pld.bounds.compose import Window
from hushgrad.accounting.pld.profiles.curve import Array, Curve

_SUM = np.add.reduce  # np.sum is three times as slow on arrays of this size
_DECADES = np.geomspace(1e-7, 1.0, HEURISTICS.moment_points)
_SHARES = 1 / (1 + np.exp(-np.linspace(-16.0, 16.0, HEURISTICS.moment_points)))


class Moments:
    """K(t) = ln E e^{tS} for curves with multiplicities, with two derivatives."""

    def __init__(self, parts: Sequence[tuple[Curve, int]], tail: float) -> None:
        self._times = np.array([[n] for _, n in parts], dtype=float)
        rows = [_quadrature(curve, tail) for curve, _ in parts]
        self._epsilon = np.stack([epsilon for epsilon, _ in rows])
        self._log_weight = np.log(np.maximum(np.stack([weight for _, weight in rows]), 1e-320))

    @property
    def longest(self) -> float:
        """The longest range of the losses of one step."""
        return float(np.max(np.max(self._epsilon, axis=1) - np.min(self._epsilon, axis=1)))

    def __call__(self, t: float) -> tuple[float, float, float]:
        """K(t), K'(t), K''(t)."""
        terms, top = self._terms(t)
        zero = _SUM(terms, axis=-1, keepdims=True)
        terms *= self._epsilon
        one = _SUM(terms, axis=-1, keepdims=True)
        two = _SUM(terms * self._epsilon, axis=-1, keepdims=True)
        a, b = t * (t + 1), 2 * t + 1
        log, total = _log_sum(a * zero, top)
        first = (b * zero + a * one) / total
        second = np.maximum((2 * zero + 2 * b * one + a * two) / total - first**2, (1e-6 * first) ** 2 + 1e-300)
        return tuple(float(_SUM(self._times * x, axis=None)) for x in (log, first, second))  # type: ignore[return-value]

    def log(self, t: Array) -> Array:
        """K alone, at several t."""
        at = t[:, None, None]
        terms, top = self._terms(at)
        return np.asarray(_SUM(self._times * _log_sum(at * (at + 1) * _SUM(terms, axis=-1, keepdims=True), top)[0], axis=(1, 2)))

    def _terms(self, t: float | Array) -> tuple[Array, Array]:
        """The weights times e^{t eps} over e^top, where top is the logarithm of the largest of them or of 1."""
        exponent = self._log_weight + t * self._epsilon
        top = np.maximum(np.maximum.reduce(exponent, axis=-1, keepdims=True), 0.0)
        return np.exp(exponent - top), top


def _log_sum(excess: Array, top: Array) -> tuple[Array, Array]:
    """ln(1 + E) and (1 + E) e^{-top} for E = ``excess`` e^top, with full relative accuracy where E is small."""
    unit = np.exp(-top)
    excess = np.maximum(excess, (1e-12 - 1) * unit)
    return np.where(top > 0, np.log(unit + excess) + top, np.log1p(excess)), unit + excess


def _quadrature(curve: Curve, tail: float) -> tuple[Array, Array]:
    """Points and weights times otm for the integral over epsilon: trapezoid rule in the logarithm, on both sides of zero.

    Towards a finite end of the support it is a rule in the logarithm of the distance to that end, too: atoms sit there.
    """
    low, high = curve.reach(tail)
    sides = []
    for end, sign, bounded in ((-low, -1.0, curve.support[0] > -math.inf), (high, 1.0, curve.support[1] < math.inf)):
        end = max(end, 1e-13)
        logistic = end * _SHARES, end * _SHARES * (1 - _SHARES) * (32.0 / (len(_SHARES) - 1))
        points, pieces = logistic if bounded else _geometric(end)
        otm = curve.right(points)[0] - curve.infinite if sign > 0 else curve.left(-points)[0]
        sides.append((sign * points, np.maximum(otm, 0.0) * pieces))
    return np.concatenate([sides[0][0], sides[1][0]]), np.concatenate([sides[0][1], sides[1][1]])


def _geometric(end: float) -> tuple[Array, Array]:
    points = end * _DECADES
    pieces = points * math.log(points[1] / points[0])
    pieces[0] += points[0]  # the piece next to zero
    return points, pieces


@dataclass(frozen=True)
class Saddle:
    """The tilt t with K'(t) = epsilon, the estimated delta there and the spread of the tilted total loss."""

    tilt: float
    epsilon: float
    log_delta: float
    spread: float

    @property
    def slope(self) -> float:
        """-d ln(delta) / d epsilon, about: an error of epsilon times this is one of ln(delta)."""
        return max(self.tilt, 1 / self.spread)


def _saddle(moments: Moments, t: float) -> Saddle:
    k, mean, variance = moments(t)
    spread = math.sqrt(variance)
    # E[e^{-tY} (1 - e^{-Y})_+] for Y ~ N(0, variance)
    factor = 0.5 * (erfcx(t * spread / math.sqrt(2)) - erfcx((t + 1) * spread / math.sqrt(2)))
    return Saddle(t, mean, k - t * mean + math.log(max(factor, 1e-300)), spread)


def saddle_for_delta(moments: Moments, delta: float) -> Saddle:
    """The saddle point whose estimated delta is ``delta``."""
    target = math.log(delta)
    return _saddle(moments, _root(lambda t: _saddle(moments, t).log_delta - target))


def saddle_for_epsilon(moments: Moments, epsilon: float) -> Saddle:
    """The saddle point at ``epsilon``."""
    return _saddle(moments, _root(lambda t: epsilon - moments(t)[1]))


def _root(decreasing: Callable[[float], float]) -> float:
    """The zero of a decreasing function of t >= 0 by bisection in ln t; the nearest end where there is none."""
    low, high = 1e-4, 1.0
    if not decreasing(low) > 0:
        return low
    while decreasing(high) > 0 and high < HEURISTICS.largest_tilt:
        low, high = high, high * 4
    for _ in range(11):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if decreasing(middle) > 0 else (low, middle)
    return high


def window(moments: Moments, at: Saddle, share: float) -> Window:
    """The narrowest of a few windows around ``at`` that change delta by at most about ``share``, relatively.

    The saddle's own tilt is the best for sums of many small losses. Where single large losses matter too, it brings them forward
    so much that the window becomes very wide; a smaller tilt then costs some digits and saves most of the work.
    """
    best = _window(moments, at, at.tilt, share)
    usual = 2.5 * math.sqrt(-2 * math.log(share)) * at.spread
    for factor in HEURISTICS.tilts:
        if best.high - best.low < usual:
            break
        other = _window(moments, at, factor * at.tilt, share)
        best = other if other.high - other.low < 0.7 * (best.high - best.low) else best
    return best


def _window(moments: Moments, at: Saddle, t: float, share: float) -> Window:
    """By Chernoff's bound: what is lost above, and what re-enters from either side, is a quarter of ``share`` of delta each."""
    slack = -math.log(share / 4)
    rest = slack - at.log_delta  # -ln of the mass that may be lost
    # for a Gaussian the best one is near the first factor
    exponents = math.sqrt(2 * slack) / at.spread * np.array(HEURISTICS.exponents)
    above, below = moments.log(t + exponents), moments.log(-exponents)
    up, high = _least((above + rest) / (t + exponents))
    high = max(high, at.epsilon + 2 * at.spread)
    far, folded = _least((above + rest - (t + exponents) * at.epsilon) / exponents)
    down, raised = _least((below + rest + exponents * high) / (t + exponents))
    reached("the moments of the loss", high, folded, min(raised, rest / t))
    width = max(folded, min(raised, rest / t), high - at.epsilon + 3 * at.spread)
    return Window(t, high - width, high, *(float(exponents[k]) for k in (down, up, far)))


def _least(values: Array) -> tuple[int, float]:
    """The position and the size of the smallest finite value."""
    at = int(np.argmin(np.where(np.isfinite(values), values, math.inf)))
    return at, float(values[at])
