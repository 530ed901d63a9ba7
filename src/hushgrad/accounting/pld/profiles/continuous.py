"""Continuous pairs other than the Gaussian: Laplace noise, the exponential mechanism, mixtures of Gaussians."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from hushgrad.accounting.pld.profiles.curve import ACCURACY, Array, Curve, OwnMirror, gaussian_tails
from hushgrad.accounting.pld.profiles.discrete import Response


@dataclass(frozen=True)
class LaplaceCurve(Curve):
    r"""Laplace noise at distance d scales: delta = 1 - e^{(eps - d)/2} for |eps| <= d. Atoms at both ends, a density between."""

    distance: float
    smooth = False

    def __post_init__(self) -> None:
        self._note(lattice=2 * self.distance)

    def atoms(self) -> tuple[Array, Array]:
        return np.array([-self.distance, self.distance]), np.array([0.5 * math.exp(-self.distance), 0.5])

    def right(self, epsilon: Array) -> tuple[Array, Array]:
        half = np.minimum((epsilon - self.distance) / 2, 0.0)
        return -np.expm1(half), np.where(epsilon >= self.distance, 0.0, 0.5 * np.exp(half))

    def left(self, epsilon: Array) -> tuple[Array, Array]:
        """The pair is its own mirror image; the atom at -d counts from -d on."""
        half = np.minimum((-epsilon - self.distance) / 2, 0.0)
        scale = np.exp(epsilon)
        return scale * -np.expm1(half), np.where(epsilon < -self.distance, 0.0, scale * (1 - 0.5 * np.exp(half)))

    def accuracy(self, step: float) -> float:
        """Two correctly rounded functions; a grid point is off by a few u d, which matters one step from an atom: u d / h."""
        return min(ACCURACY, 2.0**-48 * (1 + self.distance + self.distance / step))

    @property
    def support(self) -> tuple[float, float]:
        return -self.distance, self.distance


@dataclass(frozen=True)
class BoundedRange(OwnMirror):
    r"""Every mechanism whose log-odds have a range of at most eta: delta = (1 - e^{(eps - eta)/2})^2 / (1 - e^{-eta}).

    The upper envelope over t of the pairs with losses t and t - eta (Dong, Durfee and Rogers 2020), attained at
    t = (eps + eta)/2. As an envelope of convex functions it is convex, so it dominates under adaptive composition too.
    """

    eta: float

    def right(self, epsilon: Array) -> tuple[Array, Array]:
        half = np.minimum((epsilon - self.eta) / 2, 0.0)
        whole = -math.expm1(-self.eta)
        return np.expm1(half) ** 2 / whole, -np.expm1(half) * np.exp(half) / whole

    @property
    def support(self) -> tuple[float, float]:
        """[-eta, eta]: both orders of the pair."""
        return -self.eta, self.eta


@dataclass(frozen=True)
class HalfRange(Response):
    """One mechanism of that kind, t = eta/2: both answers equally far from a tie. From below, and of a kind with ``BoundedRange``."""

    eta: float = 0.0

    @classmethod
    def of(cls, eta: float) -> HalfRange:
        """The curve for a range of ``eta``."""
        return cls(eta / 2, eta=eta)


@dataclass(frozen=True)
class GaussianMixtureCurve(Curve):
    r"""sum_i w_i N(mu_i, 1) against N(0, 1), mu_i >= 0: the sums w_i delta_i of Gaussian profiles at one common threshold z.

    The loss f(z) = ln sum_i w_i e^{mu_i z - mu_i^2/2} increases with the output z. At z with f(z) = eps, e^eps is the mean of e^{eps_i},
    eps_i = mu_i z - mu_i^2/2, so call(eps) = sum_i w_i call_i(eps_i), and likewise put.
    """

    means: tuple[float, ...]
    weights: tuple[float, ...]

    def right(self, epsilon: Array) -> tuple[Array, Array]:
        z = self._threshold(epsilon)
        call, above = np.zeros_like(z), self._still * ndtr(-z)
        for mu, w in self._moved:
            sides = gaussian_tails(mu * z - mu * mu / 2, mu)
            call, above = call + w * sides[0], above + w * sides[1]
        return call, above

    def left(self, epsilon: Array) -> tuple[Array, Array]:
        """To the left of the log of the weight at mean 0 there is no loss."""
        void = epsilon <= self.support[0]
        z = self._threshold(np.where(void, 0.0, epsilon))
        put = np.zeros_like(z)
        for mu, w in self._moved:
            inner = mu * z - mu * mu / 2
            put += w * np.exp(np.clip(inner, -700.0, 700.0)) * gaussian_tails(-inner, mu)[0]
        return np.where(void, 0.0, put), np.where(void, 0.0, np.exp(epsilon) * ndtr(z))

    @property
    def support(self) -> tuple[float, float]:
        """Losses begin at the log of the weight at mean 0."""
        return (math.log(self._still) if self._still > 0 else -math.inf), math.inf

    @property
    def _still(self) -> float:
        return sum(w for mu, w in zip(self.means, self.weights, strict=True) if mu == 0)

    @property
    def _moved(self) -> list[tuple[float, float]]:
        return [(mu, w) for mu, w in zip(self.means, self.weights, strict=True) if mu > 0 and w > 0]

    def _threshold(self, epsilon: Array) -> Array:
        """Newton's method on a convex increasing function, started from the right: it descends to the root."""
        mu = np.array([m for m, w in zip(self.means, self.weights, strict=True) if w > 0])[:, None]
        log_w = np.log([w for w in self.weights if w > 0])[:, None]
        moved = mu[:, 0] > 0
        z = np.min((epsilon - log_w[moved] + mu[moved] ** 2 / 2) / mu[moved], axis=0)
        for _ in range(60):
            exponent = log_w + mu * z - mu * mu / 2
            top = exponent.max(axis=0)
            terms = np.exp(exponent - top)
            total = terms.sum(axis=0)
            move = (top + np.log(total) - epsilon) * total / np.maximum((mu * terms).sum(axis=0), 1e-300)
            z = np.maximum(z - move, -1e5)
            if float(np.max(np.abs(move), initial=0.0)) < 1e-13 * (1 + float(np.max(np.abs(z), initial=0.0))):
                break
        return np.asarray(z)
