"""``Lane``: the state that a stream keeps for each shard of a tensor; and memory for rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass
class Lane:
    """The state of one shard, the elements [offset, offset + count) of tensor ``index``, and its next step."""

    index: int
    offset: int
    count: int
    dtype: torch.dtype
    next: int = 0
    state: dict[str, Tensor] = field(default_factory=dict)  # each of shape (rows, count)
    interrupted: bool = False

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.offset + self.count

    def rows(self, name: str) -> np.ndarray:
        """A numpy view of one part of the state."""
        return self.state[name].numpy()


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The precision in which a tensor's noise is computed."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def fresh_like(likes: Sequence[Tensor]) -> list[Tensor]:
    """New tensors of these shapes and dtypes on their device; those of one dtype are contiguous in memory."""
    made: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(like.dtype for like in likes):
        alike = [k for k, like in enumerate(likes) if like.dtype is dtype]
        sizes = [likes[k].numel() for k in alike]
        flat = torch.empty(sum(sizes), dtype=dtype, device=likes[0].device)
        made |= {k: part.view(likes[k].shape) for k, part in zip(alike, flat.split(sizes), strict=True)}
    return [made[k] for k in range(len(likes))]


def overlap(a: Lane, b: Lane) -> bool:
    """Whether two lanes have an element in common."""
    return a.index == b.index and a.offset < b.end and b.offset < a.end


def pack(lane: Lane) -> dict[str, Any]:
    """A lane as a dict, for a checkpoint."""
    state = {name: rows.to("cpu", copy=True) for name, rows in lane.state.items()}
    return {
        "index": lane.index,
        "offset": lane.offset,
        "count": lane.count,
        "dtype": lane.dtype,
        "next": lane.next,
        "state": state,
    }
