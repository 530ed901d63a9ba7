r"""From Rényi divergences to (epsilon, delta): the improved conversion, minimised over the order.

A mechanism with D_alpha <= r is (epsilon, delta)-DP for

    epsilon = r + ln((alpha - 1)/alpha) - (ln delta + ln alpha)/(alpha - 1)

(Canonne, Kamath and Steinke 2020, proposition 12; Balle et al. 2020, theorem 21). It is below Mironov's
r + ln(1/delta)/(alpha - 1) at every order. A bound holds at each order, hence for the smallest over all of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

from hushgrad.accounting._numeric import Shares, least_over_orders, positive_up, revealed, up

Curve = Callable[[float], float]
_ROUNDING = 2.0**-48  # sixteen times that of a double: a divergence is a handful of operations


def epsilon_from_renyi(curve: Curve, delta: float) -> float:
    """The smallest epsilon that the Rényi divergences ``curve(alpha)`` prove at ``delta``.

    >>> round(epsilon_from_renyi(lambda alpha: alpha / 2, 1e-5), 3)  # Gaussian, sigma = 1; the truth is 4.377
    4.728
    """
    if delta <= 0.0:
        return up(max(0.0, curve(math.inf)))
    log_delta = math.log(delta)

    def bound(alpha: float) -> float:
        return curve(alpha) + math.log1p(-1.0 / alpha) - (log_delta + math.log(alpha)) / (alpha - 1.0)

    def hopeless(alpha: float, best: float) -> bool:  # divergences grow with the order, the other terms are bounded below
        return curve(alpha) + math.log1p(-1.0 / alpha) - math.log(alpha) / (alpha - 1.0) >= best

    epsilon = least_over_orders(bound, hopeless=hopeless)
    limit = curve(math.inf)  # pure differential privacy, where there is any
    return up(max(0.0, min(epsilon, limit)))


def delta_from_renyi(curve: Curve, epsilon: float) -> float:
    """The smallest delta that the Rényi divergences ``curve(alpha)`` prove at ``epsilon``.

    >>> 1e-5 <= delta_from_renyi(lambda alpha: alpha / 2, 4.728) < 1.01e-5
    True
    """
    if epsilon >= curve(math.inf):
        return 0.0

    def bound(alpha: float) -> float:
        size = curve(alpha)
        rounding = _ROUNDING * (1.0 + size + epsilon)  # of a difference that orders of 1e10 multiply
        return (alpha - 1.0) * (size - epsilon + math.log1p(-1.0 / alpha) + rounding) - math.log(alpha)

    def hopeless(alpha: float, best: float) -> bool:
        return curve(alpha) > epsilon and bound(alpha) > best + 20.0

    return positive_up(math.exp(min(0.0, least_over_orders(bound, hopeless=hopeless))))


def delta_beside(delta: float, shares: Shares) -> float:
    """The total delta if everything is revealed with the probabilities ``shares``, and otherwise it is ``delta``."""
    lost = revealed(shares)
    return min(1.0, delta if lost == 0.0 else lost if delta == 0.0 else up(lost + (1.0 - lost) * delta))


class RenyiLoss(ABC):
    """A loss known by its Rényi divergences, except for what is ``revealed`` outright with some probabilities."""

    revealed: Shares

    @abstractmethod
    def renyi(self, alpha: float) -> float:
        """The Rényi divergence of order ``alpha`` (a bound on it, in both directions)."""

    def epsilon(self, delta: float) -> float:
        """The best conversion over all orders."""
        lost = revealed(self.revealed)
        if delta < lost or lost == 1.0:
            return math.inf
        return epsilon_from_renyi(self.renyi, delta if lost == 0.0 else (delta - lost) / (1.0 - lost) * (1.0 - _ROUNDING))

    def delta(self, epsilon: float) -> float:
        """The best conversion over all orders."""
        return delta_beside(delta_from_renyi(self.renyi, epsilon), self.revealed)
