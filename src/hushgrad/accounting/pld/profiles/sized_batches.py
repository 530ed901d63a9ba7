r"""Profiles for batches of a fixed or limited size, where a record's participation depends on the other records.

**A fixed size under zero-out**, Gaussian noise, rate g, r = 1/sigma. Couple the batch that misses the record as T + y, the one with it as
T + x, and the one with its null as T: P = (1-g) N(y) + g N(x) against Q = (1-g) N(y) + g N(0), |x|, |y| <= r. By Gaussian interpolation
(docs/explanation/pld.md) delta grows with the distance of two centres whose densities have opposite signs in P - e^eps Q, and falls
with that of two with the same sign. For eps >= 0, P against Q: x is positive, 0 and y are negative, so the worst is x = r, y = -r (on
the line the best test is a half line to the right, and moving y to the left only helps). Q against P: 0 is positive, x and y are
negative: x = y, |x| = r.

**Truncated Poisson batches**. N ~ Bin(n-1, q) of the other records are sampled, and at most B stay. A record that survives in a batch that
was cut comes with a uniform (B-1)-subset of the others, which is also the law of the others when exactly B-1 of them were sampled. Tell the
observer whether it is N < B-1, N = B-1 *or a survivor of a cut*, or another cut. With pi = P[N = B-1], w = P[cut, and the record
survives], Pi = P[N >= B]: the record against its absence is

    N < B-1    a Poisson sample                                                      mass P[N < B-1] of both
    N = B-1    pi (1-q) N(T) + (pi q + w) N(T + x)      against   pi N(T)            mass pi + w of P, pi of Q
    others     Pi - w                                   against   Pi                 no record in it: equal up to their mass

All at a distance of one contribution. Where cuts are so frequent that w is large beside pi, a part w' of w may stay in the third
row, which is then Pi - w and w' at a distance of two contributions, against Pi (the survivor takes another record's place). Against
a null or another record, which survives where it does, the second row is a Poisson sample at rate (pi q + w)/(pi + w), and the
third is equal in both. Under add/remove the neighbour of n public records may have n-1 or n+1: both are asked, and the worse counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import erfcx, log_ndtr, ndtr

from hushgrad.accounting.pld.profiles.curve import Array, Curve, GaussianCurve
from hushgrad.accounting.pld.profiles.poisson import PoissonRemove

_HAIR = 1e-15  # an absolute error: of sums of differences of normal tails
_ROOT2 = math.sqrt(2.0)


@dataclass(frozen=True)
class ZeroedBeside(Curve):
    r"""(1-g) N(0,1) + g N(2r,1) against (1-g) N(0,1) + g N(r,1): the record opposite to all others, against its null.

    In v = e^{rz - r^2/2} the ratio is (1-g + g e^{-r^2} v^2)/(1-g + g v): above e^eps >= 1 right of one root of a quadratic equation, below
    e^eps < 1 between two. Full relative accuracy to the right; to the left put is too small by 1e-15, absolutely.
    """

    distance: float
    rate: float
    smooth = False
    lattice = math.nan

    def right(self, epsilon: Array) -> tuple[Array, Array]:
        """By Mills' ratio R: with g phi(z-2r) = A + B at the threshold, A (R(z-2r) - R(z-r)) + B (R(z-2r) - R(z))."""
        g, r = self.rate, self.distance
        # with v = e^eps u the equation is g e^{-r^2} u^2 - g u - (1-g) fall e^{-eps} = 0: nothing overflows
        fall = -np.expm1(-epsilon)
        log_u = np.log(g + np.sqrt(g * g + 4 * g * (1 - g) * fall * np.exp(-epsilon - r * r))) - math.log(2 * g) + r * r
        z = (epsilon + log_u) / r + r / 2
        near, none = g * _density(z - r, epsilon), (1 - g) * fall * _density(z, epsilon)
        best = _mills(z - 2 * r)
        call = near * (best - _mills(z - r)) + none * (best - _mills(z))
        above = (1 - g) * np.exp(epsilon + log_ndtr(-z)) + g * np.exp(epsilon + log_ndtr(r - z))
        return np.maximum(call, 0.0), above

    def left(self, epsilon: Array) -> tuple[Array, Array]:
        """Zero where the quadratic has no two roots."""
        g, r = self.rate, self.distance
        x = np.exp(epsilon)
        low, high = self._roots(x, -np.expm1(epsilon))
        real = (low > 0) & (high > low)
        one, two = (np.log(np.where(real, v, 1.0)) / r + r / 2 for v in (low, high))
        still, near, far = (ndtr(two - at) - ndtr(one - at) for at in (0.0, r, 2 * r))
        below = x * ((1 - g) * still + g * near)
        put = below - (1 - g) * still - g * far - _HAIR
        real &= put > 0
        return np.where(real, put, 0.0), np.where(real, below, 0.0)

    @property
    def support(self) -> tuple[float, float]:
        """Losses begin at the least ratio, at which the two roots coincide."""
        slack = self.rate * math.exp(self.distance**2) / (1 - self.rate)
        return math.log(2) - math.log1p(math.sqrt(1 + slack)), math.inf

    def _roots(self, x: Array, fall: Array) -> tuple[Array, Array]:
        """Of g e^{-r^2} v^2 - x g v + (1-g) ``fall``, fall = 1 - x; NaN where they are not real."""
        g, c = self.rate, math.exp(-(self.distance**2))
        with np.errstate(invalid="ignore"):
            root = np.sqrt(x * x * g * g - 4 * g * c * (1 - g) * fall)
            high = (x * g + root) / (2 * g * c)
            return 2 * (1 - g) * fall / (x * g + root), high


