r"""Privacy filters and odometers: budgets that are spent adaptively.

An ordinary composition theorem fixes the epsilons in advance. If the next step's noise is chosen after looking at the last
step's output, the *parameters* are random, and the theorem does not apply. A **filter** is a stopping rule: it admits steps
as long as the budget holds, and whatever was admitted is (epsilon, delta)-DP together. An **odometer** has no budget; it gives
a running bound on the privacy loss that holds at all times at once.

| kind of filter | rule | theorem |
|---|---|---|
| ``"basic"`` | sum of epsilon_i <= epsilon, sum of delta_i <= delta | Rogers et al. 2016 |
| ``"advanced"`` | sqrt(2 S ln(1/d)) + S/2 <= epsilon, S = sum eps_i²; sum delta_i <= delta - d | Whitehouse et al. 2023 |
| ``"zcdp"`` | sum of rho_i <= rho | Feldman and Zrnic 2021 (at every order), Whitehouse et al. 2023 |
| ``"rdp"`` | sum of D_alpha <= bound, at one order fixed in advance | Feldman and Zrnic 2021 |
| ``"gdp"`` | sum of mu_i² <= mu², Gaussian steps | Smith and Thakurta 2022; Koskela et al. 2023 |
"""

from __future__ import annotations

import math
from typing import Protocol

from hushgrad import _check
from hushgrad._printed import at_most
from hushgrad.accounting._numeric import smallest_true
from hushgrad.accounting.api import loss_of
from hushgrad.accounting.base import Loss, Nothing, Unbounded
from hushgrad.accounting.composition import Terms
from hushgrad.accounting.gaussian import gaussian_mu
from hushgrad.accounting.gdp import GDPLoss
from hushgrad.accounting.rdp import RDPLoss
from hushgrad.accounting.zcdp import ZCDPLoss
from hushgrad.errors import BudgetExceeded, NoTheorem
from hushgrad.events import Event, Relation

__all__ = ["Filter", "Odometer"]


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
        kind: str = "zcdp",
        relation: Relation | str = Relation.ADD_REMOVE,
        order: float | None = None,
    ) -> None:
        self.epsilon, self.delta = _check.positive(epsilon=epsilon), _check.delta(delta=delta)
        self.kind = _check.one_of(("advanced", "basic", "gdp", "rdp", "zcdp"), kind=kind)
        self.relation = Relation.of(relation)
        if order is not None and self.kind != "rdp":
            _check.fail("order", order, "to be given for kind='rdp' only")
        self._rule = _rule(self.kind, self.epsilon, self.delta, order)
        self._spent: tuple[float, ...] = ()

    @property
    def used(self) -> float:
        """The fraction of the budget that the admitted steps used."""
        return self._rule.used(self._spent) if self._spent else 0.0

    def admits(self, event: Event) -> bool:
        """Whether ``event`` fits into what is left."""
        return self._rule.used(self._after(event)) <= 1.0

    def spend(self, event: Event) -> None:
        """Admit ``event``, which happens next.

        Raises:
            BudgetExceeded: if it does not fit; nothing is recorded then, and the step must not be taken.
        """
        after = self._after(event)
        if not self._rule.used(after) <= 1.0:
            raise BudgetExceeded(
                f"Expected event={event} to fit into the budget epsilon={at_most(self.epsilon, 6)}, delta={at_most(self.delta, 6)}: "
                f"{self.used:.1%} of it is used. The step was not taken."
            )
        self._spent = after

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
    if kind == "zcdp":
        return _Zcdp(_rho_for(epsilon, delta))
    return _Rdp(epsilon, delta, order)


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
        self._bound = epsilon - math.log1p(-1.0 / a) + (math.log(delta) + math.log(a)) / (a - 1.0)
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


def _default_order(epsilon: float, delta: float) -> float:
    """The order at which a zCDP budget of this size would be converted: 1 + sqrt(ln(1/delta)/rho)."""
    return 1.0 + math.sqrt(math.log(1.0 / delta) / _rho_for(epsilon, delta))


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
        self._rho = 0.0

    @property
    def rho(self) -> float:
        """The sum of the rhos so far."""
        return self._rho

    def spend(self, event: Event) -> None:
        """Record ``event``, which happens next. Without a rho (no privacy), the odometer shows infinity from then on."""
        loss = loss_of(event, "zcdp", self.relation)
        if isinstance(loss, Unbounded):
            self._rho = math.inf
        elif isinstance(loss, ZCDPLoss):
            if loss.log_kept < 0.0:
                raise NoTheorem("The odometer takes rho-zCDP steps, not ApproxDP ones.")
            self._rho += loss.rho

    def epsilon(self) -> float:
        """The bound on the privacy loss of everything so far."""
        if self._rho == 0.0:
            return 0.0
        if math.isinf(self._rho):
            return math.inf
        return min(self._level(k) for k in range(80))

    def _level(self, k: int) -> float:
        log_inverse = math.log(math.pi**2 * (k + 1) ** 2 / (6.0 * self.delta))
        slope = math.sqrt(log_inverse / (self._first * 2.0**k))  # alpha - 1, fixed in advance for this level
        return (1.0 + slope) * self._rho + log_inverse / slope
