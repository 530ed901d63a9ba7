r"""Adaptive composition of exponential mechanisms, exactly, by dynamic programming on the privacy profile.

The losses of one such step lie in an interval [t - eta, t] that holds 0, so the pair with losses t and t - eta only, p = (e^eta -
e^t)/(e^eta - 1), dominates it and is itself such a step (Dong, Durfee and Rogers 2020). An adversary who chooses the steps one by one,
after seeing the answers before, therefore attains with D_0(eps) = (1 - e^eps)_+

    D_{j+1}(eps) = max_{0 <= t <= eta}  p D_j(eps - t) + (1 - p) D_j(eps - t + eta),

and none attains more: no single step attains the envelope over all t (``BoundedRange``) at every epsilon.

On a grid of t and eps of step h this is a lower bound. For an upper one let t lie between t_k and t_{k+1}. Its two losses are split
between their neighbours so that P's and Q's masses are kept, with the same share s for both: a larger pair. The result is linear in
s and in p, and p exceeds its chord in s by at most d_k = e^{t_k} (e^{h/2} - 1)^2/(e^eta - 1), since e^t is convex in s. On the
chord it is a quadratic function of s, at most its larger end and a quarter of its second coefficient above. So with G_k = D(eps -
t_k) - D(eps - t_k + eta), which is not negative, each cell adds |p_{k+1} - p_k| |G_{k+1} - G_k|/4 + d_k max(G_k, G_{k+1}): an error
of second order in h.

Rounding: every step adds products of non-negative numbers, a relative error of 16 u at most, which is paid for at the end. Ranges
that are no multiple of h are enlarged to the next one from above (a longer interval dominates) and shortened from below.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from hushgrad.accounting.heuristics import HEURISTICS
from hushgrad.accounting.pld.profiles.continuous import BoundedRange, HalfRange
from hushgrad.accounting.pld.profiles.curve import ACCURACY, Array, Curve

_U = 2.0**-53

Ranges = tuple[tuple[float, int], ...]


def is_choice(parts: Sequence[tuple[Curve, int]]) -> bool:
    """Whether all parts are exponential mechanisms, and few enough for this."""
    if not parts or not all(isinstance(curve, (BoundedRange, HalfRange)) for curve, _ in parts):
        return False
    ranges = _ranges(parts)
    fineness = _fineness(ranges)
    return fineness >= HEURISTICS.choice_coarsest and min(eta for eta, _ in ranges) <= HEURISTICS.choice_longest * fineness


def choice_epsilon(parts: Sequence[tuple[Curve, int]], delta: float, *, upper: bool) -> float:
    """A bound on epsilon at ``delta`` > 0. A single step may be chosen for the very epsilon that is asked: the envelope itself."""
    if sum(n for _, n in parts) == 1:
        (eta, _), *_ = _ranges(parts)
        root = eta + 2 * math.log1p(-math.sqrt(min(1.0, delta * -math.expm1(-eta)))) if delta < 1 else 0.0
        return max(0.0, root + (1e-13 if upper else -1e-13) * (1 + eta))
    step, values = _profile(_ranges(parts), upper)
    inside = values <= delta
    i = int(np.argmax(inside))  # the values fall to 0
    if i == 0:
        return 0.0
    if not upper:
        return (i - 1) * step
    # delta is convex in e^eps, so it lies below the chord
    share = (values[i - 1] - delta) / (values[i - 1] - values[i])
    return ((i - 1) * step + math.log1p(share * math.expm1(step))) * (1 + 1e-14)


def choice_delta(parts: Sequence[tuple[Curve, int]], epsilon: float, *, upper: bool) -> float:
    """A bound on delta at ``epsilon``."""
    if sum(n for _, n in parts) == 1:
        (eta, _), *_ = _ranges(parts)
        return BoundedRange(eta).delta(epsilon) * (1 + ACCURACY if upper else 1 - ACCURACY)
    step, values = _profile(_ranges(parts), upper)
    place = epsilon / step
    i = min(math.floor(place), len(values) - 2)
    if place >= len(values) - 1:
        return 0.0
    share = math.expm1((place - i) * step) / math.expm1(step)
    return float(values[i] + share * (values[i + 1] - values[i])) * (1 + 1e-14) if upper else float(values[i + 1])


def _ranges(parts: Sequence[tuple[Curve, int]]) -> Ranges:
    return tuple((curve.eta, n) for curve, n in parts if isinstance(curve, (BoundedRange, HalfRange)))


def _fineness(ranges: Ranges) -> int:
    """Steps of the grid per shortest range: the work is steps x grid points per range x grid points of all."""
    shortest = min(eta for eta, _ in ranges)
    cells = sum(eta / shortest * n for eta, n in ranges)
    return min(HEURISTICS.choice_finest, int(math.sqrt(HEURISTICS.choice_work / 2) / cells))


@lru_cache(maxsize=64)
def _profile(ranges: Ranges, upper: bool) -> tuple[float, Array]:
    """The step of the grid, and a bound on delta at 0, one step, two steps, ..., up to where it is 0."""
    step = min(eta for eta, _ in ranges) / _fineness(ranges)
    cells = [(math.ceil(eta / step * (1 - 1e-12)) if upper else math.floor(eta / step * (1 + 1e-12)), n) for eta, n in ranges]
    reach = sum(per * n for per, n in cells)
    # eta is per steps: of a step that is a hair longer from above, shorter from below
    step *= 1 + 1e-11 if upper else 1 - 1e-11
    values = -np.expm1(np.minimum(step * np.arange(-reach, reach + 1.0), 0.0))
    steps = 0
    for per, n in cells:
        moves = _Moves(per, step, upper=upper)
        for _ in range(n):
            values = moves.worst(values)
        steps += n
    error = (16 * steps + 64) * _U
    return step, values[reach:] * (1 + error if upper else 1 - error)


class _Moves:
    """The pairs of one range on the grid: losses k h and (k - per) h for k = 0..per."""

    def __init__(self, per: int, step: float, *, upper: bool) -> None:
        t, eta = step * np.arange(per + 1.0), step * per
        self.per, self.step, self.upper = per, step, upper
        self.p = np.expm1(t - eta) / math.expm1(-eta)
        self.beyond = np.exp(t - eta) * math.expm1(step / 2) ** 2 / -math.expm1(-eta)

    def worst(self, values: Array) -> Array:
        """One more step in front of those whose profile is ``values``."""
        per, n = self.per, len(values)
        below = -np.expm1(self.step * np.arange(-(n // 2) - per, -(n // 2)))  # farther left delta is 1 - x
        padded = np.concatenate([below, values, np.zeros(per)])
        worst, before, gap = values, values, np.zeros(n)
        for k in range(per + 1):
            high, low = padded[per - k : per - k + n], padded[2 * per - k : 2 * per - k + n]
            its = np.maximum(high - low, 0.0)
            now = low + self.p[k] * its
            if self.upper and k:
                turn = (self.p[k - 1] - self.p[k]) / 4 * np.abs(its - gap) + self.beyond[k - 1] * np.maximum(its, gap)
                worst = np.maximum(worst, np.maximum(now, before) + turn)
            else:
                worst = np.maximum(worst, now)
            before, gap = now, its
        return np.asarray(np.minimum(worst, 1.0))