def _density(z: Array, shift: Array) -> Array:
    """e^shift times the normal density."""
    return np.asarray(np.exp(shift - 0.5 * z * z) / math.sqrt(2 * math.pi))


def _mills(z: Array) -> Array:
    return np.asarray(math.sqrt(math.pi / 2) * erfcx(z / _ROOT2))


@dataclass(frozen=True)
class Joined(Curve):
    """The larger of two curves, known to be ``up`` for eps >= 0 and ``down`` for eps <= 0: convex, with an atom at 0 between them."""

    up: Curve
    down: Curve
    smooth = False
    lattice = math.nan

    def __post_init__(self) -> None:
        up, down = self.up, self.down
        self._note(infinite=up.infinite, impossible=down.impossible, endless=up.endless or down.endless)

    def atoms(self) -> tuple[Array, Array]:
        zero = np.zeros(1)
        (call, above), (put, below) = self.up.right(zero), self.down.left(zero)
        return zero, np.maximum(1 - (call + above) - (below - put), 0.0)

    def right(self, epsilon: Array) -> tuple[Array, Array]:
        return self.up.right(epsilon)

    def left(self, epsilon: Array) -> tuple[Array, Array]:
        return self.down.left(epsilon)

    @property
    def support(self) -> tuple[float, float]:
        return self.down.support[0], self.up.support[1]


@dataclass(frozen=True)
class TruncatedRemove(Curve):
    """The three rows of the table above, added up. Each mass is off by a factor of 1 +- ``error`` at most, and rounded to the safe side."""

    distance: float
    rate: float
    free: float  # P[N < B-1]
    last: float  # pi
    full: float  # Pi
    survives: float  # w
    stays: float  # w', of w
    error: float
    smooth = False
    lattice = math.nan

    def atoms(self) -> tuple[Array, Array]:
        """The third row, where all that survives is in the second."""
        loss = math.log1p(-self.survives / self.full)
        return (np.zeros(0), np.zeros(0)) if self.stays else (np.array([loss]), np.array([self.full - self.survives]))

    def right(self, epsilon: Array) -> tuple[Array, Array]:
        return self._added([row.call(epsilon) for row in self._rows(up=True)], self._poisson.right(epsilon))

    def left(self, epsilon: Array) -> tuple[Array, Array]:
        return self._added([row.put(epsilon) for row in self._rows(up=False)], self._poisson.left(epsilon))

    @property
    def support(self) -> tuple[float, float]:
        """The support of the Poisson sample, which is the widest."""
        return math.log1p(-self.rate) if self.rate < 1 else -math.inf, math.inf

    @property
    def _poisson(self) -> PoissonRemove:
        return PoissonRemove(GaussianCurve(self.distance), self.rate)

    def _added(self, rows: list[tuple[Array, Array]], free: tuple[Array, Array]) -> tuple[Array, Array]:
        share = self.free * (1 + self.error)
        return tuple(share * free[k] + sum(row[k] for row in rows) for k in (0, 1))  # type: ignore[return-value]

    def _rows(self, *, up: bool) -> list[_Row]:
        """P's part with the record larger and Q's smaller than they are (``up``), or the other way."""
        more, less = (1 + self.error, 1 - self.error) if up else (1 - self.error, 1 + self.error)
        near, far = GaussianCurve(self.distance), GaussianCurve(2 * self.distance)
        moved = (self.last * self.rate + self.survives - self.stays) * more
        return [
            _Row(near, moved, self.last * less, self.last * self.rate * less),
            _Row(far, self.stays * more, self.full * less, self.survives * (less if self.stays else 2 - less)),
        ]


@dataclass(frozen=True)
class _Row:
    """A part ``moved`` of P along ``curve`` and ``mass - offset`` of it in place, against ``mass`` of Q in place."""

    curve: GaussianCurve
    moved: float
    mass: float
    offset: float

    def call(self, epsilon: Array) -> tuple[Array, Array]:
        """(P - xQ)_+ and xQ[L > eps]."""
        need = self._need(epsilon)
        if self.moved == 0:
            return np.zeros_like(need), np.zeros_like(need)
        inner = np.log(np.maximum(need, 1e-300) / self.moved)
        left = np.minimum(inner, 0.0)
        call, above = self.curve.right(np.maximum(inner, 0.0))
        put, below = self.curve.left(left)
        call, above = np.where(inner < 0, put - np.expm1(left), call), np.where(inner < 0, np.exp(left) - below, above)
        return self.moved * call, self.mass * np.exp(np.minimum(epsilon, 600.0)) * above * np.exp(-inner)

    def put(self, epsilon: Array) -> tuple[Array, Array]:
        """(xQ - P)_+ and xQ[L <= eps], at most."""
        need = self._need(epsilon)
        some, x = need > 0, np.exp(epsilon)
        if self.moved == 0:
            return np.where(some, need, 0.0), np.where(some, x * self.mass, 0.0)
        inner = np.log(np.where(some, need, 1.0) / self.moved)
        left = np.minimum(inner, 0.0)
        put, below = self.curve.left(left)
        call, above = self.curve.right(np.maximum(inner, 0.0))
        put, below = np.where(inner > 0, call + np.expm1(inner), put), np.where(inner > 0, np.exp(inner) - above, below)
        return np.where(some, self.moved * put, 0.0), np.where(some, self.mass * x * below * np.exp(-inner), 0.0)

    def _need(self, epsilon: Array) -> Array:
        """X Q - P in place: (x - 1) mass + offset, where it is positive; rounding up is safe to the left, where it may cancel."""
        need = np.expm1(np.minimum(epsilon, 600.0)) * self.mass + self.offset
        return np.asarray(need + np.where(epsilon < 0, 4e-16 * self.mass, 0.0))
