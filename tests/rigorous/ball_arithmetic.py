r"""Truth for one to three steps: privacy profiles in ball arithmetic, every number with a proved error. No code of the accountants.

With r = dQ/dP and x = e^eps, delta(x) = E_P[(1 - x r)_+]. A composition is an outer mean, delta(x) = E_P[h(x r)] with h the profile of the
other steps, which is convex. Over a cell of outputs P and Q have masses p and q, so the mean of r is q/p and r lies between its values at
the two ends: Jensen's inequality bounds the cell from below, the chord of h from above. Cells are split until both are close.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from flint import arb, ctx

__all__ = [
    "Atoms",
    "Bounds",
    "Cell",
    "Gaussian",
    "Laplace",
    "Mirror",
    "Pair",
    "Replace",
    "Sampled",
    "between",
    "precision",
    "profile",
    "two_bins",
    "upper_tail",
]

Bounds = tuple[arb, arb]


def precision(delta: float, largest: float) -> None:
    """So many bits that neither 1 - x + tiny nor distances of 1/``largest`` lose their digits."""
    ctx.prec = int(220 - 1.2 * math.log2(delta) + 4 * math.log2(largest))


def upper_tail(z: arb) -> arb:
    """The mass of N(0, 1) above z."""
    return (z / arb(2).sqrt()).erfc() / 2


def between(a: arb | None, b: arb | None, centre: arb) -> arb:
    """The mass of N(centre, 1) between two places (None: infinitely far), from the nearer tail."""
    if a is not None and (b is None or a - centre > 0):
        return upper_tail(a - centre) - (arb(0) if b is None else upper_tail(b - centre))
    below = arb(1) if b is None else upper_tail(centre - b)
    return below - (arb(0) if a is None else upper_tail(centre - a))


@dataclass(frozen=True)
class Cell:
    """Masses of P and Q, and the range of r = dQ/dP (``most`` None: unbounded); ``place`` is what a split needs."""

    p: arb
    q: arb
    least: arb
    most: arb | None
    place: object = None


class Pair(ABC):
    """Two distributions: their profile in closed form, and cells that can be split."""

    @abstractmethod
    def delta(self, x: arb) -> arb:
        """E_P[(1 - x r)_+]."""

    @abstractmethod
    def cells(self) -> list[Cell]:
        """A partition of the outputs."""

    @abstractmethod
    def split(self, cell: Cell) -> list[Cell]:
        """A finer one; the cell itself where it cannot be split."""


class _OnTheLine(Pair):
    """Outputs are numbers, and r falls with them."""

    edges: tuple[float, ...]

    @abstractmethod
    def masses(self, a: arb | None, b: arb | None) -> tuple[arb, arb]:
        """Of P and Q."""

    @abstractmethod
    def ratio(self, z: arb | None, *, right: bool) -> arb | None:
        """R at z; at None its limit on that side, None if infinite."""

    def _cell(self, a: float | None, b: float | None) -> Cell:
        low, high = (None if z is None else arb(z) for z in (a, b))
        p, q = self.masses(low, high)
        least = self.ratio(high, right=True)
        assert least is not None
        return Cell(p, q, least, self.ratio(low, right=False), (a, b))

    def cells(self) -> list[Cell]:
        ends = [None, *self.edges, None]
        return [self._cell(a, b) for a, b in itertools.pairwise(ends)]

    def split(self, cell: Cell) -> list[Cell]:
        a, b = cell.place  # type: ignore[misc]
        if a is None:
            middle = b - 4.0
        elif b is None:
            middle = a + 4.0
        else:
            middle = (a + b) / 2
        return [self._cell(a, middle), self._cell(middle, b)]


class Gaussian(_OnTheLine):
    """N(mu, 1) against N(0, 1)."""

    def __init__(self, mu: arb) -> None:
        self.mu = mu
        top = float(mu)
        self.edges = tuple(sorted({-30.0, -12.0, -5.0, 0.0, top / 2, top, top + 5.0, top + 12.0, top + 30.0}))

    def delta(self, x: arb) -> arb:
        if not x > 0:
            return arb(1)
        t = (x.log() + self.mu**2 / 2) / self.mu
        return upper_tail(t - self.mu) - x * upper_tail(t)

    def masses(self, a: arb | None, b: arb | None) -> tuple[arb, arb]:
        return between(a, b, self.mu), between(a, b, arb(0))

    def ratio(self, z: arb | None, *, right: bool) -> arb | None:
        if z is None:
            return arb(0) if right else None
        return (self.mu**2 / 2 - self.mu * z).exp()


class Replace(_OnTheLine):
    """(1-q) N(0,1) + q N(mu,1) against (1-q) N(0,1) + q N(-mu,1)."""

    def __init__(self, mu: arb, rate: arb) -> None:
        self.mu, self.rate = mu, rate
        top = float(mu)
        self.edges = tuple(sorted({s * z for z in (0.0, top, top + 5.0, top + 12.0, top + 30.0, 5.0) for s in (1, -1)}))

    def delta(self, x: arb) -> arb:
        if not x > 0:
            return arb(1)
        if x < 1:
            return 1 - x + x * self.delta(1 / x)
        q, mu = self.rate, self.mu
        c, half = q * (-(mu**2) / 2).exp(), (1 - q) * (x - 1)
        t = ((half + (half**2 + 4 * c**2 * x).sqrt()) / (2 * c)).log() / mu
        return q * (upper_tail(t - mu) - x * upper_tail(t + mu)) - half * upper_tail(t)

    def masses(self, a: arb | None, b: arb | None) -> tuple[arb, arb]:
        still, plus, minus = (between(a, b, centre) for centre in (arb(0), self.mu, -self.mu))
        return (1 - self.rate) * still + self.rate * plus, (1 - self.rate) * still + self.rate * minus

    def ratio(self, z: arb | None, *, right: bool) -> arb | None:
        if z is None:
            return arb(0) if right else None
        up, down = (s * self.mu * z - self.mu**2 / 2 for s in (1, -1))
        return (1 - self.rate + self.rate * down.exp()) / (1 - self.rate + self.rate * up.exp())


class Laplace(_OnTheLine):
    """Laplace(1) at 0 against Laplace(1) at -d, so that r falls: from e^d below -d to e^-d above 0."""

    def __init__(self, distance: arb) -> None:
        self.distance = distance
        self.edges = (-float(distance), -float(distance) / 2, 0.0)

    def delta(self, x: arb) -> arb:
        d = self.distance
        if x >= d.exp():
            return arb(0)
        if x <= (-d).exp():
            return 1 - x
        return 1 - ((x.log() - d) / 2).exp()

    def masses(self, a: arb | None, b: arb | None) -> tuple[arb, arb]:
        return self._mass(a, b, arb(0)), self._mass(a, b, -self.distance)

    @staticmethod
    def _mass(a: arb | None, b: arb | None, centre: arb) -> arb:
        def below(z: arb) -> arb:
            return (z - centre).exp() / 2 if z - centre <= 0 else 1 - (centre - z).exp() / 2

        return (arb(1) if b is None else below(b)) - (arb(0) if a is None else below(a))

    def ratio(self, z: arb | None, *, right: bool) -> arb | None:
        d = self.distance
        if z is None:
            return (-d).exp() if right else d.exp()
        # |z| - |z + d|; at the edges, which are rounded, the wider value
        inside = z.max(-d).min(arb(0))
        return (-d - 2 * inside).exp()

    def split(self, cell: Cell) -> list[Cell]:
        return [cell] if None in cell.place else super().split(cell)  # type: ignore[operator]


@dataclass(frozen=True)
class Sampled(Pair):
    """(1-q) Q + q P against Q."""

    of: Pair
    rate: arb

    def delta(self, x: arb) -> arb:
        inner = (x - 1 + self.rate) / self.rate
        return 1 - x if inner <= 0 else self.rate * self.of.delta(inner)

    def cells(self) -> list[Cell]:
        return [self._of(cell) for cell in self.of.cells()]

    def split(self, cell: Cell) -> list[Cell]:
        return [self._of(part) for part in self.of.split(cell.place)]  # type: ignore[arg-type]

    def _of(self, cell: Cell) -> Cell:
        q = self.rate
        most = 1 / (1 - q) if cell.most is None else cell.most / ((1 - q) * cell.most + q)
        return Cell((1 - q) * cell.q + q * cell.p, cell.q, cell.least / ((1 - q) * cell.least + q), most, cell)


@dataclass(frozen=True)
class Mirror(Pair):
    """The other direction."""

    of: Pair

    def delta(self, x: arb) -> arb:
        return 1 - x + x * self.of.delta(1 / x) if x > 0 else arb(1)

    def cells(self) -> list[Cell]:
        return [self._of(cell) for cell in self.of.cells()]

    def split(self, cell: Cell) -> list[Cell]:
        return [self._of(part) for part in self.of.split(cell.place)]  # type: ignore[arg-type]

    @staticmethod
    def _of(cell: Cell) -> Cell:
        most = 1 / cell.least if cell.least > 0 else None
        return Cell(cell.q, cell.p, arb(0) if cell.most is None else 1 / cell.most, most, cell)


@dataclass(frozen=True)
class Atoms(Pair):
    """Finitely many outputs with masses (p, q)."""

    masses: tuple[tuple[arb, arb], ...]

    def delta(self, x: arb) -> arb:
        return sum((p - x * q for p, q in self.masses if p - x * q > 0), arb(0))

    def cells(self) -> list[Cell]:
        return [Cell(p, q, q / p, q / p) if p > 0 else Cell(p, q, arb(0), None) for p, q in self.masses]

    def split(self, cell: Cell) -> list[Cell]:
        return [cell]


def profile(steps: list[Pair], x: arb, width: float, most: int = 1500) -> Bounds:
    """Bounds on the delta of a composition at x = e^eps; relatively ``width`` apart if ``most`` cells suffice."""
    if len(steps) == 1:
        exact = steps[0].delta(x)
        return exact, exact
    rest = steps[1:]

    def h(y: arb) -> Bounds:
        return profile(rest, y, width / 4, most // 2)

    return _outer(steps[0], lambda r: h(x * r), width, most)


def _outer(step: Pair, h: Callable[[arb], Bounds], width: float, most: int, *, rising: bool = False) -> Bounds:
    todo = [cell for cell in step.cells() if cell.p > 0]
    done: list[tuple[Cell, arb, arb]] = []
    while True:
        done += [(cell, *_of_cell(cell, h, rising=rising)) for cell in todo]
        low, high = sum((a for _, a, _ in done), arb(0)), sum((b for _, _, b in done), arb(0))
        gap = float((high - low).mid())
        if len(done) >= most or gap <= width * float(high.mid()):
            return low, high
        done.sort(key=lambda item: float((item[2] - item[1]).mid()), reverse=True)
        count = min(max(4, len(done) // 2), sum(float((b - a).mid()) > gap / (3 * len(done)) for _, a, b in done))
        parts = [part for cell, _, _ in done[:count] for part in step.split(cell)]
        if len(parts) == count:
            return low, high
        todo, done = [part for part in parts if part.p > 0], done[count:]


def _of_cell(cell: Cell, h: Callable[[arb], Bounds], *, rising: bool) -> Bounds:
    """Jensen from below, the chord from above; where r is unbounded, the least value if h falls, the slope 1/2 if it rises."""
    mean = cell.q / cell.p
    low = cell.p * h(mean)[0]
    if cell.most is None:
        return low, cell.p * h(cell.least)[1] + ((cell.q - cell.p * cell.least) / 2 if rising else 0)
    if not cell.most - cell.least > 0:
        return low, cell.p * h(mean)[1]
    share = ((mean - cell.least) / (cell.most - cell.least)).max(arb(0)).min(arb(1))
    return low, cell.p * (share * h(cell.most)[1] + (1 - share) * h(cell.least)[1])


def two_bins(mu: arb, x: arb, width: float, *, remove: bool, most: int = 1500) -> Bounds:
    """One pass over two bins: W = (w_1 + w_2)/2 under Q; E[(W - x)_+], or E[(1 - x W)_+] for an addition."""
    gaussian = Gaussian(mu)

    def removed(w: arb) -> Bounds:
        k = 2 * x - w
        value = (1 - k if k <= 0 else gaussian.delta(k)) / 2
        return value, value

    def added(w: arb) -> Bounds:
        k = 2 / x - w
        value = arb(0) if k <= 0 else x * (k - 1 + gaussian.delta(k)) / 2
        return value, value

    # under Q the mean of w_2 in a cell is p/q, and w = 1/r: the mirror's cells have just these masses and ranges
    return _outer(Mirror(gaussian), removed if remove else added, width, most, rising=remove)
