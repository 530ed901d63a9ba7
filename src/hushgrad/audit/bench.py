"""The bench: repeats a user's own run under other keys, so that nothing of the real run is released, charged or changed.

The model and its optimizer are copies; the data, the loss, the plan and the code path of every step are the user's own: ``make_private``,
its loader, the passes of :func:`hushgrad.train.fit`, the release. A run on the bench may begin at any step.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hushgrad.clipping.adaptive import Adaptive
from hushgrad.clipping.clipper import Clipper
from hushgrad.events import Relation
from hushgrad.release.placement.sharded import is_sharded
from hushgrad.sampling.batch import Batch
from hushgrad.sampling.units import Grouping, Units
from hushgrad.train import Plan, make_private
from hushgrad.train.fitting import LossFunction, Passes
from hushgrad.train.loop import Loop
from hushgrad.train.private import Private

HALVES = (torch.float16, torch.bfloat16)
Build = Callable[[], tuple[nn.Module, Optimizer]]
Loss = Callable[[nn.Module, Any], Tensor]  # the mean over the examples of a batch


@dataclass(frozen=True, kw_only=True, eq=False)
class Seen:
    """One step of a run on the bench: its batch, and what was released, times the batch size. Not to be published.

    ``given`` is the gradient that the optimizer saw, ``clip`` and ``next_clip`` are the clippers of this step and of the next one,
    ``before`` and ``after`` the trainable parameters around the step, ``state`` and ``means`` what a denoiser and an average keep.
    """

    step: int
    batch: Batch
    released: dict[str, Tensor]
    given: dict[str, Tensor]
    learning_rate: float | None
    clip: Clipper
    next_clip: Clipper
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    state: dict[str, Any]
    means: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Bench:
    """What is audited: how to build the model and its optimizer, the plan, the data and the loss.

    Args:
        build: a fresh model and optimizer, as they are before ``make_private``; in runs of several processes, in every process.
        whole: for a sharded model, how to build it unsharded; without it the layers and the releases are not checked.
        plan: the plan.
        dataset: the run's own data.
        loss_fn: as for :func:`hushgrad.train.fit`; or a ``Loop``, for loops of other frameworks.
        groups: each example's user, for a plan with ``unit="user"``.
        max_physical_batch: as for :func:`hushgrad.train.fit`.
        options: further options of ``make_private``.
        loader_options: further options of ``private.loader``.
    """

    build: Build
    plan: Plan
    dataset: Any
    loss_fn: LossFunction | Loop
    groups: Grouping | None = None
    max_physical_batch: int | None = None
    whole: Callable[[], nn.Module] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    loader_options: Mapping[str, Any] = field(default_factory=dict)

    def plain(self) -> nn.Module:
        """The model with nothing attached and no parameter sharded."""
        return quiet(self.build()[0] if self.whole is None else self.whole())

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss of a batch by a model that nothing is attached to."""
        if isinstance(self.loss_fn, Loop):
            return self.loss_fn.loss(model, batch)
        return self.loss_fn(*Passes.answered(model, batch)).mean()

    @property
    def is_whole(self) -> bool:
        """Whether an unsharded model can be built to compare with."""
        return self.whole is not None or not any(is_sharded(p) for p in self.build()[0].parameters())

    @property
    def records(self) -> int:
        """How many examples, or users, there are."""
        examples = len(self.dataset)
        return examples if self.groups is None else Units.of(self.groups, examples=examples).count

    @contextmanager
    def run(self, key: bytes, *, step: int = 0, size: int | None = None, shake: int | None = None) -> Iterator[Live]:
        """A new run on the bench, as a context.

        Args:
            key: from which it draws.
            step: the step at which it begins.
            size: the size of micro-batches, if batches are split.
            shake: seed with which its initial weights are perturbed, if given.
        """
        model, optimizer = self.build()
        if shake is not None:
            shaken(model, shake)
        private = make_private(quiet(model), optimizer, self.plan, key=key, **self.options)
        try:
            if step:
                _jump(private, step)
            yield Live(self, private, size or self.max_physical_batch)
        finally:
            private.detach()

    @contextmanager
    def resumed(self, live: Live) -> Iterator[Live]:
        """The same run after a restart from its saved state, including the buffers of its noise."""
        saved, weights = live.private.state_dict(with_key=True), live.private.model.state_dict()
        moments = copy.deepcopy(live.private.optimizer.state_dict())
        with self.run(live.private.key.secret) as again:
            again.private.model.load_state_dict(weights)
            again.private.optimizer.load_state_dict(moments)
            again.private.load_state_dict(saved)
            yield again


