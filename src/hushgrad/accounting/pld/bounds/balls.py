r"""Balls in bins: each record is thrown into one of b batches, and every pass uses the same batches.

The dominating pair of a whole run with Gaussian noise is P = 1/b sum_j N(mu e_j, I) against Q = N(0, I) in b dimensions, mu = sqrt(epochs)/
sigma: passes over the same bin add up (Chua et al. 2024; Choquette-Choo et al. 2024, also for adaptive steps). Under Q the likelihood ratio

    W = dP/dQ = (w_1 + ... + w_b) / b,      w_j = e^{mu x_j - mu^2/2} independent,

is a *mean* of independent variables, and both directions are expectations of convex functions of it: delta = E[(W - e^eps)_+] and
E[(1 - e^eps W)_+]. Replacing each w_j by a variable that is larger in the convex order, on a grid, therefore bounds both from above, and
the sum of grid variables is one FFT. No sampling is needed, so there is no failure probability to add to delta.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hushgrad.accounting.pld.bounds.compose import Part, Window, compose, log_moment
from hushgrad.accounting.pld.bounds.from_above import chords
from hushgrad.accounting.pld.bounds.grid import GUARD, Masses
from hushgrad.accounting.pld.profiles.atoms import Atoms
from hushgrad.accounting.pld.profiles.curve import Array, Curve, GaussianCurve

__all__ = ["BallsInBinsCurve", "balls_in_bins"]

_SMALLEST, _LARGEST = 1e-3, 1.4  # of mu: below it rounding counts, above it a linear grid does not reach
_TAIL = 7.7  # standard deviations: 7e-15 of each weight lies beyond
_FINENESS = 40  # grid steps per standard deviation of a weight
_CELLS = 2**19
_ROUNDING = 1e-16  # of P's and of Q's mass, at either end


@dataclass(frozen=True)
class BallsInBinsCurve(Atoms):
    """A discrete pair that dominates (P, Q): losses ln W on the grid; ``infinite`` and ``impossible`` hold what is not on it."""

    bins: int
    mu: float

    def __post_init__(self) -> None:
        _, _, infinite, impossible = _ratio(self.bins, self.mu)
        object.__setattr__(self, "infinite", infinite)
        object.__setattr__(self, "impossible", impossible)
        object.__setattr__(self, "discrete", False)

    def atoms(self) -> tuple[Array, Array]:
        """See :class:`Atoms`."""
        ratio, mass, _, _ = _ratio(self.bins, self.mu)
        return np.log(ratio), ratio * mass


def balls_in_bins(bins: int, mu: float) -> Curve:
    """The curve of a run at distance ``mu``; without the amplification where this analysis does not reach."""
    return BallsInBinsCurve(bins, mu) if bins > 1 and _SMALLEST <= mu <= _LARGEST else GaussianCurve(mu)


@lru_cache(maxsize=16)
def _ratio(bins: int, mu: float) -> tuple[Array, Array, float, float]:
    """Values of W, upper bounds on their masses under Q, and masses of P at W = infinity and of Q at W = 0."""
    weight, infinite, lost = _weight(mu)
    parts: list[Part] = [(weight, bins)]
    spread = math.sqrt(bins * math.expm1(mu * mu))
    low, high = _window(parts, bins, spread)
    infinite += _mass_above(parts, high) / bins + bins * lost
    below = [log_moment(parts, -z / spread) + z / spread * low for z in (5.0, 9.0, 15.0)] if low > 0 else [-math.inf]
    impossible = math.exp(min(0.0, *below)) + bins * lost
    bulk = [sign * z / spread for z in (1.5, 3.5, 6.0) for sign in (1, -1)]
    tilts = (0.0, *bulk, *(z / high for z in (8.0, 20.0)))
    sums: Array = np.empty(0)
    mass: Array = np.empty(0)
    for tilt in tilts:  # each gives an upper bound on every mass; at each place one of them is sharp
        with np.errstate(all="ignore"):
            made = compose(parts, Window(tilt, low, high, 0.0, 0.0, 0.0))
            sums = np.asarray(made.low + np.arange(len(made.c)) * made.step, dtype=np.float64)
            bound = np.exp(made.log_mass - tilt * sums) * np.maximum(made.c + made.noise, 0.0) * (1 + made.relative)
        bound = np.where(np.isfinite(bound), bound, math.inf)
        mass = np.asarray(bound if len(mass) == 0 else np.minimum(mass, bound), dtype=np.float64)
    # far out the bounds are rounding: as losses these masses would matter to every composition, lost they do not
    kept = (sums > 0) & (np.cumsum(mass) > _ROUNDING) & (np.cumsum((mass * sums)[::-1])[::-1] > _ROUNDING * bins)
    impossible += float(np.sum(mass[sums <= 0])) + float(np.sum(mass[~kept]))
    infinite += float(np.sum((mass * sums)[(sums > 0) & ~kept])) / bins
    return sums[kept] / bins, mass[kept], infinite, impossible


def _weight(mu: float) -> tuple[Masses, float, float]:
    """One weight under Q on a linear grid, larger in the convex order; P's mass beyond the grid, Q's at a far-off 0."""
    low, high = math.exp(-_TAIL * mu - mu * mu / 2), math.exp(_TAIL * mu + mu * mu / 2)
    step = max(math.sqrt(math.expm1(mu * mu)) / _FINENESS, 2 * (high - low) / _CELLS)
    index = np.arange(max(1, math.floor(low / step)), math.ceil(high / step) + 2)
    losses = np.log(index * step)
    p, infinite, lost = chords(GaussianCurve(mu), losses, int(np.searchsorted(losses, 0.0)))
    # the chords' masses sum to one up to GUARD; over many steps the mass of Q must not be short of one
    mass = p * np.exp(-losses) * (1 + 4 * GUARD)
    if index[0] > 1:
        return Masses(step, 0.0, index, mass, 0.0), infinite, lost
    return Masses(step, 0.0, np.append(0, index), np.append(lost, mass), 0.0), infinite, 0.0


def _window(parts: list[Part], bins: int, spread: float) -> tuple[float, float]:
    """All sums but those of which P has less than 1e-15 above, within the number of cells."""
    masses = parts[0][0]
    # half a step off the grid, so that every composition begins at the same sum whatever its rounding
    low = (math.floor(max(0.0, bins - 9 * spread) / masses.step) - 0.5) * masses.step
    most = low + _CELLS * masses.step
    high = min(most, bins + 9 * spread)
    while high < most and _mass_above(parts, high) > 1e-15 * bins:
        high = min(most, bins + 1.7 * (high - bins))
    return low, high


def _mass_above(parts: list[Part], high: float) -> float:
    """E[S; S > high] <= K'(s) e^{K(s) - s high}, and K'(s) is at most any difference quotient to its right."""
    bins = parts[0][1]
    best = math.inf
    for s in np.geomspace(1.0, 200.0, 9) / (high - bins):
        k, right = log_moment(parts, float(s)), log_moment(parts, float(1.01 * s))
        best = min(best, (right - k) / (0.01 * s) * math.exp(min(k - s * high, 300.0)))
    return best
