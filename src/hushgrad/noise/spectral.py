"""Spectral noise: the best causal filter for a quadratic loss whose curvatures are known."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hushgrad import _check, _papers
from hushgrad.noise.base import Mechanism
from hushgrad.noise.lower_toeplitz import LongFilter
from hushgrad.noise.power_series import inverse

_LARGEST_GRID = 2**22


@dataclass(frozen=True, kw_only=True)
class Spectral(LongFilter):
    """The minimum-phase filter with |N(w)|² = S(w)^(-1/2), S(w) = sum_j l_j / |1 - eta l_j - exp(iw)|².

    ``curvatures`` l_j are the eigenvalues of the Hessian (public: from theory or public data), eta the ``learning_rate``.
    In the stationary regime of SGD on that quadratic, the excess loss of noise with filter N at rho-zCDP is
    (eta² / 2 rho) <|N|² S> <|N|^(-2)>, which Cauchy-Schwarz bounds below by (eta² / 2 rho) <sqrt(S)>²: this filter attains
    it, so no causal Toeplitz noise is better. For one curvature it is ``Nu`` with nu = eta l. The filter comes from the
    cepstrum: the Fourier series of log |N|², its causal half exponentiated (Kolmogorov's factorisation).

    **Formal guarantee.** One Gaussian event; the sensitivity is that of the computed coefficients, whatever their shape.

    >>> spectral = Spectral(curvatures=(1.0,), learning_rate=0.1)
    >>> spectral.noising_coefficients(4).round(3).tolist()  # those of Nu(nu=0.1)
    [1.0, -0.45, -0.101, -0.046]
    >>> round(spectral.excess_loss(rho=0.5), 5)
    0.02108

    Reference: the bound extends Choquette-Choo et al. 2024 (arXiv:2310.06771), section 3, from one eigenvalue to a spectrum.
    """

    papers = (_papers.CHOQUETTE_2024_CORRELATED,)

    curvatures: tuple[float, ...]
    learning_rate: float

    @classmethod
    def examples(cls) -> tuple[Mechanism, ...]:
        return (cls(curvatures=(1.0, 0.1, 0.01), learning_rate=0.5),)

    def __post_init__(self) -> None:
        curvatures = tuple(_check.positive(curvatures=x) for x in _check.several(curvatures=self.curvatures))
        eta = _check.positive(learning_rate=self.learning_rate)
        if not curvatures:
            _check.fail("curvatures", curvatures, "to have at least one number")
        if eta * max(curvatures) >= 2:
            _check.fail("learning_rate", eta, f"to be less than 2 / {max(curvatures):g}", "SGD diverges at larger rates.")
        slowest = min(min(eta * x, 2 - eta * x) for x in curvatures)
        if slowest * _LARGEST_GRID < 128:
            remedy = "Leave out the flattest directions, or use Nu."
            _check.fail("curvatures", curvatures, "to be at least 1e-5 / learning_rate", remedy)
        self._keep(curvatures=curvatures, learning_rate=eta)

    def strategy_coefficients(self, steps: int) -> np.ndarray:
        """The inverse of the noise's filter, by long division."""
        return inverse(self.noising_coefficients(steps), steps)

    def noising_coefficients(self, steps: int) -> np.ndarray:
        steps = _check.positive_int(steps=steps)
        beta = np.zeros(steps)
        filter_ = _minimum_phase(self)[:steps]  # on a grid longer than the filter's memory: what is beyond is 0
        beta[: len(filter_)] = filter_
        return beta

    def excess_loss(self, *, rho: float) -> float:
        """(eta² / 2 rho) <sqrt(S)>²: the least stationary excess loss of any causal Toeplitz noise at rho-zCDP (clip norm 1)."""
        rho = _check.positive(rho=rho)
        return float(self.learning_rate**2 / (2 * rho) * np.mean(np.sqrt(self._spectrum())) ** 2)

    def _spectrum(self) -> np.ndarray:
        """S on a grid fine enough for its narrowest peak: the quadrature of a periodic function converges geometrically."""
        contraction = self.learning_rate * np.array(self.curvatures)
        width = float(np.minimum(contraction, 2 - contraction).min())
        grid = 2 ** int(np.ceil(np.log2(max(128 / width, 4096))))
        w = 2 * np.pi * np.arange(grid) / grid
        total = np.zeros(grid)
        for curvature, a in zip(self.curvatures, 1 - contraction, strict=True):
            # |a - e^{iw}|² = (1 - a)² + 4 a sin²(w/2), without the cancellation of 1 + a² - 2 a cos w near w = 0
            total += curvature / ((1 - a) ** 2 + 4 * a * np.sin(w / 2) ** 2)
        return total


@lru_cache(maxsize=8)
def _minimum_phase(mechanism: Spectral) -> np.ndarray:
    cepstrum = np.fft.fft(-0.5 * np.log(mechanism._spectrum())).real
    grid = len(cepstrum)
    half = np.zeros(grid)
    half[1 : grid // 2] = cepstrum[1 : grid // 2] / grid  # coefficient 0 is the scale: beta_0 = 1 leaves it out
    # log N = sum_m half_m e^{imw}: the exponential of a causal series is causal and has no zero in the unit disk
    return np.fft.fft(np.exp(np.fft.ifft(half) * grid)).real[: grid // 2] / grid
