"""The public functions: epsilon, delta, intervals and curves, each a pure function of an event and an accountant."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Protocol, runtime_checkable

from hushgrad import _check
from hushgrad.accounting.base import Accountant, Loss
from hushgrad.errors import NoTheorem
from hushgrad.events import Event, Relation


@cache
def accountants() -> dict[str, type[Accountant]]:
    """Every accountant that :mod:`hushgrad.accounting` makes public, by name.

    >>> sorted(accountants())
    ['advanced', 'basic', 'gdp', 'optimal', 'pld', 'rdp', 'zcdp']
    """
    from hushgrad import accounting  # here: it imports this module

    public = (vars(accounting)[name] for name in accounting.__all__)
    return {
        kind.name: kind for kind in public if isinstance(kind, type) and issubclass(kind, Accountant) and kind is not Accountant
    }


@runtime_checkable
class SweptLoss(Protocol):
    """A loss that computes delta at many epsilons faster together than one by one."""

    def deltas(self, epsilons: Sequence[float]) -> list[float]:
        """Upper bounds on delta at each of ``epsilons``, which are increasing."""


def deltas_of(loss: Loss, epsilons: Sequence[float]) -> list[float]:
    """``loss.delta`` at each of ``epsilons``, which are increasing."""
    return loss.deltas(epsilons) if isinstance(loss, SweptLoss) else [loss.delta(e) for e in epsilons]


@runtime_checkable
class TwoSided(Protocol):
    """A loss that also bounds epsilon from below."""

    def epsilon_interval(self, delta: float, width: float) -> tuple[float, float]:
        """(lower, upper), certified; if possible, the upper end is at most a factor 1 + ``width`` above the lower."""


def accountant_of(accountant: str | Accountant) -> Accountant:
    """The accountant with a name such as ``"rdp"``; an accountant is returned as it is.

    >>> accountant_of("rdp").name
    'rdp'
    """
    if isinstance(accountant, Accountant):
        return accountant
    known = accountants()
    return known[_check.one_of(tuple(known), accountant=accountant)]()


def loss_of(event: object, accountant: str | Accountant, relation: Relation | str) -> Loss:
    """The loss of ``event``, which may be any description that :meth:`~hushgrad.events.Event.read` accepts; checks all arguments."""
    return accountant_of(accountant).loss(Event.read(event), Relation.of(relation))


def _delta(delta: float) -> float:
    return _check.delta(zero=True, delta=delta)


def epsilon(
    event: object, *, delta: float, accountant: str | Accountant = "pld", relation: Relation | str = Relation.ADD_REMOVE
) -> float:
    r"""The smallest epsilon that is known to hold for ``event`` at ``delta``; never below the truth, possibly infinite.

    **Formal guarantee.** For all neighbours D, D' under ``relation`` and all sets S of outputs of the computation that
    ``event`` describes, P[M(D) in S] <= e^epsilon P[M(D') in S] + delta.

        >>> from hushgrad.events import Gaussian
        >>> round(epsilon(Gaussian(1.0), delta=1e-5, accountant="gdp"), 4)
        4.3772
        >>> round(epsilon([(1.1, 0.01, 1000)], delta=1e-5), 3)
        1.515

    Args:
        event: an event, or its JSON, a dp-accounting event, an Opacus accountant or its history [(sigma, rate, steps)].
        delta: the delta of the guarantee; 0 asks for pure differential privacy.
        accountant: a name, or an accountant.
        relation: when two data sets are neighbours.

    Raises:
        NoTheorem: where the accountant has no analysis of a part of the event.
    """
    return _sane(loss_of(event, accountant, relation).epsilon(_delta(delta)))


def delta(
    event: object, *, epsilon: float, accountant: str | Accountant = "pld", relation: Relation | str = Relation.ADD_REMOVE
) -> float:
    """The smallest delta that is known to hold for ``event`` at ``epsilon``; never below the truth.

    Args:
        event: what is released, as an event; or its JSON, a dp-accounting event or an Opacus history.
        epsilon: at which delta is asked.
        accountant: who computes it: "pld" (tight, certified), "rdp", "zcdp", "gdp", "optimal", "advanced", "basic", or an accountant.
        relation: which data sets are neighbours: "add_remove", "replace_one" or "zero_out".

    >>> from hushgrad.events import Gaussian
    >>> round(delta(Gaussian(1.0), epsilon=1.0, accountant="gdp"), 6)
    0.126937
    """
    return sane_delta(loss_of(event, accountant, relation).delta(_check.non_negative(epsilon=epsilon)))


def epsilon_interval(
    event: object,
    *,
    delta: float,
    accountant: str | Accountant = "pld",
    relation: Relation | str = Relation.ADD_REMOVE,
    width: float = 1e-4,
) -> tuple[float, float]:
    """(lower, upper): the tight epsilon of the event's dominating pairs lies between, both ends certified.

    ``width`` is the wanted relative width. The lower end refutes; only the upper end may be claimed.

    Args:
        event: what is released, as an event; or its JSON, a dp-accounting event or an Opacus history.
        delta: at which epsilon is asked.
        accountant: who computes it: "pld" (tight, certified), "rdp", "zcdp", "gdp", "optimal", "advanced", "basic", or an accountant.
        relation: which data sets are neighbours: "add_remove", "replace_one" or "zero_out".
        width: the wanted relative width of the interval.

    >>> from hushgrad.events import Gaussian
    >>> low, high = epsilon_interval(1000 * Gaussian(1.1).sampled(rate=0.01), delta=1e-5)
    >>> 0 < low <= high <= 1.001 * low
    True

    Raises:
        NoTheorem: where the accountant bounds epsilon from above only (all but pld and gdp).
    """
    width = _check.positive(width=width)
    loss = loss_of(event, accountant, relation)
    if isinstance(loss, TwoSided):
        lower, upper = loss.epsilon_interval(_delta(delta), width)
        return lower, upper
    upper = _sane(loss.epsilon(_delta(delta)))
    if upper in (0.0, math.inf):
        return (upper, upper)  # nothing was done, or nothing is known to hold
    raise NoTheorem(f"The {accountant_of(accountant).name} accountant bounds epsilon from above only. Ask pld for an interval.")


def delta_curve(
    event: object,
    epsilons: Iterable[float],
    *,
    accountant: str | Accountant = "pld",
    relation: Relation | str = Relation.ADD_REMOVE,
) -> list[float]:
    """Delta at each of ``epsilons``; the event is analysed once.

    Args:
        event: what is released, as an event; or its JSON, a dp-accounting event or an Opacus history.
        epsilons: at which delta is asked.
        accountant: who computes it: "pld" (tight, certified), "rdp", "zcdp", "gdp", "optimal", "advanced", "basic", or an accountant.
        relation: which data sets are neighbours: "add_remove", "replace_one" or "zero_out".

    >>> from hushgrad.events import Gaussian
    >>> [round(d, 4) for d in delta_curve(Gaussian(1.0), [0, 1, 2], accountant="gdp")]
    [0.3829, 0.1269, 0.0209]
    """
    loss = loss_of(event, accountant, relation)
    asked = [_check.non_negative(epsilons=e) for e in epsilons]
    rising = sorted(set(asked))
    found = dict(zip(rising, deltas_of(loss, rising), strict=True))
    return [sane_delta(found[e]) for e in asked]


def _sane(x: float) -> float:
    """Fail closed: NaN becomes the worst answer, and negative numbers become 0."""
    return math.inf if math.isnan(x) else max(0.0, float(x))


def sane_delta(x: float) -> float:
    """A delta to return: within [0, 1], 1 for NaN, and either 0 or a normal double, so that it is a valid argument again."""
    delta = min(_sane(x), 1.0)
    return max(delta, sys.float_info.min) if delta > 0.0 else 0.0
