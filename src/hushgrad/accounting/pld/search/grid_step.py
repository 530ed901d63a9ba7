r"""How fine a grid must be for a wanted error, and where it must lie so that atoms fall on it. Nothing here enters a bound.

Spreading the losses of n steps by a variance v each changes epsilon by about n v (t + 1)/2 at tilt t:

| losses | from above | from below |
|---|---|---|
| with a density | v = h^2/6 | v = h^2/12 |
| an atom at distance r from the grid, the next ones at distance D | v = r (h - r) | v = r D |

From below an atom off the grid costs h instead of h^2. A step that suits all atoms at once has r much smaller than h: the distances
of two atoms fit h = D/k for every k, and among a few hundred such h one is taken that suits the others best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hushgrad.accounting.heuristics import HEURISTICS
from hushgrad.accounting.pld.bounds.grid import HAIR, atoms_of, heaviest, weights_of
from hushgrad.accounting.pld.profiles.curve import Array, Curve
from hushgrad.accounting.pld.search.saddle_point import Saddle

Parts = Sequence[tuple[Curve, int]]


def step_for(parts: Parts, at: Saddle, error: float, least: float, *, upper: bool) -> float:
    """The grid step for an ``error`` of epsilon, not much below ``least``."""
    lattice = parts[0][0].lattice
    if lattice > least and all(curve.discrete and curve.lattice == lattice for curve, _ in parts):
        return lattice * (1 + 2 * HAIR if upper else 1.0)  # all losses lie on this grid: nothing to refine
    steps = sum(n for _, n in parts)
    spread = sum(n * _off_atoms(curve, at.tilt) for curve, n in parts)
    step = min(math.sqrt((7.0 if upper else 16.0) * error / (spread * (at.tilt + 1))), at.spread / 8)
    step = max(step, 0.3 * error / steps, least)  # no loss moves by more than about a cell, whatever the tilt
    atoms = _Atoms.of(parts, at.tilt)
    return step if atoms is None else atoms.fitted(step, 0.3 * error / (at.tilt + 1), least, upper=upper)


@dataclass(frozen=True)
class _Atoms:
    """The atoms of all curves but those that the grids are laid through, as columns."""

    distance: Array  # from the atom of the same curve on the grid
    weight: Array  # how many of the steps' tilted losses are there
    gap: Array  # to the neighbours; 0: a density
    reach: Array  # the longest of all distances of this curve

    @classmethod
    def of(cls, parts: Parts, tilt: float) -> _Atoms | None:
        """The atoms of these parts; None if there are none to fit."""
        rows = []
        for curve, n in parts:
            losses, share = weights_of(curve, tilt)
            if len(losses) > 1:
                on_atoms = n * (1.0 if curve.discrete else 1 - _off_atoms(curve, tilt))
                gaps = (np.append(np.diff(losses), 0.0) + np.append(0.0, np.diff(losses))) / np.minimum(
                    2.0, 1 + (np.arange(len(losses)) * np.arange(len(losses))[::-1])
                )
                rows.append(
                    (
                        np.abs(losses - losses[heaviest(curve, tilt)]),
                        on_atoms * share,
                        gaps if curve.discrete else np.zeros_like(losses),
                        np.full_like(losses, losses[-1] - losses[0]),
                    )
                )
        if not rows:
            return None
        columns = [np.concatenate(column) for column in zip(*rows, strict=True)]
        matter = columns[0] > 0
        return cls(*(column[matter] for column in columns))

    def fitted(self, step: float, cost: float, least: float, *, upper: bool) -> float:
        """A step of at most ``step`` for which the atoms cost at most ``cost``, if there is one above ``least``."""
        best = step
        for _ in range(HEURISTICS.rounds):
            best = self._best(step, upper=upper)
            if self._cost(np.array([best]), upper=upper)[0] <= cost or HEURISTICS.finer * step < least:
                break
            step *= HEURISTICS.finer
        return best * (1 + 2 * HAIR if upper else 1 - 2 * HAIR)  # the outermost atoms just inside their grid points, or outside

    def _best(self, step: float, *, upper: bool) -> float:
        """The best of some steps between 3/4 of ``step`` and all of it which suit one atom exactly."""
        if len(self.distance) > HEURISTICS.fitted_atoms:
            return step
        whole = float(self.distance[int(np.argmax(self.weight * (self.gap + 1e-9 * self.reach)))])
        if whole < 0.7 * step:
            return step  # too near to each other for this grid
        cells = math.ceil(whole / step * (1 - 1e-12))
        steps = whole / (cells + np.arange(min(HEURISTICS.candidates, 1 + cells // 3)))
        return float(steps[int(np.argmin(self._cost(steps, upper=upper) * steps[0] / steps))])

    def _cost(self, steps: Array, *, upper: bool) -> Array:
        """The change of epsilon over (t + 1) for each of ``steps``."""
        cells = self.distance / steps[:, None]
        off = np.abs(cells - np.round(cells))
        if upper:
            moved = off * (1 - off) * steps[:, None] ** 2
        else:  # of a density next to an atom so much takes part as has its moment: a geometric mean
            moved = off * steps[:, None] * np.where(self.gap > 0, self.gap, np.sqrt(steps[:, None] * self.reach))
        return np.asarray(moved @ self.weight / 2)


def _off_atoms(curve: Curve, tilt: float) -> float:
    """The share of the tilted losses that a grid through the atoms at the ends of the support spreads: those between them."""
    low, high = curve.support
    losses, _ = atoms_of(curve)
    if curve.discrete or len(losses) != 2 or not (losses[0] == low < 0 < high == losses[1]):
        return 1.0
    edges = np.linspace(low, high, 66)[1:-1]
    put, below = curve.left(edges[edges < 0])
    call, above = curve.right(edges[edges >= 0])
    survival = np.concatenate([[1.0], 1 - (below - put), call + above])  # P[L > edge], from before the lower atom on
    masses = np.append(-np.diff(survival), survival[-1])
    top = float(edges[-1])  # of the cells at the two ends all is taken to be on the atom, of the others the heavier edge
    weighted = masses * np.exp(tilt * (np.append(np.append(low, edges[1:]), high) - top))
    return min(1.0, max(float(np.sum(weighted[1:-1]) / np.sum(weighted)) + 2 / 64, 0.01))
