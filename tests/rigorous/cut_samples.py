"""Truth for truncated Poisson samples: each of n records is drawn with probability q; of more than B of them B stay, at random.

A batch T of fewer than B records has probability q^|T| (1-q)^(n-|T|), one of B records that of at least B draws, shared by all such
batches. So the noisy sum is a mixture of Gaussians, and every set of outputs bounds delta from below. No code of the accountants.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from ball_arithmetic import between
from flint import arb, fmpz

__all__ = ["Mixtures", "kept", "opposite_to_all"]

_FAR = 45.0  # standard deviations
_PLACES = 6000


def _mass(n: int, k: int, q: arb) -> arb:
    return arb(fmpz.bin_uiui(n, k)) * q**k * (1 - q) ** (n - k)


def kept(q: arb, n: int, size: int) -> arb:
    """The probability that a record is in the batch."""
    below = sum((_mass(n, k, q) * k / n for k in range(1, size)), arb(0))
    full = 1 - sum((_mass(n, k, q) for k in range(size)), arb(0))
    return below + full * size / n


def _batches(values: list[float], q: arb, size: int) -> list[tuple[float, arb]]:
    """Sums of all batches with their probabilities."""
    n = len(values)
    full = (
        (1 - sum((_mass(n, k, q) for k in range(min(size, n + 1))), arb(0))) / arb(fmpz.bin_uiui(n, size))
        if size <= n
        else arb(0)
    )
    found = []
    for k in range(min(size, n) + 1):
        weight = full if k == size else q**k * (1 - q) ** (n - k)
        found += [(math.fsum(batch), weight) for batch in itertools.combinations(values, k)]
    return found


@dataclass(frozen=True)
class Mixtures:
    """P against Q: (mean, probability) of Gaussians of standard deviation 1."""

    p: tuple[tuple[arb, arb], ...]
    q: tuple[tuple[arb, arb], ...]

    @classmethod
    def of(cls, q: arb, size: int, others: list[float], scale: float, relation: str) -> Mixtures:
        """A record of value 1 among ``others``, against none, a null or its opposite."""
        second = {"add_remove": [], "zero_out": [0.0], "replace_one": [-1.0]}[relation]
        sides = (_batches([1.0, *others], q, size), _batches([*second, *others], q, size))
        return cls(*(tuple((arb(mean) / arb(scale), weight) for mean, weight in side) for side in sides))

    def mirrored(self) -> Mixtures:
        """The other direction."""
        return Mixtures(self.q, self.p)

    def at_least(self, epsilon: float) -> arb:
        """P[S] - e^eps Q[S] for intervals S that are chosen in doubles: a lower bound of delta, whichever they are."""
        means = [float(mean.mid()) for mean, _ in (*self.p, *self.q)]
        z = np.linspace(min(means) - _FAR, max(means) + _FAR, _PLACES)
        better = _log_density(self.p, z) > epsilon + _log_density(self.q, z)
        turns = np.flatnonzero(np.diff(np.concatenate([[False], better, [False]]).astype(int)))
        x, total = arb(epsilon).exp(), arb(0)
        for start, stop in turns.reshape(-1, 2):
            a = None if start == 0 else arb(float(z[start]))
            b = None if stop == len(z) else arb(float(z[stop]))
            mass, other = (sum((w * between(a, b, mean) for mean, w in side), arb(0)) for side in (self.p, self.q))
            total += mass - x * other
        return total


def opposite_to_all(rate: arb, scale: float) -> tuple[Mixtures, Mixtures]:
    """A sample of a fixed size: the record opposite to all others against its null, both directions. It takes another's place."""
    places = [arb(k) / arb(scale) for k in range(3)]
    pair = Mixtures(((places[0], 1 - rate), (places[2], rate)), ((places[0], 1 - rate), (places[1], rate)))
    return pair, pair.mirrored()


def _log_density(side: tuple[tuple[arb, arb], ...], z: np.ndarray) -> np.ndarray:
    rows = [math.log(max(float(w.mid()), 1e-300)) - (z - float(mean.mid())) ** 2 / 2 for mean, w in side]
    return np.asarray(np.logaddexp.reduce(rows))
