"""fit: a ready-made private training loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hushgrad import _check
from hushgrad.clipping.proof.inputs import tensors_in
from hushgrad.guarantee import Guarantee, Ledger
from hushgrad.release.keys import RunKey
from hushgrad.sampling.batch import Batch
from hushgrad.sampling.units import Grouping
from hushgrad.train.callbacks import OnStep, ProgressBar
from hushgrad.train.checkpoint import Checkpoint
from hushgrad.train.loss_arguments import has_rows
from hushgrad.train.opacus_names import OPACUS
from hushgrad.train.options import DATALOADER
from hushgrad.train.plan import Plan
from hushgrad.train.private import Private, make_private
from hushgrad.train.progress import EpsilonSoFar, SignalToNoise
from hushgrad.train.trial_passes import aside

_WHOLE = 1 << 62  # examples of a part: more than any batch has

LossFunction = Callable[[Any, Any], Tensor]


@_check.answering(OPACUS, also=(*DATALOADER, "identity"))
def fit(
    model: nn.Module,
    loss_fn: LossFunction,
    optimizer: Optimizer,
    dataset: Any,
    plan: Plan,
    *,
    callbacks: Iterable[OnStep] = (),
    max_physical_batch: int | None = None,
    groups: Grouping | None = None,
    scheduler: Any = None,
    progress: bool = True,
    key: bytes | None = None,
    seed: int | None = None,
    max_epsilon: float | None = None,
    prior: Ledger | None = None,
    lazy_tables: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    save_every: int = 100,
    **dataloader_options: Any,
) -> Guarantee:
    """Train ``model`` as ``plan`` says and return what it cost.

    The loss of a batch is the mean of ``loss_fn(model(*inputs), target)`` over its examples, see :meth:`Private.loss`; the last
    item of a batch is the target. For a dict it is ``loss_fn(model(**batch), batch)``, for a bare tensor ``loss_fn(model(batch), batch)``.

    **Formal guarantee.** The returned guarantee covers all parameter values. It does not cover the metrics whose names begin
    with ``raw_`` (training loss, accuracy, clipped fraction): they are for the eyes of those who may see the data.

    Args:
        model: bare module; all trainable parameters must be the optimizer's.
        loss_fn: loss of outputs and targets: a mean over the examples, or one number for each.
        optimizer: any ``torch.optim`` optimizer that needs one gradient per step.
        dataset: map-style data set.
        plan: what to run; calibrated.
        callbacks: functions that are given a dict of metrics after each step; one that is a context manager is entered first.
        max_physical_batch: run larger batches in parts of at most this size; the result is the same.
        groups: unit id of each example, for a plan with ``unit="user"``.
        scheduler: learning-rate scheduler; stepped after each step.
        progress: show a progress bar, or a few lines where there is no terminal.
        key: 32 secret bytes of your own that the run's key is made of, beside fresh ones: no two runs share it.
        seed: instead of a key, for experiments.
        max_epsilon: stop before more than this is spent.
        prior: ledger of earlier phases on the same data.
        lazy_tables: as in :func:`make_private`; all tables have their noise when this returns.
        checkpoint: folder for the run's checkpoint and journal: an interrupted run goes on there, and a finished one erases it.
        save_every: how many steps lie between two checkpoints.
        dataloader_options: ``num_workers`` and other options of torch's ``DataLoader``.

        >>> model = nn.Linear(2, 2)
        >>> data = torch.utils.data.TensorDataset(torch.randn(40, 2), torch.randint(2, (40,)))
        >>> plan = Plan.dpsgd(noise_multiplier=4.0, delta=1e-5, batch_size=8, dataset_size=40, steps=5)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> guarantee = fit(model, nn.functional.cross_entropy, optimizer, data, plan, progress=False)
        >>> str(guarantee.event)
        '5 x Poisson(0.2) Gaussian(4)'
    """
    own = RunKey.mixed(key, seed)
    private = make_private(model, optimizer, plan, key=own, max_epsilon=max_epsilon, prior=prior, lazy_tables=lazy_tables)
    try:
        saves = None if checkpoint is None else _Saves(private, checkpoint, scheduler, save_every)
        bar = [ProgressBar(private.steps_allowed)] if progress else []
        run_steps(
            private,
            loss_fn,
            dataset,
            callbacks=(*callbacks, *bar, *([] if saves is None else [saves])),
            max_physical_batch=max_physical_batch,
            groups=groups,
            scheduler=scheduler,
            prior=prior,
            **dataloader_options,
        )
        spent = private.spent()
        if saves is not None:
            saves.checkpoint.destroy()
        return spent
    finally:
        private.detach()


class _Saves:
    """Saves the run every so many steps; the last of :func:`fit`'s callbacks, so that a saved step is complete."""

    def __init__(self, private: Private, folder: str | os.PathLike[str], scheduler: Any, every: int) -> None:
        self._every = _check.positive_int(save_every=every)
        self.checkpoint = Checkpoint(folder, private, extras={} if scheduler is None else {"scheduler": scheduler})

    def __call__(self, metrics: dict[str, Any]) -> None:
        if metrics["step"] % self._every == 0:
            self.checkpoint.save()


