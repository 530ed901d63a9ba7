r"""Rényi divergences under sampling.

The Poisson-sampled Gaussian is integrated numerically at every real order. With Q = N(0, s²), P = (1 - q) Q + q N(1, s²) and
u = P/Q - 1 we have E_Q[u] = 0, so

    e^{(alpha - 1) D_alpha(P || Q)} - 1 = E_Q[(1 + u)^alpha - 1 - alpha u],

whose integrand is never negative: nothing cancels, even at q = 1e-9. The trapezoidal rule converges geometrically for such
integrands (analytic in a strip), so its error is below rounding at the step used here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

from hushgrad.accounting._numeric import up
from hushgrad.accounting.heuristics import HEURISTICS
from hushgrad.accounting.renyi import Curve

Array = npt.NDArray[np.float64]

_REACH = 14.0  # standard deviations beyond the outermost peak: e^-98 of the mass


def poisson_gaussian(noise_multiplier: float, rate: float) -> Curve:
    """A Gaussian at distance 1 on a Poisson sample, under add/remove, at any order.

    >>> round(poisson_gaussian(1.1, 0.01)(8.0), 8)
    0.00058407

    Reference: Mironov, Talwar and Zhang 2019, theorem 4 (the remove direction is the worse one) and section 3.
    """
    return gaussian_mixture(noise_multiplier, (0.0, 1.0), (1.0 - rate, rate), both=False)


def gaussian_mixture(
    noise_multiplier: float, sensitivities: Sequence[float], probabilities: Sequence[float], *, both: bool = True
) -> Curve:
    """A Gaussian whose mean is shifted by a random, hidden amount; the larger of the two directions.

    Reference: Choquette-Choo et al. 2024, "Privacy amplification for matrix mechanisms", theorem 3.1 (domination).
    """
    sigma, shifts = noise_multiplier, np.asarray(sensitivities, dtype=np.float64)
    weights = np.asarray(probabilities, dtype=np.float64)
    largest = float(shifts[weights > 0.0].max())
    if largest == 0.0:
        return lambda alpha: 0.0

    @lru_cache(maxsize=512)
    def curve(alpha: float) -> float:
        unsampled = alpha * largest**2 / (2.0 * sigma**2)
        if math.isinf(alpha):
            return math.inf
        grid = _grid(sigma, largest, alpha)
        if grid is None:
            return unsampled
        u, log_ratio = _excess(grid, sigma, shifts, weights)
        log_density = -0.5 * (grid / sigma) ** 2 - math.log(sigma * math.sqrt(2.0 * math.pi)) + math.log(grid[1] - grid[0])
        value = _log_moment(u, log_ratio, alpha, log_density)
        if both:
            value = max(value, _log_moment(u, log_ratio, 1.0 - alpha, log_density))
        return min(unsampled, up(value / (alpha - 1.0)) * (1.0 + 1e-11))

    return curve


def _grid(sigma: float, largest: float, alpha: float) -> Array | None:
    # The integrand is analytic where |Im x| < strip. A step h makes the trapezoidal error e^{y²/2 sigma² - 2 pi y/h} of it for
    # any y < strip; the best y is 2 pi sigma²/h where the strip is that wide, else the strip itself (step for e^-74).
    strip = math.pi * sigma**2 / (2.0 * largest)
    step = 0.35 * sigma
    if 2.0 * math.pi * sigma**2 / step > strip:
        step = min(step, 2.0 * math.pi * strip / (74.0 + strip**2 / (2.0 * sigma**2)))
    low, high = -_REACH * sigma - 2.0 * largest, max(alpha, 2.0) * largest + _REACH * sigma
    points = (high - low) / step
    return np.arange(low, high, step) if points <= HEURISTICS.quadrature_points else None


def _excess(x: Array, sigma: float, shifts: Array, weights: Array) -> tuple[Array, Array]:
    """U = P/Q - 1 at the points x, and ln(1 + u); the logarithm stays finite where u overflows."""
    u, log_ratio = np.zeros_like(x), np.full_like(x, -np.inf)
    with np.errstate(over="ignore"):
        for shift, weight in zip(shifts, weights, strict=True):
            if weight > 0.0:
                z = (shift * x - 0.5 * shift * shift) / sigma**2
                u += weight * np.expm1(np.minimum(z, 600.0))
                log_ratio = np.logaddexp(log_ratio, math.log(weight) + z)
    # log1p(u) keeps its digits where the ratio is near 1, the sum of logarithms where it is large.
    return u, np.where(np.abs(u) < 0.5, np.log1p(np.clip(u, -0.5, 0.5)), log_ratio)


def _log_moment(u: Array, log_ratio: Array, power: float, log_density: Array) -> float:
    """Ln E_Q[(1 + u)^power] from E_Q[(1 + u)^power - 1 - power u], a sum of terms that are not negative (Bernoulli)."""
    exponent = power * log_ratio
    small = np.abs(power * u) < 1e-3
    v = np.where(small, u, 0.0)
    p = power
    series = (
        p * (p - 1) / 2 * v**2 * (1 + (p - 2) / 3 * v * (1 + (p - 3) / 4 * v * (1 + (p - 4) / 5 * v * (1 + (p - 5) / 6 * v))))
    )
    plain = np.where(small, series, np.expm1(np.minimum(exponent, 600.0)) - power * u)
    large = exponent > 60.0  # there the subtracted 1 + power u is below rounding (or the bound is rounded up: u > 0)
    with np.errstate(divide="ignore"):
        logs = np.where(large, exponent, np.log(np.maximum(plain, 0.0))) + log_density
    top = float(logs.max())
    if top == -math.inf:
        return 0.0
    log_total = top + math.log(float(np.exp(logs - top).sum()))
    return math.log1p(math.exp(log_total)) if log_total < 30.0 else log_total + math.exp(-log_total)


def poisson(base: Curve, rate: float, *, tight: bool = False) -> Curve:
    """Any mechanism with divergences ``base`` on a Poisson sample under add/remove.

    ``tight`` drops the factor 3 of the higher terms, which is proved for Laplace and Gaussian noise.
    Reference: Zhu and Wang, "Poisson subsampled Rényi differential privacy", ICML 2019 (the general bound and the tight one).
    """

    def at_integer(order: int) -> float:
        j = np.arange(2, order + 1, dtype=np.float64)
        divergences = np.array([base(float(k)) for k in range(2, order + 1)])
        log_terms = _log_binomial(order, j) + (order - j) * math.log1p(-rate) + j * math.log(rate) + (j - 1) * divergences
        if not tight:
            log_terms[1:] += math.log(3.0)
        # 1 - sum over j >= 2 of the binomial weights, plus the terms: the excess over 1 is summed on its own.
        log_weights = _log_binomial(order, j) + (order - j) * math.log1p(-rate) + j * math.log(rate)
        return _log_one_plus(log_terms, log_weights) / (order - 1)

    return _interpolated(at_integer, base)


def shown(base: Curve, rate: float) -> Curve:
    """A mechanism that runs with probability ``rate`` and reveals whether it did: e^{(alpha-1) D} is linear in such mixtures."""

    def curve(alpha: float) -> float:
        whole = base(alpha)
        exponent = (alpha - 1.0) * whole
        if math.isinf(alpha) or exponent > 700.0:
            return whole
        return min(whole, up(math.log1p(rate * math.expm1(exponent)) / (alpha - 1.0)))

    return curve


def without_replacement(base: Curve, rate: float) -> Curve:
    """Any mechanism with divergences ``base`` under replace-one, on a fixed-size sample without replacement.

    The proof needs that the sampled record's two versions and the sample without the record are pairwise at a distance that
    ``base`` covers; for Poisson samples of noise mechanisms under replace-one that holds too (two contributions at most).
    Reference: Wang, Balle and Kasiviswanathan 2019, theorem 9.
    """
    largest = base(math.inf)
    log_gap = math.log(math.expm1(largest)) if 0.0 < largest < 700.0 else (largest if largest > 0.0 else -math.inf)

    def at_integer(order: int) -> float:
        j = np.arange(2, order + 1, dtype=np.float64)
        divergences = np.array([base(float(k)) for k in range(2, order + 1)])
        log_factor = np.minimum(math.log(2.0), j * log_gap)
        log_terms = _log_binomial(order, j) + j * math.log(rate) + (j - 1) * divergences + log_factor
        four = math.log(4.0) + math.log(math.expm1(divergences[0])) if 0.0 < divergences[0] < 700.0 else math.inf
        log_terms[0] = _log_binomial(order, j)[0] + 2 * math.log(rate) + min(four, divergences[0] + log_factor[0])
        return _log_one_plus(log_terms) / (order - 1)

    return _interpolated(at_integer, base)


def _log_binomial(n: int, k: Array) -> Array:
    return np.asarray(gammaln(n + 1.0) - gammaln(k + 1.0) - gammaln(n - k + 1.0), dtype=np.float64)


def _log_one_plus(log_terms: Array, log_weights: Array | None = None) -> float:
    """ln(1 + sum e^log_terms - sum e^log_weights)."""
    top = float(log_terms.max())
    if top > 600.0:
        return top + math.log(float(np.exp(log_terms - top).sum())) + 1e-9
    with np.errstate(under="ignore"):
        excess = np.exp(log_terms)
        if log_weights is not None:  # e^terms - e^weights, without cancellation where they are close (terms >= weights)
            gap = log_terms - log_weights
            excess = np.where(gap > 30.0, excess, np.exp(log_weights) * np.expm1(np.minimum(gap, 30.0)))
    return math.log1p(float(excess.sum())) * (1.0 + 1e-9)


def _interpolated(at_integer: Callable[[int], float], base: Curve) -> Curve:
    """A bound at every real order from one at integers: (alpha - 1) D_alpha is convex in alpha, and 0 at alpha = 1."""
    known = lru_cache(maxsize=None)(lambda order: min(at_integer(order), base(float(order))))

    def curve(alpha: float) -> float:
        if alpha >= HEURISTICS.largest_order:
            return base(alpha)
        low = math.floor(alpha)
        weight = alpha - low
        below = (low - 1) * known(low) if low > 1 else 0.0
        above = low * known(low + 1) if weight > 0.0 else 0.0
        return min(base(alpha), up(((1.0 - weight) * below + weight * above) / (alpha - 1.0)))

    return curve
