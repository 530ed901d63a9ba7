"""Runs of several processes: they share each batch, and the weights are the same as with one.

    torchrun --nproc-per-node 2 train.py        # torch.distributed.init_process_group() first, the rest unchanged

Every step, each process clips its part of *one* global batch; the clipped sums are added up once; all processes then hold the
same noisy gradient and their optimizers stay in step. There is no wrapper around the model. With ``fully_shard(model)`` each
process holds a part of every parameter, see :mod:`hushgrad.release.placement.sharded`.

**Why the guarantee is that of one process.** Records are dealt to processes after the batch is drawn, from one key, so the
batch is the sampler's, whatever the number W of processes. Clipping is per record and a record is in one part, so the summed
sums are the one clipped sum. Each process draws its own part of row t of the *same* keyed noise and adds it to its sum before
the sums are added up: every coordinate gets its noise, once, and W processes share the work and the buffers of correlated noise.
Where parameters are sharded, each process adds row t to the part that only it holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hushgrad.errors import CaptureError, HushgradError
from hushgrad.release.keys import RunKey
from hushgrad.release.placement.shared_secret import shared_secret


class ProcessLost(HushgradError, RuntimeError):
    """Another process of the run has ended or does not answer. Start all of them again: the run resumes from its checkpoint."""


@contextmanager
def answered(what: str) -> Iterator[None]:
    """Raise one sentence instead of a backend's report if a peer is gone; the report stays as its cause."""
    try:
        yield
    except RuntimeError as error:  # what torch raises for a closed connection and for a timeout alike
        raise ProcessLost(
            f"Another process ended or did not answer in time while {what}. Nothing of this step was released. Start all "
            "processes again; with a Checkpoint the run goes on from its last save."
        ) from error


class Told(Protocol):
    """What a process tells the others with each step."""

    def said(self) -> list[bool]:
        """What this process knows; as many bits in every one."""

    def heard(self, bits: Sequence[bool]) -> None:
        """What some process knows."""


_beside: tuple[Any, Any] | None = None  # the default group, and one beside it for what that one does not serve


def _group(device: torch.device) -> dist.ProcessGroup | None:
    """The default group (None) if it serves tensors on this device; otherwise, for main memory, an additional gloo group.

    A group with only an accelerator's backend cannot send what is in main memory: keys, counts, and small models.
    """
    global _beside
    served = dist.get_backend_config()
    if device.type != "cpu" or "cpu:" in served or ":" not in served:
        return None
    if _beside is None or _beside[0] is not dist.group.WORLD:
        _beside = dist.group.WORLD, dist.new_group(backend="gloo")  # by all processes: all of them send the same
    return _beside[1]


