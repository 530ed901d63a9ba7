r"""Calibration: which noise, number of steps, rate or batch meets a budget.

A search on the accountant's certified epsilon alone (``bracketing``). It ends with a certificate: a value whose epsilon is at most
the target, and a neighbour within the tolerance whose epsilon is larger; or with an error. Guesses only save evaluations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from hushgrad import _check
from hushgrad._printed import at_most
from hushgrad.accounting.base import Accountant
from hushgrad.accounting.bracketing import largest_integer
from hushgrad.accounting.calibration_target import WIDEST, Search, Target, excess, likely_noise
from hushgrad.errors import ArgumentError
from hushgrad.events import Event, Gaussian, Relation


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The certificate of a calibration: ``value`` meets the target and ``neighbour``, a tolerance away, does not.

    ``neighbour`` is None where every value in the bracket meets the target.

        >>> from hushgrad.accounting import certified_calibration
        >>> from hushgrad.events import Gaussian
        >>> found = certified_calibration(lambda noise: Gaussian(noise), epsilon=1.0, delta=1e-5)
        >>> print(f"{found.value:.4f} is enough")
        3.7307 is enough
        >>> found.epsilon <= 1.0 < found.neighbour_epsilon
        True
    """

    value: float
    epsilon: float
    neighbour: float | None
    neighbour_epsilon: float
    evaluations: int


def calibrate(
    make_event: Callable[[float], Event],
    *,
    epsilon: float,
    delta: float,
    accountant: str | Accountant = "pld",
    relation: Relation | str = Relation.ADD_REMOVE,
    bracket: tuple[float, float] | None = None,
    tolerance: float = 2e-5,
    start: float | None = None,
) -> float:
    r"""The x at which ``make_event(x)`` just meets (epsilon, delta): the smallest noise, or the largest rate.

    **Formal guarantee.** The certified epsilon of ``make_event(x)`` at the returned x is at most ``epsilon``, and at x (1 -
    ``tolerance``), or x / (1 - ``tolerance``) where epsilon rises with x, it is larger: both were evaluated
    (:func:`certified_calibration` returns them). epsilon(x) may fall (noise) or rise (rate) but must be monotone between the
    ends of ``bracket`` (default: any positive x). ``start`` is a guess; a bad one costs time only.

    Args:
        make_event: the event for an x, for example ``lambda noise: Gaussian(noise) * 100``.
        epsilon: the target that must not be exceeded.
        delta: of the target.
        accountant: who computes it: "pld" (tight, certified), "rdp", "zcdp", "gdp", "optimal", "advanced", "basic", or an accountant.
        relation: which data sets are neighbours: "add_remove", "replace_one" or "zero_out".
        bracket: the ends between which x is looked for; any positive number by default.
        tolerance: how close the answer is to the best one, relatively.
        start: a guess of x; a bad one costs time only.

        >>> from hushgrad.events import Gaussian
        >>> round(calibrate(lambda s: Gaussian(s), epsilon=1.0, delta=1e-5, accountant="gdp"), 3)
        3.731

    Raises:
        ArgumentError: where no x in the bracket meets the target (then more budget or less work is needed).
        NumericalLimit: where no such pair was found.
    """
    return certified_calibration(
        make_event,
        epsilon=epsilon,
        delta=delta,
        accountant=accountant,
        relation=relation,
        bracket=bracket,
        tolerance=tolerance,
        start=start,
    ).value


