"""From records to the clipped sum: norms, weights, one weighted pass.

A *group* is a set of calls over the same privacy units. Ordinarily the units are the examples of one physical batch, each
parameter was used once, and its squared norms were taken while the gradient was hot. Where a parameter was used more than once
(tied weights, a module called twice, probes, all examples of one user) the norm of the *sum* of its parts is needed:
‖sum_k G_k‖² is not sum_k ‖G_k‖².
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hushgrad.clipping.base import Clipper, Record, Rule, added
from hushgrad.clipping.cross import joint_sq_norms
from hushgrad.clipping.site import Call
from hushgrad.clipping.sums import Sum

__all__ = ["Group", "Part", "Use", "add_clipped", "add_usual"]


class Use(NamedTuple):
    """One call, times ``factor`` (the reduction's batch size, a probe's coefficient); ``units[i]``: example i's unit."""

    call: Call
    factor: float
    units: Tensor | None


class Group(NamedTuple):
    """All uses over the same ``size`` units."""

    size: int
    uses: list[Use]


class Part(NamedTuple):
    """What one group contributed beside its sums."""

    norms: Tensor
    weights: Tensor
    rejected: int


def add_clipped(group: Group, clipper: Clipper, sums: dict[str, Sum], scale: float) -> Part:
    """``sums[name] += scale * sum_i w_i G_i``; the calls are released one by one."""
    order = list(sums)
    grouping = clipper.groups(order)
    rows, factor = _sq_norms(group)
    if grouping is None:
        clipped_by = total = added(list(rows.values())).mul_(factor)
    else:
        clipped_by = _by_group(rows, dict(zip(order, grouping, strict=True)), group.size).mul_(factor)
        total = clipped_by.sum(1)
    weights = clipper.weights(clipped_by)
    finite = None if math.isfinite(float(total.sum())) else total.isfinite()
    rejected = 0 if finite is None else int((~finite).sum())
    if finite is not None:
        weights = torch.where(finite if weights.dim() == 1 else finite.unsqueeze(1), weights, weights.new_zeros(()))
    columns = None if grouping is None else dict(zip(order, grouping, strict=True))
    scaled: dict[float, Tensor] = {}
    for use in group.uses:
        if use.factor not in scaled:  # a mean over examples, divided by their number once more, needs no scaling at all
            scaled[use.factor] = weights if use.factor * scale == 1 else weights * (use.factor * scale)
        _add_use(use, scaled[use.factor], columns, finite, sums)
    return Part(total.sqrt(), weights, rejected)


def add_usual(calls: Sequence[Call], factor: float, clipper: Clipper, sums: dict[str, Sum], scale: float) -> Part | None:
    """The same where each parameter is used once, all have one factor and are clipped together; None if a norm is not finite.

    Then nothing was added yet, and the norms are remembered. Short, because a small model's step is mostly Python.
    """
    rows: list[Tensor] = []
    for call in calls:
        rows += (call.sq_norms or call.measure()).values()
    norms, weights, finite = clipper.clip(rows, factor * factor)
    if not finite:
        return None
    scaled = weights if factor * scale == 1 else weights * (factor * scale)
    for call in calls:
        record, site = call.record, call.site
        assert record is not None
        site.rule.add_weighted(
            record,
            dict.fromkeys(site.names, scaled if scaled.dtype is site.dtype else scaled.to(site.dtype)),
            {local: sums[name] for local, name in site.full.items()},
        )
        record.clear()
    return Part(norms, weights, 0)


def _by_group(rows: dict[str, Tensor], column: dict[str, int], units: int) -> Tensor:
    """The sums over each clipping group: (units, groups)."""
    stacked = torch.stack(list(rows.values()))
    index = torch.tensor([column[name] for name in rows], device=stacked.device)
    return stacked.new_zeros(max(column.values(), default=0) + 1, units).index_add_(0, index, stacked).t()


def _sq_norms(group: Group) -> tuple[dict[str, Tensor], float]:
    """The squared norms of each parameter's gradient, one for each unit, still to be multiplied by a common factor."""
    by_name: dict[str, list[tuple[Use, str]]] = {}
    for use in group.uses:
        for local, name in use.call.site.full.items():
            by_name.setdefault(name, []).append((use, local))
    shared = {name: uses for name, uses in by_name.items() if len(uses) > 1 or uses[0][0].units is not None}
    rows = joint_sq_norms(group, shared)
    factors = {uses[0][0].factor for name, uses in by_name.items() if name not in shared}
    common = factors.pop() if len(factors) == 1 and not shared else None
    for name, uses in by_name.items():
        if name not in shared:
            use, local = uses[0]
            row = use.call.measure()[local]
            rows[name] = row if common is not None else row * use.factor**2
    return rows, 1.0 if common is None else common**2


def _add_use(use: Use, weights: Tensor, columns: dict[str, int] | None, finite: Tensor | None, sums: dict[str, Sum]) -> None:
    record, rule, names = use.call.record, use.call.site.rule, use.call.site.full
    assert record is not None
    if use.units is not None:
        weights = weights[use.units]
    if finite is not None:  # 0 * NaN is NaN, so examples without a finite norm must leave the sum altogether
        record, weights = _without(record, rule, finite if use.units is None else finite[use.units], weights)
    weights = weights.to(use.call.site.dtype)  # layers may have different precisions
    by_name = {local: weights if columns is None else weights[:, columns[name]] for local, name in names.items()}
    rule.add_weighted(record, by_name, {local: sums[name] for local, name in names.items()})
    record.clear()


def _without(record: Record, rule: Rule, finite: Tensor, weights: Tensor) -> tuple[Record, Tensor]:
    index = finite.nonzero().squeeze(1)
    return rule.select(record, index, len(finite)), weights.index_select(0, index)
