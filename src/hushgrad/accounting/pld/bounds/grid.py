r"""Masses on a grid of losses, and the arithmetic that the two discretisations share.

A measure with masses p_j at losses l_j has the profile sum_j p_j (1 - x e^{-l_j})_+, x = e^epsilon: convex, and linear in x
between grid points. If it lies above a curve everywhere, then composing the measure bounds every composition from above; if it
lies below, from below (docs/explanation/pld.md, lemma 1). ``from_above`` and ``from_below`` make such measures.

Both work with the values v of the profile at the grid points, as ``put`` before position ``split`` and as ``call`` from it on.
The masses are the kinks of v; the two at the split follow from sum p = 1 and sum p e^{-l} = 1. Rounding is paid for at the end:
the profile is rebuilt from the masses by sums of positive terms, compared with v, and the masses are scaled by the worst ratio.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushgrad.accounting.heuristics import HEURISTICS
from hushgrad.accounting.pld.profiles.curve import ACCURACY, Array, Curve
from hushgrad.accounting.pld.profiles.stable_sums import discounted, masses_of_q
from hushgrad.errors import NumericalLimit

Indices = NDArray[np.int64]
GUARD = 2.0**-47  # covers the rounding of sums of up to 2**24 positive terms by pairwise summation
HAIR = 2.0**-41  # of a loss: more than the rounding of a grid point
_PLACES = np.linspace(0.0, 1.0, 33)
LESS, MORE = 1 - 2 * ACCURACY, 1 + 2 * ACCURACY


@dataclass(frozen=True)
class Grid:
    """The losses ``shift + index * step``; those before position ``split`` are negative."""

    step: float
    shift: float
    index: Indices

    @property
    def losses(self) -> Array:
        """The grid points."""
        return np.asarray(self.index * self.step + self.shift, dtype=np.float64)

    @property
    def split(self) -> int:
        """Position of the first loss that is not negative."""
        return int(np.searchsorted(self.losses, 0.0))


@dataclass(frozen=True)
class Masses(Grid):
    """Masses ``p`` at the grid points, and ``infinite`` at an infinite loss."""

    p: Array
    infinite: float


def anchored(curve: Curve, step: float, tail: float, tilt: float, *, hair: float = 0.0) -> Grid:
    """A grid over the losses of ``curve``, apart from tails of ``tail``.

    It has a point at the atom that matters most, or where the losses crowd at an end of the support: sampling with a small rate
    puts nearly all the mass next to ln(1-q). Away from the bulk of the *tilted* losses it leaves out points, because little mass
    is spread there, and all that are not next to an atom where there are few atoms and nothing else. If the atom is an outermost
    one its point is a ``hair`` further outside, relatively, so that rounding cannot put it on the wrong side.
    """
    low, high = curve.reach(tail)
    if not (high - low) / step < HEURISTICS.endless:
        raise NumericalLimit("The losses of a step reach too far for this grid.")
    shift = _crowd(curve, step) if curve.smooth else _anchored_shift(curve, step, tilt, hair)
    first = math.floor((min(low, 0.0) - shift) / step) - 3
    stop = math.ceil((max(high, 0.0) - shift) / step) + 4
    places = np.round((atoms_of(curve)[0] - shift) / step).astype(np.int64)
    if curve.discrete and len(places):
        around = (places[(places >= first) & (places <= stop)][:, None] + np.arange(-2, 3)).ravel()
        return Grid(step, shift, distinct([first - 1, first], around, [stop, stop + 1]))
    if curve.discrete and curve.lattice > 0:
        return Grid(step, shift, np.arange(first, stop))
    zero = math.ceil(-shift / step)
    right = zero + _thinning(stop - zero, lambda e: _mass(curve.right(e)) * np.exp(np.minimum(tilt * e, 600.0)), step, tilt)
    left = zero - 1 - _thinning(zero - first, lambda e: _mass(curve.left(-e)) * np.exp(-tilt * e), step, tilt)
    kept = [] if curve.discrete else [places - 1, places, places + 1]
    return Grid(step, shift, distinct(left[::-1], right, *kept))


def distinct(*indices: Any) -> Indices:
    """All different integers, rising. Sorting runs that are nearly in order takes a tenth of the time of numpy's hash table."""
    together = np.sort(np.concatenate([np.asarray(part, dtype=np.int64) for part in indices]), kind="stable")
    return np.asarray(together[np.append(True, together[1:] != together[:-1])])


@lru_cache(maxsize=256)
def atoms_of(curve: Curve) -> tuple[Array, Array]:
    """``curve.atoms()``; none where there are so many that they are as good as a density."""
    losses, p = curve.atoms()
    return (losses, p) if len(losses) <= HEURISTICS.few_atoms else (np.zeros(0), np.zeros(0))


def weights_of(curve: Curve, tilt: float) -> tuple[Array, Array]:
    """The atoms' losses and their shares of the tilted mass on atoms."""
    losses, p = atoms_of(curve)
    if not len(losses):
        return losses, p
    exponent = np.log(np.maximum(p, 1e-300)) + tilt * losses
    share = np.exp(exponent - np.max(exponent))
    return losses, share / np.sum(share)


def heaviest(curve: Curve, tilt: float) -> int:
    """The position of the atom that grids are laid through: the largest finite loss if that has a real share, else the heaviest."""
    share = weights_of(curve, tilt)[1]
    return len(share) - 1 if share[-1] > 0.05 else int(np.argmax(share))


