r"""Privacy filters: budgets that are spent adaptively.

An ordinary composition theorem fixes the epsilons in advance. If the next step's noise is chosen after looking at the last
step's output, the *parameters* are random, and the theorem does not apply. A **filter** is a stopping rule: it admits steps
as long as the budget holds, and whatever was admitted is (epsilon, delta)-DP together. (``odometer`` has no budget.)

| kind of filter | rule | theorem |
|---|---|---|
| ``"basic"`` | sum of epsilon_i <= epsilon, sum of delta_i <= delta | Rogers et al. 2016 |
| ``"advanced"`` | sqrt(2 S ln(1/d)) + S/2 <= epsilon, S = sum eps_i²; sum delta_i <= delta - d | Whitehouse et al. 2023 |
| ``"zcdp"`` | sum of rho_i <= rho | Feldman and Zrnic 2021 (at every order), Whitehouse et al. 2023 |
| ``"pool"`` | every step uses up copies of a step of the declared plan that dominates it | ``accounting/pool.py`` |
| ``"rdp"`` | sum of D_alpha <= bound, at one order fixed in advance (from a plan, if one is given) | Feldman and Zrnic 2021 |
| ``"gdp"`` | sum of mu_i² <= mu², Gaussian steps | Smith and Thakurta 2022; Koskela et al. 2023 |

To compose what was spent by a privacy-loss distribution and stop at the budget is *no* filter: choices made after looking break it.
"""

from __future__ import annotations

import math
from copy import deepcopy
from functools import lru_cache
from typing import Protocol

from hushgrad import _check
from hushgrad._printed import at_most
from hushgrad.accounting._numeric import smallest_true
from hushgrad.accounting.api import loss_of
from hushgrad.accounting.base import Loss, Nothing, Unbounded
from hushgrad.accounting.composition import Terms
from hushgrad.accounting.gaussian import gaussian_mu
from hushgrad.accounting.gdp import GDPLoss
from hushgrad.accounting.policy import POLICY
from hushgrad.accounting.pool import Pool
from hushgrad.accounting.rdp import RDPLoss
from hushgrad.accounting.zcdp import ZCDPLoss
from hushgrad.errors import BudgetExceeded, NoTheorem
from hushgrad.events import Event, Relation

__all__ = ["Filter", "order_for"]

_CALIBRATED = 1e-9  # a plan that was calibrated to exactly this budget fits, whatever its last digit
_ORDERS = [1.0 + math.exp(0.15 * k) for k in range(-20, 60)]
_FINE_ORDERS = [1.0 + math.exp(0.03 * k) for k in range(-100, 800)]  # up to 1e10: tiny epsilons need them


class _Rule(Protocol):
    """What a kind of filter adds up, and when it is full. ``accountant`` analyses the steps."""

    accountant: str

    def cost(self, loss: Loss) -> tuple[float, ...]: ...

    def used(self, spent: tuple[float, ...]) -> float:
        """The fraction of the budget that is used: at most 1 is within."""


