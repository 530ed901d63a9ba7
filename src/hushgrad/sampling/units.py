"""Units: which examples belong to the same person, and how many of them a step reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, Union

import numpy as np

from hushgrad import _check
from hushgrad.sampling.draws import Draws

Grouping: TypeAlias = Union[Sequence[Any], np.ndarray, Callable[[int], Any], "Units"]
"""One unit id per example: an array, or a function from the example's number to its unit's id; or :class:`Units` with a cap."""

_CHOICES = ("step", "run")


class Units:
    """Which examples belong to which unit, for user-level privacy: units are sampled, and a unit's examples are adjacent in a batch.

        >>> units = Units(["ann", "bob", "ann", "eve"], examples=4)
        >>> units.count, [part.tolist() for part in units.expand(np.array([0, 2]))]
        (3, [[0, 2, 3], [0, 0, 2]])

    Units are numbered in the order of their ids, which must be sortable. Both numbering and sizes are sensitive.

    **Formal guarantee.** With ``cap`` a unit gives at most so many of its examples to a step, chosen with uniform probability by
    randomness of its own. The choice depends on no other unit's records, and the unit's gradient is clipped as one: the event is the
    plan's, unchanged, and no amplification is claimed for the choice.

    Args:
        groups: unit id of each example.
        examples: how many there are.
        cap: examples of one unit in a step, at most; None: all of them. It bounds the memory of a step, and lets prolific units weigh
            no more than they are clipped to.
        choose: "step": anew in every step, so that all are read in the end; "run": once for the whole run.
    """

    def __init__(self, groups: Grouping, *, examples: int, cap: int | None = None, choose: str = "step") -> None:
        ids = np.asarray([groups(i) for i in range(examples)] if callable(groups) else groups)
        if ids.shape != (examples,):
            _check.fail("groups", ids.shape, f"to have one unit id for each of the {examples} examples")
        self.cap = None if cap is None else _check.positive_int(cap=cap)
        self.choose = _check.one_of(_CHOICES, choose=choose)
        _, self.owners = np.unique(ids, return_inverse=True)
        self._order = np.argsort(self.owners, kind="stable")
        self._starts = np.concatenate([[0], np.cumsum(np.bincount(self.owners))])

    @classmethod
    def of(cls, groups: Grouping, *, examples: int) -> Units:
        """``groups`` as :class:`Units`, unchanged if they are already."""
        if not isinstance(groups, cls):
            return cls(groups, examples=examples)
        if len(groups.owners) != examples:
            _check.fail("groups", len(groups.owners), f"to have one unit id for each of the {examples} examples")
        return groups

    @property
    def count(self) -> int:
        """How many units there are."""
        return len(self._starts) - 1

    def expand(self, chosen: np.ndarray, *, step: int = 0, draws: Draws | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The examples of the ``chosen`` units, and the unit of each; examples of one unit are adjacent.

        Args:
            chosen: numbers of units.
            step: for which a cap chooses examples.
            draws: the randomness of that choice; required with a cap.
        """
        spans = [self._order[self._starts[unit] : self._starts[unit + 1]] for unit in chosen.tolist()]
        if self.cap is not None:
            assert draws is not None
            at = step if self.choose == "step" else None
            spans = [self._some(span, draws, unit, at) for span, unit in zip(spans, chosen.tolist(), strict=True)]
        return np.concatenate([np.empty(0, np.int64), *spans]), np.repeat(chosen, [len(span) for span in spans])

    def _some(self, span: np.ndarray, draws: Draws, unit: int, step: int | None) -> np.ndarray:
        assert self.cap is not None
        if len(span) <= self.cap:
            return span
        return np.sort(draws.of_unit(unit, step).choice(span, self.cap, replace=False))