class Live:
    """A run on the bench, step by step."""

    def __init__(self, bench: Bench, private: Private, size: int | None) -> None:
        self.bench, self.private = bench, private
        if isinstance(bench.loss_fn, Loop):
            self._run: Callable[[Batch], Any] = partial(bench.loss_fn.run, private, size=size)
        else:
            self._run = Passes(private, bench.loss_fn, size).run
        self._released: dict[str, Tensor] = {}
        self._given: dict[str, Tensor] = {}
        self._watch()

    def _watch(self) -> None:
        """Record what is released: the gradients that the optimizer receives and, if there is a denoiser, its input."""
        self.private.optimizer.register_step_pre_hook(self._note)
        place, inner = self.private.placement, self.private.placement.denoised

        def denoised(denoiser: Any, grads: dict[str, Tensor], info: Any, state: dict[str, Any]) -> dict[str, Tensor]:
            self._released = {name: whole(grad).clone() for name, grad in place.gradients(grads).items()}
            return inner(denoiser, grads, info, state)

        if self.private.plan.denoise is not None:
            vars(place)["denoised"] = denoised

    def _note(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        params = self.private.placement.params
        self._given = {name: whole(p.grad).clone() for name, p in params.items() if p.grad is not None}

    def steps(self, count: int, *, settle: bool = True) -> Iterator[Seen]:
        """Take the next ``count`` steps; ``settle``: lazy tables get their pending noise before and after each."""
        options = {"identity": "audit", **self.bench.loader_options}
        loader = iter(self.private.loader(self.bench.dataset, groups=self.bench.groups, **options))
        for _ in range(min(count, self.private.steps_allowed - self.private.steps)):
            yield self._take(next(loader), settle)

    def _take(self, batch: Batch, settle: bool) -> Seen:
        private = self.private
        if settle:
            private.settle()
        before, clip, rate = self.parameters(), private.clip, private.optimizer.param_groups[0].get("lr")
        self._released = {}
        private.optimizer.step(partial(self._run, batch))  # type: ignore[arg-type]
        if settle:
            private.settle()
        after = self.parameters()
        given = {**self._given, **self._lazy_moves(before, after)}
        size = float(private.plan.batch_size)
        return Seen(
            step=batch.step,
            batch=batch,
            released={name: grad.double() * size for name, grad in (self._released or given).items()},
            given=given,
            learning_rate=None if rate is None else float(rate),
            clip=clip,
            next_clip=private.clip,
            before=before,
            after=after,
            state=private._release.filter_state,
            means={} if private._averaged is None else private._averaged.state_dict(),
        )

    def _lazy_moves(self, before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradients of lazy tables, which plain SGD moves without ``p.grad``: their change divided by the learning rate."""
        rate = float(self.private.optimizer.param_groups[0].get("lr", 1.0))
        lazy = before.keys() - self._given.keys()
        return {name: (before[name].double() - after[name].double()) / rate for name in before if name in lazy}

    def parameters(self) -> dict[str, Tensor]:
        """The trainable parameters now."""
        return {name: whole(p.detach()).clone() for name, p in self.private.placement.params.items()}


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor, gathered; any other as it is."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined,no-any-return]


def quiet(model: nn.Module) -> nn.Module:
    """The model with torch's dropout layers switched off, so that gradients can be computed twice and compared."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0  # some modules read the rate, and some loops set training mode themselves
        elif isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
            module.dropout = 0.0
    return model


def shaken(model: nn.Module, seed: int) -> None:
    """Move trained matrices and tables by normal noise of std 1 / (2 sqrt(inputs)).

    If one factor of an adapter is zero, the other has no gradient, and a wrong norm would not show. Vectors stay: some must be positive.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad and p.dim() > 1:
                noise = torch.randn(p.shape, generator=generator, dtype=torch.float32) * 0.5 / max(1, p[0].numel()) ** 0.5
                p.add_(noise.to(p.device, p.dtype))


def single(model: nn.Module) -> nn.Module:
    """The model in single precision if it is in half precision, whose rounding would hide errors of the layer rules."""
    return model.float() if any(p.dtype in HALVES for p in model.parameters()) else model


def _jump(private: Private, step: int) -> None:
    """Continue as if ``step`` steps had been taken, as a resumed run does."""
    state = private.state_dict(with_key=True)
    state.pop("noise", None)  # belongs to another step; it is regenerated
    chain = private.journal.chain.hex()
    books = {**state["books"], "issued": step}
    private.load_state_dict({**state, "books": books, "journal": {"position": step, "chain": chain}})


def copied(model: nn.Module, optimizer: Optimizer) -> Build:
    """A function that builds copies of a model and its optimizer as they are now, without hushgrad's hooks."""

    def build() -> tuple[nn.Module, Optimizer]:
        twin = _copied_model(model)
        twins = dict(zip(map(id, model.parameters()), twin.parameters(), strict=True))
        groups = [{**group, "params": [twins[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
        other = cast(Any, type(optimizer))(groups)  # the groups hold every setting
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return twin, other

    return build


def _copied_model(model: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and isinstance(value, OrderedDict):
                memo[id(value)] = OrderedDict((key, hook) for key, hook in value.items() if not _is_ours(hook))
    with torch.no_grad():
        twin = copy.deepcopy(model, memo)
    for p in twin.parameters():
        p.grad = None
    return twin


def _is_ours(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    owner = getattr(hook, "__self__", hook)
    return any(str(getattr(part, "__module__", "")).startswith("hushgrad") for part in (hook, owner, type(owner)))


def row_std(plan: Plan, clip: Clipper) -> float:
    """The noise standard deviation of the sum at this clip norm; an adaptive clipper spends the rest of its noise on its count."""
    multiplier = float(plan.noise_multiplier or 0.0)
    if isinstance(clip, Adaptive):
        multiplier = clip.gradient_noise(multiplier)
    return multiplier * clip.sensitivity(Relation.ADD_REMOVE)


def numbers(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Flat arrays of double precision."""
    return {name: tensor.detach().double().cpu().reshape(-1).numpy() for name, tensor in tensors.items()}
