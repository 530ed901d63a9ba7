r"""Merging of many slightly different steps: nearly equal ones are replaced by one, on the safe side.

Lemma. For Poisson samples of Gaussian noise the profile grows with the rate q and with the distance mu, at every epsilon. Proof:
given an output of the pair at (q', mu), q <= q', replace it with probability 1 - q/q' by a fresh draw of the common distribution:
that is the pair at (q, mu). Given one at mu' >= mu, scale it by mu/mu' and add the missing noise. Both are post-processing. ∎

So the steps of one cell of a grid over (ln q, ln mu) cost at least their number times a step with the smallest rate and the smallest
distance among them: that is taken from below. From above they are mixtures of the cell's corners (``blend_steps``), which costs the
square of the cell's size only. A parameter that does not vary costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hushgrad.accounting.heuristics import HEURISTICS
from hushgrad.accounting.pld.bounds.blend_steps import blended
from hushgrad.accounting.pld.profiles.curve import Array, Curve, GaussianCurve, Mirror
from hushgrad.accounting.pld.profiles.poisson import PoissonRemove

_CORNERS = 4

Parts = list[tuple[Curve, int]]
Labels = NDArray[np.int64]


def rounded(parts: Parts, width: float, *, upper: bool) -> Parts:
    """``parts`` with sampled Gaussians merged where that costs less than about ``width`` of epsilon, or where there are too many."""
    if len(parts) <= HEURISTICS.merged:
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
        steps = _Steps(np.array(rate), np.array(mu), np.array(times, dtype=np.int64))
        result += steps.merged(width, upper=upper, mirrored=mirrored)
    return result


@dataclass(frozen=True)
class _Steps:
    """Poisson samples of Gaussian noise, as columns."""

    rate: Array
    mu: Array
    times: Labels

    def merged(self, width: float, *, upper: bool, mirrored: bool) -> Parts:
        """On the coarsest of some grids that costs its share of ``width`` at most, or the finest one with few enough cells."""
        ratio, most = (HEURISTICS.merged_ratio, HEURISTICS.merged_above) if upper else (0.5, HEURISTICS.merged_below)
        cells = self._cells(ratio)
        cost = self._cost_above if upper else self._cost_below
        while ratio > 1e-12 and cost(cells) > HEURISTICS.merged_share * width:
            ratio *= 0.7
            finer = self._cells(ratio)
            if int(np.max(finer)) >= most:
                break
            cells = finer
        return self._above(cells, mirrored=mirrored) if upper else self._below(cells, mirrored=mirrored)

    def _above(self, cells: Labels, *, mirrored: bool) -> Parts:
        order = np.argsort(cells, kind="stable")
        parts: Parts = []
        for rows in np.split(order, np.flatnonzero(np.diff(cells[order])) + 1):
            times = self.times[rows].astype(np.float64)
            if len(rows) <= _CORNERS:  # not more work, and exact
                parts += [(blended(self.rate[[i]], self.mu[[i]], times, mirrored=mirrored), int(self.times[i])) for i in rows]
                continue
            parts.append((blended(self.rate[rows], self.mu[rows], times, mirrored=mirrored), int(np.sum(self.times[rows]))))
        return parts

    def _below(self, cells: Labels, *, mirrored: bool) -> Parts:
        rate, mu = self._extremes(cells, upper=False)
        counts = np.zeros(len(rate), dtype=np.int64)
        np.add.at(counts, cells, self.times)
        curves = (PoissonRemove(GaussianCurve(float(m)), float(q)) for q, m in zip(rate, mu, strict=True))
        return [(Mirror(curve) if mirrored else curve, int(n)) for curve, n in zip(curves, counts, strict=True)]

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

    def _cost_below(self, cells: Labels) -> float:
        """About how much epsilon changes, relatively: like the square root of the sum of q^2 (e^{mu^2} - 1)."""
        rate, mu = self._extremes(cells, upper=False)
        return abs(float(np.log(np.sum(self.times * _size(rate[cells], mu[cells])) / self._total()))) / 2

    def _cost_above(self, cells: Labels) -> float:
        """About how much epsilon changes, relatively, if steps become mixtures of their cells' corners; and what the series leaves out."""
        low, high = self._extremes(cells, upper=False), self._extremes(cells, upper=True)
        (q_low, mu_low), (q_high, mu_high) = ((q[cells], mu[cells]) for q, mu in (low, high))
        a, b = (
            (x - x_low) / np.maximum(x_high - x_low, 1e-300)
            for x, x_low, x_high in ((self.rate, q_low, q_high), (self.mu, mu_low, mu_high))
        )
        mixed = (1 - b) * ((1 - a) * _size(q_low, mu_low) + a * _size(q_high, mu_low))
        mixed += b * ((1 - a) * _size(q_low, mu_high) + a * _size(q_high, mu_high))
        spread = (q_high - q_low) + q_high * (mu_high - mu_low)
        excess = float(np.sum(self.times * mixed) / self._total() - 1) / 2
        return HEURISTICS.merged_tilt * excess + float(np.sum(self.times * spread**3)) / 3

    def _total(self) -> float:
        return float(np.sum(self.times * _size(self.rate, self.mu)))


def _size(rate: Array, mu: Array) -> Array:
    return np.asarray(rate**2 * np.expm1(np.minimum(mu, 5.0) ** 2))