def run_steps(
    private: Private,
    loss_fn: LossFunction,
    dataset: Any,
    *,
    callbacks: Iterable[OnStep] = (),
    max_physical_batch: int | None = None,
    groups: Grouping | None = None,
    scheduler: Any = None,
    prior: Ledger | None = None,
    **dataloader_options: Any,
) -> None:
    """Take the remaining steps of a run that is attached already; see :func:`fit` for the arguments.

    Leaves the run as it is when interrupted, so that it can be saved and continued.
    """
    if max_physical_batch is not None:
        _check.positive_int(max_physical_batch=max_physical_batch)
    remaining = private.steps_allowed - private.steps
    if remaining <= 0:
        return
    callbacks = tuple(callbacks)
    passes = Passes(private, loss_fn, max_physical_batch)
    with ExitStack() as stack:
        for callback in callbacks:
            if isinstance(callback, AbstractContextManager):
                stack.enter_context(callback)
        observer = _Observer(private, prior) if callbacks else None
        if observer is not None:
            stack.enter_context(observer.signal)
        for batch in islice(private.loader(dataset, groups=groups, **dataloader_options), remaining):
            private.optimizer.step(partial(passes.run, batch))  # type: ignore[arg-type]  # the run's hook takes the closure
            if scheduler is not None:
                scheduler.step()
            if observer is not None:
                metrics = observer.metrics(passes)
                for callback in callbacks:
                    callback(metrics)


