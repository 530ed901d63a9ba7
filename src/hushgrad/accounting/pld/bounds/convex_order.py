r"""Laws of weighted sums of independent variables on sorted places, rounded in the convex order.

X is *smaller in the convex order* than Y if E f(X) <= E f(Y) for every convex f. Sums of independent variables keep this order, so
a sum of many variables may be built up pairwise, with a rounding to few places after each addition, and stays on one side of the
truth:

* ``summed_above``: the mass between two places is split between them so that its mean is kept. That is larger (Jensen).
* ``summed_below``: the mass of a cell is put at the cell's own mean. That is smaller (Jensen again).

Rounding. All masses are sums of products of non-negative numbers, so each has a relative error of at most (number of additions) u, u =
2^-53. It adds up in the factor ``error`` of a law. A place's share is a quotient of rounded numbers: what is kept is the mean of a number
within ``8 u`` of the sum, relatively, if all terms are positive; with ``raised`` it is the mean of a number above the sum, which is what an
*increasing* convex f needs, for terms of any sign.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hushgrad import native
from hushgrad.accounting.pld.profiles.curve import Array

_U = 2.0**-53
_RAISED = 2.0**-48  # of the size of the two terms
_BLOCK = 1 << 20  # sums at a time, without the C library


@dataclass(frozen=True)
class Law:
    """Masses at increasing places, each mass right up to a factor of 1 +- ``error``."""

    places: Array
    mass: Array
    error: float = 0.0

    def kept(self, keep: NDArray[np.bool_]) -> Law:
        """The part at some places."""
        return Law(self.places[keep], self.mass[keep], self.error)


@dataclass(frozen=True)
class Outside:
    """Mass and first moment of the sums below the first place and above the last one."""

    below: float
    below_moment: float
    above: float
    above_moment: float


KERNEL = native.EXACT


def summed_above(a: Law, b: Law, weights: tuple[float, float], places: Array, *, raised: bool = False) -> tuple[Law, Outside]:
    """The law of wa A + wb B on ``places``, larger in the convex order; ``raised``: in the increasing convex order, for any signs."""
    out, outside = np.zeros(len(places)), np.zeros(4)
    if KERNEL is not None:
        raise_by = _RAISED if raised else 0.0
        longest = KERNEL.sum_above(*_terms(a, b, weights), raise_by, _at(places), len(places), _at(out), _at(outside))
    else:
        longest = _split(a, b, weights, _RAISED if raised else 0.0, places, out, outside)
    law = Law(places, out, a.error + b.error + (longest + 2 * len(a.places) + 8) * _U * 1.01)
    return law, Outside(*(float(x) for x in outside))


def summed_below(a: Law, b: Law, weights: tuple[float, float], edges: Array) -> tuple[Law, float]:
    """The law of wa A + wb B with each cell between ``edges`` at its mean, smaller in the convex order; the means' relative error."""
    mass, moment = np.zeros(len(edges) - 1), np.zeros(len(edges) - 1)
    if KERNEL is not None:
        longest = KERNEL.sum_below(*_terms(a, b, weights), _at(edges), len(edges), _at(mass), _at(moment))
    else:
        longest = _collected(a, b, weights, edges, mass, moment)
    added = (longest + 2 * len(a.places) + 8) * _U * 1.01
    kept = mass > 1e-290  # subnormal doubles lose digits; callers account for mass that is left out
    law = Law(moment[kept] / mass[kept], mass[kept], a.error + b.error + added)
    return law, 2 * added


def _terms(a: Law, b: Law, weights: tuple[float, float]) -> tuple[object, ...]:
    return (_at(a.places), _at(a.mass), len(a.places), _at(b.places), _at(b.mass), len(b.places), *weights)


def _at(array: Array) -> int:
    """Where an array's numbers are, one double after another."""
    if array.dtype != np.float64 or array.ndim != 1 or not array.flags.c_contiguous:
        raise TypeError(f"Expected contiguous doubles, got {array.dtype} of shape {array.shape}.")
    return array.ctypes.data


def _blocks(a: Law, b: Law) -> list[slice]:
    step = max(1, _BLOCK // max(1, len(b.places)))
    return [slice(i, i + step) for i in range(0, len(a.places), step)]


def _split(a: Law, b: Law, weights: tuple[float, float], raised: float, places: Array, out: Array, outside: Array) -> int:
    """``hushgrad_sum_above`` of native/accounting/convex.c; all sums of a block are added at once."""
    y = weights[1] * b.places
    for block in _blocks(a, b):
        x = weights[0] * a.places[block][:, None]
        total = (x + y + raised * (np.abs(x) + np.abs(y))).ravel()
        mass = (a.mass[block][:, None] * b.mass).ravel()
        cell = np.searchsorted(places, total, side="right") - 1
        under, over = cell < 0, cell == len(places) - 1
        outside += [np.sum(mass[under]), np.sum((mass * total)[under]), np.sum(mass[over]), np.sum((mass * total)[over])]
        inside = ~(under | over)
        cell, total, mass = cell[inside], total[inside], mass[inside]
        share = np.clip((total - places[cell]) / ((places[cell + 1] - places[cell]) * (1 - raised)), 0.0, 1.0)
        out += np.bincount(cell, mass * (1 - share), len(places)) + np.bincount(cell + 1, mass * share, len(places))
    return max(_BLOCK, len(b.places))


def _collected(a: Law, b: Law, weights: tuple[float, float], edges: Array, mass: Array, moment: Array) -> int:
    """Add the sums' masses and moments to their cells: ``hushgrad_sum_below`` of native/accounting/convex.c, in numpy."""
    for block in _blocks(a, b):
        total = (weights[0] * a.places[block][:, None] + weights[1] * b.places).ravel()
        w = (a.mass[block][:, None] * b.mass).ravel()
        cell = np.clip(np.searchsorted(edges, total, side="right") - 1, 0, len(mass) - 1)
        mass += np.bincount(cell, w, len(mass))
        moment += np.bincount(cell, w * total, len(mass))
    return max(_BLOCK, len(b.places))
