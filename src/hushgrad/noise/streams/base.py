"""Base classes of streams (rows in order, a lane of state for each shard, exact resume), and the stream of independent noise."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, final

import numpy as np
import torch
from torch import Tensor

from hushgrad import _aligned_memory, _check
from hushgrad.errors import ArgumentError, NoTheorem
from hushgrad.noise._aes_ctr import check_address
from hushgrad.noise._box_muller import GROUP, GROUP_BYTES
from hushgrad.noise._kernel import Piece
from hushgrad.noise._threads import CHUNK, over_chunks
from hushgrad.noise.device_noise import DeviceKernel, Target, Turn, kernel_for
from hushgrad.noise.noise_rows import Rows
from hushgrad.noise.source import Source
from hushgrad.noise.streams.shard_state import Lane, computed_in, fresh_like, overlap, pack


class OrderedStream(Rows):
    """A stream that draws each row once, in order, separately for every lane.

    State is kept in float32 (float64 for float64 tensors) in main memory. It is as secret as the key: with it the noise of
    later rows can be removed.
    """

    _on_grid = False  # whether rows of a secure source stay on its grid

    def __init__(self, source: Source, *, steps: int | None) -> None:
        self._source = _check.instance(Source, source=source)
        if source.secure and not self._on_grid:
            raise NoTheorem(
                "No theorem covers correlated rows from a secure source: they are not on one grid. Use independent noise."
            )
        self._steps = None if steps is None else _check.positive_int(steps=steps)
        self._lanes: dict[tuple[int, int], Lane] = {}
        self._loaded: list[Lane] = []  # from a checkpoint, not used yet; may be sharded differently

    @property
    def steps(self) -> int | None:
        """The number of rows; None: unlimited."""
        return self._steps

    @property
    def kept_here(self) -> int:
        """How many rows of state are kept in main memory."""
        return sum(self._sizes().values())

    @property
    def secure(self) -> bool:
        """Whether a row is rounded together with the sum that it is added to."""
        return self._source.secure

    @abstractmethod
    def _sizes(self) -> Mapping[str, int]:
        """The state of a lane: name and number of rows."""

    @abstractmethod
    def _advance_all(self, step: int, lanes: Sequence[Lane], pieces: Sequence[Piece], scale: float, fresh: bool) -> None:
        """Abstract on purpose: a subclass that inherited a default would draw independent rows under another mechanism's theorem."""

    def _turn(self, step: int) -> Turn | None:
        """How a device computes row ``step``; None (the default): the host draws this mechanism for every device."""
        return None

    def _kept_there(self) -> int:
        """How many rows of state are kept on a device."""
        return self.kept_here

    # On a device -------------------------------------------------------------------------------------------------------

    def _kernel_of(self, step: int, likes: Sequence[Tensor]) -> DeviceKernel | None:
        """The kernel that draws on these tensors' device; None: the host draws."""
        if not likes or likes[0].is_cpu or self._source.cipher != "chacha20" or self._source.secure or self._turn(step) is None:
            return None
        return kernel_for(likes[0].device)

    def draws_there(self, likes: Sequence[Tensor]) -> bool:
        """Whether the rows of these tensors are drawn on their device."""
        return self._kernel_of(0, likes) is not None

    def takes(self, state: dict[str, Any], likes: Sequence[Tensor]) -> bool:
        """Whether a saved state can be loaded for tensors on these devices; if not, the rows so far must be regenerated.

        State on a device and in main memory has different forms; both can be regenerated from the key.
        """
        kept = [lane["state"] for lane in state["lanes"] if lane["state"]]
        return all(("there" in rows) == self.draws_there(likes) for rows in kept)

    def _rows_there(
        self,
        kernel: DeviceKernel,
        step: int,
        likes: Sequence[Tensor],
        indices: Sequence[int] | None,
        offsets: Sequence[int] | None,
        out: Sequence[Tensor] | None,
        scale: float | Tensor,
    ) -> list[Tensor]:
        """All tensors' rows in one launch: added to ``out``, or in new contiguous memory."""
        numbers, starts = range(len(likes)) if indices is None else indices, offsets or [0] * len(likes)
        places = dict.fromkeys(like.device for like in likes)
        if len(places) > 1:  # one launch for each device
            found: dict[int, Tensor] = {}
            for place in places:
                own = [k for k, like in enumerate(likes) if like.device == place]
                given = None if out is None else [out[k] for k in own]
                asked = {"indices": [numbers[k] for k in own], "offsets": [starts[k] for k in own], "out": given, "scale": scale}
                found |= zip(own, self.rows(step, [likes[k] for k in own], **asked), strict=True)  # type: ignore[arg-type]
            return [found[k] for k in range(len(likes))]
        made = fresh_like(likes) if out is None else [t if t.is_contiguous() else t.contiguous() for t in out]
        pieces = [Piece(i, o, t, 0, t.numel()) for i, o, t in zip(numbers, starts, made, strict=True)]
        lanes = [self._lane(piece) for piece in pieces]
        end = step + 1 if self._steps is None else self._steps
        for lane in lanes:
            if step != lane.next or lane.interrupted or step >= end:
                self._refuse(step, lane)
            check_address(step, lane.index, -(-lane.end // GROUP) * (GROUP_BYTES // 16))
            lane.interrupted = True
        turn = self._turn(step)
        assert turn is not None
        targets = [Target(t, lane.state.get("there"), lane.index, lane.offset) for t, lane in zip(made, lanes, strict=True)]
        kernel.row(self._source.chacha, turn, targets, scale, fresh=out is None)
        for lane in lanes:
            lane.interrupted, lane.next = False, step + 1
        if out is None:
            return made
        for to, t in zip(out, made, strict=True):
            if t is not to:
                to.copy_(t)
        return list(out)

    def _refuse(self, step: int, lane: Lane) -> NoReturn:
        """Raise because row ``step`` is not the next row of the lane, or does not exist."""
        where = f"tensor {lane.index} at offset {lane.offset}"
        if lane.interrupted:
            raise ArgumentError(f"Expected a whole state for {where}, but a row was interrupted. Resume from a checkpoint.")
        if step != lane.next:
            _check.fail("step", step, f"to be {lane.next}, the next row of {where}", "Rows are drawn once each, in order.")
        _check.fail("step", step, f"to be less than steps={self._steps}", "Make a stream with more steps.")

    def _lane(self, piece: Piece) -> Lane:
        index, offset, dtype = piece.which, piece.start, computed_in(piece.target.dtype)
        lane = self._lanes.get((index, offset))
        if lane is None:
            lane = Lane(_check.integer(0, index=index), offset, piece.size, dtype)
            for other in self._lanes.values():
                if other.index == index and other.offset < lane.end and offset < other.end:
                    _check.fail("offset", offset, f"to lie outside the shard at {other.offset}", "Shards must not overlap.")
            self._start(lane, piece.target.device)
            self._lanes[index, offset] = lane
        if lane.count != piece.size or lane.dtype is not dtype:
            _check.fail("like", (piece.size, dtype), f"to keep its {lane.count} elements of {lane.dtype}")
        return lane

    def _start(self, lane: Lane, device: torch.device) -> None:
        """Give a new lane its first state: zeros, or the pieces of a checkpoint that cover it."""
        if device.type == "cpu":
            lane.state = {name: _aligned_memory.zeros((rows, lane.count), lane.dtype) for name, rows in self._sizes().items()}
        elif self._kept_there():
            lane.state = {"there": torch.zeros(self._kept_there(), lane.count, dtype=lane.dtype, device=device)}
        pieces = [p for p in self._loaded if p.index == lane.index and p.offset < lane.end and lane.offset < p.end]
        if not pieces:
            return
        covered = sum(min(p.end, lane.end) - max(p.offset, lane.offset) for p in pieces)
        if covered != lane.count or len({p.next for p in pieces}) != 1 or any(p.dtype != lane.dtype for p in pieces):
            where = f"[{lane.offset}, {lane.end}) of tensor {lane.index}"
            raise ArgumentError(
                f"Expected the checkpoint to cover {where} once, at one step and dtype. Load every shard's state."
            )
        lane.next = pieces[0].next
        for piece in pieces:
            low, high = max(piece.offset, lane.offset), min(piece.end, lane.end)
            for name, rows in lane.state.items():
                rows[:, low - lane.offset : high - lane.offset] = piece.state[name][:, low - piece.offset : high - piece.offset]

    def state_dict(self) -> dict[str, Any]:
        """Copies of all lanes; the lists of several ranks may be concatenated and loaded under any other sharding."""
        if any(lane.interrupted for lane in self._lanes.values()):
            raise ArgumentError("Expected whole rows, but one was interrupted. Resume from an earlier checkpoint.")
        waiting = [p for p in self._loaded if not any(overlap(p, lane) for lane in self._lanes.values())]
        return {"stream": type(self).__name__, "lanes": [pack(lane) for lane in [*self._lanes.values(), *waiting]]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue bit for bit where ``state_dict`` was taken, under the same or another sharding."""
        if state.get("stream") != type(self).__name__:
            _check.fail("state", state.get("stream"), f"to come from a {type(self).__name__}")
        loaded = [Lane(**{**lane, "state": {k: v.clone() for k, v in lane["state"].items()}}) for lane in state["lanes"]]
        for lane in loaded:
            sizes = {"there": self._kept_there()} if "there" in lane.state else dict(self._sizes())
            if {name: tuple(rows.shape) for name, rows in lane.state.items()} != {n: (r, lane.count) for n, r in sizes.items()}:
                _check.fail("state", sorted(lane.state), f"to hold {sizes} rows of {lane.count} numbers", "Same mechanism?")
        self._lanes, self._loaded = {}, loaded


@final
class IndependentStream(OrderedStream):
    """Row t = z_t (C = identity): no state except the step.

    >>> import torch
    >>> source = Source(seed=1)
    >>> stream = IndependentStream(source)
    >>> torch.equal(stream.row(0, 0, torch.empty(3)), source.z(0, 0, torch.empty(3)))
    True
    """

    _on_grid = True

    def __init__(self, source: Source, *, steps: int | None = None) -> None:
        super().__init__(source, steps=steps)

    def _sizes(self) -> Mapping[str, int]:
        return {}

    def _turn(self, step: int) -> Turn:
        return Turn(step)

    _advance_all = Rows._advance_all


class ChunkedStream(OrderedStream):
    """A stream that works on one lane at a time, in chunks."""

    _chunk: int | None = CHUNK  # numbers processed together, in the cache; None: the kernel does the chunking

    @abstractmethod
    def _advance(self, lane: Lane, low: int, high: int, out: np.ndarray, scale: float, fresh: bool) -> None:
        """Write (or, if not ``fresh``, add) row ``lane.next`` of the lane's elements [low, high) and update their state."""

    @final
    def _advance_all(self, step: int, lanes: Sequence[Lane], pieces: Sequence[Piece], scale: float, fresh: bool) -> None:
        for lane, piece in zip(lanes, pieces, strict=True):
            work = partial(self._advance_chunk, lane, piece.array(), scale, fresh)
            over_chunks(lane.count, work, self._chunk)

    def _advance_chunk(self, lane: Lane, flat: np.ndarray, scale: float, fresh: bool, low: int, high: int) -> None:
        self._advance(lane, low, high, flat[low:high], scale, fresh)