def part_of(count: int, rank: int, size: int) -> tuple[int, int, int]:
    """(chunk, first, held): of ``count`` things, process r of W holds those from r ceil(count/W) on, ceil(count/W) at most.

    >>> [part_of(5, rank, 4) for rank in range(4)]
    [(2, 0, 2), (2, 2, 2), (2, 4, 1), (2, 5, 0)]
    """
    chunk = -(-count // size)
    first = min(rank * chunk, count)
    return chunk, first, min(chunk, count - first)


@dataclass
class World:
    """This process's place among those that share the run: rank ``rank`` of ``size``.

    Messages are matched by their order alone. A process that is interrupted in the middle of a step (Ctrl-C, an error of a closure) and
    goes on would send its next message where the others expect another one: it is ``apart`` from then on, and sends nothing more.
    """

    rank: int = 0
    size: int = 1
    apart: bool = field(default=False, compare=False)
    lost: bool = field(default=False, compare=False)  # another process was gone in a step

    @classmethod
    def here(cls) -> World:
        """The initialised default process group, or one process alone."""
        if not dist.is_available() or not dist.is_initialized():
            return cls()
        return cls(dist.get_rank(), dist.get_world_size())

    def part(self, count: int) -> tuple[int, int]:
        """(offset, length) of this process's part of ``count`` numbers; the last processes may have fewer, or none.

        >>> [World(rank, 4).part(5) for rank in range(4)]
        [(0, 2), (2, 2), (4, 1), (5, 0)]
        """
        _, first, held = part_of(count, self.rank, self.size)
        return first, held

    def share_key(self, key: RunKey) -> RunKey:
        """Process 0's key, in all processes: noise and batches must be functions of the same bits everywhere."""
        if self.size == 1:
            return key
        with answered("the processes agreed on a key"):
            *secret, reproducible, fresh = shared_secret(
                bytes([*key.secret, key.reproducible, key.fresh]), self.rank, self.gathered
            )
        return RunKey(bytes(secret), reproducible=bool(reproducible), fresh=bool(fresh))

    @torch.no_grad()
    def share_parameters(self, tensors: Iterable[Tensor]) -> None:
        """Process 0's parameters and buffers, in all processes, so that they start from one point."""
        if self.size > 1:
            with answered("the processes started"):
                for tensor in tensors:
                    dist.broadcast(tensor.detach(), src=0, group=_group(tensor.device))

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
            with answered("the clipped sums were added up"):
                dist.all_reduce(flat, group=_group(flat.device))
            start = 0
            for tensor in group:
                tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
                start += tensor.numel()

    def gathered(self, content: bytes) -> list[bytes]:
        """What all processes hand in, of equal length, by rank."""
        if self.size == 1:
            return [content]
        sent = torch.tensor(list(content), dtype=torch.uint8)
        received = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(received, sent, group=_group(sent.device))
        return [bytes(one.tolist()) for one in received]

    def compared(self, content: bytes) -> list[bytes]:
        """The same where a run begins, or one sentence if a process is gone."""
        self.require_joined()
        with answered("the processes compared what they were given"):
            return self.gathered(content)

    # Small agreements ------------------------------------------------------------------------------------------------

    def total(self, count: int) -> int:
        """The sum of a small number over the processes."""
        return self._agreed(count, dist.ReduceOp.SUM) if self.size > 1 else count

    def largest(self, count: int) -> int:
        """The largest of a small number over the processes."""
        return self._agreed(count, dist.ReduceOp.MAX) if self.size > 1 else count

    def least(self, count: int) -> int:
        """The smallest of a small number over the processes."""
        return -self.largest(-count)

    def same(self, value: int) -> bool:
        """Whether all processes give the same number."""
        if self.size == 1:
            return True
        sent = torch.tensor([value, -value])
        with answered("the processes compared their steps"):
            dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=_group(sent.device))
        return int(sent[0]) == -int(sent[1])

    def _agreed(self, count: int, how: dist.ReduceOp.RedOpType) -> int:
        sent = torch.tensor([count])
        with answered("the processes agreed on a step"):
            dist.all_reduce(sent, op=how, group=_group(sent.device))
        return int(sent)

    def together(self, told: Told | None = None) -> AbstractContextManager[None]:
        """All processes leave the block, or none: if one refuses, the others raise as well instead of waiting for it.

        With the message that says so, each process sends what ``told`` says and hears what any of them has said.

        Raises:
            CaptureError: if another process refused, or could not write its file.
        """
        return self._together(told) if self.size > 1 else nullcontext()

    @contextmanager
    def _together(self, told: Told | None) -> Iterator[None]:
        self.require_joined()
        try:
            yield
        except ProcessLost:
            raise
        except HushgradError as error:
            self._tell(True, told)
            error.agreed = True
            raise
        except BaseException:
            self.apart = True
            raise
        if self._tell(False, told):
            refused = CaptureError("Another process refused; its error says why. Nothing of this step was released.")
            refused.agreed = True
            raise refused

    def _tell(self, refused: bool, told: Told | None) -> bool:
        """Whether some process has refused."""
        sent = torch.tensor([refused, *([] if told is None else told.said())], dtype=torch.int64)
        with answered("the processes agreed on a step"):
            dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=_group(sent.device))
        any_refused, *bits = map(bool, sent.tolist())
        if told is not None:
            told.heard(bits)
        return any_refused

    def part_by(self, error: BaseException) -> None:
        """Record that ``error`` ends a step that all processes have begun: unless all refuse it, this one may be behind the others."""
        self.apart = self.apart or not getattr(error, "agreed", False)
        self.lost = self.lost or isinstance(error, ProcessLost)

    def require_joined(self) -> None:
        """Raise if this process has left a step that others may have gone on with.

        Raises:
            ProcessLost: nothing has been sent.
        """
        if self.size > 1 and self.apart:
            raise ProcessLost(
                "This process was interrupted in a step that all processes take together, and the others may be further. Nothing was "
                "released here since. Start all processes again; with a Checkpoint the run goes on from its last save."
            )
