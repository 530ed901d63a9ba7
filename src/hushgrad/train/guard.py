"""The guard: refuses, at attach and before every step, what would let a raw gradient through, and steps beyond the plan or the budget."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, count
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import LBFGS, Optimizer, SparseAdam
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hushgrad import _check
from hushgrad._printed import at_most
from hushgrad.clipping.grad_scaler import SCALED
from hushgrad.errors import ArgumentError, BudgetExceeded, CaptureError
from hushgrad.events import Participation
from hushgrad.train.untrained_state import Released

if TYPE_CHECKING:
    from hushgrad.train.attached import Attached
    from hushgrad.train.plan import Plan

_private: WeakSet[Optimizer] = WeakSet()
_checking: WeakSet[Optimizer] = WeakSet()
_captured: WeakSet[nn.Module] = WeakSet()
_trained: WeakValueDictionary[int, Guard] = WeakValueDictionary()  # by the ids of parameters, which a guard keeps alive

# Walking through a large model in every step is slow, so torch reports when a module, parameter or buffer is registered anywhere.
_registrations, _changes = 0, count(1)


def _registered(*_: object) -> None:
    global _registrations
    _registrations = next(_changes)


register_module_buffer_registration_hook(_registered)
register_module_parameter_registration_hook(_registered)
register_module_module_registration_hook(_registered)

_DIVIDES = "_step_supports_amp_scaling"  # of an optimizer, asked by torch's GradScaler: whether its step divides by the scale

_requires_grad, _params = attrgetter("requires_grad"), itemgetter("params")

_ONE_GRADIENT = "Use an optimizer that takes one gradient per step: SGD, Adam, AdamW, RMSprop, Adafactor and so on."


_watched: WeakSet[Attached] = WeakSet()
OTHER = (
    "Another optimizer, without privacy, stepped while this run was dealing its batches: that its model saw none of their records is "
    "vouched for, not shown"
)


def _steps(optimizer: Optimizer, *_: object) -> None:
    if optimizer not in _private and optimizer not in _checking:
        for run in list(_watched):
            if run.dealt:
                run.journal.vouched(OTHER)


register_optimizer_step_pre_hook(_steps)  # one for all runs; cheap for a private step


def checks(optimizer: Optimizer) -> None:
    """Register ``optimizer`` as one that only recomputes a run's steps and keeps nothing of its model: no guarantee mentions it."""
    _checking.add(optimizer)


class Watch:
    """Until removed, make the guarantee of ``run`` mention any other optimizer that steps after the first batch was dealt.

    A copy of the model made before ``make_private`` is an ordinary model. What it was trained on cannot be seen here; but torch reports
    every optimizer that steps.
    """

    def __init__(self, run: Attached) -> None:
        self._run = run
        _watched.add(run)

    def remove(self) -> None:
        """Stop watching."""
        _watched.discard(self._run)


def _require_plain(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse what another library has wrapped: its hooks would see gradients, and torch's do not reach it."""
    room = type(model).__module__
    if room.startswith("opacus.") and not room.startswith("opacus.layers."):  # Opacus' layers are layers like others
        _check.fail(
            "model",
            type(model).__name__,
            "not to be Opacus'",
            "Pass the module inside of it, made anew: nothing is wrapped here.",
        )
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):  # its __init__ does not call torch's
        remedy = "Pass the optimizer inside of it: torch.optim.SGD(model.parameters(), ...), for instance."
        _check.fail(
            "optimizer", type(optimizer).__name__, "to have the hooks of torch's optimizers, not to be wrapped around one", remedy
        )


class Room:
    """The steps of a run: how many were taken, and whether one more is allowed."""

    plan: Plan
    issued: int  # steps on batches of the run's own loader
    foreign: int
    taken: int  # all steps charged so far: the number of the next one
    declared: Participation | None
    max_epsilon: float | None
    limit: int  # how many steps the plan and the budget allow in all

    def require_room(self, *, issued: bool) -> None:
        """Raise if the next step is not allowed; nothing has been changed yet.

        Raises:
            BudgetExceeded: after the last step of the plan, or if the next one would cost more than ``max_epsilon``.
        """
        taken = self.taken
        if taken >= self.plan.steps:
            raise BudgetExceeded(f"All {self.plan.steps} steps of the plan are taken. Make a longer plan to train on.")
        if taken >= self.limit:
            raise BudgetExceeded(
                f"Step {taken + 1} would exceed max_epsilon={at_most(self.max_epsilon or 0.0, 6)}; it was not taken."
            )
        if self.max_epsilon is not None and not issued and self.declared is None:
            raise BudgetExceeded(
                "A step on a batch that the run's loader did not issue costs an unknown epsilon; it was not taken."
            )

    def charge(self, *, issued: bool) -> None:
        """One more step."""
        self.taken += 1
        if issued:
            self.issued += 1
        else:
            self.foreign += 1