def certified_calibration(
    make_event: Callable[[float], Event],
    *,
    epsilon: float,
    delta: float,
    accountant: str | Accountant = "pld",
    relation: Relation | str = Relation.ADD_REMOVE,
    bracket: tuple[float, float] | None = None,
    tolerance: float = 2e-5,
    start: float | None = None,
) -> Calibration:
    """As :func:`calibrate`, with its certificate.

    Args:
        make_event: the event for an x.
        epsilon: the target that must not be exceeded.
        delta: of the target.
        accountant: who computes it: "pld" (tight, certified), "rdp", "zcdp", "gdp", "optimal", "advanced", "basic", or an accountant.
        relation: which data sets are neighbours: "add_remove", "replace_one" or "zero_out".
        bracket: the ends between which x is looked for; any positive number by default.
        tolerance: how close the answer is to the best one, relatively.
        start: a guess of x; a bad one costs time only.

    >>> from hushgrad.events import Gaussian
    >>> found = certified_calibration(lambda s: Gaussian(s), epsilon=1.0, delta=1e-5, accountant="gdp")
    >>> found.epsilon <= 1.0 < found.neighbour_epsilon and found.neighbour / found.value > 1 - 3e-5
    True
    """
    target = Target.of(epsilon, delta, accountant, relation)
    tolerance = _check.between(1e-9, 0.5, tolerance=tolerance)
    ends = WIDEST if bracket is None else tuple(sorted(_check.positive(bracket=end) for end in _check.several(bracket=bracket)))
    if len(ends) != 2:
        _check.fail("bracket", bracket, "to have two ends")
    low, high = ends
    guess = _check.number(start=start) if start is not None else 1.0 if bracket is None else math.sqrt(low * high)
    search = Search(lambda x: target.cost(make_event(x)), target.epsilon, low, high)
    found, neighbour = search.crossing(min(max(guess, low), high), tolerance)
    if math.isnan(found):
        _refuse(target, search, whole=bracket is None)
    if neighbour is None and bracket is None:
        raise ArgumentError(
            f"Expected epsilon={target.epsilon} to ask for something, but every value from {low:g} to {high:g} meets it. "
            "Lower delta: it may be no smaller than the probability to take part at all."
        )
    return Calibration(
        value=found,
        epsilon=search.epsilon(found),
        neighbour=neighbour,
        neighbour_epsilon=0.0 if neighbour is None else search.epsilon(neighbour),
        evaluations=len(search.seen),
    )


def _refuse(target: Target, search: Search, *, whole: bool) -> NoReturn:
    """Nothing meets the target, in the ``whole`` range or in the caller's bracket."""
    least = f"the least that is reachable is epsilon={at_most(min(search.seen.values()), 6)}"
    if whole:
        remedy = "Allow more epsilon or a larger delta, or do less."
        raise ArgumentError(f"Expected epsilon={target.epsilon} to be within reach at delta={target.delta}: {least}. {remedy}")
    where = f"the bracket from x={search.low:g} to x={search.high:g} to contain a value that meets epsilon={target.epsilon}"
    raise ArgumentError(f"Expected {where}, but {least}. Allow more epsilon, do less, or look elsewhere.")


def calibrate_noise(
    *,
    epsilon: float,
    delta: float,
    steps: int = 1,
    rate: float = 1.0,
    accountant: str | Accountant = "pld",
    relation: Relation | str = Relation.ADD_REMOVE,
) -> float:
    """The smallest noise multiplier for ``steps`` Gaussian steps on Poisson samples at ``rate``.

    Args:
        epsilon: the target that must not be exceeded.
        delta: of the target.
        steps: number of Gaussian steps.
        rate: Poisson sampling rate; 1 is the whole data in every step.
        accountant: who computes it: "pld" (tight, certified), "rdp", "zcdp", "gdp", "optimal", "advanced", "basic", or an accountant.
        relation: which data sets are neighbours: "add_remove", "replace_one" or "zero_out".

    >>> round(calibrate_noise(epsilon=1.0, delta=1e-6, steps=1000, accountant="gdp"), 2)
    133.6
    """
    steps, rate = _check.positive_int(steps=steps), _check.rate(rate=rate)
    return calibrate(
        lambda sigma: Gaussian(sigma).sampled(rate=rate) * steps,
        epsilon=epsilon,
        delta=delta,
        accountant=accountant,
        relation=relation,
        start=likely_noise(epsilon, delta, steps, rate, relation),
    )


