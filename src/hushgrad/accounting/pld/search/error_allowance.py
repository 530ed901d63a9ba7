r"""How much mass each approximation may lose for a wanted accuracy, how fine a grid must be, and where, so that atoms fall on it.

The choice of a step enters no bound. Spreading the losses of n steps by a variance v each changes epsilon by about n v (t + 1)/2 at tilt t:

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
from dataclasses import dataclass, replace

import numpy as np

from hushgrad.accounting._numeric import reached
from hushgrad.accounting.heuristics import HEURISTICS
from hushgrad.accounting.pld.bounds.blend_steps import Blend
from hushgrad.accounting.pld.bounds.compose import Part, Window, range_of
from hushgrad.accounting.pld.bounds.from_above import connect_the_dots
from hushgrad.accounting.pld.bounds.from_below import lower as from_below
from hushgrad.accounting.pld.bounds.grid import HAIR, Masses, atoms_of, heaviest, weights_of
from hushgrad.accounting.pld.bounds.merge_steps import rounded
from hushgrad.accounting.pld.profiles.curve import Array, Curve
from hushgrad.accounting.pld.search.saddle_point import Moments, Saddle, window
from hushgrad.errors import NumericalLimit

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


_FARTHEST = 2.0**45  # points of a grid: their losses then have a relative error of 2^-8 of a step


class Allowance:
    """How much mass each approximation may lose for an answer at ``delta``: a small share of the wanted error each."""

    def __init__(self, parts: Parts, delta: float, share: float = 1e-3) -> None:
        self.parts, self.delta = parts, delta
        self.steps = sum(n for _, n in parts)
        self.farthest = max((abs(end) for curve, _ in parts for end in curve.support if math.isfinite(end)), default=0.0)
        reached("the losses of all steps", self.steps * self.farthest)
        self.share = share  # the relative error of delta that truncation may cause
        self.tail = max(1e-300, share * delta / self.steps)
        # only an estimate, so a coarse one will do for very many steps
        self.moments = Moments(rounded(list(parts), HEURISTICS.rough, upper=True), self.tail)

    def refined(self, at: Saddle, error: float) -> Allowance:
        """That for an absolute error of epsilon: so much of ln(delta) times its slope, a 30th of it here."""
        share = min(1e-3, max(error * at.slope / 30, 1e-12))
        return self if share >= self.share else Allowance(self.parts, self.delta, share)

    def stricter(self) -> Allowance:
        """One with a thousandth of the losses, for when the answer was not found."""
        return Allowance(self.parts, self.delta, self.share / 1000)

    def discretised(self, at: Saddle, error: float, *, upper: bool) -> tuple[list[Part], Window]:
        """Masses for every curve on one grid, and the window to compose them on."""
        around = window(self.moments, at, self.share)
        width = around.high - around.low
        least = max(width, self.moments.longest) / HEURISTICS.cells
        if not all(curve.discrete for curve, _ in self.parts) and self.farthest > _FARTHEST * least:
            raise NumericalLimit("Doubles do not tell the points of a grid apart that reaches the largest loss.")
        step = step_for(self.parts, at, error, least, upper=upper)
        if not upper and all(curve.smooth for curve, _ in self.parts):
            # tangents need a few cells between zero and the end of the support at which the losses crowd
            nearest = min(abs(end) for curve, _ in self.parts for end in (*curve.support, math.inf))
            step = min(step, max(0.3 * nearest, width / 2**17, self.moments.longest / 2**17))
        make = _from_above if upper else from_below
        grids = [(make(curve, step, self.tail, at.tilt), n) for curve, n in self.parts]
        return grids, _widened(around, grids, step)


def _from_above(curve: Curve, step: float, tail: float, tilt: float) -> Masses:
    return curve.from_above(step, tail, tilt) if isinstance(curve, Blend) else connect_the_dots(curve, step, tail, tilt)


def _widened(around: Window, grids: list[Part], step: float) -> Window:
    """A window over all losses, if that is cheap: nothing is lost or wraps around. For few steps, where Chernoff's bound is weak."""
    least, most = range_of(grids)
    if (most - least) / step > max(HEURISTICS.few_cells, 1.25 * (around.high - around.low) / step):
        return around
    return replace(around, low=least - 2 * step, high=most + 4 * step)
