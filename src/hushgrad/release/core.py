"""The release of one step: from a clipped sum to a privatised gradient. The only place where noise is added to a sum.

One step, in order:

    begin        the row of noise of the step is about to be drawn; a step that is refused after this point draws the same row again
    early        noise of sums that are cheapest added to it (tables, shards)
    collect      the capture clips and adds up; or the sums of a server's clients
    noise        the rest of the row is added to the other sums
    add up       over the processes (stage 6 of the path; before it every process has its own part of sum and noise)
    count        how many norms lie below the clip norm, with its own noise, if the clip norm is adaptive
                 so far the run has not changed: now the caller enters a digest of everything in its journal, or refuses the step
    denoise      post-processing
    adapt        the clip norm of the next step, also post-processing

:meth:`Release.privatise` does everything before the journal entry, :meth:`Release.finished` everything after it. Where the tensors live is
up to the placement; nothing here depends on its kind.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from itertools import repeat
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor

from hushgrad.clipping import Capture, ClippedSum
from hushgrad.clipping.adaptive import Adaptive, AdaptiveOnDevice
from hushgrad.errors import CaptureError
from hushgrad.release.run_state import RunState


class Noised(NamedTuple):
    """The sums of a step with their noise, not yet released: the row is drawn, and nothing is charged or recorded."""

    step: int
    sums: dict[str, Tensor]
    norms: Tensor  # of the contributions; they identify the batch
    moved: Adaptive | AdaptiveOnDevice | None  # the next adaptive clip norm
    std: float  # of the noise
    raw_rows: dict[str, Tensor]  # the sums of lazy tables, whose noise is added later: never released as they are


class Placement:
    """What a step needs to know about where its sums live. This one: a single process that holds every parameter whole.

    The core never distinguishes cases; placements override these methods. One law binds all of them: after :meth:`add_up` every
    coordinate of every sum has the contributions of all processes, and its noise exactly once.
    """

    waited_for = True  # False: a device that a step does not wait for
    finishes = True  # whether a sum with its noise is final: add_up does nothing
    params: dict[str, Tensor]
    index: dict[str, int]  # each parameter's number in the noise stream

    def own(self, buffers: Mapping[str, Tensor]) -> list[tuple[str, Tensor, int]]:
        """The part of each sum whose noise is drawn here, and its offset in the whole flattened parameter."""
        return list(zip(buffers, buffers.values(), repeat(0)))

    def add_up(self, buffers: dict[str, Tensor]) -> None:
        """Add up the sums, noise included, over all processes; each gets the parts that it holds."""

    def gradients(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """``sums`` as the parameters' gradients, in their precision."""
        grads = {}
        for name, g in sums.items():
            dtype = self.params[name].dtype
            grads[name] = g if g.dtype is dtype else g.to(dtype)
        return grads


