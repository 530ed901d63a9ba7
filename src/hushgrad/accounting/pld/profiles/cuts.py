"""How often a Poisson batch is cut to a size, with bounds on the error of each number."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.special import bdtr, bdtrc, betaln

from hushgrad.accounting.policy import POLICY

_TAILS = 1e-9  # the relative error of binomial tails, generously
_U = 2.0**-53


@dataclass(frozen=True)
class Cuts:
    """The masses of ``profiles/places`` for one record among n, each with a relative error of at most ``error``."""

    rate: float
    free: float  # P[N < B-1]
    last: float  # P[N = B-1]
    full: float  # P[N >= B]
    survives: float  # P[N >= B, the record is sampled and stays]
    error: float

    @classmethod
    def of(cls, n: int, q: float, size: int) -> Cuts:
        """For N ~ Bin(n-1, q) others. P[N = k] q/(k+1) = P[Bin(n, q) = k+1]/n makes the survivors a tail."""
        full = float(bdtrc(size - 1, n - 1, q)) if size - 1 < n - 1 else 0.0
        survives = size / n * float(bdtrc(size, n, q)) if size < n else 0.0
        free = float(bdtr(size - 2, n - 1, q)) if size > 1 else 0.0
        last, error = _point(size - 1, n - 1, q)
        return cls(q, free, last, full, min(survives, full), max(_TAILS, error))

    @property
    def stays(self) -> float:
        """How much of ``survives`` is better left at two contributions; any part is valid."""
        first, all_of_it = POLICY.frequent_cuts
        ratio = self.survives / (self.last * self.rate) if self.last > 1e-250 else math.inf
        return self.survives * min(1.0, max(0.0, (ratio - first) / (all_of_it - first)))

    @property
    def rate_of_last(self) -> float:
        """How probably the record is in a batch of the second row, if another record takes its place."""
        moved = self.survives - self.stays
        return (self.last * self.rate + moved) / (self.last + moved) if self.last + moved > 0 else self.rate

    @property
    def rate_of_full(self) -> float:
        """How probably the record is in a batch of the third row, if another record takes its place."""
        return self.stays / (self.full - self.survives + self.stays)


def _point(k: int, n: int, q: float) -> tuple[float, float]:
    """P[Bin(n, q) = k] and a bound on its relative error: so many roundings of its largest terms."""
    if k > n:
        return 0.0, 0.0
    if q == 1:
        return float(k == n), 0.0
    terms = (-math.log(n + 1), -float(betaln(k + 1, n - k + 1)), k * math.log(q), (n - k) * math.log1p(-q))
    return math.exp(math.fsum(terms)), 32 * _U * sum(abs(term) for term in terms)
