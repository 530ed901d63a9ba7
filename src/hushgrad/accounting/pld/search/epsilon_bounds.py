"""Bounds on epsilon for one direction and one side: choose tilt, window and grid, compose, and read off the bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hushgrad.accounting._numeric import revealed, smallest_true, up
from hushgrad.accounting.heuristics import HEURISTICS
from hushgrad.accounting.pld.bounds.blend_steps import Blend
from hushgrad.accounting.pld.bounds.compose import Composed, compose
from hushgrad.accounting.pld.bounds.grid import atoms_of
from hushgrad.accounting.pld.profiles.continuous import LaplaceCurve
from hushgrad.accounting.pld.profiles.curve import ACCURACY, UNSEEN, Curve
from hushgrad.accounting.pld.profiles.discrete import Response
from hushgrad.accounting.pld.search.error_allowance import Allowance
from hushgrad.accounting.pld.search.exponential_composition import choice_epsilon, is_choice
from hushgrad.accounting.pld.search.saddle_point import Moments, Saddle, saddle_for_delta, saddle_for_epsilon
from hushgrad.errors import NumericalLimit

Parts = Sequence[tuple[Curve, int]]
_LAST_DIGITS = 2.0**-49  # of an epsilon, and of the largest loss of a curve


@dataclass(frozen=True)
class Answer:
    """A bound on epsilon, whether it may be far from the truth, and whether a finer grid can bring it nearer."""

    epsilon: float
    doubtful: bool = False
    improvable: bool = False


def epsilon_bound(parts: Parts, delta: float, width: float, *, upper: bool, known: float = 0.0) -> Answer:
    """A bound on epsilon at ``delta`` (0: the largest loss); answers that turn out below ``known`` need not be accurate."""
    answer = _epsilon_bound(parts, delta, width, upper=upper, known=known)
    if delta == 0 or not is_choice(parts):
        return answer
    return Answer((min if upper else max)(answer.epsilon, choice_epsilon(parts, delta, upper=upper)))


def _epsilon_bound(parts: Parts, delta: float, width: float, *, upper: bool, known: float) -> Answer:
    infinite = infinite_mass(parts)
    if upper and delta <= unseen_mass(parts):
        return Answer(math.inf)
    if delta == 0:
        return Answer(math.inf if infinite > 0 else largest_loss(parts) * (1 if upper else 1 - 3e-12))
    if delta < infinite if upper else delta <= infinite * (1 - ACCURACY):
        return Answer(math.inf)
    if is_single(parts):
        return Answer(_invert(parts[0][0], delta, upper=upper))
    if largest_loss(parts) <= known:
        return Answer(largest_loss(parts) if upper else 0.0)
    if sum(n * curve.delta(0.0) for curve, n in parts) * (1 + ACCURACY) <= delta:
        return Answer(0.0)  # at epsilon 0 delta is a total variation, which composes by sums
    try:
        with np.errstate(all="ignore"):
            answer = _composed_epsilon(parts, delta, width, upper=upper, known=known, infinite=infinite)
    except NumericalLimit:
        answer = Answer(_simple(parts, delta, upper=True) if upper else 0.0, doubtful=True)
    if upper and len(parts) <= HEURISTICS.alone:
        answer = replace(answer, epsilon=_basic(parts, delta, answer.epsilon))
    if not upper and answer.doubtful:
        answer = Answer(max(answer.epsilon, _simple(parts, delta, upper=False)), doubtful=True)
    return replace(answer, epsilon=min(answer.epsilon, largest_loss(parts))) if upper else answer


def _composed_epsilon(parts: Parts, delta: float, width: float, *, upper: bool, known: float, infinite: float) -> Answer:
    allowed = Allowance(parts, delta)
    at = saddle_at(allowed.moments, max(delta - infinite, delta * 1e-6))
    error = max(width * max(at.epsilon, 1e-9), 0.4 * (known - at.epsilon))
    for _ in range(HEURISTICS.attempts):
        allowed = allowed.refined(at, error)
        composed = compose(*allowed.discretised(at, error, upper=upper))
        found = _read(composed, delta, at, upper=upper)
        if found is not None:
            poor = not upper and found == 0  # nothing was proved: rounding, or a grid that is too coarse for one of the parts
            if found >= known:
                found, composed = _resolved(allowed, at, error, (found, composed), upper=upper)
            rounding = composed.rounding(found, delta)
            if rounding > 30 * width and found > known:
                found = _shortened(parts, delta, width, found, upper=upper)
            improvable = len(composed.c) < HEURISTICS.cells / 4 and rounding < width
            return Answer(found, doubtful=poor or (upper and found > 1.02 * at.epsilon), improvable=improvable)
        allowed, error = allowed.stricter(), error / 4
    raise NumericalLimit("The answer was not inside any window.")


def _resolved(
    allowed: Allowance, at: Saddle, error: float, first: tuple[float, Composed], *, upper: bool
) -> tuple[float, Composed]:
    """A bound, on finer grids while it is but a few of their steps from zero: where large losses are rare, the saddle point is far."""
    best, composed = first
    for _ in range(HEURISTICS.attempts):
        if best >= HEURISTICS.resolved * composed.step or (upper and best == 0):
            break
        error *= max(best / (HEURISTICS.resolved * composed.step), 0.05) ** 2
        try:
            finer = compose(*allowed.refined(at, error).discretised(at, error, upper=upper))
        except NumericalLimit:
            break
        other = _read(finer, allowed.delta, at, upper=upper) if finer.step < 0.9 * composed.step else None
        if other is None:  # the finest grid that there is
            break
        best, composed = (min if upper else max)(best, other), finer
    return best, composed


def _shortened(parts: Parts, delta: float, width: float, found: float, *, upper: bool) -> float:
    """A better bound than ``found`` where rounding dominates it: with so few large losses that a real share of delta is lost.

    Rare large losses need a small tilt, which does not suppress the noise of a million steps. Without the rarest of them the
    tilt grows. From above they count as infinite, from below as smaller ones, so each such bound is valid.
    """
    best = found
    for share in HEURISTICS.short:
        allowed = Allowance(parts, delta, share)
        try:
            at = saddle_at(allowed.moments, delta * (1 - share))
            other = _read(compose(*allowed.discretised(at, width * at.epsilon, upper=upper)), delta, at, upper=upper)
        except NumericalLimit:
            continue
        if other is not None:
            best = min(best, other) if upper else max(best, other)
    return best


def saddle_at(moments: Moments, delta: float) -> Saddle:
    """The saddle point for ``delta``, or the one at epsilon 0 if that delta needs no epsilon."""
    at = saddle_for_delta(moments, delta)
    return at if at.epsilon > 0 else saddle_for_epsilon(moments, 0.0)


def _read(composed: Composed, delta: float, at: Saddle, *, upper: bool) -> float | None:
    """Epsilon from a composition, or None if this composition does not hold it."""
    for start in (at.epsilon - 2 * at.spread, -math.inf):
        found = composed.epsilon(delta, upper=upper, start=start)
        if found is not None:
            return max(0.0, found)
    # from below, no positive epsilon is needed if even the upper reading of the lower measure says so
    return 0.0 if composed.delta(0.0, upper=True) <= delta else None


def _simple(parts: Parts, delta: float, *, upper: bool) -> float:
    """Bounds without composition, for parameters outside the range of doubles: basic composition, and the worst single step."""
    if not upper:
        single = max(_largest_at(parts, delta), *(_invert(curve, delta, upper=False) for curve, _ in parts))
        if len(parts) == 1:
            return single
        # to forget the other parts' outputs is post-processing: what one part loses alone is lost by all of them
        return max(
            single, *(epsilon_bound([part], delta, 1e-3, upper=False, known=single).epsilon for part in parts[: HEURISTICS.alone])
        )
    steps = sum(n for _, n in parts)
    worst = [(curve.corners[-1] if isinstance(curve, Blend) else curve, n) for curve, n in parts]
    return sum(n * _invert(curve, delta / steps * (1 - 1e-12), upper=True) for curve, n in worst) * (1 + 1e-12)


def _basic(parts: Parts, delta: float, found: float) -> float:
    """The smaller of ``found`` and basic composition with the same epsilon for each step."""
    steps = sum(n for _, n in parts)

    def holds(epsilon: float) -> bool:
        return sum(n * delta_of(curve, epsilon / steps, upper=True) for curve, n in parts) <= delta

    return smallest_true(holds, 0.0, found, tolerance=1e-6) * (1 + 1e-12) if math.isfinite(found) and holds(found) else found


def _largest_at(parts: Parts, delta: float) -> float:
    """From below, for a tiny delta: with probability p all steps have their largest loss, so delta(eps) >= p (1 - e^{eps - sum})."""
    tops = [(*(float(column[-1]) for column in atoms_of(curve)), n) for curve, n in parts if len(atoms_of(curve)[0])]
    if len(tops) < len(parts):
        return 0.0
    log_p = sum(n * math.log(max(p, 1e-300)) for _, p, n in tops) - 1e-9
    whole = sum(n * (loss - 1e-12 * abs(loss)) for loss, _, n in tops)
    share = math.exp(min(math.log(delta) - log_p, 0.0))
    return max(0.0, whole + math.log1p(-share)) if share < 1 else 0.0


def infinite_mass(parts: Parts) -> float:
    """The probability of an infinite loss in some step, rounded up."""
    return revealed((curve.infinite if isinstance(curve, Response) else up(curve.infinite), n) for curve, n in parts)


def unseen_mass(parts: Parts) -> float:
    """An upper bound on the mass at losses that are in no table."""
    return sum(n * UNSEEN for curve, n in parts if curve.endless)


def largest_loss(parts: Parts) -> float:
    """An upper bound on all finite losses, beyond which delta is the mass at infinity."""
    if is_single(parts) and isinstance(parts[0][0], (Response, LaplaceCurve)):
        return parts[0][0].support[1]  # as it was stated, or rounded up before
    return sum(n * curve.support[1] for curve, n in parts) * (1 + 1e-12)


def is_single(parts: Parts) -> bool:
    """Whether there is one step only, which has a closed form."""
    return len(parts) == 1 and parts[0][1] == 1


def delta_of(curve: Curve, epsilon: float, *, upper: bool) -> float:
    """The delta of one curve in closed form. Near its largest loss the last digits of epsilon matter, so epsilon is rounded safely."""
    if upper:
        at = epsilon * (1 - _LAST_DIGITS) if epsilon < largest_loss([(curve, 1)]) else epsilon
        return abs(curve.delta(at)) * (1 + ACCURACY)
    return abs(curve.delta(epsilon * (1 + _LAST_DIGITS))) * (1 - ACCURACY)


def _invert(curve: Curve, delta: float, *, upper: bool) -> float:
    """The epsilon of one curve in closed form: bisection that ends on the safe side, by more than the rounding of epsilon itself."""
    target = delta / (1 + ACCURACY) if upper else delta / (1 - ACCURACY)

    def above(epsilon: float) -> bool:  # NaN proves nothing on either side
        value = curve.delta(epsilon)
        return not value <= target if upper else value > target

    if not above(0.0):
        return 0.0
    low, high = 0.0, curve.likely(target)
    while above(high):
        low, high = high, 2 * high
        if high > 1e15:
            return math.inf if upper else low
    if low == 0.0 and above(0.98 * high):  # a good first guess
        low = 0.98 * high
    while low == 0.0 and high > 1e-290:  # to a relative accuracy, however small it is
        low, high = (high / 16, high) if above(high / 16) else (0.0, high / 16)
    for _ in range(56):
        middle = 0.5 * (low + high)
        if not low < middle < high:  # there is no number between them
            break
        low, high = (middle, high) if above(middle) else (low, middle)
    return high * (1 + 2.0**-40) if upper else low * (1 - 2.0**-40)  # a loss of hundreds, mapped by ln, is off by 1e-13
