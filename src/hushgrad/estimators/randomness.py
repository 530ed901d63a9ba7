"""The source of the estimators' noise: the operating system, or a seed that is declared as such.

A private estimator draws a few thousand numbers, so it can afford a slow and strong source: every uniform consumes 64 fresh bits of
``os.urandom`` and becomes a Gaussian through the inverse distribution function, which has no gap up to 8.2 standard deviations.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod

import numpy as np
from scipy.special import ndtri

REPRODUCIBLE = "Reproducible: not private against whoever knows random_state"


class Randomness(ABC):
    """A stream of uniform numbers, and the distributions that the mechanisms need."""

    notes: tuple[str, ...] = ()

    @abstractmethod
    def bits(self, count: int) -> np.ndarray:
        """``count`` uniform 64-bit integers."""

    def beside(self) -> Randomness:
        """A separate stream for another purpose; creating it does not advance this one, if this one is reproducible."""
        return self

    def uniform(self, size: int) -> np.ndarray:
        """Uniform numbers strictly inside (0, 1), each from 53 bits."""
        return ((self.bits(size) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53

    def normal(self, size: int) -> np.ndarray:
        """Standard Gaussians."""
        return ndtri(self.uniform(size))

    def exponential(self, size: int) -> np.ndarray:
        """Standard exponentials."""
        return -np.log(self.uniform(size))

    def gumbel(self, size: int) -> np.ndarray:
        """Standard Gumbels."""
        return -np.log(self.exponential(size))

    def spherical(self, size: int) -> np.ndarray:
        """A vector with density proportional to exp(-norm): a uniform direction and a Gamma(size) length."""
        direction = self.normal(size)
        return direction / np.linalg.norm(direction) * self.exponential(size).sum()


class _System(Randomness):
    def bits(self, count: int) -> np.ndarray:
        return np.frombuffer(os.urandom(8 * count), dtype=np.uint64)


class _Seeded(Randomness):
    notes = (REPRODUCIBLE,)

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator

    def bits(self, count: int) -> np.ndarray:
        return self._generator.integers(0, 2**64, size=count, dtype=np.uint64)

    def beside(self) -> Randomness:
        return _Seeded(self._generator.spawn(1)[0])


def randomness(random_state: int | np.random.Generator | np.random.RandomState | None) -> Randomness:
    """The operating system's randomness for None; a reproducible one, which says so, for a seed or a generator.

    >>> randomness(3).normal(2).round(4).tolist() == randomness(3).normal(2).round(4).tolist()
    True
    >>> randomness(None).notes
    ()
    """
    if random_state is None:
        return _System()
    # From a generator a fixed number of draws: how far it has moved must not tell how many trials a search has made.
    if isinstance(random_state, np.random.Generator):
        return _Seeded(np.random.default_rng(random_state.integers(0, 2**31, size=8)))
    if isinstance(random_state, np.random.RandomState):
        return _Seeded(np.random.default_rng(random_state.randint(0, 2**31, size=8)))
    return _Seeded(np.random.default_rng(random_state))
