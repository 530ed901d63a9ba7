r"""Many slightly different steps: near-equal ones are taken to be one, on the safe side.

Lemma. For Poisson samples of Gaussian noise the profile grows with the rate q and with the distance mu, at every epsilon. Proof:
given an output of the pair at (q', mu), q <= q', replace it with probability 1 - q/q' by a fresh draw of the common distribution:
that is the pair at (q, mu). Given one at mu' >= mu, scale it by mu/mu' and add the missing noise. Both are post-processing. ∎

So the steps of one cell of a grid over (ln q, ln mu) cost at most their number times a step with the largest rate and the largest
distance among them, and at least as much with the smallest ones. A parameter that does not vary costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hushgrad.accounting.pld.curve import Array, Curve, GaussianCurve, Mirror
from hushgrad.accounting.pld.poisson import PoissonRemove

__all__ = ["MERGED", "rounded"]

MERGED = 300  # more different curves than these are merged
_MANY = 2500  # so many at most: a composition then takes some seconds
_SHARE = 0.6  # of the wanted width that merging may cost

Parts = list[tuple[Curve, int]]
Labels = NDArray[np.int64]


def rounded(parts: Parts, width: float, *, upper: bool) -> Parts:
    """``parts`` with sampled Gaussians merged where that costs less than about ``width`` of epsilon, or where there are too many."""
    if len(parts) <= MERGED:
        return parts
    result: Parts = []
    columns: dict[bool, tuple[list[float], list[float], list[int]]] = {}
    for curve, n in parts:
        inner = curve.of if isinstance(curve, Mirror) else curve
        if isinstance(inner, PoissonRemove) and isinstance(inner.base, GaussianCurve):
            rate, mu, times = columns.setdefault(inner is not curve, ([], [], []))
            rate.append(inner.rate)
            mu.append(inner.base.mu)
            times.append(n)
        else:
            result.append((curve, n))
    for mirrored, (rate, mu, times) in columns.items():
        merged = _Steps(np.array(rate), np.array(mu), np.array(times, dtype=np.int64)).merged(width, upper=upper)
        result += [(Mirror(curve) if mirrored else curve, n) for curve, n in merged]
    return result


@dataclass(frozen=True)
class _Steps:
    """Poisson samples of Gaussian noise, as columns."""

    rate: Array
    mu: Array
    times: Labels

    def merged(self, width: float, *, upper: bool) -> Parts:
        """On the coarsest of some grids that costs its share of ``width`` at most, or the finest one with few enough cells."""
        ratio = 0.5
        cells = self._cells(ratio)
        while ratio > 1e-12 and self._cost(cells, upper=upper) > _SHARE * width:
            ratio *= 0.7
            finer = self._cells(ratio)
            if int(np.max(finer)) >= _MANY:
                break
            cells = finer
        rate, mu = self._extremes(cells, upper=upper)
        counts = np.zeros(len(rate), dtype=np.int64)
        np.add.at(counts, cells, self.times)
        return [(PoissonRemove(GaussianCurve(float(m)), float(q)), int(n)) for q, m, n in zip(rate, mu, counts, strict=True)]

    def _cells(self, ratio: float) -> Labels:
        """The number of the cell of each step: cells of a relative size of ``ratio`` in both parameters, empty ones left out."""
        places = [np.floor(np.log(x / np.min(x)) / np.log1p(ratio)).astype(np.int64) for x in (self.rate, self.mu)]
        return np.unique(places[0] * (int(np.max(places[1])) + 1) + places[1], return_inverse=True)[1]

    def _extremes(self, cells: Labels, *, upper: bool) -> tuple[Array, Array]:
        """The largest rate and distance of each cell, or the smallest ones."""
        count, extreme = int(np.max(cells)) + 1, np.maximum if upper else np.minimum
        rate, mu = (np.full(count, 0.0 if upper else np.inf) for _ in range(2))
        extreme.at(rate, cells, self.rate)
        extreme.at(mu, cells, self.mu)
        return rate, mu

    def _cost(self, cells: Labels, *, upper: bool) -> float:
        """About how much epsilon changes, relatively: like the square root of the sum of q^2 (e^{mu^2} - 1)."""
        rate, mu = self._extremes(cells, upper=upper)
        return abs(float(np.log(self._size(rate[cells], mu[cells]) / self._size(self.rate, self.mu)))) / 2

    def _size(self, rate: Array, mu: Array) -> float:
        return float(np.sum(self.times * rate**2 * np.expm1(np.minimum(mu, 5.0) ** 2)))
