r"""Random allocation under replace-one, Gaussian noise: 1/b sum_j N(mu e_j, I) against 1/b sum_j N(-mu e_j, I).

No other replacement is worse, also if each step depends on all answers before it (docs/explanation/allocation.md). The pair is its
own mirror image, and under N(0, I), x = e^eps,

    delta(eps) = E[(D_1 + ... + D_b)_+] / b,      D_j = e^{mu z_j - mu^2/2} - x e^{-mu z_j - mu^2/2} independent:

for each epsilon the mean of b signed terms, whose law is built by doubling, larger in the increasing convex order (``convex_order``).
Delta is convex in x, so the chords between some epsilons lie above it.

Rounding. A term's mean over a cell is raised by ``_CELLS`` times the size of its two parts, which is more than it is off;
``raised`` does the same for sums. So each computed sum lies above the true one, and masses are off by the law's ``error`` only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from hushgrad.accounting.heuristics import HEURISTICS
from hushgrad.accounting.pld.bounds.allocation import CELLS as _CELLS
from hushgrad.accounting.pld.bounds.allocation import mean_of, normal_cells
from hushgrad.accounting.pld.bounds.convex_order import Law, summed_above
from hushgrad.accounting.pld.profiles.curve import Array, GaussianCurve, OwnMirror


@dataclass(frozen=True)
class AllocatedReplace(OwnMirror):
    """A curve above that of ``bins`` bins at distance ``mu`` from nothing, one record replaced by any other."""

    mu: float
    bins: int
    lattice = math.nan
    smooth = False

    def __post_init__(self) -> None:
        last = self.value(float(self.nodes(HEURISTICS.exchange_few_nodes)[-1]))
        self._note(infinite=last, impossible=last)

    def right(self, epsilon: Array) -> tuple[Array, Array]:
        """Chords in x between the nodes."""
        nodes = self.nodes(
            HEURISTICS.exchange_nodes if len(epsilon) <= HEURISTICS.exchange_alone else HEURISTICS.exchange_few_nodes
        )
        last = len(nodes) - 1
        at = np.clip(np.searchsorted(nodes, epsilon, side="right") - 1, 0, last - 1)
        values = np.zeros(len(nodes))
        for k in np.unique(np.concatenate([at, at + 1])):
            values[k] = self.value(float(nodes[k]))
        gap = nodes[at + 1] - nodes[at]
        beyond = np.minimum(epsilon - nodes[at], gap)
        share = np.expm1(beyond) / np.expm1(gap)
        call = values[at] + share * (values[at + 1] - values[at])
        slope = np.exp(beyond) * (values[at] - values[at + 1]) / np.expm1(gap)
        return call, np.where(epsilon >= nodes[last], 0.0, np.maximum(slope, 0.0))

    @property
    def support(self) -> tuple[float, float]:
        """An interval of losses; losses beyond it are counted as infinite."""
        last = float(self.nodes(HEURISTICS.exchange_few_nodes)[-1])
        return -last, last

    def value(self, epsilon: float) -> float:
        """An upper bound on delta at one epsilon, as sharp as can be."""
        return _value(self.mu, self.bins, epsilon)

    def nodes(self, count: int) -> Array:
        """Epsilons up to where delta is next to nothing, closest near 0 where it falls fastest."""
        return _farthest(self.mu) * (np.arange(count + 1) / count) ** 2


@lru_cache(maxsize=64)
def _farthest(mu: float) -> float:
    return GaussianCurve(2 * mu).reach(HEURISTICS.exchange_tail)[1]


@lru_cache(maxsize=4096)
def _value(mu: float, bins: int, epsilon: float) -> float:
    """An upper bound on delta at one epsilon: this mean's, or that of the run without the bins' secrecy."""
    mean = mean_of(_term(mu, math.exp(epsilon)), bins)
    positive = float(np.sum(mean.law.mass * np.maximum(mean.law.places, 0.0)))
    return min((positive + mean.infinite) * (1 + 2 * mean.law.error + 1e-13), GaussianCurve(2 * mu).delta(epsilon) * (1 + 1e-9))


@dataclass(frozen=True)
class _Signed:
    """A partial mean under N(0, I): its law; the moment of what was too large for it, and the mass of that."""

    law: Law
    infinite: float = 0.0
    lost: float = 0.0

    def plus(self, other: _Signed, share: float) -> _Signed:
        """The mean with ``share`` of this and the rest of ``other``, larger in the increasing convex order."""
        rest = 1 - share
        low, high = (share * self.law.places[i] + rest * other.law.places[i] for i in (0, -1))
        law, outside = summed_above(
            self.law, other.law, (share, rest), places_of(low, high, *middle_of(self.law, other.law, share)), raised=True
        )
        law.mass[0] += outside.below  # raised to the first place
        # the positive part of a sum is at most the sum of the positive parts, and the mean of one of them is at most one
        infinite = share * (self.infinite + other.lost) + rest * (other.infinite + self.lost) + outside.above_moment
        more = 1 + 2 * law.error
        return _Signed(law, infinite * more, (self.lost + other.lost + outside.above) * more).trimmed()

    def trimmed(self) -> _Signed:
        """Without the largest values, and with the smallest ones raised to one place."""
        law = self.law
        moment, beyond = (np.cumsum(x[::-1])[::-1] for x in (law.mass * np.maximum(law.places, 0.0), law.mass))
        last = int(np.searchsorted(-np.maximum(moment, beyond), -HEURISTICS.exchange_tail))
        first = int(np.searchsorted(np.cumsum(law.mass), HEURISTICS.exchange_tail))
        mass = law.mass[first:last].copy()
        mass[0] += float(np.sum(law.mass[:first]))
        infinite, over = (float(x[last]) * (1 + 2 * law.error) + 1e-280 if last < len(x) else 0.0 for x in (moment, beyond))
        kept = Law(law.places[first:last].copy(), mass, law.error + len(law.mass) * 2.0**-53)
        return replace(self, law=kept, infinite=self.infinite + infinite, lost=self.lost + over)


def middle_of(mine: Law, others: Law, share: float) -> tuple[float, float]:
    """About the median of a mean, and half of the distance of two quantiles: where the places should be closest."""
    sums = np.sort((share * _quantiles(mine)[:, None] + (1 - share) * _quantiles(others)).ravel())
    low, middle, high = (float(sums[int(q * len(sums))]) for q in (0.16, 0.5, 0.84))
    return middle, (high - low) / 2


def _quantiles(law: Law) -> Array:
    """So few places, all equally likely, about."""
    at = np.searchsorted(np.cumsum(law.mass), (np.arange(64) + 0.5) / 64)
    return np.asarray(law.places[np.minimum(at, len(law.places) - 1)])


def places_of(low: float, high: float, centre: float, spread: float) -> Array:
    """Even steps around the centre, farther out in proportion to the distance from it; fewer on the left, which hardly matters."""
    core = HEURISTICS.allocation_core
    spans = [math.log1p(max(0.0, reach / spread - core)) for reach in (centre - low, high - centre)]
    small = math.log(spread / HEURISTICS.exchange_small) if spread >= HEURISTICS.exchange_large else 0.0
    # a sum takes the square of the number of places
    fine = min(
        float(HEURISTICS.exchange_fineness), HEURISTICS.exchange_places / (2 * core + spans[0] / 2 + spans[1] + 2 * small / 3)
    )
    even = np.arange(-math.ceil(core * fine), math.ceil(core * fine) + 1) * (spread / fine)
    sides = []
    for span, fineness in zip(spans, (fine / 2, fine), strict=True):
        count = math.ceil(span * fineness) + 2
        sides.append(even[-1] + spread * np.expm1(np.arange(1, count + 1) / fineness))
    places = centre + np.concatenate([-sides[0][::-1], even, sides[1]])
    if not small:
        return np.asarray(places)
    # terms of all sizes: the mean of the positive ones is 1 at most, so sums that are small beside the spread count too
    near = np.geomspace(HEURISTICS.exchange_small, spread, math.ceil(small * fine / 3))
    near = near[near < min(high, -low)]
    return np.unique(np.concatenate([places, -near[::-1], [0.0], near]))


def _term(mu: float, x: float) -> _Signed:
    """One term, larger in the increasing convex order: the mass of each cell of z is split between its ends."""
    fine, far = HEURISTICS.exchange_fineness, HEURISTICS.exchange_deep + mu
    edge = np.arange(-math.ceil(far * fine), math.ceil(far * fine) + 1) / fine
    plus, minus = np.exp(mu * edge - mu * mu / 2), np.exp(-mu * edge - mu * mu / 2)
    places = plus - x * minus
    q, p, n = (normal_cells(edge - shift) for shift in (0.0, mu, -mu))
    inner = q[1:-1]
    # mean - first end, times the mass, as two differences that are not negative
    rise = (p[1:-1] - inner * plus[:-1]) + x * (inner * minus[:-1] - n[1:-1])
    rise = rise + 2 * _CELLS * (inner * plus[1:] + x * inner * minus[:-1])
    up = np.clip(rise / np.maximum(np.diff(places) * (1 - 2.0**-46), 1e-300), 0.0, inner)
    mass = np.append(inner - up, 0.0) + np.append(0.0, up)
    mass[0] += q[0]
    law = Law(places, np.asarray(mass * (1 + _CELLS)), 2 * _CELLS)
    return _Signed(law, float(p[-1]) * (1 + _CELLS), float(q[-1]) * (1 + _CELLS)).trimmed()
