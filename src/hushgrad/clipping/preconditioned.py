"""Scales gradients coordinate by coordinate before they are clipped.

Norms and sums are those of s ⊙ G_i, where s is public. With a factor for every coordinate no product form is left, so each example's scaled
gradient is formed; then it is handled like any per-example gradient, and clipped by the norm of what was formed. That takes as many
copies of the parameters as a micro-batch has examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from hushgrad.clipping.base import Record, Rule
from hushgrad.clipping.site import Call


class _Formed(Rule):
    """A call whose per-example gradients all exist."""

    hot = False

    def per_example(self, record: Record) -> dict[str, Tensor]:
        """As they were formed."""
        return record.kept


class _FormedFromPositions(_Formed):
    """The same for a layer whose rows were grouped by example."""

    positions = True


_FORMED = {False: _Formed(), True: _FormedFromPositions()}


def precondition(calls: Iterable[Call], scales: Mapping[str, Tensor]) -> None:
    """Replace every example's gradient by s ⊙ G_i; ``scales`` has s by the parameter's name, in its shape."""
    for call in calls:
        record = call.record
        assert record is not None
        record.join()
        made = record.kept
        if not record.complete:
            made = call.rule.per_example(record) | made
        record.kept = {local: made[local] * scales[name].to(made[local].dtype) for local, name in call.site.full.items()}
        record.masses, call.sq_norms = {}, None
        record.release()
        call.rule = _FORMED[call.rule.positions]
