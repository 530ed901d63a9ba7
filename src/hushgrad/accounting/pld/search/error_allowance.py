"""How much mass may be lost in each approximation for a wanted accuracy, and grids and windows that respect it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hushgrad.accounting._numeric import reached
from hushgrad.accounting.heuristics import HEURISTICS
from hushgrad.accounting.pld.bounds.blend_steps import Blend
from hushgrad.accounting.pld.bounds.compose import Part, Window, range_of
from hushgrad.accounting.pld.bounds.from_above import connect_the_dots
from hushgrad.accounting.pld.bounds.from_below import lower as from_below
from hushgrad.accounting.pld.bounds.grid import Masses
from hushgrad.accounting.pld.bounds.merge_steps import rounded
from hushgrad.accounting.pld.profiles.curve import Curve
from hushgrad.accounting.pld.search.grid_step import step_for
from hushgrad.accounting.pld.search.saddle_point import Moments, Saddle, window
from hushgrad.errors import NumericalLimit

Parts = Sequence[tuple[Curve, int]]
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
