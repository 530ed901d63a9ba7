r"""Exact stationary errors of SGD with stationary correlated noise: the formulas behind the slides' rates.

With a = 1 - eta lam, N the noise's filter (beta_0 = 1) and <f> the mean of f(w) over (-pi, pi), SGD on a quadratic of curvature lam
with noise of rho-zCDP at clip norm 1 has in the long run the variance

    s = (eta²/2 rho) <|N|² / |a - e^{iw}|²> <1/|N|²>,

and for linear regression with Gaussian inputs x ~ N(0, H), where (I - eta x x^T) multiplies instead of I - eta H,

    E ||theta - theta*||²_H = [sum_j lam_j s_j (2 - eta lam_j)/(2 (1 - eta lam_j))] / [1 - sum_j eta lam_j/(2 (1 - eta lam_j))],

because the cross-covariance of theta with the noise only sees the mean of the multiplier. It is finite iff the denominator is
positive. Reference: Choquette-Choo et al. 2024 (arXiv:2310.06771), section 3; the exact regression formula is derived in the docs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize_scalar

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)


def _quadrature() -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights for <f> of an even f: Gauss-Legendre on panels that are equal in log w, so that any peak at 0 is met."""
    edges = np.concatenate(([0.0], np.geomspace(1e-9, np.pi, 241)))
    half, middle = np.diff(edges) / 2, (edges[1:] + edges[:-1]) / 2
    w = (middle[:, None] + half[:, None] * _NODES).ravel()
    return w, (half[:, None] * _WEIGHTS).ravel() / np.pi


W, _WEIGHT = _quadrature()


def mean(values: np.ndarray) -> float:
    """<f> from the values of an even f at the nodes ``W``.

    >>> round(mean(np.cos(W) ** 2), 12)
    0.5
    """
    return float(values @ _WEIGHT)


def _distance(a: float) -> np.ndarray:
    """|a - e^{iw}|² at the nodes, without cancellation near w = 0."""
    return np.asarray((1 - a) ** 2 + 4 * a * np.sin(W / 2) ** 2)


def filter_independent() -> np.ndarray:
    """|N|² = 1."""
    return np.ones_like(W)


def filter_anti(damping: float) -> np.ndarray:
    """|1 - damping e^{iw}|²."""
    return _distance(damping)


def filter_nu(nu: float) -> np.ndarray:
    """|1 - (1 - nu) e^{iw}|: the square root has half the power."""
    return np.asarray(np.sqrt(_distance(1 - nu)))


def best_damping(eta: float) -> float:
    """(1 - sqrt(1 - a²))/a with a = 1 - eta: the damping of least error for mean estimation."""
    a = 1 - eta
    return float((1 - np.sqrt(1 - a * a)) / a)


def filtered(z: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """sum_j beta_j z_{t-j} along axis 0."""
    size = 2 ** int(np.ceil(np.log2(2 * len(z))))
    shape = (-1,) + (1,) * (z.ndim - 1)
    spectrum = np.fft.rfft(z, size, axis=0) * np.fft.rfft(beta[: len(z)], size).reshape(shape)
    return np.asarray(np.fft.irfft(spectrum, size, axis=0)[: len(z)])


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A quadratic with curvatures (value, multiplicity), a learning rate, a privacy level rho, and label noise (std)."""

    curvatures: tuple[tuple[float, int], ...]
    eta: float
    rho: float = 0.5
    label_noise: float = 0.0

    @property
    def dimension(self) -> int:
        """D."""
        return sum(count for _, count in self.curvatures)

    @property
    def trace(self) -> float:
        """Tr(H)."""
        return sum(lam * count for lam, count in self.curvatures)

    def variance(self, lam: float, power: np.ndarray) -> float:
        """S of one direction of curvature ``lam`` for noise of spectrum ``power`` = |N|²: no multiplicative noise."""
        a = 1 - self.eta * lam
        noise = mean(power / _distance(a)) * mean(1 / power) / (2 * self.rho)
        return self.eta**2 * (noise + self.label_noise**2 * lam / (1 - a * a))

    def margin(self) -> float:
        """1 - sum_j eta lam_j / (2 (1 - eta lam_j)): the second moment is finite iff this is positive."""
        return 1 - sum(count * self.eta * lam / (2 * (1 - self.eta * lam)) for lam, count in self.curvatures)

    def first_order_risk(self, power: np.ndarray) -> float:
        """sum_j lam_j s_j: the slides' theta^(0)."""
        return sum(count * lam * self.variance(lam, power) for lam, count in self.curvatures)

    def risk(self, power: np.ndarray) -> float:
        """E ||theta - theta*||²_H, exact for Gaussian inputs; infinite beyond the stability boundary."""
        if self.margin() <= 0:
            return float("inf")
        total = 0.0
        for lam, count in self.curvatures:
            step = self.eta * lam
            total += count * lam * self.variance(lam, power) * (2 - step) / (2 * (1 - step))
        return total / self.margin()

    def optimal_power(self) -> np.ndarray:
        """|N|² = S^(-1/2), S = sum_j lam_j / |1 - eta lam_j - e^{iw}|²: ``noise.Spectral``, best of all causal Toeplitz noise."""
        spectrum = sum((count * lam / _distance(1 - self.eta * lam) for lam, count in self.curvatures), np.zeros_like(W))
        return np.asarray(1 / np.sqrt(spectrum))


def tuned(risk: Callable[[float], float], low: float, high: float) -> float:
    """The parameter of least risk, searched on a logarithmic scale."""
    found = minimize_scalar(lambda x: np.log(risk(float(np.exp(x)))), bounds=(np.log(low), np.log(high)), method="bounded")
    return float(np.exp(found.x))
