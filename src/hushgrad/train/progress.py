"""What can be reported during a run without affecting its privacy: epsilon so far, signal to noise."""

from __future__ import annotations

import bisect
import math
from functools import lru_cache
from types import TracebackType
from typing import Any

import torch
from torch.optim import Optimizer

from hushgrad import _check
from hushgrad.clipping.adaptive import Adaptive
from hushgrad.events import Event, Relation
from hushgrad.guarantee import Ledger
from hushgrad.train.plan import Plan
from hushgrad.train.private import Private

_MARKS = (1 / 128, 1 / 64, 1 / 32, *(k / 16 for k in range(1, 17)))  # a question costs about 20 ms


class EpsilonSoFar:
    """An upper bound of the epsilon spent, exact at every sixteenth of the steps, and at 1/128, 1/64 and 1/32 of them.

    Between two marks the value of the next one is given, which is an upper bound because epsilon grows with the number of steps. The
    accountant runs when a step passes a mark, and once in a process for runs with the same plan.
    """

    def __init__(self, plan: Plan, *, steps: int | None = None, prior: Ledger | None = None) -> None:
        last = plan.steps if steps is None else _check.positive_int(steps=steps)
        self._plan, self._prior = plan, Ledger() if prior is None else prior + Ledger()  # a copy: the caller's may grow
        self._marks = sorted({math.ceil(last * share) for share in _MARKS})
        self._table: dict[int, float] = {}

    def after(self, steps: int) -> float:
        """At least what ``steps`` steps cost, earlier phases included."""
        mark = self._marks[min(bisect.bisect_left(self._marks, steps), len(self._marks) - 1)]
        if mark not in self._table:
            ledger = self._prior + Ledger()
            ledger.record(self._plan.event(mark), stream="this run")
            self._table[mark] = _epsilon(ledger.event(), self._plan.delta, self._plan.relation)
        return self._table[mark]


@lru_cache(maxsize=256)
def _epsilon(event: Event, delta: float, relation: Relation) -> float:
    from hushgrad import accounting  # not needed to train, and takes a while to import

    return accounting.epsilon(event, delta=delta, relation=relation)


class SignalToNoise:
    r"""How much of the released gradient is signal: an estimate of ||g|| / ||noise|| from the released gradient alone.

    The noise z of a step is independent of its signal g, so E||g + z||² = ||g||² + d std²: the estimate is
    sqrt(max(0, ||g + z||² - d std²)) / (std sqrt(d)). It is post-processing, hence as private as the model. With a denoiser
    the released gradient is not g + z, and the estimate is None.
    """

    def __init__(self, private: Private) -> None:
        self._private = private
        self._next = private.clip
        self.max_grad_norm = private.plan.max_grad_norm  # of the latest step: adaptive clipping moves it
        self.ratio: float | None = None

    def __enter__(self) -> SignalToNoise:
        self._handle = self._private.optimizer.register_step_pre_hook(self._look)  # after the hook that privatises
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._handle.remove()

    @torch.no_grad()
    def _look(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        plan, clip = self._private.plan, self._next
        self._next = self._private.clip  # the release of this step has moved it already
        self.max_grad_norm = clip.sensitivity(Relation.ADD_REMOVE)
        multiplier = plan.noise_multiplier or 0.0
        multiplier = clip.gradient_noise(multiplier) if isinstance(clip, Adaptive) else multiplier
        if plan.denoise is not None or multiplier == 0:
            return
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        row = plan.noise.row_std(self._private.steps - 1, steps=plan.steps)
        std = multiplier * self.max_grad_norm * row / plan.batch_size
        noise = std**2 * sum(g.numel() for g in grads)
        total = sum(float(g.square().sum()) for g in grads)
        self.ratio = math.sqrt(max(0.0, total - noise) / noise) if noise else None
