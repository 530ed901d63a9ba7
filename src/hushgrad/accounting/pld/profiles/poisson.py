r"""Poisson sampling of any pair, and the symmetrised curve of sampling without replacement.

Theorem (Zhu, Dong and Wang 2022, theorem 11). If (P, Q) dominates a mechanism for removals of a record, then
((1-q) Q + q P, Q) dominates the Poisson-sampled mechanism for removals, and its mirror image for additions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import erfcx, log_ndtr

from hushgrad.accounting.pld.profiles.curve import Array, Curve, OwnMirror, gaussian_step
from hushgrad.accounting.pld.profiles.stable_sums import masses_of_q

_FAR = 1e4  # an epsilon at which every curve has reached its limit; stands for infinity where infinity would make NaN


@dataclass(frozen=True)
class PoissonRemove(Curve):
    r"""(1-q) Q + q P against Q: delta(eps) = q delta_0(eps'), e^{eps'} = 1 + (e^eps - 1)/q."""

    base: Curve
    rate: float

    def __post_init__(self) -> None:
        if self.base.lattice != 0:
            losses = self.atoms()[0]  # mapped by a function that is not linear
            self._note(lattice=float(losses[1] - losses[0]) if len(losses) == 2 else math.nan)
        base = self.base
        self._note(discrete=base.discrete, infinite=self.rate * base.infinite, smooth=base.smooth, endless=base.endless)

    def atoms(self) -> tuple[Array, Array]:
        """Where only Q has mass, the loss is ln(1-q)."""
        losses, p = self.base.atoms()
        masses = self.rate * p + (1 - self.rate) * masses_of_q(losses, p)
        with np.errstate(over="ignore"):
            far = losses + math.log(self.rate) + np.log1p((1 - self.rate) / self.rate * np.exp(-losses))
            mapped = np.where(losses > 30, far, np.log1p(self.rate * np.expm1(np.minimum(losses, 30.0))))
        if self.base.impossible:
            mapped, masses = np.append(math.log1p(-self.rate), mapped), np.append((1 - self.rate) * self.base.impossible, masses)
        return mapped, masses

    def right(self, epsilon: Array) -> tuple[Array, Array]:
        """The event {L > eps} is {L_0 > eps'}."""
        inner = _amplified(epsilon, self.rate)
        call, above = self.base.right(inner)
        return self.rate * call, np.exp(epsilon - inner) * above

    def left(self, epsilon: Array) -> tuple[Array, Array]:
        """To the left of ln(1-q) there is no loss."""
        inner = _amplified(epsilon, self.rate)
        put, below = self.base.left(inner)
        void = inner <= -_FAR
        return np.where(void, 0.0, self.rate * put), np.where(void, 0.0, np.exp(np.minimum(epsilon - inner, 700.0)) * below)

    @property
    def support(self) -> tuple[float, float]:
        """The base's support mapped by l -> ln(1 - q + q e^l)."""
        low, high = self.base.support
        return _mix(-math.inf if self.base.impossible else low, self.rate), _mix(high, self.rate)


@dataclass(frozen=True)
class PoissonReplace(OwnMirror):
    r"""(1-q) N(0,1) + q N(mu,1) against (1-q) N(0,1) + q N(-mu,1): Poisson sampling, one record replaced by its opposite.

    No other replacement is worse, in any dimension and at any epsilon (proved in docs/explanation/pld.md).

    The loss increases with the output z; {L > eps} = {z > z*}, and with x = e^eps, c = e^{-mu^2/2} the difference of the densities,
    p - x p', over phi is g(z) = q c (e^{mu z} - x e^{-mu z}) - (1-q)(x-1), which vanishes at z*. So g(z* + t) = g(z* + t) - g(z*) has
    positive terms only, and with Mills' ratio R(y) = \int_0^inf e^{-y t - t^2/2} dt

        call = q phi(z* - mu) [R(z* - mu) - R(z*)] + q x phi(z* + mu) [R(z*) - R(z* + mu)] :

    no digits are lost however small mu is, and e^eps occurs in exponents only.
    """

    mu: float
    rate: float

    def right(self, epsilon: Array) -> tuple[Array, Array]:
        q, mu = self.rate, self.mu
        z = self._threshold(epsilon)
        # e^eps phi(z + mu) = e^{eps - mu z - mu^2/2} phi(z)
        call = q * _mills_step(z, mu, np.zeros_like(z)) + q * _mills_step(z + mu, mu, epsilon - mu * z - 0.5 * mu * mu)
        above = (1 - q) * np.exp(epsilon + log_ndtr(-z)) + q * np.exp(epsilon + log_ndtr(-mu - z))
        return call, above

    def _threshold(self, epsilon: Array) -> Array:
        """Z* = (eps/2 + arsinh y) / mu with y = (1-q)/(q c) sinh(eps/2): u = e^{mu z*} solves q c (u^2 - x) = (1-q)(x-1) u."""
        half = epsilon / 2
        with np.errstate(divide="ignore"):
            log_sinh = np.where(half < 1.0, np.log(np.sinh(np.minimum(half, 1.0))), half + np.log(-np.expm1(-2 * half) / 2))
        log_y = math.log1p(-self.rate) - math.log(self.rate) + 0.5 * self.mu**2 + log_sinh
        arsinh = np.where(log_y > 20.0, log_y + math.log(2.0), np.arcsinh(np.exp(np.minimum(log_y, 20.0))))
        return np.asarray((half + arsinh) / self.mu)


def _mills_step(z: Array, mu: float, shift: Array) -> Array:
    """e^shift phi(z - mu) [R(z - mu) - R(z)] for z >= 0; with phi R = Phi where R itself would overflow."""
    if mu < 0.1:  # the integral of -R' over (z - mu, z)
        return gaussian_step(z - mu, mu, shift)
    density = np.exp(shift - 0.5 * (z - mu) ** 2) / math.sqrt(2 * math.pi)
    near = density * (_mills(np.maximum(z - mu, 0.0)) - _mills(z))
    return np.where(z > mu, near, np.exp(shift + log_ndtr(mu - z)) - density * _mills(z))


def _mills(y: Array) -> Array:
    return np.asarray(math.sqrt(math.pi / 2) * erfcx(y / math.sqrt(2.0)))


@dataclass(frozen=True)
class Shown(Curve):
    """``base`` with probability ``rate``, else the loss is 0; which of the two it was is visible: delta = q delta_0(eps)."""

    base: Curve
    rate: float
    lattice = math.nan
    smooth = False

    def __post_init__(self) -> None:
        base, rate = self.base, self.rate
        self._note(infinite=rate * base.infinite, impossible=rate * base.impossible, discrete=base.discrete, endless=base.endless)
        losses = self.atoms()[0]
        if self.discrete and len(losses) == 3 and losses[0] == -losses[2]:
            self._note(lattice=float(losses[2]))

    def atoms(self) -> tuple[Array, Array]:
        """The atom at 0 may be joined by one of the base's."""
        losses, p = self.base.atoms()
        together = np.append(losses[losses != 0], 0.0)
        masses = np.append(self.rate * p[losses != 0], 1 - self.rate + self.rate * float(np.sum(p[losses == 0])))
        order = np.argsort(together)
        return together[order], masses[order]

    def right(self, epsilon: Array) -> tuple[Array, Array]:
        call, above = self.base.right(epsilon)
        return self.rate * call, self.rate * above

    def left(self, epsilon: Array) -> tuple[Array, Array]:
        """The loss 0 counts from 0 on."""
        put, below = self.base.left(epsilon)
        return self.rate * put, self.rate * below + np.where(epsilon >= 0, 1 - self.rate, 0.0)

    @property
    def support(self) -> tuple[float, float]:
        """The base's, and 0."""
        low, high = self.base.support
        return min(low, 0.0), max(high, 0.0)


@dataclass(frozen=True)
class Symmetrised(OwnMirror):
    r"""The curve ``half`` for eps >= 0, continued by call(eps) = 1 - e^eps + e^eps call(-eps) for eps < 0.

    The profile of a relation under which the two data sets can be exchanged. It is convex in e^eps when ``half`` is
    ``PoissonRemove`` of a mirror-symmetric pair (docs/explanation/pld.md), with an atom at loss 0.
    """

    half: Curve
    lattice = math.nan
    smooth = False

    def __post_init__(self) -> None:
        half = self.half
        self._note(infinite=half.infinite, impossible=half.infinite, discrete=half.discrete, endless=half.endless)
        losses = self.atoms()[0]
        if len(losses) == 3:
            self._note(lattice=float(losses[2]))

    def atoms(self) -> tuple[Array, Array]:
        """All that is not on one of the two sides is at 0."""
        losses, p = self.half.atoms()
        losses, p = losses[losses > 0], p[losses > 0]
        call, above = (float(x[0]) for x in self.half.right(np.zeros(1)))
        masses = np.concatenate([(p * np.exp(-losses))[::-1], [max(0.0, 1 - call - 2 * above)], p])
        return np.concatenate([-losses[::-1], [0.0], losses]), masses

    def right(self, epsilon: Array) -> tuple[Array, Array]:
        return self.half.right(epsilon)

    @property
    def support(self) -> tuple[float, float]:
        return -self.half.support[1], self.half.support[1]


def _amplified(epsilon: Array, q: float) -> Array:
    """The eps' with e^{eps'} = 1 + (e^eps - 1)/q, or -_FAR where that is not positive; accurate near 0 and for large eps."""
    if q == 1:
        return np.maximum(epsilon, -_FAR)
    large = epsilon > 30.0
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        near = np.log1p(np.maximum(np.expm1(np.minimum(epsilon, 30.0)) / q, -1.0))
        far = epsilon - math.log(q) + np.log1p(-(1 - q) * np.exp(-np.maximum(epsilon, 30.0)))
    inner: Array = np.maximum(np.where(large, far, near), -_FAR)
    return inner


def _mix(loss: float, q: float) -> float:
    """ln(1 - q + q e^loss)."""
    if q == 1:
        return loss
    if loss > 30:
        return loss + math.log(q) + math.log1p((1 - q) / q * math.exp(-loss))
    return math.log1p(q * math.expm1(loss))
