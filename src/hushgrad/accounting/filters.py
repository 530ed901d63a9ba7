r"""Privacy filters: budgets that are spent adaptively.

An ordinary composition theorem fixes the epsilons in advance. If the next step's noise is chosen after looking at the last
step's output, the *parameters* are random, and the theorem does not apply. A **filter** is a stopping rule: it admits steps
as long as the budget holds, and whatever was admitted is (epsilon, delta)-DP together. An **odometer** has no budget: it is a
running bound on what was spent, valid at all times at once.

| kind of filter | rule | theorem |
|---|---|---|
| ``"basic"`` | sum of epsilon_i <= epsilon, sum of delta_i <= delta | Rogers et al. 2016 |
| ``"advanced"`` | sqrt(2 S ln(1/d)) + S/2 <= epsilon, S = sum eps_i²; sum delta_i <= delta - d | Whitehouse et al. 2023 |
| ``"zcdp"`` | sum of rho_i <= rho | Feldman and Zrnic 2021 (at every order), Whitehouse et al. 2023 |
| ``"pool"`` | every step uses up copies of a step of the declared plan that dominates it | ``accounting/reference_pool.py`` |
| ``"rdp"`` | sum of D_alpha <= bound, at one order fixed in advance (from a plan, if one is given) | Feldman and Zrnic 2021 |
| ``"gdp"`` | sum of mu_i² <= mu², Gaussian steps | Smith and Thakurta 2022; Koskela et al. 2023 |

To compose what was spent by a privacy-loss distribution and stop at the budget is *no* filter: choices made after looking break it.
"""

from __future__ import annotations

import math
from copy import deepcopy
from fractions import Fraction

from hushgrad import _check
from hushgrad._printed import above, at_most
from hushgrad.accounting.api import loss_of
from hushgrad.accounting.base import Nothing, Unbounded
from hushgrad.accounting.filter_rules import Cost, is_finite, order_for, rule_of
from hushgrad.accounting.reference_pool import Pool
from hushgrad.accounting.zcdp import ZCDPLoss
from hushgrad.errors import BudgetExceeded, NoTheorem
from hushgrad.events import Event, Relation


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
        self._rule = rule_of(self.kind, self.epsilon, self.delta, order)
        self._spent: tuple[Cost, ...] = ()

    def _checked_pool(self, plan: Event) -> Pool:
        cost = loss_of(plan, "pld", self.relation).epsilon(self.delta)
        if not cost <= self.epsilon:
            _check.fail("plan", str(plan), f"to fit into the budget: it costs epsilon={at_most(cost, 6)}")
        return Pool(plan)

    @property
    def used(self) -> float:
        """The fraction of the budget that the admitted steps used; for a pool, by the epsilon of the references used up."""
        if self._pool is not None:
            return self._share_of(self._pool)
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
        return self._share_of(pool) if pool.take(event) else math.inf

    def _share_of(self, pool: Pool) -> float:
        """A pool's fraction, capped at 1: a part of the plan costs no more than the plan, but may be rounded differently."""
        return min(1.0, loss_of(pool.used, "pld", self.relation).epsilon(self.delta) / self.epsilon)

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
        """The remedy to print if the default Rényi order admits none of the steps."""
        alone = (
            Filter(epsilon=self.epsilon, delta=self.delta, kind=self.kind, relation=self.relation) if self.kind == "rdp" else None
        )
        if alone is None or alone.admits(event):
            return ""
        return (
            " No such step fits at the Rényi order that suits this budget alone: give plan=, for a pool or an order of its own."
        )

    def _after(self, event: Event) -> tuple[Cost, ...]:
        loss = loss_of(event, self._rule.accountant, self.relation)
        if isinstance(loss, Unbounded):
            return (math.inf, math.inf)
        cost = (0.0, 0.0) if isinstance(loss, Nothing) else self._rule.cost(loss)
        before = self._spent or (0.0,) * len(cost)
        return tuple(_sum(a, b) for a, b in zip(before, cost, strict=False))


def _sum(a: Cost, b: Cost) -> Cost:
    """An exact sum, so that no small step is lost beside a large total; infinite if a term is."""
    return Fraction(a) + Fraction(b) if is_finite(a) and is_finite(b) else math.inf


class Odometer:
    r"""A running bound on the privacy loss of adaptively chosen zCDP steps, valid at all times at once.

    **Formal guarantee.** With probability at least 1 - delta over the outputs, the realised privacy loss ln P[out | D]/P[out |
    D'] of everything so far is at most ``epsilon()`` at *every* moment, for neighbours D, D'. (An odometer in the sense of
    Rogers et al. 2016. For a budget that is fixed in advance a :class:`Filter` is tighter.)

    Proof. For a fixed order alpha, exp((alpha - 1)(L_t - alpha rho_t)) with rho_t the sum of the rhos so far is a
    supermartingale (the rhos are predictable), so by Ville's inequality L_t <= alpha rho_t + ln(1/d)/(alpha - 1) for all t,
    except with probability d (the argument of Whitehouse et al. 2023). Take the orders that are best for rho = first 2^k,
    k = 0, 1, ..., with d_k = 6 delta/(pi² (k + 1)²), which sum to delta; ``epsilon`` is the smallest of the bounds.

        >>> from hushgrad.events import Gaussian
        >>> meter = Odometer(delta=1e-5)
        >>> for _ in range(100):
        ...     meter.spend(Gaussian(20.0))
        >>> round(meter.epsilon(), 2)  # rho = 0.125; fixed in advance it would be 2.52
        2.97
    """

    def __init__(self, *, delta: float, first: float = 1e-3, relation: Relation | str = Relation.ADD_REMOVE) -> None:
        self.delta = _check.delta(delta=delta)
        self.relation = Relation.of(relation)
        self._first = _check.positive(first=first)
        self._sum: Fraction | None = Fraction(0)  # exact, so that the smallest step counts beside any sum; None: infinite

    @property
    def rho(self) -> float:
        """The sum of the rhos so far, rounded up."""
        return math.inf if self._sum is None else above(self._sum)

    def spend(self, event: Event) -> None:
        """Record ``event``, which happens next. Without a rho (no privacy), the odometer shows infinity from then on."""
        loss = loss_of(event, "zcdp", self.relation)
        if isinstance(loss, ZCDPLoss) and loss.revealed:
            raise NoTheorem("The odometer takes rho-zCDP steps, not ApproxDP ones.")
        if isinstance(loss, Unbounded) or (isinstance(loss, ZCDPLoss) and math.isinf(loss.rho)):
            self._sum = None
        elif isinstance(loss, ZCDPLoss) and self._sum is not None:
            self._sum += Fraction(loss.rho)

    def epsilon(self) -> float:
        """The bound on the privacy loss of everything so far."""
        rho = self.rho
        return rho if rho in (0.0, math.inf) else min(self._level(k, rho) for k in range(80)) * (1 + 1e-14)

    def _level(self, k: int, rho: float) -> float:
        log_inverse = math.log(math.pi**2 * (k + 1) ** 2 / (6.0 * self.delta))
        slope = math.sqrt(log_inverse / (self._first * 2.0**k))  # alpha - 1, fixed in advance for this level
        return (1.0 + slope) * rho + log_inverse / slope
