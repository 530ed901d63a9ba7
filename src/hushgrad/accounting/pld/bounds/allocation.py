r"""Random allocation (balls in bins) under add/remove and zero-out, from above and from below, at every noise multiplier.

A record is thrown into one of b bins, uniformly. Let (P0, Q0) dominate what one bin shows of it, record against nothing. Then the
pair

    P = 1/b sum_j Q0 x .. x P0 (place j) x .. x Q0,      Q = Q0 x .. x Q0

dominates the whole pass: there is a kernel that turns P0 into the bin's answer with the record and Q0 into the one without it, and
it may depend on the answers before. Under Q the likelihood ratio is a *mean* of independent variables, W = (w_1 + ... + w_b)/b with
w = dP0/dQ0, and both directions are expectations of convex functions of it: E[(W - e^eps)_+] and E[(1 - e^eps W)_+]. For Gaussian
noise several passes over the same bins are one pass at the distance sqrt(passes)/sigma, also if each step depends on all answers
before it (docs/explanation/allocation.md has both proofs).

So w is put on few places, larger (or smaller) in the convex order, and the law of W follows by doubling (``convex_order``). Only products
and sums of non-negative numbers occur: no FFT, no tilt, and no floor below which all is rounding.

Rounding. The computed ratio is that of a variable within a factor of 1 +- ``moved`` of the one that the proof has, because relative
errors of positive terms pass through sums and means; masses are off by the law's ``error``. So from above, losses are moved away
from 0 by ``moved`` and masses enlarged by ``error``: E[(W - x)_+] <= E[(W' - x (1 - moved))_+] / (1 - moved). From below, the other
way.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol, TypeVar, cast

import numpy as np
from scipy.special import ndtr

from hushgrad.accounting.heuristics import HEURISTICS
from hushgrad.accounting.pld.bounds.convex_order import Law, summed_above, summed_below
from hushgrad.accounting.pld.bounds.from_above import chords
from hushgrad.accounting.pld.bounds.grid import GUARD
from hushgrad.accounting.pld.profiles.curve import Array, Curve, Mirror
from hushgrad.accounting.pld.profiles.discrete import Atoms

_U = 2.0**-53
_EXPONENTIALS = 2048 * _U  # the relative error of places and masses of one term: exponentials of numbers below 700
CELLS = 2.0**-36  # the relative error of a difference of normal tails, at least 1/150 apart: 200 times that of a tail
_TINY = 1e-280
_NARROWEST, _WIDEST = 1e-6, 600.0  # range of losses of one term: below it rounding matters, above it ratios overflow


class _Table(Atoms):
    """A table of so many losses that it is treated as a density."""

    def atoms(self) -> tuple[Array, Array]:
        return np.zeros(0), np.zeros(0)

    def __post_init__(self) -> None:
        self._note(discrete=False, infinite=self._ratio().infinite, impossible=self._ratio().lost)

    @abstractmethod
    def _ratio(self) -> _Ratio:
        """The law behind the table."""


@dataclass(frozen=True)
class AllocatedAbove(_Table):
    """A pair that dominates one pass over ``bins`` bins, each of which is dominated by ``base`` (record against nothing)."""

    base: Curve
    bins: int

    def losses(self) -> tuple[Array, Array]:
        ratio = self._ratio()
        losses = np.log(ratio.law.places)
        # away from 0, and P's masses (the ratio times Q's) with it
        mass = ratio.law.mass * (1 + 1.01 * ratio.law.error + 2 * ratio.moved)
        return losses + np.where(losses > 0, ratio.moved, -ratio.moved), ratio.law.places * mass

    def _ratio(self) -> _Ratio:
        return _above(self.base, self.bins)


@dataclass(frozen=True)
class AllocatedBelow(_Table):
    """A pair that one pass with Gaussian noise at distance ``mu`` dominates."""

    mu: float
    bins: int

    def losses(self) -> tuple[Array, Array]:
        ratio = self._ratio()
        losses = np.log(ratio.law.places)
        mass = ratio.law.mass * (1 - 1.01 * ratio.law.error - 2 * ratio.moved)
        nearer = np.sign(losses) * np.maximum(np.abs(losses) - ratio.moved, 0.0)
        apart = np.append(True, np.diff(nearer) > 0)  # losses that were moved to 0 carry no information
        return nearer[apart], (ratio.law.places * mass)[apart]

    def _ratio(self) -> _Ratio:
        return _below(self.mu, self.bins)


def reaches(base: Curve) -> bool:
    """Whether the losses of ``base`` are neither too close nor too wide for this analysis."""
    low, high = _ends(base)
    return high > _NARROWEST and max(high, -low) < _WIDEST


def _ends(base: Curve) -> tuple[float, float]:
    """Losses outside which P and Q have next to no mass."""
    return -Mirror(base).reach(HEURISTICS.allocation_tail)[1], base.reach(HEURISTICS.allocation_tail)[1]


class _Mean(Protocol):
    def plus(self: M, other: M, share: float) -> M:
        """The mean with ``share`` of this and the rest of ``other``, which are independent."""


M = TypeVar("M", bound=_Mean)


def mean_of(one: M, count: int) -> M:
    """The mean of ``count`` independent copies of ``one``, by doubling."""
    power, have, done = one, 1, 0
    result: M | None = None
    while count:
        if count & 1:
            result = power if result is None else power.plus(result, have / (have + done))
            done += have
        count >>= 1
        if count:
            power, have = power.plus(power, 0.5), 2 * have
    return cast(M, result)


@dataclass(frozen=True)
class _Ratio:
    """W under Q: its law, P's mass at W = infinity and Q's mass at W = 0; places are about a share of ``spread`` apart in ln W."""

    law: Law
    spread: float
    widest: float
    infinite: float = 0.0
    lost: float = 0.0
    moved: float = _EXPONENTIALS

    def narrowed(self, share: float, other: _Ratio) -> float:
        """About the spread of ln W for a mean with ``share`` of this and the rest of ``other``."""
        variance = share**2 * _variance(self.law) + (1 - share) ** 2 * _variance(other.law)
        return min(self.spread, other.spread, math.sqrt(max(variance, 1e-300)))


@dataclass(frozen=True)
class _Above(_Ratio):
    def plus(self, other: _Above, share: float) -> _Above:
        """Larger in the convex order."""
        rest, spread = 1 - share, self.narrowed(share, other)
        low, high = (share * self.law.places[i] + rest * other.law.places[i] for i in (0, -1))
        places = np.exp(_places(math.log(low), math.log(high), spread, self.widest))
        law, outside = summed_above(self.law, other.law, (share, rest), places)
        # a sum below the first place is split between it and 0; one above the last counts at both ends
        law.mass[0] += outside.below_moment / places[0]
        # so does a sum with one part at 0, whatever the other part is
        lost = self.lost + other.lost + outside.below + outside.above
        infinite = share * (self.infinite + other.lost) + rest * (other.infinite + self.lost) + outside.above_moment
        more = 1 + 2 * law.error
        moved = max(self.moved, other.moved) + 8 * _U
        return _Above(law, spread, self.widest, infinite * more, lost * more, moved).trimmed()

    def trimmed(self) -> _Above:
        """Move the masses at both ends to 0 and to infinity: two outcomes instead of one, which can only increase the profile."""
        law, moment = self.law, self.law.mass * self.law.places
        keep = (np.cumsum(law.mass) > HEURISTICS.allocation_tail) & (np.cumsum(moment[::-1])[::-1] > HEURISTICS.allocation_tail)
        lost, infinite = (float(np.sum(x[~keep])) * (1 + 2 * law.error) + _TINY for x in (law.mass, moment))
        return replace(self, law=law.kept(keep), infinite=self.infinite + infinite, lost=self.lost + lost)


@dataclass(frozen=True)
class _Below(_Ratio):
    def plus(self, other: _Below, share: float) -> _Below:
        """Smaller in the convex order."""
        rest, spread = 1 - share, self.narrowed(share, other)
        low, high = (share * self.law.places[i] + rest * other.law.places[i] for i in (0, -1))
        edges = np.exp(_places(math.log(low), math.log(high), spread, self.widest))
        law, added = summed_below(self.law, other.law, (share, rest), edges)
        # all places of a cell lie within one step, so masses that are off move the cell's mean by that much of the step only
        step = float(np.max(np.diff(np.log(edges)))) + 1e-9
        moved = max(self.moved, other.moved) + added + 2.1 * math.expm1(step) * law.error
        return _Below(law, spread, self.widest, moved=moved).trimmed()

    def trimmed(self) -> _Below:
        """Merge the masses at each end at their mean."""
        law, moment = self.law, self.law.mass * self.law.places
        first = int(np.searchsorted(np.cumsum(law.mass), HEURISTICS.allocation_tail))
        last = len(law.mass) - 1 - int(np.searchsorted(np.cumsum(moment[::-1]), HEURISTICS.allocation_tail))
        starts = np.concatenate([[0], np.arange(first + 1, last), [last]]) if last > first + 1 else np.arange(len(law.mass))
        mass, moment = np.add.reduceat(law.mass, starts), np.add.reduceat(moment, starts)
        grown = (len(law.mass) - len(starts) + 4) * _U
        return replace(self, law=Law(moment / mass, mass, law.error + grown), moved=self.moved + 2 * grown)


def _deep() -> float:
    """Standard deviations of a Gaussian beyond which a mean may leave out its tails."""
    return math.sqrt(-2 * math.log(HEURISTICS.allocation_tail))


def _variance(law: Law) -> float:
    return float(np.sum(law.mass * np.minimum(law.places - 1, 1e150) ** 2))


def _places(low: float, high: float, spread: float, widest: float) -> Array:
    """Values of ln W from ``low`` to ``high``: even steps in the core, growing to steps of ``widest`` a few spreads above 0."""
    fine = HEURISTICS.allocation_fineness
    step, core = spread / fine, HEURISTICS.allocation_core * spread
    even = np.arange(math.floor(low / step) - 1, math.ceil(min(high, core) / step) + 2) * step
    if even[-1] >= high:
        return np.asarray(even)
    count = math.ceil(math.log(max(widest / spread, 1.0)) * fine)
    grown = even[-1] + spread * np.expm1(np.arange(1, count + 1) / fine)
    last = float(grown[-1]) if count else float(even[-1])
    far = last + np.arange(1, max(1, math.ceil((high - last) / widest * fine) + 2)) * widest / fine
    places = np.concatenate([even, grown, far])
    return np.asarray(places[: int(np.searchsorted(places, high)) + 2])


@lru_cache(maxsize=16)
def _above(base: Curve, bins: int) -> _Above:
    """W from above; one term by the chords of its profile, which lie above it."""
    low, high = _ends(base)
    spread = (high - low) / (2 * _deep())
    step = spread / HEURISTICS.allocation_fineness
    losses: Array = np.arange(math.floor(low / step) - 1, math.ceil(high / step) + 2, dtype=np.float64) * step
    p, infinite, lost = chords(base, losses, int(np.searchsorted(losses, 0.0)))
    # the chords' masses sum to one up to GUARD; over many terms the mass of Q must not be short of one
    law = Law(np.exp(losses), p * np.exp(-losses) * (1 + 4 * GUARD), _EXPONENTIALS)
    return mean_of(_Above(law, spread, spread, infinite, lost).trimmed(), bins)


@lru_cache(maxsize=16)
def _below(mu: float, bins: int) -> _Below:
    """W from below; one term by the masses of cells under both distributions."""
    fine = HEURISTICS.allocation_fineness
    edge = np.arange(-math.ceil(_deep() * fine), math.ceil((_deep() + mu) * fine) + 1) / fine
    q, p = normal_cells(edge), normal_cells(edge - mu)
    kept = (q > _TINY) & (p > _TINY)
    law = Law(p[kept] / q[kept], q[kept], CELLS)
    return mean_of(_Below(law, mu, mu, moved=2 * CELLS).trimmed(), bins)


def normal_cells(edge: Array) -> Array:
    """Normal masses between edges, and of what is beyond the outermost ones; differences of the smaller tails."""
    inner = np.where(edge[:-1] > 0, ndtr(-edge[:-1]) - ndtr(-edge[1:]), ndtr(edge[1:]) - ndtr(edge[:-1]))
    return np.concatenate([[ndtr(edge[0])], inner, [ndtr(-edge[-1])]])
