"""A dry run: one real private step on a throw-away copy, then time and memory of the whole run."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hushgrad import _check
from hushgrad.train.plan import Plan
from hushgrad.train.private import make_private


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """Measured on one step, extrapolated to ``steps``; ``str()`` is one sentence."""

    steps: int
    seconds_per_step: float
    seconds: float
    parameter_bytes: int
    optimizer_bytes: int
    noise_bytes: int
    examples: int

    def __str__(self) -> str:
        total = self.parameter_bytes + self.optimizer_bytes + self.noise_bytes
        return (
            f"{self.steps} steps of {self.seconds_per_step:.3g} s ({self.examples} examples each) take about "
            f"{self.seconds:.3g} s; parameters, optimizer and noise state keep {total / 2**20:.3g} MiB between steps."
        )


def dry_run(
    model: nn.Module, optimizer: Optimizer, plan: Plan, batch: Any, loss_fn: Callable[[Any, Any], Tensor], *, repeats: int = 1
) -> DryRun:
    """Take real private steps on a copy of ``model`` and ``optimizer``; nothing of the originals changes, nothing is released.

    ``batch`` is (inputs, ..., target), as a loader gives it, of the size that the run will have. One step warms up (it also
    checks that the model keeps examples apart); ``repeats`` more are timed and the fastest counts. Noise that regenerates its
    past (Toeplitz, Nu, Dense) gets slower towards the end of a run, so that its time is a lower bound.

    Args:
        model: stays as it is.
        optimizer: stays as it is.
        plan: of the run that is rehearsed.
        batch: (inputs, ..., target), of the size that the run will have.
        loss_fn: from outputs and target to a loss.
        repeats: timed steps after the first one.

    >>> model = nn.Linear(2, 2)
    >>> plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=8, dataset_size=40, steps=50)
    >>> batch = (torch.randn(8, 2), torch.randint(2, (8,)))
    >>> found = dry_run(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, batch, nn.functional.cross_entropy)
    >>> found.steps, found.seconds >= found.seconds_per_step, found.parameter_bytes
    (50, True, 24)
    """
    repeats = _check.positive_int(repeats=repeats)
    plan = _check.instance(Plan, plan=plan)
    # One deep copy of both: the copied optimizer holds the copied parameters.
    model_copy, optimizer_copy = copy.deepcopy((model, optimizer))
    private = make_private(model_copy, optimizer_copy, plan)
    private.declare(plan.participation)  # the batch is the caller's, and the copy's ledger is thrown away
    random = torch.get_rng_state()
    try:
        times = [_step(model_copy, optimizer_copy, batch, loss_fn) for _ in range(min(plan.steps, 1 + repeats))]
        noise_bytes = _bytes(private.noise_state())
    finally:
        private.detach()
        torch.set_rng_state(random)  # a dropout layer of the copy must not change the real run
    fastest = min(times[1:] or times)
    return DryRun(
        steps=plan.steps,
        seconds_per_step=fastest,
        seconds=fastest * plan.steps,
        parameter_bytes=_bytes(list(model_copy.parameters())),
        optimizer_bytes=_bytes(optimizer_copy.state),
        noise_bytes=noise_bytes,
        examples=len(batch[0]),
    )


def _step(model: nn.Module, optimizer: Optimizer, batch: Any, loss_fn: Callable[[Any, Any], Tensor]) -> float:
    began = time.perf_counter()

    def closure() -> float:
        *inputs, target = batch
        loss = loss_fn(model(*inputs), target)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    optimizer.step(closure)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _bytes(held: Any) -> int:
    """Bytes of all tensors in nested containers."""
    if isinstance(held, Tensor):
        return held.numel() * held.element_size()
    if isinstance(held, Mapping):
        return sum(map(_bytes, held.values()))
    if isinstance(held, (list, tuple)):
        return sum(map(_bytes, held))
    return 0
