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

import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hushgrad.errors import HushgradError
from hushgrad.release.keys import RunKey
from hushgrad.release.placement.notices import LOOK, PATIENT, Notices, ProcessLost, described, lost, raised_there, unlike
from hushgrad.release.placement.shared_secret import shared_secret


@contextmanager
def answered(what: str) -> Iterator[None]:
    """Raise one sentence instead of a backend's report if a peer is gone; the report stays as its cause."""
    try:
        yield
    except RuntimeError as error:  # what torch raises for a closed connection and for a timeout alike
        raise lost(what) from error


class Told(Protocol):
    """What a process tells the others with each step."""

    def said(self) -> list[bool]:
        """What this process knows; as many bits in every one."""

    def heard(self, bits: Sequence[bool]) -> None:
        """What some process knows."""


_ROOM = 16  # numbers in a short message, or a multiple
_NOBODY = -(2**62)
_notices: tuple[Any, Notices] | None = None  # the default group, and its notices
_beside: tuple[Any, Any] | None = None  # the default group, and one beside it for what that one does not serve


def _notices_here() -> Notices:
    """The notices of the default group."""
    global _notices
    if _notices is None or _notices[0] is not dist.group.WORLD:
        _notices = dist.group.WORLD, Notices()
    return _notices[1]


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
    notices: Notices = field(default_factory=Notices, compare=False, repr=False)
    _found: list[bool] = field(default_factory=list, compare=False, repr=False)  # by a process that has left a notice
    _left: BaseException | None = field(default=None, compare=False, repr=False)  # what this one has left, or read

    @classmethod
    def here(cls) -> World:
        """The initialised default process group, or one process alone."""
        if not dist.is_available() or not dist.is_initialized():
            return cls()
        notices = _notices_here()
        return cls(dist.get_rank(), dist.get_world_size(), apart=notices.out_of_step, notices=notices)

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """Inside, a run is made: what one process refuses, all do."""
        self.notices.begin()
        with self.leaving():
            yield

    @contextmanager
    def leaving(self, told: Told | None = None) -> Iterator[None]:
        """Inside, an error of this process alone is left for the others, who may wait for it."""
        try:
            yield
        except BaseException as error:
            self.leave(error, told)
            raise

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
        self.require_joined()
        *secret, reproducible, fresh = shared_secret(bytes([*key.secret, key.reproducible, key.fresh]), self.rank, self.gathered)
        return RunKey(bytes(secret), reproducible=bool(reproducible), fresh=bool(fresh))

    @torch.no_grad()
    def share_parameters(self, tensors: Iterable[Tensor]) -> None:
        """Process 0's parameters and buffers, in all processes, so that they start from one point."""
        if self.size > 1:
            for tensor in tensors:
                self._send(dist.broadcast, tensor.detach(), "the processes started", src=0)

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
            self._send(dist.all_reduce, flat, "the clipped sums were added up")
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
        self._send(partial(dist.all_gather, received), sent, "the processes compared what they were given")
        return [bytes(one.tolist()) for one in received]

    def compared(self, content: bytes) -> list[bytes]:
        """The same where a run begins, or one sentence if a process is gone."""
        self.require_joined()
        return self.gathered(content)

    # Small agreements ------------------------------------------------------------------------------------------------

    def total(self, count: int) -> int:
        """The sum of a small number over the processes."""
        if self.size == 1:
            return count
        each = [_NOBODY] * self.size
        each[self.rank] = count
        return sum(one for one in self._agreed(each) if one != _NOBODY)

    def largest(self, count: int) -> int:
        """The largest of a small number over the processes."""
        return self._agreed([count])[0] if self.size > 1 else count

    def least(self, count: int) -> int:
        """The smallest of a small number over the processes."""
        return -self.largest(-count)

    def same(self, value: int) -> bool:
        """Whether all processes give the same number."""
        if self.size == 1:
            return True
        largest, least = self._all_told([value, -value], "same", "the processes compared their steps")
        return largest == -least

    def _agreed(self, numbers: Sequence[int]) -> list[int]:
        asker = sys._getframe(1)
        while asker.f_globals is globals() and asker.f_back is not None:
            asker = asker.f_back
        return self._all_told(numbers, asker.f_code.co_name, "the processes agreed on a step")

    def _all_told(self, numbers: Sequence[int], asked: str, what: str) -> list[int]:
        """The largest of each number over all processes, if all of them have ``asked`` for the same.

        Messages are matched by their order alone, and one that is longer than what is waited for aborts the process. So all of these are
        of one length, and each begins with what it is about.
        """
        about, room = zlib.crc32(f"{asked} {len(numbers)}".encode()), -(-(len(numbers) + 2) // _ROOM) * _ROOM
        sent = torch.tensor([about, -about, *numbers, *[0] * (room - 2 - len(numbers))], dtype=torch.int64)
        self._send(dist.all_reduce, sent, what, op=dist.ReduceOp.MAX)
        first, second, *told = sent.tolist()
        if (first, second) != (about, -about):
            raise self._out_of_step(unlike(what))
        return told[: len(numbers)]

    def together(self, told: Told | None = None) -> AbstractContextManager[None]:
        """All processes leave the block, or none: if one refuses, all raise its error.

        With the message that says so, each process sends what ``told`` says and hears what any of them has said.

        Raises:
            HushgradError: another process's, in its words.
        """
        return self._together(told) if self.size > 1 else nullcontext()

    @contextmanager
    def _together(self, told: Told | None) -> Iterator[None]:
        self.require_joined()
        refused: HushgradError | None = None
        try:
            yield
        except HushgradError as error:
            if self.apart or error.agreed:  # the others have heard of it already, or cannot hear of it here
                raise
            refused = error
        except BaseException as error:
            self.part_by(error, told)
            raise
        self._conclude(refused, told)

    def _conclude(self, refused: HushgradError | None, told: Told | None) -> None:
        """Tell the others whether this process refuses; if any does, all raise the error of the first of them."""
        said = [refused is not None, *([] if told is None else told.said())]
        any_refused, *bits = map(bool, self._all_told([*map(int, said)], "together", "the processes agreed on a step"))
        if told is not None:
            told.heard(bits)
        if not any_refused:
            return
        own = b"" if refused is None else described(refused)
        every = [one.rstrip() for one in self.gathered(own.ljust(self.largest(len(own))))]
        first = next(filter(None, every))
        error = refused if refused is not None and first == own else raised_there(first)
        error.agreed = True
        raise error from (None if error is refused else refused)

    def part_by(self, error: BaseException, told: Told | None = None) -> None:
        """Record that ``error`` ends a step that all processes have begun: unless all refuse it, this one may be behind the others."""
        self.leave(error, told)
        self.apart = self.apart or not getattr(error, "agreed", False)
        self.lost = self.lost or isinstance(error, ProcessLost)

    def leave(self, error: BaseException, told: Told | None = None) -> None:
        """Leave ``error`` for those that wait for this process, with what it has found; or hear what was left by who raised it."""
        if self.size == 1 or getattr(error, "agreed", False):
            return
        if error is not self._left:
            self._left = error
            self.notices.leave(error, [] if told is None else told.said())
        if told is not None and self._found:
            told.heard(self._found)
            self._found = []

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

    # Waiting ---------------------------------------------------------------------------------------------------------

    def _send(self, operation: Callable[..., Any], tensor: Tensor, what: str, **options: Any) -> None:
        """Send and receive a message."""
        with answered(what):
            work = operation(tensor, async_op=True, group=_group(tensor.device), **options)
        self.wait(work, what, tensor.device)

    def wait(self, work: Any, what: str, device: torch.device) -> None:
        """Wait for a message, as long as no process has left an error instead. One to a device is waited for by the device.

        Raises:
            HushgradError: another process's; or ProcessLost, if that is gone.
        """
        if device.type != "cpu":
            with answered(what):
                work.wait()
            return
        self.notices.sent()
        for looks in count():
            failed = work.is_completed()  # if it is, and raises all the same
            try:
                work.wait(LOOK)
                return
            except RuntimeError as error:
                self._look(error)
                if failed:
                    raise self._out_of_step(lost(what)) from error
            if looks >= PATIENT and (differs := self.notices.differs(what, self.rank, self.size)):
                self.leave(differs)
                raise self._out_of_step(differs)

    def _out_of_step(self, error: HushgradError) -> HushgradError:
        """The error of a message that this process has begun, and that does not arrive: no other one may be sent."""
        self.apart = self.notices.out_of_step = True
        return error

    def _look(self, report: RuntimeError) -> None:
        """Raise what another process has left, if any has."""
        left = self.notices.read()
        if left is not None:
            error, self._found = left
            self._left, self.lost = error, self.lost or not self._found
            self.notices.leave(error)  # for who has raised an error before, too
            raise self._out_of_step(error) from report
