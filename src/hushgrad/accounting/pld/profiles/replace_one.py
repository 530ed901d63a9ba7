r"""Poisson samples of noise other than Gaussian, under replace-one.

Lemma (numbers). For noise on a number with a symmetric log-concave density f (Laplace, and on the integers the discrete Laplace and
Gaussian distributions) the pair (1-q) f_0 + q f_r against (1-q) f_0 + q f_{-r} is the worst one of two records in [-r, r]. Proof.
Let u and v be the two contributions and x >= 1 (the rest by symmetry). If v <= u and u >= 0, then f_0/f_u and f_v/f_u decrease, so
the best test is a half line to the right, and there moving u up to r and v down to -r only helps; u <= 0 and v >= u is its mirror
image. If 0 <= u < v (or mirrored), all three lie within r of each other, so delta <= q delta_r(x'), x' = 1 + (x-1)/q, which is the
value at (r, 0), at most that at (r, -r). QED

Lemma (anything). For every kind of noise delta <= q ((1-b) delta_r(x') + b delta_2r(x')), b = x/x'. Proof. Advanced joint convexity
(Balle, Barthe and Gaboardi 2018, theorem 2): delta = q H_{x'}(f_u, (1-b) f_0 + b f_v), and H is convex in its second argument. QED
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hushgrad.accounting.pld.profiles.curve import UNSEEN, Array, Curve
from hushgrad.accounting.pld.profiles.discrete import Atoms, DiscreteGaussianCurve, DiscreteLaplaceCurve
from hushgrad.accounting.pld.profiles.poisson import _amplified, _mix
from hushgrad.errors import NoTheorem


@dataclass(frozen=True)
class LaplaceReplace(Curve):
    r"""(1-q) f_0 + q f_r against (1-q) f_0 + q f_{-r} for Laplace densities of scale 1.

    With z* = ln(1 + e^r (e^eps - 1)(1 - q + q e^{-r})/q)/2 the best test is {z > z*}, and delta = q (1 - e^{z* - r}): the parts of the
    integral between z* and r and beyond r are q (1-y)^2/2 and q (1-y^2)/2, y = e^{z*-r}. Atoms at both ends, a density between.
    """

    distance: float
    rate: float
    smooth = False

    def __post_init__(self) -> None:
        self._note(lattice=2 * self.support[1])

    def atoms(self) -> tuple[Array, Array]:
        """All outputs beyond r have the same loss."""
        q, r, end = self.rate, self.distance, self.support[1]
        low, high = 0.5 * math.exp(-r) * (1 - q + q * math.exp(-r)), 0.5 * ((1 - q) * math.exp(-r) + q)
        return np.array([-end, end]), np.array([low, high])

    def right(self, epsilon: Array) -> tuple[Array, Array]:
        z = np.minimum(self._threshold(epsilon), self.distance)
        above = np.exp(epsilon - z) * 0.5 * self._still
        return -self.rate * np.expm1(z - self.distance), np.where(epsilon >= self.support[1], 0.0, above)

    def left(self, epsilon: Array) -> tuple[Array, Array]:
        """The pair is its own mirror image; the atom at the lower end counts from there on."""
        z = np.minimum(self._threshold(-epsilon), self.distance)
        call, scale = -self.rate * np.expm1(z - self.distance), np.exp(epsilon)
        below = scale * (call + np.exp(-epsilon - z) * 0.5 * self._still)
        return scale * call, np.where(epsilon < self.support[0], 0.0, below)

    @property
    def support(self) -> tuple[float, float]:
        end = math.log1p(2 * self.rate * math.sinh(self.distance) / self._still)
        return -end, end

    @property
    def _still(self) -> float:
        return 1 - self.rate + self.rate * math.exp(-self.distance)

    def _threshold(self, epsilon: Array) -> Array:
        with np.errstate(over="ignore"):
            grown = np.expm1(np.minimum(epsilon, 600.0)) * (math.exp(self.distance) * self._still / self.rate)
        return np.asarray(0.5 * np.log1p(grown))


@dataclass(frozen=True)
class DiscreteReplace(Atoms):
    """The same for integer noise: P(k) = (1-q) f(k) + q f(k-d) against Q(k) = P(-k).

    Outputs beyond the table of the noise count as infinite losses, or, ``cut``, as none at all: a bound from below.
    """

    noise: DiscreteLaplaceCurve | DiscreteGaussianCurve
    rate: float
    cut: bool = False

    def __post_init__(self) -> None:
        lost = 0.0
        # P's mass at outputs that are beyond the table of Q's noise
        if isinstance(self.noise, DiscreteGaussianCurve) and not self.cut:
            lost = self.rate * float(np.sum(self.noise.masses()[-self.noise.distance :]))
        lost = lost if lost > UNSEEN else 0.0
        self._note(infinite=lost, impossible=lost, endless=self.noise.endless)

    def atoms(self) -> tuple[Array, Array]:
        still, moved = _gaussian(self.noise) if isinstance(self.noise, DiscreteGaussianCurve) else _laplace(self.noise)
        p: Array = (1 - self.rate) * still + self.rate * moved
        return np.maximum.accumulate(np.log(p) - np.log(p[::-1])), p


def _gaussian(noise: DiscreteGaussianCurve) -> tuple[Array, Array]:
    """Masses of the noise around 0 and around the distance."""
    f = noise.masses()
    moved = np.zeros_like(f)
    moved[noise.distance :] = f[: -noise.distance]
    return f, moved


def _laplace(noise: DiscreteLaplaceCurve) -> tuple[Array, Array]:
    """The same for outputs from -d to d; those beyond have the losses of the two ends, which hold their masses."""
    d, scale = noise.distance, noise.scale
    k, tail = np.arange(-d, d + 1.0), 1 / (1 + math.exp(-1 / scale))
    still, moved = (-math.expm1(-1 / scale) * tail * np.exp(-np.abs(k - at) / scale) for at in (0, d))
    still[[0, -1]] = math.exp(-d / scale) * tail
    moved[0], moved[-1] = math.exp(-2 * d / scale) * tail, tail
    return still, moved


@dataclass(frozen=True)
class TwoDistances(Curve):
    """The second lemma, for eps >= 0 only: ``near`` and ``far`` are the noise's curves at one and at two contributions."""

    near: Curve
    far: Curve
    rate: float
    lattice = math.nan
    smooth = False

    def __post_init__(self) -> None:
        # at an infinite epsilon x/x' is the rate
        self._note(endless=self.far.endless, infinite=self.rate * max(self.near.infinite, self.far.infinite))

    def right(self, epsilon: Array) -> tuple[Array, Array]:
        """-x d/dx has one term from each of the curves and one from b, all positive."""
        inner = _amplified(epsilon, self.rate)
        (near, above), (far, above_far) = self.near.right(inner), self.far.right(inner)
        share = np.exp(epsilon - inner)
        rest = -(1 - self.rate) * np.expm1(-inner)  # 1 - b, without a difference
        turned = share * (1 - self.rate) * np.exp(-inner) * np.maximum(far - near, 0.0)
        return self.rate * (rest * near + share * far), share * (rest * above + share * above_far) + turned

    def left(self, epsilon: Array) -> tuple[Array, Array]:
        """Not known: a :class:`Symmetrised` one takes its left side from the right one."""
        raise NoTheorem(
            "This lemma says nothing below epsilon 0. Ask the symmetrised curve, which holds for an exchange of records."
        )

    @property
    def support(self) -> tuple[float, float]:
        """Up to the end of ``far``."""
        return -math.inf, _mix(self.far.support[1], self.rate)
