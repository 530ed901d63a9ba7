"""The path of one batch through a run: issued, passed, checked, released, charged. A base class of :class:`Private`.

1, 2   the loader hands out a batch, stamped: :meth:`Stepping._on_issue`
3, 4   forward and backward: the capture's
5      ``optimizer.step()`` begins: :meth:`Stepping._check_passes` refuses what may be refused; then norms, weights, one weighted pass
6, 7   over all processes, with noise: :meth:`hushgrad.release.core.Release.privatise`; the step is charged, :meth:`Stepping._take`
8      released, denoised: :meth:`hushgrad.release.core.Release.finished`
9, 10  the user's own optimizer; :meth:`Stepping._after_step`

What only some runs need (lazy tables, sharded parameters, several processes, certified sums) is decided at construction: its functions
are put into the lists of what is called before a pass and before a step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hushgrad.clipping import Capture
from hushgrad.clipping.rejected import Rejected
from hushgrad.errors import ArgumentError, CaptureError, NotIsolated
from hushgrad.release.core import Noised, Release, other_examples
from hushgrad.release.deferred_digests import DeferredDigests
from hushgrad.release.journal import Journal
from hushgrad.release.lazy import LazyTables
from hushgrad.release.placement.whole import Whole
from hushgrad.release.placement.world import World
from hushgrad.release.probe_passes import Closure, run_passes
from hushgrad.sampling.attendance import TOGETHER, Attendance
from hushgrad.sampling.batch import Batch, Smallest
from hushgrad.train.after.averaged import Averaged
from hushgrad.train.batch_invariance import BatchInvariance
from hushgrad.train.books import Books
from hushgrad.train.contract import DataContract
from hushgrad.train.findings import Findings
from hushgrad.train.guard import Guard
from hushgrad.train.invariant_sizes import InvariantSizes, OneLength
from hushgrad.train.loss_tracking import Losses
from hushgrad.train.micro_batches import Parts
from hushgrad.train.plan import Plan


class Issued(NamedTuple):
    """The batch that the loader has handed out and that the next step must be taken on."""

    examples: int
    units: Tensor | None
    padding: int  # examples at the end that are padding
    records: np.ndarray | None  # who takes part, in every process
    counted: int  # examples that do count
    contributions: int  # how many gradients will be clipped: one for each example, or each unit
    smallest: Smallest | None  # None: all examples are of one size
    cut: int | None = None  # None: not a micro-batch


class Stepping:
    """The steps of a run: what happens to a batch, in order."""

    model: nn.Module
    optimizer: Optimizer
    plan: Plan
    placement: Whole
    losses: Losses
    _params: dict[str, Tensor]
    _world: World
    _guard: Guard
    _books: Books
    _capture: Capture
    _release: Release
    _journal: Journal
    _contract: DataContract
    _later: DeferredDigests
    _lazy: LazyTables | None
    _bits: BatchInvariance
    _own: InvariantSizes
    _length: OneLength
    _findings: Findings
    _parts: Parts
    _together: Callable[[], AbstractContextManager[None]]  # all processes leave the block, or none
    _before_pass: list[Callable[[int], None]]  # called before a pass over so many examples
    _checks: list[Callable[[], None]]  # called before a step
    _loss_checks: list[Callable[[], None]]  # called before them, if the step's losses ask for it
    _averaged: Averaged | None
    _attendance: Attendance | None
    _issued: Issued | None
    _dim: Callable[[], int | None] | None
    _usual: int
    _rejected: Rejected
    _raw_norms: Tensor
    _raw_loss: Any
    _attached: bool
    _splitting: bool

    @property
    def steps(self) -> int:
        """Steps taken (charged) so far."""
        return self._books.taken

    def settle(self) -> None:
        """Give every row of lazy tables the noise that it owes, after which their memory is as private as everything else."""
        if self._lazy is not None:
            self._lazy.settle()

    @property
    def dealt(self) -> bool:
        """Whether the run has dealt a batch of records in this process, or taken a step."""
        return self._issued is not None or self._books.taken > 0

    def _in_step(self) -> bool:
        """Whether a forward pass that runs now reads rows of the step's own batch; a proof's passes do, with gradients and without."""
        passing = torch.is_grad_enabled() or self._capture.proving
        return not self._journal.durable or (self._issued is not None and passing)

    # A batch is handed out -------------------------------------------------------------------------------------------

    def _on_issue(self, batch: Batch) -> None:
        """The loader is about to hand out a batch, or one micro-batch of it."""
        with self.losses.leaving():
            if not self._attached:
                raise CaptureError("This run is detached: a step on its batches would be an ordinary one, without any privacy.")
            if batch.part is None:
                self._begin(batch)
            else:
                self._begin_part(batch)
            self.losses.issued(batch, whole=batch.part is None, listed=self._parts.listed)
            for prepare in self._before_pass:
                prepare(batch.examples)
            self._announce(batch)

    def _begin(self, batch: Batch) -> None:
        taken = self._books.taken
        if batch.step != taken:
            raise CaptureError(
                f"The loader is at step {batch.step}, but {taken} steps have been taken. Call optimizer.step() once for "
                "each batch, empty ones too (to accumulate gradients, give the plan the large batch and cut it: for part in "
                "batch.split(size)); after leaving a loop in mid-batch, ask for a new private.loader()."
            )
        if torch.get_num_threads() != self._own.threads:
            self._own.require_threads()
        if not self._contract.is_read:
            self._contract.read()
        self._capture.discard()  # first: restores what an interrupted pass has switched off
        self._guard.before()
        counted = batch.examples - batch.padding
        contributions = counted if batch.units is None else len(torch.unique(batch.units[:counted]))
        self._issued = Issued(batch.examples, batch.units, batch.padding, batch._records, counted, contributions, batch._smallest)
        if self._parts.any:
            self._parts.clear()
            self._capture.fold_with(None)  # a whole batch needs no second buffer
        if self._lazy is not None and self._journal.read_all_before(taken):
            self._lazy.settle()

    def _begin_part(self, part: Batch) -> None:
        if self.placement.in_parts and not self._splitting:
            raise ArgumentError(
                "Expected private.split(batch, size): with fully_shard all processes must run equally many parts."
            )
        self._parts.issued(part)
        self._capture.fold_with(self._release.live_clip)  # clipped one by one, and their activations freed

    def _announce(self, batch: Batch | Issued) -> None:
        usual = self._usual if batch.cut is None else min(self._usual, batch.cut)
        self._capture.examples(batch.examples, padding=batch.padding, dim=self._dim, usual=usual)
        if batch.units is not None:
            self._capture.units(batch.units)

    def _announce_part(self, part: Batch) -> None:
        self.losses.issued(part, whole=False)
        self._announce(part)

    def _announce_whole(self) -> None:
        if self._issued is not None:
            self._announce(self._issued)

    # The optimizer steps ---------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        closure: Closure | None = args[1] if len(args) > 1 else kwargs.get("closure")
        try:
            with self._together():
                step = self._check_passes(closure, kwargs)
                self._journal.begin(step)
            self._release_gradient(step)  # the capture has forgotten its passes
        except BaseException as error:
            self._world.part_by(error, self._findings)
            self._capture.discard()
            if self._attendance is not None:
                self._attendance.noted.pop(self._books.taken, None)  # the step was not charged
            self._announce_whole()  # so the passes may be run again
            raise
        # If the closure stayed in the arguments, it would run after this hook, and the optimizer would use its raw gradients.
        return args[:1], {}

    def _check_passes(self, closure: Closure | None, options: dict[str, Any]) -> int:
        """Refuse whatever may be refused before the step's noise is drawn and anything is sent; returns the step's number."""
        asks = closure is not None or self.plan.denoise is not None
        with self._passing() if asks and self.placement.in_parts else nullcontext():
            if self._capture.not_isolated:  # for good, even if the proof's own error was caught
                self._look_back()
                raise NotIsolated(self._capture.not_isolated)
            if torch.get_num_threads() != self._own.threads:
                self._own.require_threads()
            self._books.require_room(issued=self._issued is not None)
            if self._averaged is not None:
                self._averaged.require_outside("a step")
            self._raw_loss = run_passes(self._release, self._capture, closure, self._announce_whole) if asks else None
        if self.placement.in_parts:
            self.placement.moved(self.model)  # an evaluation may have changed it
        self._guard.check(options)
        for check in (*self._loss_checks, *self._checks) if self.losses.to_check else self._checks:
            check()
        if self._capture.resized or (self._issued is not None and self._issued.smallest is not None):
            self._length.require(self._books.taken, None if self._issued is None else self._issued.smallest)
        if self._parts.any:
            self._parts.check()
        return self._books.taken

    @contextmanager
    def _passing(self) -> Iterator[None]:
        """Inside, passes exchange messages of their own: who refuses leaves its error for the others instead of sending it."""
        try:
            yield
        except BaseException as error:
            self._world.part_by(error, self._findings)
            raise

    def _ended(self, model: nn.Module, inputs: Any, output: Any) -> None:
        """A pass has ended. If it was by an error, others may wait for this process in it, or in the step."""
        error, caller = sys.exc_info()[1], sys._getframe(1)  # which has caught it, unless a loop handles one of its own
        if error is None or error.__traceback__ is None or error.__traceback__.tb_frame is not caller:
            return
        waited_for = self.placement.in_parts or (self._issued is not None and torch.is_grad_enabled())
        if waited_for and model is self.model and not self._capture.aside:
            self._look_back()
            self._world.leave(error, self._findings)

    def _look_back(self) -> None:
        """If a repeated proof has failed, it is unknown since when: what was released is then covered by no theorem."""
        if self._capture.late and (taken := self._books.taken) and not self._books.broken:
            self._books.broken = f"after {taken} steps a later look failed: {self._capture.not_isolated}"

    def _check_captured(self) -> None:
        """With several processes: one that would refuse must do so before any sends. With one, the release does this itself."""
        captured = self._capture.check()
        if self._issued is not None and captured != self._issued.contributions:
            raise other_examples(self._books.taken, captured, self._issued.contributions)

    def _release_gradient(self, step: int) -> None:
        contributions = None if self._issued is None else self._issued.contributions
        noised, clipped = self._release.privatise(self._capture, step, contributions)
        self._take(noised)
        rate = self.optimizer.param_groups[0].get("lr")
        for name, grad in self._release.finished(noised, None if rate is None else float(rate)).items():
            self._params[name].grad = grad
        self._raw_norms = clipped.raw_norms
        if not isinstance(clipped.rejected, int) or clipped.rejected:  # on a device it is not known yet
            self._rejected.add(clipped.rejected)
        if self._lazy is not None:
            self._lazy.update(noised.raw_rows, noised.std, step)

    def _take(self, noised: Noised) -> None:
        """The last check before a release: a row of noise that was released before must give the same value again.

        All processes send their witnesses, then all enter the step or none. It is charged before it is released: its noise is spent then.
        """
        step, issued, book = noised.step, self._issued, self._attendance
        records = None if issued is None or book is None else issued.records
        witness = self._release.witness(noised) if self.placement.waited_for or self._journal.durable else None
        self.losses.weigh(None if issued is None else issued.counted)
        with self._journal:
            with self._together():
                found = None if witness is None else int.from_bytes(witness[:6], "little")
                found = found if found is None or self._world.size == 1 else self._world.total(found)
                if step != self._books.taken:
                    raise CaptureError(f"Step {step} was taken by another thread meanwhile; nothing of this one was released.")
                if book is not None and records is not None and book.asks:
                    book.require(step, records)
                if found is None:  # without a journal on disk nothing is compared, and no device is synchronised
                    self._later.add(step, noised.norms)
                else:
                    self._journal.released(step, found.to_bytes(8, "little"))
                    self._books.content = self._journal.chain.hex()
            if book is not None and records is not None:
                if len(book.noted) * (len(records) + 1) > TOGETHER:
                    book.enter_noted()
                book.noted[step] = records
            self._books.charge(issued=issued is not None and not self._findings.foreign)
            self.losses.settle()
            self._issued = None

    def _enter_later(self, step: int, found: bytes) -> None:
        """Enter the digest of an earlier release on a device in the journal."""
        with self._journal:
            self._journal.released(step, found)
        self._books.content = self._journal.chain.hex()

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for p in self._params.values():
            p.grad = None
        if self.plan.projection is not None:
            self.plan.projection.project_(self._params.values())
        taken = self._books.taken
        if self._averaged is not None:
            self._averaged.update(taken - 1)
        if taken >= self._books.limit:
            self.settle()
            self._books.broken = self._books.broken or self._promise_broken()

    def _promise_broken(self) -> str:
        """At the end of a run: how its batches differed from those accounted for; empty if they did not."""
        changed = self._contract.changed()
        if self._world.largest(bool(changed)) and not changed:
            changed = "another process found the data of this run changed while it went on"
        return changed or ("" if self._attendance is None else self._attendance.check())
