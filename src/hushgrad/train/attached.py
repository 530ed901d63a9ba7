"""The parts of a private run, and its hooks on a model and an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hushgrad import _check
from hushgrad._precision import require_double
from hushgrad.clipping import Capture
from hushgrad.clipping.certificate import Certificate
from hushgrad.clipping.rejected import Rejected
from hushgrad.guarantee import Ledger
from hushgrad.release.core import Release
from hushgrad.release.deferred_digests import DeferredDigests
from hushgrad.release.journal import Journal
from hushgrad.release.keys import RunKey
from hushgrad.release.lazy import LazyTables, require_lazy_plan
from hushgrad.release.placement import placement_of
from hushgrad.release.placement.lockstep import SOMETIMES, CheckedTogether
from hushgrad.release.placement.sharded import is_sharded
from hushgrad.release.placement.whole import with_cipher
from hushgrad.release.placement.world import World
from hushgrad.sampling.attendance import Attendance
from hushgrad.train.after.averaged import Averaged
from hushgrad.train.agreement import require_same_run
from hushgrad.train.batch_invariance import BatchInvariance
from hushgrad.train.books import Books
from hushgrad.train.contract import DataContract
from hushgrad.train.findings import Findings
from hushgrad.train.guard import Guard, Watch
from hushgrad.train.invariant_sizes import InvariantSizes, OneLength
from hushgrad.train.loss_tracking import Losses
from hushgrad.train.micro_batches import Parts
from hushgrad.train.model_loss import Inside
from hushgrad.train.plan import Plan
from hushgrad.train.saving import Saving

_OF_A_USER = 16  # examples assumed for a user when formulas are chosen


class Attached(Saving):
    """A run from its construction, on an unchanged model and optimizer, until it is detached."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        plan: Plan,
        *,
        key: RunKey,
        max_epsilon: float | None = None,
        prior: Ledger | None = None,
        loss_reduction: str | None = None,
        check_isolation: bool = True,
        lazy_tables: bool = False,
        unused: str = "raise",
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._guard = Guard(model, optimizer)
        self._params = self._guard.params
        plan = self.plan = with_cipher(_check.instance(Plan, plan=plan), self._params)
        _check.instance(bool, check_isolation=check_isolation)
        _check.instance(bool, lazy_tables=lazy_tables)
        self._world = World.here()
        self._key = self._world.share_key(key.for_run())
        self._asked = {"unused": unused, "check_isolation": check_isolation, "lazy_tables": lazy_tables}
        before = prior.to_json() if isinstance(prior, Ledger) else prior  # checked below: first all processes must agree
        asked = {**self._asked, "loss_reduction": loss_reduction, "max_epsilon": max_epsilon, "prior": before}
        require_same_run(self._world, self._key.journal, plan, model, optimizer, asked)
        self._books = Books(plan, self._key.run_name(), prior=prior, max_epsilon=max_epsilon)
        self.placement = placement_of(self._params, self._world, plan)
        if plan.certified:
            for device in {p.device for p in self._params.values()}:
                require_double(device, "certified sums")
        self._own = InvariantSizes.of(model, certified=plan.certified)
        certificate = Certificate(plan.capacity, plan.capacity // self._world.size) if plan.certified else None
        # Formulas are chosen by a public number of examples. How many a batch of users has is not public; a wrong guess only costs
        # time.
        each = plan.augmentations * (_OF_A_USER if plan.unit == "user" else 1)
        self._usual = ceil(plan.batch_size * each / self._world.size)
        self._capture = Capture(
            model,
            loss_reduction=("sum" if plan.certified else "mean") if loss_reduction is None else loss_reduction,
            unused=unused,
            held=self.placement,
            certificate=certificate,
            copies=plan.augmentations,
            check_isolation=check_isolation,
            fixed=None if plan.pad_to is None else -(-plan.pad_to // self._world.size),
        )
        self._length = OneLength(self._capture, vouched=not check_isolation, certified=plan.certified)
        self._release = Release(plan, self.placement, self._key, witnessed=True)
        if plan.denoise is not None and plan.denoise.rescales:
            self._capture.scales = self._release.scales
        self._averaged = None if plan.average is None else Averaged(plan.average, self._params, plan.steps)
        self._journal, self._contract = Journal(self._key), DataContract()
        self._attendance: Attendance | None = None
        self._issued = None
        self._dim: Callable[[], int | None] | None = None  # of the examples, as the loader deals them
        self._raw_norms: Tensor = torch.empty(0, dtype=torch.float32)
        self._raw_loss: Any = None
        self._rejected, self._splitting = Rejected(), False
        self._later = DeferredDigests(self._enter_later)
        self._lazy: LazyTables | None = None
        self._bits = BatchInvariance(self._capture, self._world, self._own.sizes.multiple, lambda: self._dim and self._dim())
        self._parts = Parts(model, self._announce_part)
        self.losses = Losses(
            self._capture,
            steps=plan.steps,
            together=self.sharding is not None,
            must=plan.certified and loss_reduction is None,
            checked=check_isolation,
        )
        self._handles: list[Any] = [self._parts]
        self._before_pass: list[Callable[[int], None]] = []
        self._checks: list[Callable[[], None]] = []
        self._loss_checks: list[Callable[[], None]] = []
        self._sharded_notes: tuple[str, ...] = ()
        self._findings = Findings(
            self._books,
            self.losses,
            notes=lambda: (*self._own.notes, *self.losses.notes, *self._journal.notes, *self._contract.notes),
            add=lambda note: self._journal.vouched(note),
            issued=lambda: self._issued is not None,
        )
        self._together = partial(self._world.together, self._findings) if self._world.size > 1 else nullcontext
        self._attached = True
        self._guard.attach()
        try:
            self._attach(check_isolation, lazy_tables)
        except BaseException:  # a refused model is restored
            self.detach()
            raise
        self._key.taken = True

    def _attach(self, check_isolation: bool, lazy_tables: bool) -> None:
        self._world.share_parameters([t for t in (*self.model.parameters(), *self.model.buffers()) if not is_sharded(t)])
        self._guard.released.renew()
        if self._world.size > 1:
            self._before_pass.append(lambda _: self._world.require_joined())
        # Before the capture's own hooks, which then see the check's passes from the start and ignore them.
        if check_isolation and self.placement.in_parts:
            gate = CheckedTogether(self.model, self._world, self._capture)
            self._handles.append(gate)
            self._before_pass.append(gate.before)
            self._sharded_notes = (SOMETIMES,)
        if self.sharding is not None:
            self._handles.append(self.sharding.gathering(self.model))
        self._capture.attach()
        if self._world.size > 1:  # after the capture, which may refuse what a pass has returned
            self._handles.append(self.model.register_forward_hook(self._ended, always_call=True))
            self._capture.refusals(lambda error: self._world.leave(error, self._findings))
            self.losses.leaving = partial(self._world.leaving, self._findings)
        if self.plan.certified:  # after the capture, whose hooks are put first: the check's passes are no part of a proof's
            self._handles.append(self._bits.attach(self.model))
            self._before_pass.append(self._bits.before)
        self._handles.append(self.losses.handed.attach(self.model))
        if check_isolation:
            inside = Inside(self.model, self.losses)
            inside.attach()
            self._loss_checks += [inside.check, self.losses.padded.check]
        if lazy_tables:
            self._attach_tables()
        if self.losses.must:
            self._checks.append(self._check_losses)
        if self._world.size > 1:
            self._checks += [self._look_at_data, self._check_captured]
        self._handles.append(self.optimizer.register_step_pre_hook(self._before_step))
        self._handles.append(self.optimizer.register_step_post_hook(self._after_step))
        self._handles.append(Watch(self))

    def _check_losses(self) -> None:
        """In a certified run: require that the losses were sums."""
        if self._issued is not None:
            self.losses.require(self._issued.counted)

    def _look_at_data(self) -> None:
        """Before steps 1, 2, 4, 8 and so on, since other processes cannot see this one's data."""
        taken = self.steps
        if taken & (taken + 1) == 0:
            self._books.broken = self._books.broken or self._contract.changed()

    def _attach_tables(self) -> None:
        require_lazy_plan(self.plan, self._world, sharded=self.placement.in_parts)
        self._lazy = LazyTables(
            self._capture,
            self._params,
            self.optimizer,
            lambda: self._release.source,
            in_step=self._in_step,
            before=lambda: self._journal.read_all(self.steps),
            whole=lambda: self._journal,
        )
        self._release.lazy, self._release.noted = self._capture.by_rows, self._lazy.noted
        self._guard.released.moves = True
        self._checks.append(self._lazy.check)

    def detach(self) -> None:
        """Remove all hooks; model and optimizer are ordinary again, and what they do then is not private."""
        self._attached = False
        if self._lazy is not None:
            self._lazy.detach()
        self._journal.close()
        for handle in self._handles:
            handle.remove()
        self._capture.detach()
        self._guard.detach()
