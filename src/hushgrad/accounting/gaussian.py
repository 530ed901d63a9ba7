r"""The Gaussian mechanism, exactly.

A Gaussian mechanism whose two outputs are mu standard deviations apart (mu = sensitivity / sigma) has

    delta(epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)

(Balle and Wang 2018, theorem 8). With x = epsilon/mu - mu/2, y = epsilon/mu + mu/2 and the Mills ratio R(t) = Phi(-t)/phi(t)
it is phi(x) (R(x) - R(y)), which has no overflow and, unlike the printed form, loses no digits in the far tail.
"""

from __future__ import annotations

import math
from functools import lru_cache

from scipy.special import erfcx, log_ndtr, ndtr

from hushgrad import _check
from hushgrad.accounting._numeric import positive_up, smallest_true, up

_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)
_FARTHEST = 1e150  # its square is still a number
_ULPS = 32 * 2.0**-52  # erfcx is accurate to a few units in the last place; the rest is headroom


def _mills(t: float) -> float:
    return math.sqrt(math.pi / 2.0) * float(erfcx(t / math.sqrt(2.0)))


def gaussian_delta(mu: float, epsilon: float) -> float:
    r"""The delta of a Gaussian mechanism at distance ``mu``: exact, rounded up.

    **Formal guarantee.** For N(0, s²) noise and outputs at most mu s apart, the mechanism is (epsilon, delta)-DP with the
    returned delta and with none that is smaller by more than rounding.

        >>> round(gaussian_delta(1.0, 1.0), 6)
        0.126937

    Reference: Balle and Wang, "Improving the Gaussian mechanism for differential privacy", ICML 2018, theorem 8.
    """
    mu = _check.non_negative(mu=mu)
    epsilon = _check.non_negative(epsilon=epsilon)
    if mu == 0.0:
        return 0.0
    far = min(epsilon / mu, _FARTHEST)
    x, y = far - mu / 2.0, far + mu / 2.0
    if x < -3.0:  # far from the tail: nothing cancels, and the Mills ratio would overflow
        return min(1.0, up(float(ndtr(-x)) - math.exp(min(0.0, epsilon + float(log_ndtr(-y))))))
    if mu < 1e-4:  # R(x) - R(y) is the integral of D(t) = 1 - t R(t); midpoint rule, its remainder mu³ D''/24 with D'' <= 6 D²
        middle = 0.5 * (x + y)
        slope = 1.0 - middle * _mills(middle)
        difference = mu * slope + mu**3 * slope * slope / 2.0
        difference += _ULPS * mu
    else:
        difference = _mills(x) - _mills(y) + _ULPS * _mills(x)
    return min(1.0, positive_up(difference * math.exp(-0.5 * x * x - _LOG_SQRT_2PI)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The smallest epsilon of a Gaussian mechanism at distance ``mu`` for this ``delta``, rounded up.

    >>> round(gaussian_epsilon(1.0, 1e-5), 6)
    4.377178
    """
    mu = _check.non_negative(mu=mu)
    delta = _check.delta(delta=delta)
    high = mu * mu / 2.0 + mu * math.sqrt(2.0 * math.log(1.0 / delta)) + 1e-300  # Chernoff: always enough
    return smallest_true(lambda epsilon: gaussian_delta(mu, epsilon) <= delta, 0.0, high * (1.0 + 1e-9), tolerance=1e-13)


@lru_cache(maxsize=256)
def gaussian_mu(epsilon: float, delta: float) -> float:
    """The largest distance mu at which a Gaussian mechanism is still (``epsilon``, ``delta``)-DP, rounded down.

    >>> round(1 / gaussian_mu(1.0, 1e-5), 4)
    3.7306
    """
    epsilon = _check.non_negative(epsilon=epsilon)
    delta = _check.delta(delta=delta)
    high = 1.0
    while gaussian_delta(high, epsilon) <= delta:
        high *= 2.0
    inverse = smallest_true(lambda s: gaussian_delta(1.0 / s, epsilon) <= delta, 0.5 / high, _enough(epsilon, delta))
    return 1.0 / inverse


def _enough(epsilon: float, delta: float) -> float:
    sigma = 1.0
    while gaussian_delta(1.0 / sigma, epsilon) > delta:
        sigma *= 2.0
    return sigma
