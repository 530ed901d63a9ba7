"""Prefetching: the host draws a device's noise one step ahead, while the device computes.

Noise does not depend on data: while the device computes step t, a thread draws row t + 1 of all tensors into one of two flat buffers. A
step then costs one copy, asynchronous from pinned memory, and the row has the same bits as without prefetching.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hushgrad import _aligned_memory
from hushgrad.errors import ArgumentError
from hushgrad.noise.base import NoiseStream
from hushgrad.noise.streams.base import OrderedStream
from hushgrad.noise.streams.shard_state import computed_in

_PINS = frozenset({"cuda", "xpu"})  # devices with asynchronous copies from pinned memory, and events
_MOST_KEPT = 8  # largest number of rows of state, of which prefetching needs a copy


def drawn_ahead(stream: NoiseStream) -> NoiseStream:
    """``stream`` with prefetching for devices, or ``stream`` itself if it is secure or has too much state."""
    if isinstance(stream, OrderedStream) and not stream.secure and stream.kept_here <= _MOST_KEPT:
        return Ahead(stream)
    return stream


class Staging:
    """A buffer in main memory from which rows go to a device."""

    def __init__(self, numbers: int, dtype: torch.dtype, device: torch.device) -> None:
        self._device, self._sent = device, None if device.type not in _PINS else torch.Event(device=device)
        pinned = self._sent is not None
        self.flat = torch.empty(numbers, dtype=dtype, pin_memory=True) if pinned else _aligned_memory.empty((numbers,), dtype)

    def send(self) -> Tensor:
        """Copy the numbers to new memory on the device; asynchronously, if this memory is pinned."""
        there = self.flat.to(self._device, non_blocking=self._sent is not None)
        if self._sent is not None:
            self._sent.record(torch.accelerator.current_stream(self._device))
        return there

    def wait(self) -> None:
        """Wait until the device has read the last copy; then the buffer may be overwritten."""
        if self._sent is not None:
            self._sent.synchronize()


class _Layout(NamedTuple):
    """The tensors of a row: indices, offsets, shapes, dtypes and devices."""

    indices: tuple[int, ...]
    offsets: tuple[int, ...]
    shapes: tuple[torch.Size, ...]
    kinds: tuple[tuple[torch.dtype, torch.device], ...]


class _Room:
    """Memory for one row: a buffer for each dtype and device, and the tensors in it."""

    def __init__(self, layout: _Layout, staging: type[Staging]) -> None:
        sizes = [shape.numel() for shape in layout.shapes]
        of_kind = {kind: [k for k, own in enumerate(layout.kinds) if own == kind] for kind in dict.fromkeys(layout.kinds)}
        self._members = list(of_kind.values())
        self._stages = [staging(sum(sizes[k] for k in own), *kind) for kind, own in of_kind.items()]
        self._shapes = layout.shapes
        self.tensors = self._cut([stage.flat for stage in self._stages])

    def emptied(self) -> list[Tensor]:
        """All tensors, set to 0, once the device has read what they held."""
        for stage in self._stages:
            stage.wait()
            stage.flat.zero_()
        return self.tensors

    def send(self, scale: float | Tensor) -> list[Tensor]:
        """The tensors on their devices, times ``scale``; the product is rounded separately, as on the host."""
        sent = [stage.send() for stage in self._stages]
        for flat in sent:
            flat.mul_(scale.to(device=flat.device, dtype=flat.dtype) if isinstance(scale, Tensor) else scale)
        return self._cut(sent)

    def _cut(self, flats: Sequence[Tensor]) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for flat, own in zip(flats, self._members, strict=True):
            parts = flat.split([self._shapes[k].numel() for k in own])
            found |= {k: part.view(self._shapes[k]) for k, part in zip(own, parts, strict=True)}
        return [found[k] for k in range(len(found))]


class Ahead(NoiseStream):
    """The rows of ``inner``, each drawn at scale 1 by a thread while the step before it is computed.

    | what happens | |
    |---|---|
    | the thread fails | the step that needs the row raises the thread's error |
    | the state is saved | it is the state after the last row that was handed out |
    | another row than the next one, or of other tensors, is requested | the prefetched row is discarded, and rows are drawn in the step |
    | the row is for main memory, or its device draws by itself | ``inner`` draws it |

    No row is handed out twice: ``inner`` refuses that, and its rows are handed out in their order.

    Args:
        inner: the stream.
        staging: the buffers that rows go through.
    """

    def __init__(self, inner: OrderedStream, *, staging: type[Staging] = Staging) -> None:
        self._inner, self._staging, self._home = inner, staging, os.getpid()
        self._layout: _Layout | None = None  # of all rows so far
        self._rooms: list[_Room] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hushgrad noise")
        self._next: tuple[int, Future[dict[str, Any]]] | None = None  # a step, and the future state before its row
        self._otherwise = False  # tensors of a row are not requested in one call

    def rows(
        self,
        step: int,
        likes: Sequence[Tensor],
        *,
        indices: Sequence[int] | None = None,
        offsets: Sequence[int] | None = None,
        out: Sequence[Tensor] | None = None,
        scale: float | Tensor = 1.0,
    ) -> list[Tensor]:
        """As :meth:`NoiseStream.rows`, with the same bits; uses the prefetched row if it is the one requested."""
        layout, there = _layout(likes, indices, offsets), self._serves(likes, out)
        if not there or self._otherwise or (self._layout is not None and layout != self._layout):
            self._otherwise = self._otherwise or there
            self._take_back()
            return self._inner.rows(step, likes, indices=indices, offsets=offsets, out=out, scale=scale)
        self._layout = layout
        room = self._drawn(step, layout)
        if self._inner.steps is None or step + 1 < self._inner.steps:
            self._next = step + 1, self._thread.submit(self._draw, step + 1, layout)
        return _handed_out(room.send(scale), likes, out)

    def _serves(self, likes: Sequence[Tensor], out: Sequence[Tensor] | None) -> bool:
        """Whether the host draws for these tensors' devices; invalid arguments are left to ``inner``."""
        if not likes or any(like.is_cpu or not like.is_floating_point() for like in likes) or self._inner.draws_there(likes):
            return False
        return out is None or [(t.shape, t.dtype, t.device) for t in out] == [(t.shape, t.dtype, t.device) for t in likes]

    def _drawn(self, step: int, layout: _Layout) -> _Room:
        """The buffers with row ``step``, prefetched or drawn now."""
        if not self._rooms:
            self._rooms = [_Room(layout, self._staging), _Room(layout, self._staging)]
        if self._next is not None and self._next[0] == step:
            self._finished()
            self._next = None
        else:
            self._take_back()
            self._draw(step, layout)
        return self._rooms[step % 2]

    def _draw(self, step: int, layout: _Layout) -> dict[str, Any]:
        """Draw row ``step`` into its buffers and return the state before it. Runs in the thread."""
        before = self._inner.state_dict()
        views = self._rooms[step % 2].emptied()
        self._inner.rows(step, views, indices=layout.indices, offsets=layout.offsets, out=views)
        return before

    def _finished(self) -> dict[str, Any]:
        """The state before the prefetched row; raises the thread's error."""
        assert self._next is not None
        if os.getpid() != self._home:
            raise ArgumentError(
                "A row of noise was being drawn when this process was forked. Make the run in the process that trains."
            )
        return self._next[1].result()

    def _take_back(self) -> None:
        """Discard the prefetched row, which was never handed out, and restore the state before it."""
        if self._next is not None:
            before = self._finished()
            self._next = None
            self._inner.load_state_dict(before)

    # Saving ----------------------------------------------------------------------------------------------------------

    def draws_there(self, likes: Sequence[Tensor]) -> bool:
        """Whether the rows of these tensors are drawn on their device."""
        return self._inner.draws_there(likes)

    def takes(self, state: dict[str, Any], likes: Sequence[Tensor]) -> bool:
        return self._inner.takes(state, likes)

    def state_dict(self) -> dict[str, Any]:
        """The state after the last row that was handed out."""
        return self._inner.state_dict() if self._next is None else self._finished()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._next is not None and os.getpid() == self._home:
            self._next[1].exception()  # wait for the thread, however it ended
        self._next = None
        self._inner.load_state_dict(state)


def _layout(likes: Sequence[Tensor], indices: Sequence[int] | None, offsets: Sequence[int] | None) -> _Layout:
    return _Layout(
        tuple(range(len(likes)) if indices is None else indices),
        (0,) * len(likes) if offsets is None else tuple(offsets),
        tuple(like.shape for like in likes),
        tuple((computed_in(like.dtype), like.device) for like in likes),
    )


def _handed_out(rows: list[Tensor], likes: Sequence[Tensor], out: Sequence[Tensor] | None) -> list[Tensor]:
    if out is None:
        return [row.to(like.dtype) for row, like in zip(rows, likes, strict=True)]
    with torch.no_grad():
        if all(row.dtype is total.dtype for row, total in zip(rows, out, strict=True)):
            torch._foreach_add_(list(out), rows)
        else:
            for row, total in zip(rows, out, strict=True):
                total.add_(row)
    return list(out)
