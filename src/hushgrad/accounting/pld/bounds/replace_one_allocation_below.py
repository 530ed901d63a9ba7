r"""Random allocation under replace-one, from below.

The pair is that of ``replace_one_allocation``, which two records with opposite gradients attain:
delta(eps) = E[(D_1 + ... + D_b)_+]/b. Each cell of a term, and of every partial mean, is put at its own mean: smaller in the convex order,
so the mean of the positive part is smaller. What lies far out is left out: the positive part of a sum is never negative.

Rounding. Means are lowered by more than they are off. A sum t = x + y of two places is off by u (|x| + |y|), which is at most u (|t| + 2
min(|x|, |y|)): the second part counts for opposite signs only, and there neither exceeds the largest place of its sign. Masses that are off
by a factor move a cell's mean by that share of the cell's width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hushgrad.accounting.heuristics import HEURISTICS
from hushgrad.accounting.pld.bounds.allocation import CELLS, mean_of, normal_cells
from hushgrad.accounting.pld.bounds.convex_order import Law, summed_below
from hushgrad.accounting.pld.bounds.replace_one_allocation import AllocatedReplace, middle_of, places_of
from hushgrad.accounting.pld.profiles.curve import Array, Curve
from hushgrad.accounting.pld.profiles.poisson import PoissonReplace

_U = 2.0**-53


@dataclass(frozen=True)
class AllocatedReplaceBelow(Curve):
    """A curve below that of bins at distance ``mu``: composed, that of an observer of one bin; alone, :meth:`delta` is near the truth.

    ``above`` is the curve above, whose values are known already.
    """

    mu: float
    above: AllocatedReplace
    smooth = False

    def right(self, epsilon: Array) -> tuple[Array, Array]:
        return self._one_bin.right(epsilon)

    def left(self, epsilon: Array) -> tuple[Array, Array]:
        return self._one_bin.left(epsilon)

    @property
    def support(self) -> tuple[float, float]:
        return self._one_bin.support

    @property
    def _one_bin(self) -> PoissonReplace:
        return PoissonReplace(self.mu, 1 / self.above.bins)

    def delta(self, epsilon: float) -> float:
        """The profile at one epsilon: delta is convex in x = e^eps, so it lies above its chords' continuations beyond two nodes."""
        one_bin = super().delta(epsilon)
        nodes = self.above.nodes(HEURISTICS.exchange_nodes)
        k = int(np.searchsorted(nodes, epsilon, side="right")) - 1
        if epsilon < 0 or k + 2 >= len(nodes):
            return one_bin
        x, at = math.exp(epsilon), [math.exp(float(node)) for node in nodes[max(k - 1, 0) : k + 3]]
        before, here, after, beyond = at if k else [math.nan, *at]
        lows = [_least(self.mu, self.above, float(nodes[i])) for i in (k, k + 1)]
        bounds = [one_bin, lows[1]]
        if k:
            bounds.append(lows[0] + (x - here) * (lows[0] - self.above.value(float(nodes[k - 1]))) / (here - before))
        bounds.append(lows[1] + (after - x) * (lows[1] - self.above.value(float(nodes[k + 2]))) / (beyond - after))
        return max(bounds)

    def likely(self, delta: float) -> float:
        """A start by bisection on ``above``, whose values are known already."""
        low, high = 0.0, float(self.above.nodes(1)[-1])
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if self.above.delta(middle) > delta else (low, middle)
        return high


@lru_cache(maxsize=4096)
def _least(mu: float, above: AllocatedReplace, epsilon: float) -> float:
    """A lower bound on delta at one epsilon; what is left out is a small share of the upper one."""
    tail = HEURISTICS.exchange_left * above.value(epsilon)
    law = mean_of(_term(mu, math.exp(epsilon), tail), above.bins).law
    return float(np.sum(law.mass * np.maximum(law.places, 0.0))) * (1 - 2 * law.error - 1e-13)


@dataclass(frozen=True)
class _Lowered:
    """A partial mean under N(0, I), without its tails of ``tail``; smaller than the truth in the increasing convex order."""

    law: Law
    tail: float

    def plus(self, other: _Lowered, share: float) -> _Lowered:
        """The mean with ``share`` of this and the rest of ``other``, smaller in the increasing convex order."""
        mine, others, rest = self.law, other.law, 1 - share
        low, high = (share * mine.places[i] + rest * others.places[i] for i in (0, -1))
        edges = places_of(low, high, *middle_of(mine, others, share))
        law, off = summed_below(mine, others, (share, rest), edges)
        cell = np.clip(np.searchsorted(edges, law.places, side="right") - 1, 0, len(edges) - 2)
        size, width = np.maximum(np.abs(edges[cell]), np.abs(edges[cell + 1])), edges[cell + 1] - edges[cell]
        opposite = _opposite(share * mine.places, rest * others.places)
        lowered = law.places - (off + 8 * _U) * (size + opposite) - 2.1 * law.error * width
        return _Lowered(Law(np.minimum.accumulate(lowered[::-1])[::-1], law.mass, law.error), self.tail).trimmed()

    def trimmed(self) -> _Lowered:
        """Without the largest and the smallest values."""
        law = self.law
        above = np.cumsum((law.mass * np.maximum(law.places, 1.0))[::-1])[::-1] > self.tail
        return _Lowered(law.kept(above & (np.cumsum(law.mass) > self.tail)), self.tail)


def _opposite(a: Array, b: Array) -> float:
    """At least twice the smaller of |x| and |y| for places x and y of opposite signs."""
    up, down = (max(float(x[-1]), 0.0) for x in (a, b)), (max(-float(x[0]), 0.0) for x in (b, a))
    return 2 * max(min(pair) for pair in zip(up, down, strict=True))


def _term(mu: float, x: float, tail: float) -> _Lowered:
    """One term: the cells of z at their means, lowered by what differences of normal tails are off."""
    fine, far = HEURISTICS.exchange_fineness, HEURISTICS.exchange_deep + mu
    edge = np.arange(-math.ceil(far * fine), math.ceil(far * fine) + 1) / fine
    q, p, n = (normal_cells(edge - shift) for shift in (0.0, mu, -mu))
    kept = (q > 1e-280) & (p > 1e-280)
    places = p[kept] / q[kept] * (1 - 4 * CELLS) - x * (n[kept] / q[kept]) * (1 + 4 * CELLS)
    return _Lowered(Law(np.minimum.accumulate(places[::-1])[::-1], q[kept], 2 * CELLS), tail).trimmed()