class Filter:
    r"""A stopping rule: ``spend(event)`` admits a step or raises ``BudgetExceeded``, before the step is taken.

    **Formal guarantee.** All steps ever admitted are together (epsilon, delta)-DP under ``relation``, although each step, its
    noise and the decision to go on may depend on all outputs before (full adaptivity), by the theorem of ``kind`` (see the
    table of this module). A refused step costs nothing and is not taken; smaller ones may still be admitted.

        >>> from hushgrad.events import Gaussian
        >>> budget = Filter(epsilon=1.0, delta=1e-6, kind="gdp")
        >>> steps = 0
        >>> while budget.admits(Gaussian(100.0)):
        ...     budget.spend(Gaussian(100.0)); steps += 1
        >>> steps  # as many as if the steps had been fixed in advance: a Gaussian filter costs nothing
        560
    """

    def __init__(
        self,
        *,
        epsilon: float,
        delta: float,
        kind: str | None = None,
        relation: Relation | str = Relation.ADD_REMOVE,
        order: float | None = None,
        plan: Event | None = None,
    ) -> None:
        self.epsilon, self.delta = _check.positive(epsilon=epsilon), _check.delta(delta=delta)
        kind = ("zcdp" if plan is None else "pool") if kind is None else kind
        self.kind = _check.one_of(("advanced", "basic", "gdp", "pool", "rdp", "zcdp"), kind=kind)
        self.relation = Relation.of(relation)
        if order is not None and self.kind != "rdp":
            _check.fail("order", order, "to be given for kind='rdp' only")
        if (plan is None and self.kind == "pool") or (plan is not None and self.kind not in ("pool", "rdp")):
            _check.fail("plan", plan, "to be given for kind='pool', or for the order of kind='rdp'")
        if self.kind == "rdp" and order is None and plan is not None:
            order = order_for(plan, self.epsilon, self.delta, self.relation)
        self._pool = self._checked_pool(plan) if self.kind == "pool" and plan is not None else None
        self._rule = _rule(self.kind, self.epsilon, self.delta, order)
        self._spent: tuple[float, ...] = ()

    def _checked_pool(self, plan: Event) -> Pool:
        cost = loss_of(plan, "pld", self.relation).epsilon(self.delta)
        if not cost <= self.epsilon * (1 + _CALIBRATED):
            _check.fail("plan", str(plan), f"to fit into the budget: it costs epsilon={at_most(cost, 6)}")
        return Pool(plan)

    @property
    def used(self) -> float:
        """The fraction of the budget that the admitted steps used; of a pool, by the epsilon of the references that are used up."""
        if self._pool is not None:
            return loss_of(self._pool.used, "pld", self.relation).epsilon(self.delta) / self.epsilon
        return self._rule.used(self._spent) if self._spent else 0.0

    def admits(self, event: Event) -> bool:
        """Whether ``event`` fits into what is left."""
        if self._pool is not None:
            return deepcopy(self._pool).take(event)
        return self._rule.used(self._after(event)) <= 1.0

    def used_with(self, event: Event) -> float:
        """The fraction of the budget that is used with ``event``: above 1, or infinite, where it does not fit."""
        if self._pool is None:
            return self._rule.used(self._after(event))
        pool = deepcopy(self._pool)
        fits = pool.take(event)
        return loss_of(pool.used, "pld", self.relation).epsilon(self.delta) / self.epsilon if fits else math.inf

    def spend(self, event: Event) -> None:
        """Admit ``event``, which happens next.

        Raises:
            BudgetExceeded: if it does not fit; nothing is recorded then, and the step must not be taken.
        """
        if self._pool is not None:
            if not self._pool.take(event):
                raise BudgetExceeded(
                    f"Expected event={event} to be covered by what is left of the declared plan, {self._pool.plan}; "
                    f"used up: {self._pool.used}. The step was not taken."
                )
            return
        after = self._after(event)
        if not self._rule.used(after) <= 1.0:
            raise BudgetExceeded(
                f"Expected event={event} to fit into the budget epsilon={at_most(self.epsilon, 6)}, delta={at_most(self.delta, 6)}: "
                f"{self.used:.1%} of it is used. The step was not taken.{self._remedy(event)}"
            )
        self._spent = after

    def _remedy(self, event: Event) -> str:
        """What helps where a Rényi order that nobody chose for these steps admits none of them."""
        alone = (
            Filter(epsilon=self.epsilon, delta=self.delta, kind=self.kind, relation=self.relation) if self.kind == "rdp" else None
        )
        if alone is None or alone.admits(event):
            return ""
        return (
            " No such step fits at the Rényi order that suits this budget alone: give plan=, for a pool or an order of its own."
        )

    def _after(self, event: Event) -> tuple[float, ...]:
        loss = loss_of(event, self._rule.accountant, self.relation)
        if isinstance(loss, Unbounded):
            return (math.inf, math.inf)
        cost = (0.0, 0.0) if isinstance(loss, Nothing) else self._rule.cost(loss)
        before = self._spent or (0.0,) * len(cost)
        return tuple(a + b for a, b in zip(before, cost, strict=False))


def _rule(kind: str, epsilon: float, delta: float, order: float | None) -> _Rule:
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
    accountant = "basic"

    def __init__(self, epsilon: float, delta: float) -> None:
        self._epsilon, self._delta = epsilon, delta

    def cost(self, loss: Loss) -> tuple[float, ...]:
        pairs = _pairs(loss)
        return (sum(e * n for e, _, n in pairs), sum(d * n for _, d, n in pairs))

    def used(self, spent: tuple[float, ...]) -> float:
        # A budget of ten times 0.1 is meant to admit ten steps of 0.1, whatever the rounding of their sum.
        return max(spent[0] / self._epsilon, spent[1] / self._delta) * (1.0 - 1e-13)


