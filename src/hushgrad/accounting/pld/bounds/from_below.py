r"""Lower discretisation: segments under supporting lines (``touch``), or losses rounded down (``floor``).

``touch``. Let T_k be a supporting line of the curve over cell k: its tangent at the middle, or in the outermost cells at the outer
end. At each grid point take the lower of the two neighbouring lines; the segment over cell k then lies below T_k at both ends, hence
below the curve. The lower convex hull of these values is lower still, and its corners are grid points. Nothing here asks for a
density, so the curve may have atoms.

Where the density of the loss is smooth on the scale of the grid the values are convex themselves, and the losses are *contracted*
by a variance of h^2/4 per step: second order, like the upper bound. An atom on the grid stays where it is. One at a distance of r from
it is moved by r, and the hull moves its neighbours at a distance of D the other way: a variance of about r D.

``floor`` moves every loss down to the grid: first order only, but exact for losses on the grid.
"""

from __future__ import annotations

import math

import numpy as np

from hushgrad.accounting.heuristics import HEURISTICS
from hushgrad.accounting.pld.bounds.grid import (
    GUARD,
    HAIR,
    LESS,
    MORE,
    Indices,
    Masses,
    anchored,
    balance,
    both_sides,
    kinks,
    rebuild,
)
from hushgrad.accounting.pld.profiles.curve import ACCURACY, Array, Curve

_TINY = 1e-280
_WIDEST = 600.0  # of a loss: a hull needs x = e^epsilon itself, and differences of it


def lower(curve: Curve, step: float, tail: float, tilt: float) -> Masses:
    """Masses whose profile lies below ``curve``: by ``touch`` where it works, else by ``floor``."""
    on_grid = curve.discrete and curve.lattice > 0 and abs(curve.lattice / step - round(curve.lattice / step)) < 1e-9
    masses = None if on_grid else touch(curve, step, tail, tilt)
    return floor(curve, step, tail, tilt) if masses is None else masses


def touch(curve: Curve, step: float, tail: float, tilt: float) -> Masses | None:
    """Masses whose profile consists of segments under supporting lines of ``curve``; None where no such profile is found."""
    grid = anchored(curve, step, tail, tilt, hair=-HAIR)
    if max(-grid.losses[0], grid.losses[-1]) > _WIDEST:
        return None
    losses, split, index = grid.losses[1:-1], grid.split - 1, grid.index[1:-1]
    values = _ended(curve, losses, _under_tangents(curve, grid.losses, grid.split)[1:-1], split)
    if values is None:
        return None
    total, total_q = 1 - curve.infinite, 1 - curve.impossible
    corners = _hull(values, losses, split, total, total_q)
    middle = int(np.searchsorted(corners, split))
    if middle < 2 or middle + 2 > len(corners):
        return None
    others = np.maximum(kinks(values[corners], losses[corners], middle), 0.0)  # the hull is convex; what is clipped is rounding
    # the proof: at every grid point, corner or not, the profile that was made is below the wanted values after this scaling
    spread = np.zeros_like(losses)
    spread[corners] = others
    made = rebuild(spread, losses, split, 0.0, 0.0)
    positive = made > 0
    ratio = min(1.0, float(np.min(values[positive] / made[positive], initial=1.0))) * (1 - ACCURACY)
    p = balance(others * ratio, losses[corners], middle, total - GUARD, total_q + GUARD)
    if p is None or ratio < 0.999:
        return None
    return Masses(step, grid.shift, index[corners], p, curve.infinite * (1 - 4 * ACCURACY))


def _under_tangents(curve: Curve, losses: Array, split: int) -> Array:
    """The lower of the two neighbouring tangents at each grid point but the outermost, as put before the split, then as call."""
    half = np.diff(losses) / 2
    call, above, put, below = both_sides(curve, losses[:-1] + half)
    up, down = np.expm1(half), -np.expm1(-half)
    values = np.zeros_like(losses)
    # the middle before a point is read half a cell to its right, the middle after it half a cell to its left
    left, right = slice(1, split), slice(split, -1)
    before, after = slice(0, split - 1), slice(1, split)
    values[left] = np.minimum(LESS * (put + up * below)[before], (LESS * put - MORE * down * below)[after])
    before, after = slice(split - 1, -1), slice(split, None)
    values[right] = np.minimum((LESS * call - MORE * up * above)[before], LESS * (call + down * above)[after])
    return values


