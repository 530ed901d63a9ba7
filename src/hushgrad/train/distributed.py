"""Data parallel runs: several processes share each batch, and the weights are the same as with one.

    torchrun --nproc-per-node 2 train.py        # torch.distributed.init_process_group() first, the rest unchanged

Every step, each process clips its part of *one* global batch; the clipped sums are added up once; all processes then hold the
same noisy gradient and their optimizers stay in step. There is no wrapper around the model.

**Why the guarantee is that of one process.** Records are dealt to processes after the batch is drawn, from one key, so the
batch is the sampler's, whatever the number W of processes. Clipping is per record and a record is in one part, so the summed
sums are the one clipped sum. Each process adds row t divided by W of the *same* keyed noise: the total is row t, once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hushgrad.train.keys import RunKey

__all__ = ["World"]


@dataclass(frozen=True)
class World:
    """This process's place among those that share the run: number ``rank`` of ``size``."""

    rank: int = 0
    size: int = 1

    @classmethod
    def here(cls) -> World:
        """The initialised default process group, or one process alone."""
        if not dist.is_available() or not dist.is_initialized():
            return cls()
        return cls(dist.get_rank(), dist.get_world_size())

    def share_key(self, key: RunKey) -> RunKey:
        """Process 0's key, in all processes: noise and batches must be functions of the same bits everywhere."""
        if self.size == 1:
            return key
        sent = torch.tensor([*key.secret, key.reproducible], dtype=torch.uint8)
        dist.broadcast(sent, src=0)
        *secret, reproducible = sent.tolist()
        return RunKey(bytes(secret), reproducible=bool(reproducible), fresh=key.fresh)

    @torch.no_grad()
    def share_parameters(self, tensors: Iterable[Tensor]) -> None:
        """Process 0's parameters and buffers, in all processes: they start from one point and then stay together."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0)

    @torch.no_grad()
    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor, in place, by its sum over the processes; one message for each dtype and device."""
        if self.size == 1:
            return
        alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            alike[tensor.dtype, tensor.device].append(tensor)
        for group in alike.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in group])
            dist.all_reduce(flat)
            start = 0
            for tensor in group:
                tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
                start += tensor.numel()

    def total(self, count: int) -> int:
        """The sum of a small number over the processes."""
        if self.size == 1:
            return count
        sent = torch.tensor([count])
        dist.all_reduce(sent)
        return int(sent)