def calibrate_steps(
    step: Event,
    *,
    epsilon: float,
    delta: float,
    most: int = 10**8,
    accountant: str | Accountant = "pld",
    relation: Relation | str = Relation.ADD_REMOVE,
) -> int:
    """The largest number of repetitions of ``step`` within the budget; 0 if not even one fits, ``most`` at the most.

    Args:
        step: what one step releases.
        epsilon: the target that must not be exceeded.
        delta: of the target.
        most: where the search ends.
        accountant: who computes it: "pld" (tight, certified), "rdp", "zcdp", "gdp", "optimal", "advanced", "basic", or an accountant.
        relation: which data sets are neighbours: "add_remove", "replace_one" or "zero_out".

    >>> calibrate_steps(Gaussian(100.0), epsilon=1.0, delta=1e-6, accountant="gdp")
    560
    """
    return _largest(lambda n: step * n, most, Target.of(epsilon, delta, accountant, relation))


def calibrate_rate(
    of: Event,
    *,
    epsilon: float,
    delta: float,
    steps: int,
    accountant: str | Accountant = "pld",
    relation: Relation | str = Relation.ADD_REMOVE,
) -> float:
    """The largest Poisson sampling rate for ``steps`` runs of ``of``; 1 if the budget allows the whole data every time.

    Args:
        of: what one step does to its sample.
        epsilon: the target that must not be exceeded.
        delta: of the target.
        steps: number of steps.
        accountant: who computes it: "pld" (tight, certified), "rdp", "zcdp", "gdp", "optimal", "advanced", "basic", or an accountant.
        relation: which data sets are neighbours: "add_remove", "replace_one" or "zero_out".

    >>> from hushgrad.events import Gaussian
    >>> print(f"{calibrate_rate(Gaussian(1.0), epsilon=2.0, delta=1e-5, steps=100):.4f}")
    0.0283
    """
    steps = _check.positive_int(steps=steps)
    return calibrate(
        lambda rate: of.sampled(rate=rate) * steps,
        epsilon=epsilon,
        delta=delta,
        accountant=accountant,
        relation=relation,
        bracket=(1e-9, 1.0),
    )


def calibrate_batch_size(
    of: Event,
    *,
    epsilon: float,
    delta: float,
    steps: int,
    dataset_size: int,
    accountant: str | Accountant = "pld",
    relation: Relation | str = Relation.ADD_REMOVE,
) -> int:
    """The largest expected batch size for ``steps`` runs of ``of`` on Poisson samples of ``dataset_size`` records, or 0.

    Args:
        of: what one step does to its sample.
        epsilon: the target that must not be exceeded.
        delta: of the target.
        steps: number of steps.
        dataset_size: a public number of records.
        accountant: who computes it: "pld" (tight, certified), "rdp", "zcdp", "gdp", "optimal", "advanced", "basic", or an accountant.
        relation: which data sets are neighbours: "add_remove", "replace_one" or "zero_out".

    >>> from hushgrad.events import Gaussian
    >>> calibrate_batch_size(Gaussian(1.0), epsilon=2.0, delta=1e-5, steps=100, dataset_size=10_000)
    282
    """
    n = _check.positive_int(dataset_size=dataset_size)
    steps = _check.positive_int(steps=steps)

    def make_event(batch_size: int) -> Event:
        return of.sampled(rate=batch_size / n) * steps

    return _largest(make_event, n, Target.of(epsilon, delta, accountant, relation))


def _largest(make_event: Callable[[int], Event], most: int, target: Target) -> int:
    """The largest n in 1..most whose certified epsilon meets the target, 0 if none does; epsilon rises with n.

    The first guess is where n times the square of the epsilon of 100 steps (or all) would be: losses add up like variances.
    """
    most = _check.positive_int(most=most)

    def g(n: int) -> float:
        return excess(target.cost(make_event(n)), target.epsilon)

    few = min(100, most)
    guess = math.floor(few * math.exp(min(max(-2 * g(few), -600.0), 30.0)))
    return largest_integer(g, guess, most)