def _ended(curve: Curve, losses: Array, values: Array, split: int) -> Array | None:
    """The finite losses' share of ``values``, with zeros at both ends; None if the middle is negative.

    There the profile is (1 - x)_+, which is below any curve. Lowering a side by a line keeps it convex: its mass at infinity, and
    its outermost value. Where the tangent at the middle of a cell is negative at its outer end, the supporting line at this end
    takes its place. It is not negative there, so the end may be zero, and the segment inwards lies below the line. If there is
    no atom at the end or outside the line is flat; an atom at the end is kept.
    """
    x = np.exp(losses[:split])
    right, left = values[split:] - max(values[-1], curve.infinite), values[:split] - curve.impossible * x
    left -= max(left[0], 0.0)
    # across the split the neighbour's zero would be 1 - x instead, and the segment would cut the corner of (1 - x)_+
    if right[0] < 0 or left[-1] < 0:
        return None
    if (right < 0).any():
        end = int(np.argmax(right < 0))
        call, above = curve.right(losses[split + end : split + end + 1])
        line = LESS * (call + above * -np.expm1(losses[split + end - 1] - losses[split + end])) - curve.infinite
        right[end - 1], right[end:] = np.clip(line[0], 0.0, right[end - 1]), 0.0
    if (left < 0).any():
        end = int(np.flatnonzero(left < 0)[-1])
        put, below = curve.left(losses[end : end + 1])
        line = LESS * (put + below * np.expm1(losses[end + 1] - losses[end])) - curve.impossible * x[end + 1]
        left[end + 1], left[: end + 1] = np.clip(line[0], 0.0, left[end + 1]), 0.0
    values = np.concatenate([left, right])
    return np.where(values < _TINY, 0.0, values)  # lower is safe; the smallest doubles have no digits


def _hull(values: Array, losses: Array, split: int, total: float, total_q: float) -> Indices:
    """The positions of the corners of the lower convex hull of put before the split and call after it.

    A point above the chord of its two neighbours is no corner, and all such points may go at once: whichever of them go, each lies
    above a chord of the whole set. Slopes are compared in units of mass at the common point, as in ``kinks``: as slopes in e^loss
    they would leave the range of doubles.
    """
    kept = np.arange(len(values))
    for _ in range(HEURISTICS.passes):
        at, level = losses[kept], values[kept]
        middle = int(np.searchsorted(kept, split))
        gaps, change = np.diff(at), np.diff(level)
        before, after = change / -np.expm1(-gaps), change / np.expm1(gaps)
        if 0 < middle < len(kept):  # over the split the two sides are compared in the terms of the point in question
            last, first = total - total_q * math.exp(at[middle - 1]), total - total_q * math.exp(at[middle])
            before[middle - 1] = (change[middle - 1] - last) / -math.expm1(-gaps[middle - 1])
            after[middle - 1] = (change[middle - 1] - first) / math.expm1(gaps[middle - 1])
        above = after[1:] < before[:-1]
        if not above.any():
            break
        kept = kept[np.concatenate([[True], ~above, [True]])]
    return kept


def floor(curve: Curve, step: float, tail: float, tilt: float) -> Masses:
    """Masses that are stochastically smaller than the losses of ``curve``: each loss moves down to the grid."""
    grid = anchored(curve, step, tail, tilt)
    hair = -1e-12 * max(1.0, float(np.max(np.abs(grid.losses))))  # an atom on the grid must not fall by rounding
    edges, split = grid.losses + hair, int(np.searchsorted(grid.losses + hair, 0.0))
    put, below = curve.left(edges[:split])
    call, above = curve.right(edges[split:])
    under = np.minimum(np.maximum(below - put, 0.0) * (1 + 4 * ACCURACY), 1.0)  # P[L <= edge], over-estimated
    over = (call + above - curve.infinite) * (1 - 4 * ACCURACY)  # P[edge < L < infinity], under-estimated
    survival = np.concatenate([1 - curve.infinite - under - GUARD, over, [0.0]])
    survival = np.minimum.accumulate(np.maximum(survival, 0.0))
    return Masses(step, grid.shift + hair, grid.index, survival[:-1] - survival[1:], curve.infinite)
