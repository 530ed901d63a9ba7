"""EmbeddingBag: y[i] = sum over the ids of bag i of a W[id], with a = 1, the given weight, or 1 / (ids in the bag) for the mean.

A bag is an example. G_i has one row for each distinct id of the bag, a g[i] summed over its places: the rows of an embedding
whose output gradient is a g[i] at every place, so the same sorting gives the norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hushgrad.clipping.base import Example, Record, Rule, rule
from hushgrad.clipping.rules.embedding import Rows, measured
from hushgrad.clipping.sums import Sum


@rule(nn.EmbeddingBag)
class EmbeddingBag(Rule):
    """Sort and segment-sum for the norm, one scatter-add for the weighted sum; bags as (B, T) ids or by offsets."""

    parameters = frozenset({"weight"})
    scatters = True

    @staticmethod
    def examples() -> tuple[Example, ...]:
        """Means and sums."""
        return (
            (nn.EmbeddingBag(6, 3), (torch.randint(6, (5, 4)),)),
            (nn.EmbeddingBag(6, 3, mode="sum"), (torch.randint(6, (5, 4)),)),
        )

    def check(self, module: nn.Module) -> str | None:
        """Refuse options that mix examples, write to the table in forward, or have no outer-product form."""
        assert isinstance(module, nn.EmbeddingBag)
        if module.mode == "max":
            return 'mode="max" has no rule. Use mode="sum" or "mean", or nn.Embedding(...) followed by .amax(1)'
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
        """As for an embedding."""
        weight: Any = record.module.weight
        return {"weight": measured(record, _rows(record), weight.shape[0])}

    def add_weighted(self, record: Record, weights: Mapping[str, Tensor], out: Mapping[str, Sum]) -> None:
        """Scatter-add of the weighted rows straight into the table."""
        rows = _rows(record)
        out["weight"].add_rows(rows.ids, rows.values, weights["weight"][rows.example])

    def reads(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """The ids of all bags."""
        return _inputs(args, kwargs)[0]

    def select(self, record: Record, index: Tensor, examples: int) -> Record:
        """Bags given by offsets are selected one by one."""
        ids, offsets, scale = _inputs(record.args, record.kwargs)
        if ids.dim() == 2:
            args: tuple[Any, ...] = (ids[index], None, None if scale is None else scale[index])
        else:
            starts = offsets[:examples]
            ends = torch.cat([starts[1:], starts.new_tensor([len(ids)])])
            places = [torch.arange(int(starts[i]), int(ends[i]), device=ids.device) for i in index]
            sizes = torch.tensor([len(p) for p in places], device=ids.device, dtype=offsets.dtype)
            chosen = torch.cat([*places, starts.new_zeros(0)]).long()
            ends = sizes.cumsum(0)
            layer: Any = record.module
            last = [ends[-1:] if len(ends) else ends.new_zeros(1)] if layer.include_last_offset else []
            args = (ids[chosen], torch.cat([ends - sizes, *last]), None if scale is None else scale[chosen])
        return Record(record.module, record.names, args, {}, (record.g[index],))


def _inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Any, Any]:
    """(ids, offsets, per_sample_weights)."""
    given = dict(zip(("input", "offsets", "per_sample_weights"), args, strict=False)) | dict(kwargs)
    return given["input"], given.get("offsets"), given.get("per_sample_weights")


def _rows(record: Record) -> Rows:
    module: Any = record.module
    ids, offsets, scale = _inputs(record.args, record.kwargs)
    B = len(record.g)
    if ids.dim() == 2:
        bag = torch.arange(B, device=ids.device).repeat_interleave(ids.shape[1])
    else:
        bag = torch.searchsorted(offsets[:B].contiguous(), torch.arange(len(ids), device=ids.device), right=True) - 1
    ids = ids.reshape(-1)
    scale = None if scale is None else scale.detach().reshape(-1)
    if module.padding_idx is not None:  # neither trained nor counted in the mean
        used = (ids != module.padding_idx).nonzero().squeeze(1)
        ids, bag, scale = ids[used], bag[used], None if scale is None else scale[used]
    values = record.g[bag]
    if module.mode == "mean":
        values = values / torch.bincount(bag, minlength=B).to(values.dtype)[bag].unsqueeze(1)
    elif scale is not None:
        values = values * scale.unsqueeze(1)
    return Rows(ids.long(), bag, values, B)
