"""Units: which examples belong to the same person."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hushgrad import _check

__all__ = ["Grouping", "Units"]

Grouping = Sequence[Any] | np.ndarray | Callable[[int], Any]
"""One unit id per example: an array, or a function from the example's number to its unit's id."""


class Units:
    """The examples of each unit, for privacy of whole users: sampling is over units, and a batch holds all their examples.

        >>> units = Units(["ann", "bob", "ann", "eve"], examples=4)
        >>> units.count, [part.tolist() for part in units.expand(np.array([0, 2]))]
        (3, [[0, 2, 3], [0, 0, 2]])

    Units are numbered in the order of their ids, which must be sortable. Both numbering and sizes are sensitive.
    """

    def __init__(self, groups: Grouping, *, examples: int) -> None:
        ids = np.asarray([groups(i) for i in range(examples)] if callable(groups) else groups)
        if ids.shape != (examples,):
            _check.fail("groups", groups, f"to have one unit id for each of the {examples} examples")
        _, unit = np.unique(ids, return_inverse=True)
        self._order = np.argsort(unit, kind="stable")
        self._starts = np.concatenate([[0], np.cumsum(np.bincount(unit))])

    @property
    def count(self) -> int:
        """How many units there are."""
        return len(self._starts) - 1

    def expand(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """All examples of the ``chosen`` units, and each one's unit; examples of one unit are neighbours."""
        first, last = self._starts[chosen], self._starts[chosen + 1]
        spans = [self._order[a:b] for a, b in zip(first, last, strict=True)]
        return np.concatenate([np.empty(0, np.int64), *spans]), np.repeat(chosen, last - first)
