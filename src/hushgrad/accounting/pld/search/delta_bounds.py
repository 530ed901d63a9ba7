"""Bounds on delta for one direction and one side (above or below), at one epsilon or along a curve."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np

from hushgrad._printed import below
from hushgrad.accounting.heuristics import HEURISTICS
from hushgrad.accounting.pld.bounds.compose import Composed, compose
from hushgrad.accounting.pld.profiles.curve import ACCURACY
from hushgrad.accounting.pld.search.epsilon_bounds import (
    Parts,
    delta_of,
    epsilon_bound,
    infinite_mass,
    is_single,
    largest_loss,
    saddle_at,
    unseen_mass,
)
from hushgrad.accounting.pld.search.error_allowance import Allowance
from hushgrad.accounting.pld.search.exponential_composition import choice_delta, is_choice
from hushgrad.accounting.pld.search.saddle_point import saddle_for_epsilon
from hushgrad.errors import Contradiction, NumericalLimit


def delta_bound(parts: Parts, epsilon: float, *, upper: bool, width: float = 1e-4, known: float = 0.0) -> float:
    """A bound on delta at ``epsilon``; answers that turn out below ``known`` need not be accurate."""
    found = _delta_bound(parts, epsilon, width, known, upper=upper)
    if is_choice(parts):
        found = (min if upper else max)(found, choice_delta(parts, epsilon, upper=upper))
    return _in_range(parts, epsilon, found + unseen_mass(parts)) if upper else found if found >= sys.float_info.min else 0.0


def _in_range(parts: Parts, epsilon: float, delta: float) -> float:
    """An upper bound on delta as a normal double: at any epsilon below the largest loss delta is positive, however small."""
    nothing = delta == 0 and epsilon >= largest_loss(parts)
    return 0.0 if nothing else min(1.0, max(delta, sys.float_info.min))


def _delta_bound(parts: Parts, epsilon: float, width: float, known: float, *, upper: bool) -> float:
    if is_single(parts):
        return min(1.0, delta_of(parts[0][0], epsilon, upper=upper))
    if epsilon >= largest_loss(parts):
        return infinite_mass(parts) * (1 if upper else 1 - ACCURACY)
    if upper:
        each = below(Fraction(epsilon) / sum(n for _, n in parts))  # rounded up it may be the largest loss, and delta 0 there
        simple = sum(n * delta_of(curve, each, upper=True) for curve, n in parts)
    else:
        simple = max(delta_of(curve, epsilon, upper=False) for curve, _ in parts)
    bounds = [min(1.0, simple)]
    try:
        with np.errstate(all="ignore"):
            for composed in _composed_deltas(parts, epsilon, width, bounds[0], upper=upper):
                bounds.append(composed.delta(epsilon, upper=upper))
                if upper and bounds[-1] <= known:
                    break
    except NumericalLimit:
        pass  # what was found before is valid
    if upper and 0 < known < min(bounds) and epsilon_bound(parts, known, 1e-2, upper=True).epsilon <= epsilon:
        bounds.append(known)  # the question the other way round, which is sharper where rare large losses matter
    if not upper and max(bounds) > 1 + 1e-9:
        raise Contradiction(f"A certified lower bound of delta is {max(bounds)!r} at epsilon={epsilon!r}.")
    return min(bounds) if upper else min(1.0, max(bounds))


def delta_bounds(parts: Parts, epsilons: Sequence[float], known: Sequence[float], *, width: float = 1e-3) -> list[float]:
    """Upper bounds on delta at rising ``epsilons``. One composition serves all that it reads as sharply as its own.

    Answers below ``known``, one for each epsilon, need not be accurate.

    They are asked from the largest down: delta is steepest there, so its grid is finer than the smaller ones need.
    """
    if is_choice(parts):
        return [delta_bound(parts, e, upper=True, width=width, known=least) for e, least in zip(epsilons, known, strict=True)]
    found: list[float] = []
    composed: Composed | None = None
    for epsilon, least in zip(reversed(epsilons), reversed(known), strict=True):
        if composed is None or not _serves(composed, parts, epsilon, width):
            composed = _sharpest(parts, epsilon, width)
        if composed is None or not _serves(composed, parts, epsilon, width):
            found.append(delta_bound(parts, epsilon, upper=True, known=least))
        else:
            found.append(_in_range(parts, epsilon, composed.delta(epsilon, upper=True) + unseen_mass(parts)))
    return found[::-1]


def _sharpest(parts: Parts, epsilon: float, width: float) -> Composed | None:
    """The last composition for ``epsilon``, where there is one."""
    if is_single(parts) or epsilon >= largest_loss(parts):
        return None
    last: Composed | None = None
    try:
        with np.errstate(all="ignore"):
            for composed in _composed_deltas(parts, epsilon, width, 1.0, upper=True):
                last = composed
    except NumericalLimit:
        pass  # what was found before is valid
    return last


def _serves(composed: Composed, parts: Parts, epsilon: float, width: float) -> bool:
    """Whether a composition reads delta sharply at ``epsilon``: it is clear, and what it cut off does not matter there."""
    return _clear(composed, epsilon, width) and not _is_cut(composed, parts, composed.delta(epsilon, upper=True), width)


def _is_cut(composed: Composed, parts: Parts, bound: float, width: float) -> bool:
    """Whether the mass that was cut off the tails, which counts as infinite, makes up more than ``width`` of ``bound``."""
    return composed.infinite - infinite_mass(parts) > width * bound


def _clear(composed: Composed, epsilon: float, width: float) -> bool:
    """Whether the mass lost at the ends of the window is negligible at ``epsilon``."""
    with np.errstate(all="ignore"):  # far from the saddle point the loss may be infinite, and then it is not clear
        return composed.delta(epsilon, upper=True) <= (1 + 2 * width) * composed.delta(epsilon, upper=False)


def _composed_deltas(parts: Parts, epsilon: float, width: float, simple: float, *, upper: bool) -> Iterator[Composed]:
    """Compositions until one bounds delta as well as the wanted width, each made for a better guess of delta.

    The first is made for the saddle point at ``epsilon``. Where rare large losses matter its estimate of delta is off by orders of
    magnitude; the later ones are made for the delta that the bounds before them say, as for a question about epsilon.
    """
    at = saddle_for_epsilon(Allowance(parts, 1e-30).moments, epsilon)
    allowed = Allowance(parts, min(math.exp(min(max(at.log_delta, -598.0), 0.0)), 0.5))
    at, best = saddle_for_epsilon(allowed.moments, epsilon), simple
    for attempt in range(HEURISTICS.attempts + 2):
        error = width / at.slope / 4 ** max(0, attempt - 1)
        composed = compose(*allowed.refined(at, error).discretised(at, error, upper=upper))
        yield composed
        bound, before = composed.delta(epsilon, upper=upper), best
        best = min(best, bound) if upper else max(best, bound)
        clear = _clear(composed, epsilon, width)
        cut = _is_cut(composed, parts, bound, width)  # the guess was too large for these tails
        stuck = attempt > 1 and abs(before - best) <= 1e-2 * best
        if (clear or stuck) and not cut:
            return
        guess = min(max(best if best > 0 else allowed.delta, 1e-260), 0.5)
        allowed = Allowance(parts, guess, allowed.share if clear else allowed.share / 1000)
        at = saddle_at(allowed.moments, guess)
