r"""Textbook bounds on the excess risk of private convex learning, with explicit constants.

n records, d parameters, an L-Lipschitz convex loss averaged over the records, a domain of diameter D. Every bound is at most L D, which
any point of the domain achieves.

| method | rate |
|---|---|
| output perturbation | L D (√d / εn)^{1/2} (one lecture slide prints the exponent 2: a slip) |
| objective perturbation, DP-GD | L D √d / εn |
"""

from __future__ import annotations

import math

from hushgrad import _check
from hushgrad.accounting.classical import dp_gd_sigma
from hushgrad.accounting.gaussian import gaussian_mu


def output_perturbation_regularised(*, n: int, d: int, epsilon: float, delta: float, lipschitz: float, l2: float) -> float:
    """E[L(w_priv) - L(w*)] <= 2 √2 L² √(d ln(1.25/δ)) / (ε μ n) for a μ-strongly convex regulariser, μ = ``l2``, ε < 1 (lecture 9).

    >>> round(output_perturbation_regularised(n=10_000, d=10, epsilon=0.5, delta=1e-5, lipschitz=1.0, l2=0.1), 3)
    0.061
    """
    _conditions(n, d, epsilon, delta)
    return 2 * math.sqrt(2) * lipschitz**2 * math.sqrt(d * math.log(1.25 / delta)) / (epsilon * l2 * n)


def output_perturbation(*, n: int, d: int, epsilon: float, delta: float, lipschitz: float, diameter: float) -> float:
    """The bound for the best regulariser: μD²/2 + K/μ is least at μ = √(2K)/D, where it is D √(2K) = O(LD (√d/εn)^{1/2}).

    >>> round(output_perturbation(n=10_000, d=10, epsilon=0.5, delta=1e-5, lipschitz=1.0, diameter=1.0), 2)
    0.11
    """
    price = output_perturbation_regularised(n=n, d=d, epsilon=epsilon, delta=delta, lipschitz=lipschitz, l2=1.0)
    return min(lipschitz * diameter, diameter * math.sqrt(2 * price))


def objective_perturbation(
    *, n: int, d: int, epsilon: float, delta: float, lipschitz: float, diameter: float, smoothness: float
) -> float:
    """√d σ D/n, for the λ that balances the noise's dσ²/2λ and the regulariser's λD²/2, both over n.

    A λ-strongly convex objective with gradient b at w exceeds its minimum by at most ‖b‖²/2λ. Half of ε is left to the curvature, so λ is
    at least 2β/ε as in Kifer, Smith and Thakurta 2012; σ is that of the two-vertex bound.

        >>> round(objective_perturbation(n=10_000, d=10, epsilon=0.5, delta=1e-5, lipschitz=1.0, diameter=1.0, smoothness=0.25), 4)
        0.0044
    """
    _conditions(n, d, epsilon, delta)
    sigma = lipschitz / gaussian_mu(epsilon / 2, delta / 2)
    l2 = max(math.sqrt(d) * sigma / diameter, smoothness / math.expm1(epsilon / 2))
    return min(lipschitz * diameter, (d * sigma**2 / (2 * l2) + l2 * diameter**2 / 2) / n)


def gradient_descent(
    *, n: int, d: int, epsilon: float, delta: float, lipschitz: float, diameter: float, steps: int | None = None
) -> float:
    """2 D G (2 + ln T)/√T with G² = L² + dσ² and the lectures' σ = 8L√T/(εn) (ln(1.25/δ) + ln(T + 1)); the best T if none is given.

    Shamir and Zhang 2013, theorem 2, for the last iterate with steps D/(G√t). The same bound holds for DP-SGD with the lectures'
    amplified σ.

        >>> gradient_descent(n=1_000_000, d=10, epsilon=0.5, delta=1e-5, lipschitz=1.0, diameter=1.0) < 0.05
        True
    """
    _conditions(n, d, epsilon, delta)
    choices = [steps] if steps is not None else [2**k for k in range(41)]
    return min(lipschitz * diameter, min(_descent(t, n, d, epsilon, delta, lipschitz, diameter) for t in choices))


def _descent(steps: int, n: int, d: int, epsilon: float, delta: float, lipschitz: float, diameter: float) -> float:
    sigma = dp_gd_sigma(epsilon=epsilon, delta=delta, lipschitz=lipschitz, dataset_size=n, steps=steps)
    size = math.sqrt(lipschitz**2 + d * sigma**2)
    return 2 * diameter * size * (2 + math.log(steps)) / math.sqrt(steps)


def _conditions(n: int, d: int, epsilon: float, delta: float) -> None:
    _check.positive_int(n=n)
    _check.positive_int(d=d)
    _check.between(0, 1, remedy="The lectures' bounds are stated for epsilon < 1.", epsilon=epsilon)
    _check.delta(delta=delta)
