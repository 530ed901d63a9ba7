"""The rules of the kinds of filters: what they add up, and when the budget is used up. The theorems are in ``filters``."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from typing import Protocol

from hushgrad import _check
from hushgrad._printed import above, at_most
from hushgrad.accounting._numeric import smallest_true
from hushgrad.accounting.api import loss_of
from hushgrad.accounting.base import Loss
from hushgrad.accounting.basic import Terms
from hushgrad.accounting.gaussian import gaussian_mu
from hushgrad.accounting.gdp import GDPLoss
from hushgrad.accounting.heuristics import HEURISTICS
from hushgrad.accounting.rdp import RDPLoss
from hushgrad.accounting.zcdp import ZCDPLoss
from hushgrad.errors import NoTheorem
from hushgrad.events import Event, Relation


def _orders(first: float, last: float, step: float) -> list[float]:
    return [1.0 + math.exp(step * k) for k in range(round(first / step), round(last / step))]


_ORDERS, _FINE_ORDERS = _orders(*HEURISTICS.order_logs), _orders(*HEURISTICS.fine_order_logs)

Cost = float | Fraction  # sums of doubles are exact


class FilterRule(Protocol):
    """What a kind of filter adds up, and when its budget is used up; ``accountant`` analyses the steps."""

    accountant: str

    def cost(self, loss: Loss) -> tuple[Cost, ...]:
        """What a step adds."""

    def used(self, spent: tuple[Cost, ...]) -> float:
        """The fraction of the budget that is used: at most 1 is within."""


def rule_of(kind: str, epsilon: float, delta: float, order: float | None) -> FilterRule:
    """The rule of a kind of filter."""
    if kind == "basic":
        return _Basic(epsilon, delta)
    if kind == "advanced":
        return _Advanced(epsilon, delta)
    if kind == "gdp":
        return _Gdp(gaussian_mu(epsilon, delta) ** 2)
    if kind == "rdp":
        return _Rdp(epsilon, delta, order)
    return _Zcdp(_rho_for(epsilon, delta))


def _pairs(loss: Loss) -> list[tuple[float, float, int]]:
    """(epsilon, delta, times) of steps with one statement each."""
    if not isinstance(loss, Terms) or any(s.flexible for s, _ in loss.terms):
        raise NoTheorem("This kind of filter needs steps with one (epsilon, delta) each. For Gaussians use kind='gdp'.")
    return [(s.epsilon(s.fixed), s.fixed, n) for s, n in loss.terms]


class _Basic:
    """Exact sums of the decimals that the numbers are written as: ten steps of 0.1 use up a budget of 1 exactly."""

    accountant = "basic"

    def __init__(self, epsilon: float, delta: float) -> None:
        self._epsilon, self._delta = _decimal(epsilon), _decimal(delta)

    def cost(self, loss: Loss) -> tuple[Cost, ...]:
        pairs = _pairs(loss)
        if any(math.isinf(e) for e, _, _ in pairs):
            return (math.inf, math.inf)
        return (sum(_decimal(e) * n for e, _, n in pairs), sum(_decimal(d) * n for _, d, n in pairs))

    def used(self, spent: tuple[Cost, ...]) -> float:
        if math.inf in spent:
            return math.inf
        return above(max(Fraction(spent[0]) / self._epsilon, Fraction(spent[1]) / self._delta))


def _total(spent: Cost) -> float:
    """A sum as a double, rounded up."""
    return above(Fraction(spent)) if is_finite(spent) else math.inf


def is_finite(cost: Cost) -> bool:
    """Whether a cost is finite; a Fraction always is, even if it exceeds every double."""
    return isinstance(cost, Fraction) or math.isfinite(cost)


def _decimal(x: float) -> Fraction:
    return Fraction(repr(x))


class _Advanced:
    accountant = "basic"

    def __init__(self, epsilon: float, delta: float) -> None:
        self._epsilon, self._half = epsilon, delta / 2.0  # one half for the theorem, one for the steps' own deltas

    def cost(self, loss: Loss) -> tuple[Cost, ...]:
        pairs = _pairs(loss)
        return (sum(e * e * n for e, _, n in pairs), sum(d * n for _, d, n in pairs))

    def used(self, spent: tuple[Cost, ...]) -> float:
        squares = _total(spent[0])
        epsilon = math.sqrt(2.0 * math.log(1.0 / self._half) * squares) + squares / 2.0
        return max(epsilon / self._epsilon, _total(spent[1]) / self._half)


class _Gdp:
    accountant = "gdp"

    def __init__(self, mu_squared: float) -> None:
        self._mu_squared = mu_squared

    def cost(self, loss: Loss) -> tuple[Cost, ...]:
        assert isinstance(loss, GDPLoss)
        return (loss.mu_squared,)

    def used(self, spent: tuple[Cost, ...]) -> float:
        return _total(spent[0]) / self._mu_squared


class _Zcdp:
    accountant = "zcdp"

    def __init__(self, rho: float) -> None:
        self._rho = rho

    def cost(self, loss: Loss) -> tuple[Cost, ...]:
        assert isinstance(loss, ZCDPLoss)
        if loss.revealed:
            raise NoTheorem("A zcdp filter takes rho-zCDP steps, not ApproxDP ones. Use kind='basic' or kind='advanced'.")
        return (loss.rho,)

    def used(self, spent: tuple[Cost, ...]) -> float:
        return _total(spent[0]) / self._rho


class _Rdp:
    accountant = "rdp"

    def __init__(self, epsilon: float, delta: float, order: float | None) -> None:
        # The theorem holds for one order only, fixed in advance.
        self._order = _default_order(epsilon, delta) if order is None else _check.between(1, 1e9, order=order)
        a = self._order
        self._bound = _room(a, epsilon, delta)
        if self._bound <= 0.0 and order is None:
            raise NoTheorem(f"No Rényi order leaves room for epsilon={at_most(epsilon, 6)}. Use another kind of filter.")
        if self._bound <= 0.0:
            _check.fail("order", a, f"to leave room for epsilon={at_most(epsilon, 6)}", "Use a larger order.")

    def cost(self, loss: Loss) -> tuple[Cost, ...]:
        assert isinstance(loss, RDPLoss)
        if loss.revealed:
            raise NoTheorem("An rdp filter takes steps with finite Rényi divergences, not ApproxDP ones. Use kind='basic'.")
        return (loss.renyi(self._order),)

    def used(self, spent: tuple[Cost, ...]) -> float:
        return _total(spent[0]) / self._bound


def _rho_for(epsilon: float, delta: float) -> float:
    """The largest rho that the optimised conversion allows: 1/rho is searched, so that rho is rounded down."""

    def fits(inverse: float) -> bool:
        return ZCDPLoss(1.0 / inverse).epsilon(delta) <= epsilon

    high = 1.0
    while not fits(high):
        high *= 4.0
    return 1.0 / smallest_true(fits, 1e-9, high, tolerance=1e-9)


@lru_cache(maxsize=256)
def order_for(plan: Event, epsilon: float, delta: float, relation: Relation) -> float | None:
    """A Rényi order at which nearly the largest number of copies of ``plan`` fits the budget; None if its divergences are infinite.

    Among the orders that admit 85 % of the largest number, the one nearest to the budget's own best order: other steps may follow.

    The order depends on the plan and the budget alone, which are public and fixed in advance, as the filter's theorem requires.
    """
    loss = loss_of(plan, "rdp", relation)
    if not isinstance(loss, RDPLoss):
        return None

    def share(order: float) -> float:
        room = _room(order, epsilon, delta)
        return loss.renyi(order) / room if room > 0.0 else math.inf

    shares = {order: share(order) for order in _ORDERS}
    best = min(shares, key=lambda order: shares[order])
    if math.isinf(shares[best]):
        return None
    around = [1.0 + (best - 1.0) * math.exp(0.01 * k) for k in range(-14, 15)]  # where divergences jump, a few per cent matter
    shares |= {order: share(order) for order in around}
    least = min(shares.values())
    usual, wide = math.log(_default_order(epsilon, delta) - 1.0), least / HEURISTICS.most_copies
    # a plan that fits only at its best order must still fit
    good = [order for order, used in shares.items() if used <= (wide if wide <= 1.0 else max(least, 1.0))]
    return min(good, key=lambda order: abs(math.log(order - 1.0) - usual))


def _room(order: float, epsilon: float, delta: float) -> float:
    """The Rényi divergence of this order that (epsilon, delta) allows."""
    return epsilon - math.log1p(-1.0 / order) + (math.log(delta) + math.log(order)) / (order - 1.0)


@lru_cache(maxsize=256)
def _default_order(epsilon: float, delta: float) -> float:
    """The smallest order that admits a share of the Gaussian steps that the best one does (``Heuristics.least_copies``).

    Nothing is known about the steps. Those on samples have divergences that jump at an order of their own, and below it small ones: a lower
    order costs Gaussian steps a little and admits more of the others.
    """
    rooms = {order: max(_room(order, epsilon, delta), 0.0) / order for order in _FINE_ORDERS}
    most = max(rooms.values())
    return min((order for order, room in rooms.items() if room >= HEURISTICS.least_copies * most > 0.0), default=_FINE_ORDERS[-1])
