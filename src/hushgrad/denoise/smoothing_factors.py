"""The factors gamma and beta of DP-LSSGD, by which Laplacian smoothing reduces noise, in closed form."""

from __future__ import annotations

import math

from hushgrad import _check


def decay_rate(sigma: float) -> float:
    """The rate θ at which the kernel of A_σ⁻¹ decays: its taps are α^|k| tanh(θ/2) with α = exp(-θ).

    α + 1/α = 2 + 1/σ gives sinh²(θ/2) = 1/(4σ); unlike (2σ + 1 - sqrt(4σ + 1)) / 2σ this form cancels nothing, whether σ is tiny
    or huge, and tanh(θ/2) = 1/sqrt(4σ + 1) is the kernel's normaliser.
    """
    return 2.0 * math.asinh(0.5 / math.sqrt(sigma))


def gamma(sigma: float, d: int) -> float:
    r"""E ⟨z, A_σ⁻¹ z⟩ / d for standard Gaussian z in d dimensions: the factor in DP-LSSGD's convex utility bound.

    γ = 1/d Σ_i 1 / (1 + 2σ - 2σ cos(2πi/d)) = tanh(θ/2) / tanh(dθ/2), with θ of :func:`decay_rate`.
    It falls to 1/sqrt(4σ + 1) as d grows, and not to 0 as the remark in the paper's Proposition 5 says.

    >>> round(gamma(1.0, 1000), 3), round(1 / math.sqrt(5), 3)
    (0.447, 0.447)

    Reference: Wang et al., "DP-LSSGD", MSML 2020, Theorem 4, Proposition 5 and Table 3.
    """
    sigma, d = _check.non_negative(sigma=sigma), _check.positive_int(d=d)
    if sigma == 0:
        return 1.0
    theta = decay_rate(sigma)
    return math.tanh(theta / 2) / math.tanh(d * theta / 2)


def beta(sigma: float, d: int) -> float:
    r"""E ‖A_σ⁻¹ z‖² / d for standard Gaussian z in d dimensions: the share of the noise's variance that smoothing leaves.

    β = 1/d Σ_i 1 / (1 + 2σ - 2σ cos(2πi/d))² = (1 + 2σ) / ((1 + 4σ)^1.5 tanh(dθ/2)) + 2d q / ((1 + 4σ) (1 - q)²), q = exp(-dθ).
    It tends to (1 + 2σ) / (1 + 4σ)^1.5 as d grows.

    >>> round(beta(1.0, 1000), 3), round(3 / 5**1.5, 3)
    (0.268, 0.268)

    Reference: Wang et al., "DP-LSSGD", MSML 2020, Theorem 7, Proposition 8 and Table 4.
    """
    sigma, d = _check.non_negative(sigma=sigma), _check.positive_int(d=d)
    if sigma == 0:
        return 1.0
    x = d * decay_rate(sigma)
    wrapped = 2 * d * math.exp(-x) / math.expm1(-x) ** 2
    return (1 + 2 * sigma) / (math.pow(1 + 4 * sigma, 1.5) * math.tanh(x / 2)) + wrapped / (1 + 4 * sigma)
