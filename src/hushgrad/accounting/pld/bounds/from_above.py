r"""Upper discretisation ("connect the dots"): the chords of a convex function lie above it.

The smallest measure on a grid whose profile dominates a curve joins the curve's values at the grid points (Doroshenko, Ghazi,
Kamath, Kumar and Manurangsi 2022, theorem 3.3). Each loss is split between its two grid neighbours so that its mass under P and
under Q are both kept, which spreads it by a variance of at most h^2/4: the error of a composition is O(steps h^2).
"""

from __future__ import annotations

import math

import numpy as np

from hushgrad.accounting.pld.bounds.grid import GUARD, HAIR, Masses, anchored, balance, kinks, rebuild
from hushgrad.accounting.pld.profiles.curve import Array, Curve
from hushgrad.accounting.pld.profiles.stable_sums import masses_of_q


def connect_the_dots(curve: Curve, step: float, tail: float, tilt: float) -> Masses:
    """Masses whose profile lies above ``curve``.

    Losses beyond the last grid point count as infinite (mass call(last)), losses before the first one are raised to it.
    """
    grid = anchored(curve, step, tail, tilt, hair=HAIR)
    p, infinite, _ = chords(curve, grid.losses, grid.split)
    return Masses(step, grid.shift, grid.index, p, infinite)


def chords(curve: Curve, losses: Array, split: int) -> tuple[Array, float, float]:
    """P's masses at any increasing losses whose profile lies above ``curve``; P's mass at infinity, Q's at minus infinity."""
    accuracy = curve.accuracy(float(np.min(np.diff(losses))))
    values = np.concatenate([curve.left(losses[:split])[0], curve.right(losses[split:])[0]]) * (1 + accuracy)
    infinite = max(float(values[-1]), 1e-300)
    # the first chord starts at x = 0: this much of Q has no counterpart
    lost = max(curve.impossible, float(masses_of_q(losses[:1], values[:1])[0]))
    others = np.maximum(kinks(values, losses, split), 0.0)  # convexity makes them positive; what is clipped is rounding
    made = rebuild(others, losses, split, lost * np.exp(losses[:split]), infinite)
    ratio = max(1.0, float(np.max(values / np.maximum(made, 1e-300)))) * (1 + accuracy)
    p = balance(others * ratio, losses, split, 1 - infinite + GUARD, 1 - lost * ratio - GUARD)
    if p is None:  # no mass near zero that could give way, as for losses on a lattice: scale all of it
        # to the left of zero the profile is at least 1 - x: at the first point there, this share of it pays for the rounding
        small = 8 * GUARD / -math.expm1(losses[split - 1])
        ratio = ratio * (1 + accuracy) + 2 * small
        others = others / (1 + accuracy)
        plain = balance(others, losses, split, 1 - infinite / (1 + accuracy), 1 - lost / (1 + accuracy), tolerance=small)
        p = (_unbalanced(others, split, infinite) if plain is None else plain) * ratio
    return p, infinite, lost * ratio


def _unbalanced(p: Array, split: int, infinite: float) -> Array:
    """All the missing mass on the upper of the two middle points: sum p e^{-l} only falls, so the profile only rises."""
    p = p.copy()
    p[split - 1] = 0.0
    p[split] = max(0.0, 1 - infinite + GUARD - float(np.sum(p) - p[split]))
    return p
