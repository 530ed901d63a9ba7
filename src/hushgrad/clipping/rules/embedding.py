"""Embedding: y[i,t] = W[id[i,t]].

G_i has one row for each distinct id of the example: the sum of g over the positions that hold it. So

    ‖G_i‖² = sum over ids of ‖sum of their g‖², which is ‖g‖² for ids that occur once,

by sorting the keys (example, id): O(B T d), no one-hot, no T x T mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hushgrad._precision import widest, widest_sq_norms
from hushgrad.clipping import _fused_products
from hushgrad.clipping.base import Example, Factors, Record, Rule, rule
from hushgrad.clipping.mass import Mass, sq_norm
from hushgrad.clipping.sums import Sum


class Rows(NamedTuple):
    """Scattered rows of a table's gradient: ``values[k]`` is added to row ``ids[k]`` for example ``example[k]``."""

    ids: Tensor
    example: Tensor
    values: Tensor
    examples: int


@rule(nn.Embedding)
class Embedding(Rule):
    """Sort and segment-sum for the norm, one scatter-add for the weighted sum."""

    parameters = frozenset({"weight"})
    scatters = True
    positions = True

    @staticmethod
    def examples() -> tuple[Example, ...]:
        """Without padding, and with."""
        return (
            (nn.Embedding(7, 3), (torch.randint(7, (5, 4)),)),
            (nn.Embedding(7, 3, padding_idx=0), (torch.randint(7, (5, 4)),)),
        )

    def check(self, module: nn.Module) -> str | None:
        """Refuse options that make one example's gradient depend on others, or write to the table in forward."""
        assert isinstance(module, nn.Embedding)
        if module.max_norm is not None:
            return "max_norm rewrites the table's rows in forward, without noise. Leave it out"
        return "scale_grad_by_freq counts ids over the batch. Leave it out" if module.scale_grad_by_freq else None

    def per_example(self, record: Record) -> dict[str, Tensor]:
        """A dense table for each example."""
        rows = _rows(record)
        weight: Any = record.module.weight
        table = record.g.new_zeros(rows.examples, *weight.shape)
        return {"weight": table.index_put_((rows.example, rows.ids), rows.values, accumulate=True)}

    def sq_norms(self, record: Record) -> dict[str, Tensor]:
        """See the formula of this module."""
        weight: Any = record.module.weight
        if not record.g.is_cpu and record.x.numel():
            ids, g = self.factors(record)["weight"]
            norms, record.masses["weight"] = _sq_norm_there(ids, g, skips=record.module.padding_idx is not None)
            return {"weight": norms}
        return {"weight": measured(record, _rows(record), weight.shape[0])}

    def add_weighted(self, record: Record, weights: Mapping[str, Tensor], out: Mapping[str, Sum]) -> None:
        """Scatter-add of the weighted rows straight into the table."""
        rows = _rows(record)
        out["weight"].add_rows(rows.ids, rows.values, weights["weight"][rows.example])

    def reads(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """The ids."""
        ids: Tensor = args[0] if args else kwargs["input"]
        return ids

    def factors(self, record: Record) -> dict[str, Factors]:
        """One-hot rows times g."""
        ids, g = record.x.flatten(1) if record.x.dim() > 1 else record.x.unsqueeze(1), record.g
        padding: Any = record.module.padding_idx
        left = ids if padding is None else ids.masked_fill(ids == padding, -1)
        return {"weight": Factors(left, g.reshape(*ids.shape, g.shape[-1]))}


def _rows(record: Record) -> Rows:
    ids, g = record.x, record.g
    B = ids.shape[0]
    example = torch.arange(B, device=ids.device).unsqueeze(1).expand(B, ids[0].numel() if B else 0).reshape(-1)
    ids, values = ids.reshape(-1).long(), g.reshape(-1, g.shape[-1])
    padding: Any = record.module.padding_idx
    if padding is not None and not g.is_cpu:
        values = values.masked_fill((ids == padding).unsqueeze(1), 0.0)
    elif padding is not None:  # the padding row is never trained
        used = (ids != padding).nonzero().squeeze(1)
        ids, example, values = ids[used], example[used], values[used]
    return Rows(ids, example, values, B)


def table_sq_norm(ids: Tensor, g: Tensor, table: int) -> tuple[Tensor, Mass | None]:
    """The squared norm of each example's scattered rows ``g`` (B, T, n) at ``ids`` (B, T); negative ids do not count."""
    if not g.is_cpu:
        return _sq_norm_there(ids, g, skips=True)
    example, position = (ids >= 0).nonzero().unbind(1)
    return rows_sq_norm(Rows(ids[example, position], example, g[example, position], len(ids)), table)


def _sq_norm_there(ids: Tensor, g: Tensor, *, skips: bool) -> tuple[Tensor, Mass]:
    """On a device, in shapes that do not depend on the ids: position t of an example goes to the segment of its id, 0 ... T-1."""
    if skips:
        g = g.masked_fill((ids < 0).unsqueeze(2), 0.0)
    ids, order = ids.sort(1)
    segment = torch.nn.functional.pad(ids[:, 1:] != ids[:, :-1], (1, 0)).cumsum(1)
    g = widest(g.gather(1, order.unsqueeze(2).expand_as(g)))
    sums = torch.zeros_like(g).scatter_add_(1, segment.unsqueeze(2).expand_as(g), g)
    lengths = torch.linalg.vector_norm(g, dim=2)
    sizes = torch.zeros_like(lengths).scatter_add_(1, segment, lengths)
    return widest_sq_norms(sums.flatten(1)), Mass(torch.linalg.vector_norm(sizes, dim=1), ids.shape[1])


def measured(record: Record, rows: Rows, table: int) -> Tensor:
    """The squared norms of a table's gradients; the record gets their masses."""
    norms, mass = rows_sq_norm(rows, table)
    if mass is not None:
        record.masses["weight"] = mass
    return norms


def rows_sq_norm(rows: Rows, table: int) -> tuple[Tensor, Mass | None]:
    """The squared norm of each example's scattered rows, rows with equal (example, id) added up first; the mass, where there are such."""
    made = _fused_products.row_norms(*rows)
    if made is not None:
        return made[0], Mass(*made[1:]) if made[2] > 1 else None
    sq = sq_norm(rows.values)
    total: Tensor = sq.new_zeros(rows.examples)
    keys = rows.example * table + rows.ids
    if (
        0 < rows.examples * table <= len(keys)
    ):  # a small table (relative positions): each of its rows is a segment, and nothing is sorted
        return _dense_sq_norm(rows, keys, sq, table)
    keys, order = keys.sort()
    again = keys[1:] == keys[:-1]
    if not bool(again.any()):
        return total.index_add_(0, rows.example, sq), None
    repeated = torch.nn.functional.pad(again, (1, 0)) | torch.nn.functional.pad(again, (0, 1))
    first = torch.nn.functional.pad(~again, (1, 0), value=True)[repeated]
    segment = first.cumsum(0).sub_(1)
    chosen = order[repeated]
    segments, owner = int(segment[-1]) + 1, rows.example[chosen][first]
    sums = sq.new_zeros(segments, rows.values.shape[1]).index_add_(0, segment, widest(rows.values[chosen]))
    sizes = sq.new_zeros(segments).index_add_(0, segment, sq[chosen].sqrt())
    sq[chosen] = 0  # not subtracted afterwards: where equal ids cancel, rounding would leave anything of the difference
    total.index_add_(0, rows.example, sq)
    mass = total.index_add(0, owner, sizes.square_()).sqrt_()
    most = int(torch.bincount(segment).max())
    return total.index_add_(0, owner, sums.square_().sum(1)), Mass(mass, most)


def _dense_sq_norm(rows: Rows, keys: Tensor, sq: Tensor, table: int) -> tuple[Tensor, Mass]:
    segments = rows.examples * table
    sums = sq.new_zeros(segments, rows.values.shape[1]).index_add_(0, keys, widest(rows.values))
    sizes = sq.new_zeros(segments).index_add_(0, keys, sq.sqrt())
    norms, masses = (t.square_().view(rows.examples, -1).sum(1) for t in (sums, sizes))
    return norms, Mass(masses.sqrt_(), int(torch.bincount(keys).max()))
