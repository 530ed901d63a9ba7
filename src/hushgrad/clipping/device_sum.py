"""The clipped sum of a step on an accelerator: without synchronisation until the sum is there, and all layers are measured together.

On a CPU, an unusual example is detected and handled separately. On a device that would mean waiting for it, so instead:

| an example | gets |
|---|---|
| whose norm is not finite | weight 0, and its numbers are replaced by 0 before they are multiplied by it |
| whose parts are far larger than their sum (heavy) | a weight of at most 63 C / mass, so that its parts stay below the cap |

Both weights are at most min(1, C / norm), so no example adds more than C. Heavy examples lose some of their gradient; all others have the
same weights as on a CPU.

Per-example gradients (B, n) that exist are concatenated: one norm, one cleaning, one matrix-vector product for all layers. Layers with one
position are measured by ‖x‖² ‖g‖² from one table of all x and g.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hushgrad._precision import widest, widest_dtype, widest_sq_norms
from hushgrad.clipping.base import Record
from hushgrad.clipping.clipper import Clipper, added
from hushgrad.clipping.mass import Mass, cap
from hushgrad.clipping.site import Call
from hushgrad.clipping.sums import Sum
from hushgrad.events import Relation

FILLED = -1.0  # the norm of padding in a batch of fixed shape

_LEAST = 2.0**-126  # as in clipper.usable
_ROUNDED = 2.0**-20  # of a squared mass: what its sum may lose in single precision
_TOGETHER = 1 << 28  # floats of gradients that are concatenated at most (1 GB in single precision)


class Part(NamedTuple):
    """Norms and weights of the examples; ``rejected`` is counted on request. See :class:`hushgrad.clipping.reduce.Part`."""

    norms: Tensor
    weights: Tensor
    rejected: Tensor
    counted: int | None


def clean(value: Any) -> Any:
    """Replace every NaN and infinity by 0, in nested tensors; finite examples do not change."""

    def one(t: Any) -> Any:
        return t.nan_to_num(0.0, 0.0, 0.0) if isinstance(t, Tensor) and t.is_floating_point() else t

    return tree_map(one, value)


def raised(total: Tensor, masses: Sequence[Mass]) -> Tensor:
    """Squared norms; those that were added up in single precision are raised to a bound on their exact value."""
    if total.dtype is torch.float64 or not masses:
        return total
    return total + added([mass.rows.square() for mass in masses]) * _ROUNDED


def held_back(weights: Tensor, masses: Sequence[Mass], factor: float, clipper: Clipper) -> Tensor:
    """Weights under which no example is heavy: at most 63 C / mass. Those of light examples do not change."""
    if not masses:
        return weights
    total = added([mass.rows.square() for mass in masses]) if len(masses) > 1 else masses[0].rows.square()
    # The cap for one part: a cap by the largest number of parts would make an example's weight depend on the others.
    bound = total.rsqrt_().mul_((cap(1) - 1) / abs(factor)).mul_(clipper.sensitivity(Relation.ADD_REMOVE))
    return torch.minimum(weights, bound if weights.dim() == 1 else bound.unsqueeze(1)).nan_to_num_(0.0)


class _Layers(NamedTuple):
    """The calls of a batch, by how they are measured."""

    kept: list[tuple[str, Tensor]]  # gradients that exist, by full name
    outer: list[tuple[Call, Tensor, Tensor]]  # x and g of layers with one position
    others: list[Call]


def filled(size: int, counted: int, device: torch.device) -> Tensor:
    """A mask of the padding among ``size`` places: those after the first ``counted``, which comes with the batch.

    ``counted`` is sent as a tensor, so the same operations run whatever the number is.
    """
    return _places(size, device) >= torch.tensor(counted).to(device, non_blocking=True)


def summed_on_device(
    calls: Sequence[Call], factor: float, clipper: Clipper, sums: dict[str, Sum], scale: float, counted: int | None
) -> Part:
    """``sums[name] += scale * sum_i w_i G_i`` if each parameter is used once and all are clipped together.

    ``counted``: how many examples, from the first, take part in a batch of fixed shape.
    """
    layers = _sorted(calls)
    rows = torch.cat([G.flatten(1) for _, G in layers.kept], 1) if layers.kept else None
    table = torch.cat([t for _, x, g in layers.outer for t in (x, g)], 1) if layers.outer else None
    squares: list[Tensor] = []
    masses: list[Mass] = []
    if rows is not None:
        squares.append(widest_sq_norms(rows))
    if table is not None:
        squares.append(_outer_squares(layers.outer, table))
    for call in layers.others:
        squares += call.measure().values()
        masses += call.record.masses.values()  # type: ignore[union-attr]
    total = added(squares) if len(squares) > 1 else squares[0]
    total = raised(total, masses)
    total = total.mul_(factor * factor) if factor != 1 else total
    weights = held_back(clipper.weights(total), masses, factor, clipper)
    weights = torch.nn.functional.threshold(weights, _LEAST, 0.0)
    norms, rejected = total.sqrt(), total
    if counted is not None:
        free = filled(len(total), counted, total.device)
        weights.masked_fill_(free, 0.0)
        rejected = norms.masked_fill_(free, FILLED)
    scaled = (weights * (factor * scale) if factor * scale != 1 else weights).to(calls[0].site.dtype)
    _add(layers, rows, table, scaled, sums)
    return Part(norms, weights, rejected, counted)


def _sorted(calls: Sequence[Call]) -> _Layers:
    layers, room = _Layers([], [], []), _TOGETHER
    for call in calls:
        call.prepare()
        record = call.record
        assert record is not None
        outer = call.rule.outer(record)
        floats = sum(G.numel() for G in record.kept.values())
        if outer is not None:
            layers.outer.append((call, *outer))
        elif len(record.kept) == len(record.names) and not call.sq_norms and floats <= room:
            layers.kept.extend((call.site.full[local], record.kept[local]) for local in record.names)
            room -= floats
        else:
            layers.others.append(call)
    return layers


def _outer_squares(outer: list[tuple[Call, Tensor, Tensor]], table: Tensor) -> Tensor:
    """Sum over the layers of ‖g‖² (‖x‖² + 1), or without the 1 where there is no bias (or no weight but a bias alone)."""
    widths = tuple(t.shape[1] for _, x, g in outer for t in (x, g))
    sq = widest(table).square() @ _segments(widths, table.device, widest_dtype(table.device))
    sq_x, sq_g = sq[:, 0::2], sq[:, 1::2]
    names = [call.site.names for call, _, _ in outer]
    if all(len(own) == 2 for own in names):
        return torch.addcmul(sq_g, sq_x, sq_g).sum(1)
    weight, bias = (_flags(tuple(which in own for own in names), table.device, sq.dtype) for which in ("weight", "bias"))
    return (sq_x * weight + bias).mul_(sq_g).sum(1)


def _add(layers: _Layers, rows: Tensor | None, table: Tensor | None, weights: Tensor, sums: dict[str, Sum]) -> None:
    targets: list[Tensor] = []
    terms: list[Tensor] = []
    if rows is not None:
        made = torch.mv(rows.nan_to_num_(0.0, 0.0, 0.0).t(), weights)
        for (name, _), part in zip(layers.kept, made.split([G[0].numel() for _, G in layers.kept]), strict=True):
            targets.append(sums[name].buffer)
            terms.append(part.view(targets[-1].shape))
    if table is not None:
        _add_outer(layers.outer, table.nan_to_num_(0.0, 0.0, 0.0), weights, sums, targets, terms)
    if targets:
        torch._foreach_add_(targets, terms)
    for call in layers.others:
        record, site = call.record, call.site
        assert record is not None
        cleaned_in_place(record)
        by = dict.fromkeys(site.names, weights if weights.dtype is site.dtype else weights.to(site.dtype))
        call.rule.add_weighted(record, by, {local: sums[name] for local, name in site.full.items()})
    for call in (*(call for call, _, _ in layers.outer), *layers.others):
        call.record.clear()  # type: ignore[union-attr]


def _add_outer(
    outer: list[tuple[Call, Tensor, Tensor]],
    table: Tensor,
    weights: Tensor,
    sums: dict[str, Sum],
    targets: list[Tensor],
    terms: list[Tensor],
) -> None:
    weighted = table * weights.unsqueeze(1)
    columns = weighted.sum(0) if any("bias" in call.site.names for call, _, _ in outer) else None
    start = 0
    for call, x, g in outer:
        middle, end = start + x.shape[1], start + x.shape[1] + g.shape[1]
        for local, name in call.site.full.items():
            if local == "weight":
                sums[name].addmm(weighted[:, middle:end].t(), table[:, start:middle])
            else:
                assert columns is not None
                targets.append(sums[name].buffer)
                terms.append(columns[middle:end])
        start = end


def cleaned_in_place(record: Record) -> None:
    """Replace every NaN and infinity in a record by 0."""
    record.join()
    record.args, record.kwargs, record.grads = clean((record.args, dict(record.kwargs), record.grads))
    record.kept = clean(record.kept)


# Constants of a model, made once ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _segments(widths: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """The 0/1 matrix whose product with a table adds up its columns by segments."""
    return torch.block_diag(*[torch.ones(width, 1, dtype=dtype) for width in widths]).to(device)


@lru_cache(maxsize=64)
def _places(size: int, device: torch.device) -> Tensor:
    return torch.arange(size).to(device)


@lru_cache(maxsize=64)
def _flags(flags: tuple[bool, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(flags, dtype=dtype).to(device)
