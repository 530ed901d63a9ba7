"""Joint norms: parameters whose per-example gradient has several parts.

‖sum_k G_k‖² = sum_k ‖G_k‖² + 2 sum_{k<l} <G_k, G_l>. The general way makes the per-example gradients of all parts, a
chunk of units at a time, adds them up and takes the norm; its memory is bounded by the chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hushgrad.clipping.base import sq_norm

if TYPE_CHECKING:
    from hushgrad.clipping.reduce import Group, Use

__all__ = ["joint_sq_norms"]

# Per-example gradients that are alive at the same time, in floats (64 MB in single precision).
_CHUNK = 1 << 24


def joint_sq_norms(group: Group, names: dict[int, dict[str, str]], shared: dict[str, list[tuple[Use, str]]]) -> dict[str, Tensor]:
    """The squared norm, for each unit, of the sum of all parts of each shared parameter."""
    if not shared:
        return {}
    uses = [use for use in group.uses if any(name in shared for name in names[id(use.call.site)].values())]
    shapes = {name: _parameter(uses[0]).shape for name, uses in shared.items()}
    some = uses[0].call.record
    assert some is not None
    rows = {name: torch.zeros(group.size, dtype=uses[0].call.site.dtype, device=_device(uses[0])) for name in shared}
    floats = sum(shape.numel() for shape in shapes.values())
    step = max(1, _CHUNK // max(1, floats))
    for start in range(0, group.size, step):
        stop = min(start + step, group.size)
        totals = {name: rows[name].new_zeros(stop - start, *shapes[name]) for name in shared}
        for use in uses:
            _add_part(use, names[id(use.call.site)], totals, start, stop)
        for name, G in totals.items():
            rows[name][start:stop] = sq_norm(G)
    return rows


def _add_part(use: Use, names: dict[str, str], totals: dict[str, Tensor], start: int, stop: int) -> None:
    """Add this use's per-example gradients of the units in [start, stop)."""
    call = use.call
    assert call.record is not None
    units = use.units
    if units is None:
        units = torch.arange(call.batch.examples, device=_device(use))
    index = ((units >= start) & (units < stop)).nonzero().squeeze(1)
    part = call.site.rule.select(call.record, index, call.batch.examples)
    made = part.kept if len(part.kept) == len(part.names) else call.site.rule.per_example(part)
    for local, name in names.items():
        if name in totals:
            totals[name].index_add_(0, units[index] - start, made[local].to(totals[name].dtype), alpha=use.factor)


def _parameter(use_and_local: tuple[Use, str]) -> Tensor:
    use, local = use_and_local
    return use.call.site.params[use.call.site.names.index(local)]


def _device(use: Use) -> torch.device:
    return use.call.site.params[0].device