class Guard:
    """Remembers what was attached, and notices when it has changed."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        _check.instance(nn.Module, model=model)
        _check.instance(Optimizer, optimizer=optimizer)
        _require_plain(model, optimizer)
        if isinstance(model, (DistributedDataParallel, DataParallel)):
            remedy = "Pass the bare module: a private run shares the work itself, under the same torchrun."
            _check.fail("model", type(model).__name__, "not to be wrapped for parallel training", remedy)
        if isinstance(optimizer, (LBFGS, SparseAdam)):
            _check.fail("optimizer", type(optimizer).__name__, "to need one dense gradient per step", _ONE_GRADIENT)
        self._model, self._optimizer = model, optimizer
        self.params: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._require_same_parameters()
        self._all = list(model.parameters())
        self._trainable = [*map(_requires_grad, self._all)]
        self._owned = [id(p) for group in optimizer.param_groups for p in group["params"]]
        self._walked_at = _registrations
        self._checks, self._due = 0, True
        self.released = Released(model, self.params)
        self._kept: dict[str, Any] = {}

    def attach(self) -> None:
        """Claim the model and the optimizer; each can be private once at a time."""
        if self._optimizer in _private or self._model in _captured:
            raise ArgumentError(
                "Expected a model and an optimizer that are not private yet. Call detach() on the earlier run first."
            )
        shared = next((name for name, p in self.params.items() if id(p) in _trained), None)
        if shared is not None:
            remedy = "A step of one run would change what the other has released. Detach that run, or give each model layers of its own."
            _check.fail(
                "model",
                type(self._model).__name__,
                f"to share no trained parameter with another private run, as {shared}",
                remedy,
            )
        _private.add(self._optimizer)
        _captured.add(self._model)
        _trained.update((id(p), self) for p in self.params.values())
        # A GradScaler then leaves the division to the step, which refuses it; otherwise it would look for gradients and find none.
        own = vars(self._optimizer)
        self._kept = {_DIVIDES: own[_DIVIDES]} if _DIVIDES in own else {}
        own[_DIVIDES] = True

    def detach(self) -> None:
        """Release them."""
        own = vars(self._optimizer)
        own.pop(_DIVIDES, None)
        own.update(self._kept)
        _private.discard(self._optimizer)
        _captured.discard(self._model)
        for p in self.params.values():
            if _trained.get(id(p)) is self:
                del _trained[id(p)]

    def before(self) -> None:
        """Called when a batch is handed out.

        Raises:
            CaptureError: if the model or the optimizer has other parameters: a pass would end in an autograd error.
        """
        self._require_same()
        if self._due:
            self.released.before()

    def check(self, options: Mapping[str, Any]) -> None:
        """Before a step: check that everything is still as attached, and that no raw gradient came in. ``options`` are the step's own.

        Raises:
            CaptureError: if not; nothing has been released.
        """
        if "grad_scale" in vars(self._optimizer) or "grad_scaler" in options:
            self._refuse_scale()
        self._require_same()
        for name, p in self.params.items():
            if p.grad is not None:
                raise CaptureError(
                    f"Parameter {name} has a gradient that did not pass the clipping, from a use outside the model's layers or "
                    "a backward pass before make_private. Clear it with optimizer.zero_grad(); for a penalty use weight_decay."
                )
        if self._due or self.released.seen:
            self.released.check(values=self._due)
        self._checks += 1  # last: an interrupted check is due again, with the same marks
        self._due = (self._checks + 1) & self._checks == 0  # at steps 1, 2, 4, 8 and so on

    def _refuse_scale(self) -> NoReturn:
        """Refuse a GradScaler: one that steps leaves its scale with the optimizer, or is passed as an option; its traces are removed."""
        vars(self._optimizer).pop("grad_scale", None)
        vars(self._optimizer).pop("found_inf", None)
        raise CaptureError(SCALED)

    def _require_same(self) -> None:
        owned = [*map(id, chain.from_iterable(map(_params, self._optimizer.param_groups)))]
        changed = [*map(_requires_grad, self._all)] != self._trainable or owned != self._owned
        if not changed and self._walked_at != _registrations:
            changed = list(map(id, self._model.parameters())) != list(map(id, self._all))
            if not changed:
                self.released.require_known()
                self._walked_at = _registrations
        if changed:
            raise CaptureError(
                "The model's parameters, or the optimizer's, are not those that were made private: one was added, removed, "
                "frozen or unfrozen. Detach, change the model, and call make_private again."
            )

    def _require_same_parameters(self) -> None:
        if not self.params:
            _check.fail("model", type(self._model).__name__, "to have a trainable parameter")
        owned = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        strangers = owned - {id(p) for p in self._model.parameters()}
        if strangers:
            remedy = "Build the optimizer from model.parameters(), after every change of the model."
            _check.fail("optimizer", type(self._optimizer).__name__, "to hold parameters of this model only", remedy)
        missing = [name for name, p in self.params.items() if id(p) not in owned]
        if missing:
            remedy = "Add them to the optimizer, or freeze them with requires_grad_(False): clipping would pay for them in vain."
            _check.fail("optimizer", missing, "to hold every trainable parameter", remedy)
        sparse = [name for name, p in self.params.items() if p.layout is not torch.strided]
        if sparse:
            _check.fail("model", sparse, "to have dense parameters")