class Passes:
    """The forward and backward passes of one step, and the sums behind its metrics."""

    def __init__(self, private: Private, loss_fn: LossFunction, size: int | None) -> None:
        self._private, self._model, self._size = private, private.model, size
        self._loss_fn, self._loss = loss_fn, private.loss(loss_fn)
        self._by_outputs: bool | None = None  # None before the first pass
        self._device = next(self._model.parameters()).device
        self.examples = 0
        self.raw_loss: list[tuple[Tensor, int]] = []
        self.raw_correct: list[tuple[Tensor, int]] = []

    def run(self, batch: Batch) -> Tensor:
        """All passes of ``batch``, as the closure of the optimizer's step. Rows of an empty batch do not count; its step is only noise."""
        self.raw_loss, self.raw_correct, self.examples = [], [], batch.examples - batch.padding
        for part in self._private.split(batch, self._size or _WHOLE):
            output, target, loss = self._forward(_moved(part, self._device), part.examples)
            loss.backward()  # type: ignore[no-untyped-call]
            counted = part.examples - part.padding
            self.raw_loss.append((self._mean(loss.detach(), part.examples, counted), counted))
            self._count_correct(output, target, counted)
        return self.raw_loss[0][0]

    def _mean(self, loss: Tensor, examples: int, counted: int) -> Tensor:
        """The loss of a pass as a mean: that of a certified run is a sum, over all examples unless it is taken of each alone."""
        if self._private.losses.capture.loss_reduction == "sum":
            return loss / max(1, counted if self._by_outputs else examples)
        return loss * (examples / max(1, counted)) if self._by_outputs and self._private.losses.fixed else loss

    def _forward(self, part: Any, examples: int) -> tuple[Any, Any, Tensor]:
        if self._by_outputs is None:
            self._by_outputs = self._gives_rows(part, examples)
        if not self._by_outputs:
            return None, None, self._loss(self._model, part)
        output, target = self.answered(self._model, part)
        return output, target, self._loss(output, target)

    def _gives_rows(self, part: Any, examples: int) -> bool:
        """Whether the model's outputs have a row for each example, so that the loss can be taken of each example alone."""
        with self._private.losses.capture.pause(), aside(self._model):
            by_outputs = has_rows(self.answered(self._model, part), examples)
        if not by_outputs:
            self._loss = self._private.loss(self._of_batch)
        return by_outputs

    def _of_batch(self, model: nn.Module, part: Any) -> Tensor:
        examples = len(tensors_in(part)[0])
        return self._private.losses.summed(self._loss_fn(*self.answered(model, part)), examples)

    @staticmethod
    def answered(model: nn.Module, part: Any) -> tuple[Any, Any]:
        """(output, target)."""
        if isinstance(part, Mapping):
            return model(**part), part
        if isinstance(part, Tensor):
            return model(part), part
        *inputs, target = part
        return model(*inputs), target

    def _count_correct(self, output: Any, target: Any, counted: int) -> None:
        """Counts correct predictions if the task is classification: scores (B, classes, ...) and integer targets (B, ...)."""
        if not isinstance(output, Tensor) or not isinstance(target, Tensor) or target.is_floating_point():
            return
        if output.dim() >= 2 and output.shape[:1] + output.shape[2:] == target.shape:
            hits = (output.detach().argmax(dim=1) == target)[:counted]
            if hits.numel():  # a micro-batch may have no example
                self.raw_correct.append((hits.sum(), hits.numel()))


def _moved(data: Any, device: torch.device) -> Any:
    if isinstance(data, Tensor):
        return data.to(device)
    if isinstance(data, Mapping):
        return {key: _moved(item, device) for key, item in data.items()}
    if isinstance(data, (list, tuple)):
        return [_moved(item, device) for item in data]
    return data


@dataclass
class _Observer:
    """Collects the metrics that callbacks get after each step. Names that begin with ``raw_`` are not covered by the guarantee."""

    private: Private
    prior: Ledger | None

    def __post_init__(self) -> None:
        self.signal = SignalToNoise(self.private)
        self._epsilon = EpsilonSoFar(self.private.plan, steps=self.private.steps_allowed, prior=self.prior)

    def metrics(self, passes: Passes) -> dict[str, Any]:
        steps = self.private.steps
        metrics: dict[str, Any] = {
            "step": steps,
            "steps": self.private.steps_allowed,
            "epsilon": self._epsilon.after(steps),
            "learning_rate": float(self.private.optimizer.param_groups[0].get("lr", 0.0)),
            "signal_to_noise": self.signal.ratio,
        }
        if passes.examples:
            norms = self.private.raw_norms
            metrics["raw_loss"] = _mean([(float(loss), count) for loss, count in passes.raw_loss])
            metrics["raw_clipped_fraction"] = float((norms > self.signal.max_grad_norm).float().mean()) if len(norms) else 0.0
        if passes.raw_correct:
            metrics["raw_accuracy"] = _mean([(float(hits) / count, count) for hits, count in passes.raw_correct])
        return metrics


def _mean(weighted: list[tuple[float, int]]) -> float:
    return sum(value * count for value, count in weighted) / sum(count for _, count in weighted)
