"""Counts rejected examples on request: on a device, counting in each step would mean waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MOST = 64  # pending tensors

Counted = int | Tensor  # a number, or squared norms of which the non-finite ones count


def joined(parts: Sequence[Counted]) -> Counted:
    """Merge those of several micro-batches."""
    tensors = [part for part in parts if isinstance(part, Tensor)]
    return torch.cat(tensors) if tensors else sum(part for part in parts if isinstance(part, int))


class Rejected:
    """The examples so far whose gradient was NaN or infinite."""

    def __init__(self) -> None:
        self._known = 0
        self._waiting: list[Tensor] = []

    def add(self, rejected: Counted) -> None:
        """Add those of one step."""
        if isinstance(rejected, int):
            self._known += rejected
            return
        self._waiting.append(rejected)
        if len(self._waiting) >= _MOST:
            self._waiting = [torch.cat([t[~t.isfinite()] for t in self._waiting])]

    @property
    def count(self) -> int:
        """The number, waiting for the device if need be."""
        for total in self._waiting:
            self._known += int((~total.isfinite()).sum())
        self._waiting = []
        return self._known
