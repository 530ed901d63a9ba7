"""Samplers: which records take part in which step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import numpy as np

from hushgrad._value import Value
from hushgrad.events import Participation

__all__ = ["Sampler"]


class Sampler(Value, family="sampler"):
    """A frozen, public description of how batches are drawn.

    Every *field* is public. The *arguments* of :meth:`batches` are sensitive: ``n`` is the true number of records (secret
    under add/remove) and ``rng`` decides who takes part.
    """

    @abstractmethod
    def participation(self) -> Participation:
        """What this sampler promises about any one record; the mechanism's theorem is chosen by it."""

    @abstractmethod
    def batches(self, n: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
        """The record numbers of each step's batch, one array per step; empty batches are steps too."""
