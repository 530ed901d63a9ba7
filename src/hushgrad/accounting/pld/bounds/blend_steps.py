r"""Upper bounds for very many slightly different steps: the steps of a cell are dominated by mixtures of its four corners.

Lemma. The profile of a Poisson-sampled Gaussian is, at every epsilon, convex in the rate q for a fixed distance mu, and convex in
s = erf(mu / sqrt 8), the total variation, for a fixed q. Proof. With w = dP/dQ the profile is E_Q[(1 - x + q (w - 1))_+]: a
mean of convex functions of q. For the second, without sampling, delta' = phi(mu/2 - eps/mu) as a function of mu, so
delta''/delta' = eps^2/mu^3 - mu/4 >= -mu/4 = s''/s', hence d^2 delta / ds^2 >= 0. Sampling is a linear map of the profile, and so is
taking the mirror image. ∎

So a step (q, mu) in a cell [q_1, q_2] x [mu_1, mu_2] is dominated by the mixture of the cell's four corners with bilinear weights in
(q, s), and the excess is of second order in the size of the cell. The steps of a cell share their corners and differ in their
weights only: with phi the transform of the mean mixture and rho_i the relative deviation of step i, sum_i rho_i = 0, so

    sum_i ln(phi (1 + rho_i)) = n ln phi - sum_i rho_i^2 / 2 + R,     |R| <= n r^3 / (3 (1 - r)),    r = max |rho_i|.

The middle term needs the covariance of the weights only, and R is added to the bound on rounding (``compose``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import erf

from hushgrad.accounting.pld.bounds.from_above import chords
from hushgrad.accounting.pld.bounds.grid import HAIR, Masses, anchored
from hushgrad.accounting.pld.profiles.curve import Array, Curve, GaussianCurve, Mirror
from hushgrad.accounting.pld.profiles.poisson import PoissonRemove


@dataclass(frozen=True)
class Blend(Curve):
    """The mean of several steps' mixtures of ``corners``, and how much their weights vary."""

    corners: tuple[Curve, ...]  # the last one dominates the others
    mean: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]  # sums over the steps
    deviation: float  # the largest sum of |weight - mean| over the corners

    def right(self, epsilon: Array) -> tuple[Array, Array]:
        return self._sum([corner.right(epsilon) for corner in self.corners])

    def left(self, epsilon: Array) -> tuple[Array, Array]:
        return self._sum([corner.left(epsilon) for corner in self.corners])

    def _sum(self, sides: list[tuple[Array, Array]]) -> tuple[Array, Array]:
        first, second = (sum(w * side[k] for w, side in zip(self.mean, sides, strict=True)) for k in (0, 1))
        return np.asarray(first), np.asarray(second)

    @property
    def support(self) -> tuple[float, float]:
        """Of the corner that dominates: the widest."""
        return self.corners[-1].support

    def from_above(self, step: float, tail: float, tilt: float) -> BlendedMasses:
        """Chords of each corner on one grid."""
        grid = anchored(self.corners[-1], step, tail, tilt, hair=HAIR)
        made = [chords(corner, grid.losses, grid.split) for corner in self.corners]
        rows = np.stack([p for p, _, _ in made])
        infinite = max(lost for _, lost, _ in made)
        mean = np.array(self.mean) @ rows
        return BlendedMasses(step, grid.shift, grid.index, mean, infinite, rows, np.array(self.covariance), self.deviation)


@dataclass(frozen=True)
class BlendedMasses(Masses):
    """The mean masses of steps that are different mixtures of ``corners``; the largest of their masses at infinity."""

    corners: Array
    covariance: Array
    deviation: float


def corner_weights(rate: Array, mu: Array) -> tuple[list[tuple[float, float]], Array]:
    """The corners (q, mu) of the smallest cell around some steps, and each step's weights for them."""
    total = erf(mu / np.sqrt(8.0))
    sides = []
    for x, place in ((rate, rate), (mu, total)):
        low, high = float(np.min(x)), float(np.max(x))
        first, last = float(np.min(place)), float(np.max(place))
        share = np.clip((place - first) / (last - first), 0.0, 1.0) if high > low and last > first else np.ones_like(x)
        # slightly more of the upper corner, to cover rounding
        share = np.minimum(share + 1e-12 + 4e-16 * last / max(last - first, 1e-300), 1.0)
        sides.append([(low, 1 - share), (high, share)] if high > low else [(high, np.ones_like(x))])
    corners = [(q, m) for q, _ in sides[0] for m, _ in sides[1]]
    return corners, np.stack([u * v for _, u in sides[0] for _, v in sides[1]], axis=1)


def blended(rate: Array, mu: Array, times: Array, *, mirrored: bool) -> Curve:
    """The curve of the steps of one cell, ``times`` of each, together."""
    corners, weights = corner_weights(rate, mu)
    curves: list[Curve] = [PoissonRemove(GaussianCurve(m), q) for q, m in corners]
    curves = [Mirror(curve) for curve in curves] if mirrored else curves
    if len(curves) == 1:
        return curves[0]
    mean = times @ weights / np.sum(times)
    away = weights - mean
    covariance = (away * times[:, None]).T @ away
    return Blend(
        tuple(curves),
        tuple(mean.tolist()),
        tuple(tuple(row) for row in covariance.tolist()),
        float(np.max(np.sum(np.abs(away), axis=1))),
    )