def _anchored_shift(curve: Curve, step: float, tilt: float, hair: float) -> float:
    """The shift of a grid through the atom that matters most, and exactly through zero if it comes next to it."""
    losses, at = atoms_of(curve)[0], 1
    if len(losses):
        at = heaviest(curve, tilt)
    elif curve.lattice > 0:
        losses = np.array(curve.support)
    else:
        return 0.0
    outwards = hair * float(np.max(np.abs(losses)))
    anchor = float(losses[at]) + (outwards if at == len(losses) - 1 else -outwards if at == 0 else 0.0)
    shift = math.remainder(anchor, step)
    return 0.0 if abs(shift) <= max(1e-9 * step, 4 * abs(outwards)) else shift


def _mass(side: tuple[Array, Array]) -> Array:
    return side[0] + side[1]


def _thinning(count: int, weight: Callable[[Array], Array], step: float, tilt: float) -> Indices:
    """0, 1, 2, ... up to ``count``, with gaps of 2^k from where the tilted mass beyond is below 4^-k / 300.

    The spread that a gap adds is its square times the mass, so each octave costs a fixed small share of the error.
    """
    points = np.geomspace(max(step, 1e-4 * count * step), count * step, 60)
    beyond = np.maximum.accumulate(weight(points)[::-1])[::-1]
    blocks, start, gap = [], 0, 1
    while start < count:
        small = np.flatnonzero(beyond <= 1 / (300 * (2 * gap) ** 2))
        wider = 2 * gap * step * (tilt + 1) < 0.2 or count > HEURISTICS.most_points * gap
        stop = int(points[small[0]] / step) + 1 if len(small) and wider else count
        stop = min(count, max(stop, start + 32 * gap))
        blocks.append(np.arange(start, stop, gap))
        start, gap = int(blocks[-1][-1]) + gap, 2 * gap
    return np.concatenate([*blocks, [start]]).astype(np.int64)


def _crowd(curve: Curve, step: float) -> float:
    """The loss nearest to a finite end of the support at which the tangent half a cell further inside is not negative."""
    low, high = curve.support
    up, down = math.expm1(step / 2) if step < 1400 else math.inf, -math.expm1(-step / 2)  # no tangent is that steep
    if math.isfinite(low):
        outer, direction = low, step
    elif math.isfinite(high):
        outer, direction = high, -step
    else:
        return 0.0
    start, width = 0.0, 1.0  # in cells from the end
    for _ in range(4):
        at = start + width * _PLACES
        call, above, put, below = both_sides(curve, outer + direction * (at + 0.5))
        inside = LESS * put - MORE * down * below >= 0 if direction > 0 else LESS * call - MORE * up * above >= 0
        chosen = int(np.argmax(inside)) if inside.any() else 32
        start, width, found = float(at[max(chosen - 1, 0)]), width / 32, float(at[chosen])
    return outer + direction * found


def both_sides(curve: Curve, epsilon: Array) -> tuple[Array, Array, Array, Array]:
    """``(call, above, put, below)`` at any epsilons; the far side of each by call - put = 1 - x, above + below = x."""
    positive = epsilon >= 0
    call, above, put, below = (np.zeros_like(epsilon) for _ in range(4))
    call[positive], above[positive] = curve.right(epsilon[positive])
    put[~positive], below[~positive] = curve.left(epsilon[~positive])
    one_minus_x, x = -np.expm1(epsilon), np.exp(epsilon)
    call[~positive], above[~positive] = (put + one_minus_x)[~positive], (x - below)[~positive]
    put[positive], below[positive] = (call - one_minus_x)[positive], (x - above)[positive]
    return call, above, put, below


def kinks(values: Array, losses: Array, split: int) -> Array:
    """Changes of the slope at each point, in units of mass; the two beside the split are left to ``balance``.

    Before the first point the profile runs to put = 0 at x = 0, after the last one it is constant.
    """
    gaps, change = np.diff(losses), np.diff(values)
    before, after = change / -np.expm1(-gaps), change / np.expm1(gaps)
    p = np.zeros_like(values)
    p[1 : split - 1] = (after[1:] - before[:-1])[: split - 2]
    p[split + 1 : -1] = (after[1:] - before[:-1])[split:]
    p[0] = after[0] - values[0]
    p[-1] = -before[-1]
    return p


def rebuild(p: Array, losses: Array, split: int, baseline: Array | float, infinite: float) -> Array:
    """Put before ``split`` (over a ``baseline``) and call from it on, by sums of positive terms only."""
    gaps = np.diff(losses)
    call = infinite + np.append(
        np.cumsum((-np.expm1(-gaps[split:]) * discounted(p[split:], losses[split:])[1:])[::-1])[::-1], 0.0
    )
    # the slope of put in x just after a point is the mass of Q at this point and below
    below = np.cumsum(masses_of_q(losses[:split], p[:split]))
    put = baseline + np.append(0.0, np.cumsum(-np.expm1(-gaps[: split - 1]) * np.exp(losses[1:split]) * below[:-1]))
    return np.concatenate([put, call])


def balance(p: Array, losses: Array, split: int, total: float, total_q: float, tolerance: float = 0.0) -> Array | None:
    """Set the masses beside the split so that sum p = total and sum p e^{-l} = total_q; None if one is below -``tolerance``."""
    p = p.copy()
    p[split - 1] = p[split] = 0.0
    need = total - float(np.sum(p))
    need_q = total_q - float(np.sum(p * np.exp(-losses)))
    one, two = np.exp(-losses[[split - 1, split]])  # not math.exp, which raises where numpy says infinity
    if one == two or not math.isfinite(one):
        raise NumericalLimit("Doubles do not tell the losses next to zero apart.")
    p[split - 1] = (need_q - need * two) / (one - two)
    p[split] = need - p[split - 1]  # exact sums matter more than exact masses: they are raised to the number of steps
    return np.maximum(p, 0.0) if min(p[split - 1], p[split]) >= -tolerance else None
