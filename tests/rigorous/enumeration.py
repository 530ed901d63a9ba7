"""Truth for discrete mechanisms: every output of a composition with its two masses, in ball arithmetic. No code of the accountants."""

from __future__ import annotations

import itertools
import math

from ball_arithmetic import Atoms
from flint import arb, fmpz

__all__ = ["approximate", "composed", "discrete_gaussian", "discrete_laplace", "mirrored", "response", "sampled", "shown"]

Masses = list[tuple[arb, arb]]


def response(noise: arb, categories: int) -> Masses:
    """Randomised response: the true answer, the other one, and the rest."""
    lie = noise / categories
    rest = [(lie * (categories - 2), lie * (categories - 2))] if categories > 2 else []
    return [(1 - noise + lie, lie), (lie, 1 - noise + lie), *rest]


def approximate(epsilon: arb, delta: arb) -> Masses:
    """The worst (epsilon, delta)-DP mechanism."""
    truth = (1 - delta) / (1 + (-epsilon).exp())
    lie = 1 - delta - truth
    return [(truth, lie), (lie, truth), (delta, arb(0)), (arb(0), delta)]


def discrete_laplace(scale: arb, distance: int) -> Masses:
    """Masses e^{-|k|/scale} around 0 and around ``distance``; the two geometric ends are one output each."""
    t = (-1 / scale).exp()
    unit = (1 - t) / (1 + t)
    ends = [(1 / (1 + t), t**distance / (1 + t)), (t**distance / (1 + t), 1 / (1 + t))]
    return [*ends, *((unit * t**k, unit * t ** (distance - k)) for k in range(1, distance))]


def discrete_gaussian(sigma: arb, distance: int) -> Masses:
    """Masses e^{-k^2/2 sigma^2} around 0 and around ``distance``; what is further than 60 sigma away is left out (below 1e-780)."""
    far = math.ceil(60 * float(sigma)) + distance
    weight = {k: (-(arb(k) ** 2) / (2 * sigma**2)).exp() for k in range(-far - distance, far + distance + 1)}
    total = sum(weight.values(), arb(0))
    return [(weight[k] / total, weight[k - distance] / total) for k in range(-far, far + 1)]


def sampled(masses: Masses, rate: arb) -> Masses:
    """(1-q) Q + q P against Q."""
    return [((1 - rate) * q + rate * p, q) for p, q in masses]


def shown(masses: Masses, rate: arb) -> Masses:
    """With probability 1 - q an output of its own, the same in both worlds."""
    return [(1 - rate, 1 - rate), *((rate * p, rate * q) for p, q in masses)]


def mirrored(masses: Masses) -> Masses:
    """The other direction."""
    return [(q, p) for p, q in masses]


def composed(masses: Masses, times: int) -> Atoms:
    """All outputs of ``times`` runs, counted by how often each output of one run occurs."""
    kinds, found = len(masses), []
    for counts in _splits(times, kinds):
        many = arb(fmpz(math.factorial(times)))
        p = q = arb(1)
        for n, (a, b) in zip(counts, masses, strict=True):
            many /= arb(fmpz(math.factorial(n)))
            p, q = p * a**n, q * b**n
        found.append((many * p, many * q))
    return Atoms(tuple(found))


def _splits(times: int, kinds: int) -> list[tuple[int, ...]]:
    """All ways to write ``times`` as an ordered sum of ``kinds`` numbers."""
    bars = itertools.combinations(range(times + kinds - 1), kinds - 1)
    return [tuple(b - a - 1 for a, b in zip((-1, *cut), (*cut, times + kinds - 1), strict=True)) for cut in bars]