class _Advanced:
    accountant = "basic"

    def __init__(self, epsilon: float, delta: float) -> None:
        self._epsilon, self._half = epsilon, delta / 2.0  # one half for the theorem, one for the steps' own deltas

    def cost(self, loss: Loss) -> tuple[float, ...]:
        pairs = _pairs(loss)
        return (sum(e * e * n for e, _, n in pairs), sum(d * n for _, d, n in pairs))

    def used(self, spent: tuple[float, ...]) -> float:
        squares = spent[0]
        epsilon = math.sqrt(2.0 * math.log(1.0 / self._half) * squares) + squares / 2.0
        return max(epsilon / self._epsilon, spent[1] / self._half)


class _Gdp:
    accountant = "gdp"

    def __init__(self, mu_squared: float) -> None:
        self._mu_squared = mu_squared

    def cost(self, loss: Loss) -> tuple[float, ...]:
        assert isinstance(loss, GDPLoss)
        return (loss.mu_squared,)

    def used(self, spent: tuple[float, ...]) -> float:
        return spent[0] / self._mu_squared


class _Zcdp:
    accountant = "zcdp"

    def __init__(self, rho: float) -> None:
        self._rho = rho

    def cost(self, loss: Loss) -> tuple[float, ...]:
        assert isinstance(loss, ZCDPLoss)
        if loss.log_kept < 0.0:
            raise NoTheorem("A zcdp filter takes rho-zCDP steps, not ApproxDP ones. Use kind='basic' or kind='advanced'.")
        return (loss.rho,)

    def used(self, spent: tuple[float, ...]) -> float:
        return spent[0] / self._rho


class _Rdp:
    accountant = "rdp"

    def __init__(self, epsilon: float, delta: float, order: float | None) -> None:
        # One order, fixed before anything is seen: the theorem holds at a fixed order only.
        self._order = _default_order(epsilon, delta) if order is None else _check.between(1, 1e9, order=order)
        a = self._order
        self._bound = _room(a, epsilon, delta)
        if self._bound <= 0.0:
            _check.fail("order", a, f"to leave room for epsilon={at_most(epsilon, 6)}", "Use a larger order.")

    def cost(self, loss: Loss) -> tuple[float, ...]:
        assert isinstance(loss, RDPLoss)
        if loss.log_kept < 0.0:
            raise NoTheorem("An rdp filter takes steps with finite Rényi divergences, not ApproxDP ones. Use kind='basic'.")
        return (loss.renyi(self._order),)

    def used(self, spent: tuple[float, ...]) -> float:
        return spent[0] / self._bound


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
    """A Rényi order at which (nearly) most copies of ``plan`` fit into the budget; None where ``plan`` has no finite divergence.

    Of the orders that admit 85 % of the most copies, the one nearest to what suits the budget alone: other steps may follow.

    The order is fixed by the plan and the budget, which are public, before anything is seen: the filter's theorem asks for no more.
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
    usual, wide = math.log(_default_order(epsilon, delta) - 1.0), least / POLICY.most_copies
    # a plan that fits only at its best order must still fit
    good = [order for order, used in shares.items() if used <= (wide if wide <= 1.0 else max(least, 1.0))]
    return min(good, key=lambda order: abs(math.log(order - 1.0) - usual))


def _room(order: float, epsilon: float, delta: float) -> float:
    """The Rényi divergence of this order that (epsilon, delta) allows."""
    return epsilon - math.log1p(-1.0 / order) + (math.log(delta) + math.log(order)) / (order - 1.0)


@lru_cache(maxsize=256)
def _default_order(epsilon: float, delta: float) -> float:
    """The smallest order that admits a share of the Gaussian steps that the best one does (``Policy.least_copies``).

    Nothing is known about the steps. Those on samples have divergences that jump at an order of their own, and below it small ones: a lower
    order costs Gaussian steps a little and admits more of the others.
    """
    rooms = {order: max(_room(order, epsilon, delta), 0.0) / order for order in _FINE_ORDERS}
    most = max(rooms.values())
    return min((order for order, room in rooms.items() if room >= POLICY.least_copies * most > 0.0), default=_FINE_ORDERS[-1])
