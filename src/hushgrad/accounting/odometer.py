"""An odometer: instead of a budget, a running bound on the privacy loss of adaptively chosen steps, valid at all times at once."""

from __future__ import annotations

import math
from fractions import Fraction

from hushgrad import _check
from hushgrad._printed import above
from hushgrad.accounting.api import loss_of
from hushgrad.accounting.base import Unbounded
from hushgrad.accounting.zcdp import ZCDPLoss
from hushgrad.errors import NoTheorem
from hushgrad.events import Event, Relation


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
