r"""Monotone bracketing: the smallest u with g(u) <= 0 for a falling g, between two points that were both evaluated.

g is ln(epsilon / target) of a *certified* epsilon, so the result is proved by its two ends alone: a bad guess, a
jump where an accountant changes its method, or an infinite value costs evaluations, never correctness. Secant proposals are aimed
so that the last two evaluations are the answer and its neighbour one tolerance below; bisection where they do not halve the bracket.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from hushgrad.accounting.heuristics import HEURISTICS
from hushgrad.errors import NumericalLimit


@dataclass
class Bracket:
    """A decreasing function with a cache of its values."""

    g: Callable[[float], float]
    seen: dict[float, float] = field(default_factory=dict)

    def __call__(self, u: float) -> float:
        """g(u), evaluated once for each u."""
        if u not in self.seen:
            if len(self.seen) >= HEURISTICS.most_evaluations:
                raise NumericalLimit(
                    f"No crossing was found in {HEURISTICS.most_evaluations} evaluations. Is epsilon monotone in this parameter?"
                )
            self.seen[u] = self.g(u)
        return self.seen[u]

    def failed_below(self, u: float) -> float | None:
        """The largest evaluated point below ``u`` with g > 0, if any."""
        return max((v for v, value in self.seen.items() if v < u and value > 0.0), default=None)

    def met_above(self, u: float) -> float | None:
        """The smallest evaluated point above ``u`` with g <= 0, if any."""
        return min((v for v, value in self.seen.items() if v > u and value <= 0.0), default=None)


def crossing(ask: Bracket, start: float, ends: tuple[float, float], gap: float) -> tuple[float, float | None]:
    """(u, v): g(u) <= 0 < g(v) with v = u - ``gap``; v is None where g is not positive at the lower end. NaN where none is."""
    low, high = _expanded(ask, start, ends)
    if high is None:
        return math.nan, low
    widths: list[float] = []
    while low is not None:
        widths.append(high - low)
        if high - low <= gap * (1 + 1e-9):  # low may be high - gap, rounded
            neighbour = max(high - gap, ends[0])
            if ask(neighbour) > 0.0:
                return high, neighbour
            low, high = _down(ask, neighbour, ends)  # g jumps: a smaller u suffices
            widths.clear()
            continue
        u = _proposal(ask, low, high, gap, halved=len(widths) < 5 or widths[-1] <= widths[-5] / 2)
        low, high = (u, high) if ask(u) > 0.0 else (low, u)
    return high, None


def _expanded(ask: Bracket, start: float, ends: tuple[float, float]) -> tuple[float | None, float | None]:
    """(low, high) around the crossing; None for a side on which no such point exists."""
    if ask(start) <= 0.0:
        return _down(ask, start, ends)
    low, step = start, HEURISTICS.first_step
    while low < ends[1]:
        met = ask.met_above(low)
        u = min(low + _stride(ask, low, step), ends[1]) if met is None else met
        if ask(u) <= 0.0:
            return low, u
        low, step = u, step * HEURISTICS.growth
    return low, None


def _down(ask: Bracket, high: float, ends: tuple[float, float]) -> tuple[float | None, float]:
    known, step = ask.failed_below(high), HEURISTICS.first_step
    while known is None and high > ends[0]:
        u = max(high - _stride(ask, high, step), ends[0])
        if ask(u) > 0.0:
            known = u
        else:
            high, step = u, step * HEURISTICS.growth
    return known, high


def _stride(ask: Bracket, u: float, step: float) -> float:
    """The next stride from ``u``: slightly beyond the zero of the line through ``u`` and its neighbour, and at least ``step``."""
    others = [v for v, value in ask.seen.items() if v != u and math.isfinite(value)]
    if not others or not math.isfinite(ask(u)):
        return step
    v = min(others, key=lambda v: abs(v - u))
    slope = (ask(u) - ask(v)) / (u - v)
    return max(step, min(HEURISTICS.beyond * abs(ask(u) / slope), HEURISTICS.farthest)) if slope < 0.0 else step


def _root(ask: Bracket, low: float, high: float) -> float:
    """Where the line through the two answers nearest to 0 crosses, or the one through both ends if that is not between them."""
    a, b = sorted(ask.seen, key=lambda u: abs(ask(u)))[:2]
    if ask(a) != ask(b):
        root = a - ask(a) * (b - a) / (ask(b) - ask(a))
        if low < root < high:
            return root
    return low + (high - low) * ask(low) / (ask(low) - ask(high))


def _proposal(ask: Bracket, low: float, high: float, gap: float, *, halved: bool) -> float:
    """Where to ask next: just above the secant's root, or one gap below the upper end if the root lies in between."""
    if halved and math.isfinite(ask(low)) and math.isfinite(ask(high)):
        root = _root(ask, low, high)
        if high - root <= 0.9 * gap:
            return high - gap
        aimed = root + 0.3 * gap
        if low + 0.1 * gap < aimed < high - 0.1 * gap:
            return aimed
    return 0.5 * (low + high)


def largest_integer(g: Callable[[int], float], start: int, most: int) -> int:
    """The largest n in 1..``most`` with g(n) <= 0 for a rising g, 0 if there is none; n and n + 1 were both evaluated."""
    seen: dict[int, float] = {0: -math.inf}

    def ask(n: int) -> float:
        if n not in seen:
            seen[n] = g(n)
        return seen[n]

    low, high = 0, most + 1
    n, factor = min(max(start, 1), most), 1.02
    while low == 0 or high > most:
        low, high = (n, high) if ask(n) <= 0.0 else (low, n)
        if low == most or high == 1:
            return low
        if low and high <= most:
            break
        n = min(max(math.ceil(n * factor), n + 1), most) if low else max(min(math.floor(n / factor), n - 1), 1)
        factor = factor**2
    widths: list[float] = []
    while high - low > 1:
        widths.append(math.log(high / low))
        n = math.isqrt(low * high) if high >= 4 * low else (low + high) // 2
        below, above = ask(low), ask(high)
        if math.isfinite(below) and math.isfinite(above) and (len(widths) < 4 or widths[-1] <= widths[-4] / 2):
            root = low * math.exp(math.log(high / low) * below / (below - above))
            n = math.floor(root) if math.floor(root) > low else low + 1
        n = min(max(n, low + 1), high - 1)
        low, high = (n, high) if ask(n) <= 0.0 else (low, n)
    return low
