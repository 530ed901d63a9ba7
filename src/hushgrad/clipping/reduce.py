"""From records to the clipped sum: norms, weights, one weighted pass.

A *group* is a set of calls over the same privacy units. Ordinarily the units are the examples of one physical batch, each
parameter was used once, and its squared norms were taken while the gradient was hot. Where a parameter was used more than once
(tied weights, a module called twice, probes, all examples of one user) the norm of the *sum* of its parts is needed:
‖sum_k G_k‖² is not sum_k ‖G_k‖².
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hushgrad.clipping.base import Record, Rule
from hushgrad.clipping.certificate import Certificate
from hushgrad.clipping.clipper import Clipper, added, usable
from hushgrad.clipping.device_sum import FILLED, cleaned_in_place, filled, held_back, raised
from hushgrad.clipping.heavy_units import Columns, by_group, form, heavy_units
from hushgrad.clipping.joint_norms import joint_norms
from hushgrad.clipping.mass import Mass
from hushgrad.clipping.rejected import Counted, joined
from hushgrad.clipping.site import Call
from hushgrad.clipping.sums import Sum

_MANY = 64  # more parts than this are merged


class Use(NamedTuple):
    """One call, times ``factor`` (the reduction's batch size, a probe's coefficient); ``units[i]``: example i's unit."""

    call: Call
    factor: float
    units: Tensor | None


class Group(NamedTuple):
    """All uses over the same ``size`` units; the last ``padding`` of them are padding, with weight 0.

    ``fixed``: every batch is padded to one size, and on a device no operation may depend on how far.
    """

    size: int
    uses: list[Use]
    padding: int = 0
    fixed: bool = False


class Part(NamedTuple):
    """What one group contributed besides its sums.

    ``counted``: only the first so many norms and weights belong to examples; the other norms are ``FILLED``. None: all do.
    """

    norms: Tensor
    weights: Tensor
    rejected: Counted
    counted: int | None = None

    @property
    def taken(self) -> int:
        """The number of examples, or units."""
        return len(self.norms) if self.counted is None else self.counted


def together(parts: list[Part]) -> list[Part]:
    """Merge many parts into one: small tensors take far more memory than their numbers."""
    if len(parts) < _MANY:
        return parts
    norms, weights = torch.cat([p.norms for p in parts]), torch.cat([p.weights for p in parts])
    counted = None if parts[0].counted is None else sum(p.taken for p in parts)
    return [Part(norms, weights, joined([p.rejected for p in parts]), counted)]


def add_clipped(
    group: Group, clipper: Clipper, sums: dict[str, Sum], scale: float, certificate: Certificate | None = None
) -> Part:
    """``sums[name] += scale * sum_i w_i G_i``; calls are freed one by one. With a certificate, in double precision."""
    order = list(sums)
    grouping = clipper.groups(order)
    columns = None if grouping is None else dict(zip(order, grouping, strict=True))
    sq_norms, masses = _measured(group, wide=certificate is not None)
    if certificate is not None:
        sq_norms = {name: certificate.upper(name, square, masses) for name, square in sq_norms.items()}
    elif not group.uses[0].call.site.params[0].is_cpu:
        sq_norms = {name: raised(square, [masses[name]] if name in masses else []) for name, square in sq_norms.items()}
    clipped_by = added(list(sq_norms.values())) if columns is None else by_group(sq_norms, columns, group.size)
    total = clipped_by if columns is None else clipped_by.sum(1)
    finite, norms = total.isfinite(), total.sqrt()
    weights = usable(clipper.weights(clipped_by))
    weights = torch.where(finite if columns is None else finite.unsqueeze(1), weights, 0.0)
    counted = group.size - group.padding
    there = certificate is None and not weights.is_cpu
    free = filled(group.size, counted, weights.device) if there and group.fixed else None
    if free is None:
        weights[counted:] = 0
    else:
        weights = weights.masked_fill(free if columns is None else free.unsqueeze(1), 0.0)
    if there:
        weights = held_back(weights, list(masses.values()), 1.0, clipper)
    heavy = [] if there else heavy_units(sq_norms, masses, weights, columns, clipper, certificate)
    formed = form(group, heavy, masses, clipper, columns, certificate)
    shares = weights
    if heavy:  # they are added separately
        shares = weights.clone()
        shares[heavy] = 0
        weights[heavy], norms[heavy] = torch.stack(formed.weights), norms.new_tensor(formed.norms)
    ends = {name: k for k, use in enumerate(group.uses) for name in use.call.site.full.values()}
    for k, use in enumerate(group.uses):
        # Rounded before scaling, as in an ordinary step: one unusual record must not change the weights of all others.
        by = shares if certificate is not None else shares.to(use.call.site.dtype)  # layers may have different precisions
        _add_use(use, by * (use.factor * scale), columns, finite, sums)
        for name in use.call.site.full.values():
            if ends[name] == k and name in formed.sums:  # while its sum is open: sums of shards are sent layer by layer
                sums[name].add_dense(formed.sums.pop(name).mul_(scale))
    dtype = group.uses[0].call.site.dtype
    if free is not None:
        norms = norms.masked_fill(free, FILLED)
        return Part(norms.to(dtype), weights.to(dtype), norms, counted)
    norms = norms[:counted]
    return Part(norms.to(dtype), weights[:counted].to(dtype), norms if there else int((~norms.isfinite()).sum()))


def _measured(group: Group, *, wide: bool) -> tuple[dict[str, Tensor], dict[str, Mass]]:
    """Each parameter's squared gradient norms, one for each unit, and the masses where they exceed the norms."""
    by_name: dict[str, list[tuple[Use, str]]] = {}
    for use in group.uses:
        for local, name in use.call.site.full.items():
            by_name.setdefault(name, []).append((use, local))
    shared = {name: uses for name, uses in by_name.items() if len(uses) > 1 or uses[0][0].units is not None}
    rows, masses = joint_norms(group, shared, wide=wide)
    for name, uses in by_name.items():
        if name not in shared:
            use, local = uses[0]
            rows[name] = use.call.measure()[local] * use.factor**2
            mass = use.call.record.masses.get(local)  # type: ignore[union-attr]
            if mass is not None:
                masses[name] = Mass(mass.rows * abs(use.factor), mass.parts)
    return rows, masses


def _add_use(use: Use, weights: Tensor, columns: Columns, finite: Tensor, sums: dict[str, Sum]) -> None:
    record, rule, names = use.call.record, use.call.rule, use.call.site.full
    assert record is not None
    out = {local: sums[name] for local, name in names.items()}
    if use.units is not None:
        weights, finite = weights[use.units], finite[use.units]
    if not finite.is_cpu and weights.dtype is use.call.site.dtype:
        cleaned_in_place(record)
    elif not bool(finite.all()):
        record = _replaced(record, rule, finite)
    if record is not None:
        rule.add_weighted(
            record, {local: weights if columns is None else weights[:, columns[name]] for local, name in names.items()}, out
        )
        record.clear()


def _replaced(record: Record, rule: Rule, finite: Tensor) -> Record | None:
    """Replace examples without a finite norm by a copy of another one, since 0 * NaN is NaN; their weight is 0. None: there is no other.

    The batch keeps its shape: that would reveal how many there are, and all roundings depend on it.
    """
    good = finite.nonzero().flatten()
    if not len(good):
        return None
    index = torch.where(finite, torch.arange(len(finite), device=finite.device), good[0])
    chosen = rule.select(record, index, len(finite))
    chosen.most = record.most  # formulas are chosen as for the whole batch
    return chosen