class Release(RunState):
    """(sum_i w_i g_i + noise_multiplier C row(t)) / batch_size, denoised: one run's noise, clip norm and denoiser.

    Each sum is written once and its noise added to it in one pass. Where a sum has few rows in a large table (embeddings) the
    noise is written first and the rows are added to it, so that no table of zeros is made.
    """

    # One step --------------------------------------------------------------------------------------------------------

    def privatise(self, capture: Capture, step: int, contributions: int | None) -> tuple[Noised, ClippedSum]:
        """The noised sums of ``step`` from the captured passes, and the statistics of its examples.

        ``contributions`` is how many examples or units the issued batch has; None for a batch from elsewhere.
        """
        if self._first is None:
            self._first = self._early(capture.scattered)
        begun: dict[str, Tensor] = {}
        if self._first:
            captured = capture.check()
            if contributions is not None and captured != contributions:  # refuse the step before its noise is drawn
                raise other_examples(step, captured, contributions)
            self.begin(step)
            begun = self._fresh(step, self._first)
        clipped = capture.collect(self.live_clip, out=begun, scale=1.0 / self._plan.batch_size)
        captured = clipped.raw_norms.shape[0]
        if contributions is not None and captured != contributions:
            raise other_examples(step, captured, contributions)
        if not self._first:
            if self._ahead:
                self.settle(step)
            self._ahead = True
        norms = clipped.raw_norms if clipped.fixed_norms is None or self.placement.waited_for else clipped.fixed_norms
        noised = self.noised(step, clipped.raw_sums, norms, begun=begun)
        return noised, ClippedSum(noised.raw_rows, *clipped[1:])

    def _early(self, scattered: frozenset[str]) -> list[str]:
        """Sums whose noise is drawn first. A sum that is rounded to a grid with its noise, or sent as it is, must be complete before.

        A certified sum is complete before it is added to its noise, once, and rounded: so it is never in memory in double precision.
        """
        if self._plan.secure or (self._plan.certified and not self.placement.finishes):
            return []
        names = list(self.placement.params) if self._plan.certified else self.placement.early(scattered)
        return [name for name in names if name not in self.lazy]

    def begin(self, step: int) -> None:
        """Begin step ``step``: its row is about to be drawn, and is not released yet."""
        if self._ahead:
            self.settle(step)
        self._ahead = True

    def noised(self, step: int, sums: dict[str, Tensor], norms: Tensor, *, begun: Mapping[str, Tensor]) -> Noised:
        """The ``sums`` of a step that has begun, divided by the batch size, with their noise; those in ``begun`` have it already."""
        if sums.keys() != self.placement.params.keys() or not all(map(is_, map(sums.get, begun), begun.values())):
            raise CaptureError("The clipped sum was not added to its noise: a defect of the capture. Nothing was released.")
        rows = {name: sums[name] for name in self.lazy} if self.lazy else {}
        std = self._scale  # of this step, before the clip norm adapts
        self.source.seen = None  # forget a row that was drawn and not released
        buffers = self._rounded(step, sums) if self._plan.certified and not begun else self._noised(step, sums, begun)
        moved = self._moved_clip(step, norms) if self._adapts else None
        return Noised(step, buffers, norms, moved, std, rows)

    def witness(self, noised: Noised) -> bytes:
        """A digest of everything that the step will release: its sums with their noise, and the next clip norm."""
        moved = noised.moved.fetched if isinstance(noised.moved, AdaptiveOnDevice) else noised.moved
        more = (b"" if self.noted is None else self.noted()) + (b"" if moved is None else struct.pack("<d", moved.max_grad_norm))
        seen, self.source.seen = self.source.seen, None
        covered = {**noised.raw_rows, **noised.sums} if noised.raw_rows else noised.sums
        return self._witness.of(covered, noised.norms, more, seen)

    def finished(self, noised: Noised, learning_rate: float | None) -> dict[str, Tensor]:
        """The gradient of a step that is recorded: denoised; then the clip norm adapts."""
        self._ahead = False  # its row is spent, whatever fails from here on
        try:
            grads = noised.sums if self._plan.denoise is None else self._denoised(noised, learning_rate)
        finally:
            if noised.moved is not None:
                self.use_clip(noised.moved)
        return self.placement.gradients(grads)

    def _noised(self, step: int, sums: dict[str, Tensor], begun: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sums, each with its noise; those in ``begun`` have it already, if they are the tensors that the capture was given.

        Lazy tables are left out: their noise is added when they are read.
        """
        buffers = rest = sums
        if begun or self.lazy:
            rest = {name: total for name, total in sums.items() if name not in begun and name not in self.lazy}
            buffers = {name: begun.get(name, total) for name, total in sums.items() if name not in self.lazy}
        self._add(step, rest)
        self.placement.add_up(buffers)
        return buffers

    def _rounded(self, step: int, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """The sums over all processes; the process that draws a number's noise rounds the sum of both, once.

        A row is in single precision even if sums are in double; in a secure run it is whatever brings the sum to the public grid.
        """
        buffers = {name: total.to(torch.float64) for name, total in sums.items() if name not in self.lazy}
        self.placement.add_up(buffers)
        if self._plan.secure:
            self._add(step, buffers)
        else:
            for name, row in self._fresh(step, buffers).items():
                buffers[name].add_(row)
        rounded = {name: total.to(self.placement.like(name).dtype) for name, total in buffers.items()}
        self.placement.gather(rounded)
        return rounded

    def _add(self, step: int, buffers: dict[str, Tensor]) -> None:
        """Add this process's part of row ``step`` to sums, in place."""
        indices, out, offsets, index = [], [], [], self.placement.index
        for name, part, offset in self.placement.own(buffers):
            if part.numel():
                indices.append(index[name])
                out.append(part)
                offsets.append(offset)
        if out:
            self.stream.rows(step, out, indices=indices, offsets=offsets, out=out, scale=self._scale)

    def _fresh(self, step: int, names: Iterable[str]) -> dict[str, Tensor]:
        """This process's part of row ``step`` in new tensors: the row itself if all of it is drawn here, otherwise added to zeros."""
        likes = {name: self.placement.like(name) for name in names}
        if not self.placement.draws_all:
            buffers = {name: torch.zeros(p.shape, dtype=p.dtype, device=p.device) for name, p in likes.items()}
            self._add(step, buffers)
            return buffers
        own = [part for part in self.placement.own(likes) if part[1].numel()]
        held, indices = [part for _, part, _ in own], [self.placement.index[name] for name, _, _ in own]
        rows = self.stream.rows(step, held, indices=indices, offsets=[offset for _, _, offset in own], scale=self._scale)
        drawn = {name: row for (name, _, _), row in zip(own, rows, strict=True)}
        # In the parameters' order, in all processes: denoisers gather tensor by tensor.
        return {name: drawn[name] if name in drawn else torch.zeros_like(like) for name, like in likes.items()}


def other_examples(step: int, captured: int, contributions: int) -> CaptureError:
    """The error message for a step whose passes were over other examples than its batch."""
    return CaptureError(
        f"The batch of step {step} has {contributions} contributions, but {captured} were captured. Run each "
        "example forward and backward exactly once per step; cut a batch with batch.split(size)."
    )
