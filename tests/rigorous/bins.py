r"""Truth for random allocation: two bins under replace-one in ball arithmetic, any number of bins by inversion. No code of the accountants.

*Two bins, replace-one.* Under N(0, I), x = e^eps, delta(x) = E[(D_1 + D_2)_+]/2 with D = e^{mu z - mu^2/2} - x e^{-mu z - mu^2/2}.
Given D_1 = d the inner mean g(d) has a closed form, since D_2 rises with z; g is convex and rises with a slope of at most one. Over a cell
of z_1 Jensen's inequality bounds from below, the chord of g from above.

*Many bins.* W is the mean of b independent w = e^{mu z - mu^2/2}. E[(y - W)_+] = 1/(2 pi i) * integral over Re s = c of e^{sy} L(s)/s^2 ds,
L(s) = (E e^{-sw/b})^b, and E[(W - y)_+] = 1 - y + E[(y - W)_+]: taken on two contours which must agree. This one is not a proof.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from ball_arithmetic import Bounds, between, upper_tail
from flint import arb
from inversion import Undecided

__all__ = ["many_bins", "two_bins_replace"]


@dataclass(frozen=True)
class _Cell:
    """z_1 between a and b (None: infinitely far): what this adds to twice delta, from below and from above."""

    a: float | None
    b: float | None
    low: arb
    high: arb


@dataclass(frozen=True)
class _Exchange:
    mu: arb
    x: arb

    def term(self, z: float) -> arb:
        """D at z."""
        return (self.mu * z - self.mu**2 / 2).exp() - self.x * (-self.mu * z - self.mu**2 / 2).exp()

    def inner(self, d: arb) -> arb:
        """g(d) = E[(d + D_2)_+]; D_2 = -d where c y^2 + d y - x c = 0, y = e^{mu z}, c = e^{-mu^2/2}."""
        c = (-(self.mu**2) / 2).exp()
        root = (d**2 + 4 * self.x * c**2).sqrt()
        y = 2 * self.x * c / (d + root) if d > 0 else (root - d) / (2 * c)
        z = y.log() / self.mu
        return d * upper_tail(z) + upper_tail(z - self.mu) - self.x * upper_tail(z + self.mu)

    def cell(self, a: float | None, b: float | None) -> _Cell:
        ends = tuple(None if z is None else arb(z) for z in (a, b))
        mass, plus, minus = (between(*ends, centre) for centre in (arb(0), self.mu, -self.mu))
        moment = plus - self.x * minus
        low = mass * self.inner(moment / mass)
        if a is None:  # g rises
            return _Cell(a, b, low, mass * self.inner(self.term(b or 0.0)))
        first = self.term(a)
        if b is None:  # its slope is at most one
            return _Cell(a, b, low, mass * self.inner(first) + moment - mass * first)
        last = self.term(b)
        share = ((moment / mass - first) / (last - first)).max(arb(0)).min(arb(1))
        return _Cell(a, b, low, mass * (share * self.inner(last) + (1 - share) * self.inner(first)))


def two_bins_replace(mu: arb, x: arb, width: float, most: int = 1200) -> Bounds:
    """Bounds on delta at x, relatively ``width`` apart if ``most`` cells suffice."""
    pair, far = _Exchange(mu, x), 40.0 + float(mu)
    edges = [None, *np.linspace(-far, far, 33).tolist(), None]
    cells = [pair.cell(a, b) for a, b in itertools.pairwise(edges)]
    while True:
        low, high = sum((c.low for c in cells), arb(0)) / 2, sum((c.high for c in cells), arb(0)) / 2
        if len(cells) >= most or float((high - low).mid()) <= width * float(high.mid()):
            return low, high
        cells.sort(key=lambda c: float((c.high - c.low).mid()), reverse=True)
        worst, rest = cells[: max(4, len(cells) // 4)], cells[max(4, len(cells) // 4) :]
        halves = [(c.a, c.b, (c.a + c.b) / 2) for c in worst if c.a is not None and c.b is not None]
        if not halves:
            return low, high
        kept = [c for c in worst if c.a is None or c.b is None]
        cells = rest + kept + [pair.cell(*ends) for a, b, m in halves for ends in ((a, m), (m, b))]


def many_bins(mu: float, bins: int, epsilon: float, *, remove: bool, floor: float) -> tuple[float, float]:
    """The logarithm of delta of one pass, less and more what two contours differ by ten times; of ``floor`` where delta is smaller.

    Raises:
        Undecided: where that cannot be had.
    """
    y = math.exp(epsilon if remove else -epsilon)
    with np.errstate(all="ignore"):
        scale = max(math.sqrt(min(math.expm1(mu * mu), 1e4) / bins), y - 1)
        first, second = (_put(mu, bins, y, c / scale, fine) for c, fine in ((2.0, 1.0), (3.1, 0.8)))
    values = [1 - y + put if remove else put / y for put in (first, second)]
    if max(abs(value) for value in values) < floor:
        return -math.inf, math.log(floor)
    if not (min(values) > 0 and max(values) < 1.0001 * min(values)):
        raise Undecided(f"two contours give {values}")
    found, error = math.log(values[0]), 10 * (max(values) / min(values) - 1) + 1e-5
    return found - error, found + error


def _put(mu: float, bins: int, y: float, c: float, fine: float) -> float:
    """E[(y - W)_+] on the contour Re s = c."""
    end = min(9.5 + mu, (math.log(60.0 * bins / c) + mu * mu / 2) / mu)  # beyond it e^{-cw/b} is nothing
    step = fine * min(0.01, 2e-3 / mu)
    z = np.arange(-9.5, end + step, step)
    w, density = np.exp(mu * z - mu * mu / 2) / bins, np.exp(-z * z / 2) * step / math.sqrt(2 * math.pi)
    spacing, total, at, size = fine * 2 * math.pi / (y + 40.0 / c), 0.0, 0, 64
    while at < 2_000:
        s = c + 1j * (at + np.arange(size)) * spacing
        if float(np.max(s[-1].imag * w * mu * step * (density * np.exp(-c * w) > 1e-17))) > 2.0:
            raise Undecided("the oscillation is too fast for this rule")
        moment = np.exp(-s[:, None] * w) @ density
        value = (np.exp(s * y + bins * np.log(moment)) / s**2).real * (spacing / math.pi)
        if at == 0:
            value[0] /= 2
        total += float(np.sum(value))
        at += size
        if float(np.max(np.abs(value))) * size < 1e-15:
            return total
    raise Undecided("the integral converges too slowly")
