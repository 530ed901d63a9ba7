r"""Lower bounds: segments under tangents, or losses rounded down.

``touch``. Let T_k be the tangent of the curve at the middle of cell k. At each grid point take the lower of the two neighbouring
tangents; the segment over cell k then lies below T_k at both ends, hence below the curve. Where the density of the loss is
smooth on the scale of the grid these values are convex, otherwise their lower convex hull is taken, which is lower still. This
*contracts* the losses by a variance of h^2/4 per step: second order, like the upper bound.

``floor`` moves every loss down to the grid: first order only, but valid for any curve and exact for losses on the grid.
"""

from __future__ import annotations

import numpy as np

from hushgrad.accounting.pld.curve import ACCURACY, Array, Curve
from hushgrad.accounting.pld.grid import GUARD, LESS, MORE, Masses, anchored, balance, both_sides, kinks, rebuild

__all__ = ["floor", "lower", "touch"]


def lower(curve: Curve, step: float, tail: float, tilt: float) -> Masses:
    """Masses whose profile lies below ``curve``: by ``touch`` where it works, else by ``floor``."""
    masses = touch(curve, step, tail, tilt) if curve.smooth and curve.lattice == 0 and curve.infinite == 0 else None
    return floor(curve, step, tail, tilt) if masses is None else masses


def touch(curve: Curve, step: float, tail: float, tilt: float) -> Masses | None:
    """Masses whose profile consists of segments under tangents of ``curve``; None where no such profile is found."""
    grid = anchored(curve, step, tail, tilt)
    losses, split = grid.losses, grid.split
    values = _ended(_under_tangents(curve, losses, split)[1:-1], split - 1)
    losses, split = losses[1:-1], split - 1
    others = None if values is None else _hull_kinks(values, losses, split)
    if values is None or others is None:
        return None
    made = rebuild(others, losses, split, 0.0, 0.0)
    positive = made > 0
    ratio = min(1.0, float(np.min(values[positive] / made[positive], initial=1.0))) * (1 - ACCURACY)
    p = balance(others * ratio, losses, split, 1 - GUARD, 1 + GUARD)
    return None if p is None or ratio < 0.999 else Masses(step, grid.shift, grid.index[1:-1], p, 0.0)


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


def _ended(values: Array, split: int) -> Array | None:
    """Make both ends zero; None if the middle is negative. There the profile is (1 - x)_+, which is below any curve.

    Lowering a whole side by its outermost value keeps it convex. A negative value means that its own segments would cut the
    curve if they were raised to zero, so its inner neighbour becomes zero too.
    """
    values = values.copy()
    values[split:] -= max(values[-1], 0.0)
    values[:split] -= max(values[0], 0.0)
    right = np.flatnonzero(values[split:] < 0)
    left = np.flatnonzero(values[:split] < 0)
    if len(right):
        values[split + int(right[0]) - 1 :] = 0.0
    if len(left):
        values[: int(left[-1]) + 2] = 0.0
    # across the split the neighbour's zero would be 1 - x instead, and the segment would cut the corner of (1 - x)_+
    return None if 0 in right or split - 1 in left else values


def _hull_kinks(values: Array, losses: Array, split: int, rounds: int = 40) -> Array | None:
    """Masses of the lower convex hull: points above the chord of their neighbours are dropped until none is left."""
    keep = np.arange(len(values))
    for _ in range(rounds):
        at = int(np.searchsorted(keep, split))
        if at < 2 or at + 2 > len(keep) or keep[at] != split or keep[at - 1] != split - 1:
            return None
        masses = kinks(values[keep], losses[keep], at)
        bad = masses < 0
        if not bad.any():
            p = np.zeros_like(values)
            p[keep] = masses
            return p
        keep = keep[~bad]
    return None


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
