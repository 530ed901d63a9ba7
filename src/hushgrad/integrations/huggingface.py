"""Hugging Face: a ``transformers.Trainer`` whose steps are those of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

try:
    from transformers import Trainer, TrainerCallback, TrainingArguments
except ImportError as error:  # pragma: no cover
    raise ImportError("hushgrad.integrations.huggingface needs transformers: pip install 'hushgrad[hf]'.") from error

from hushgrad import _check
from hushgrad.clipping.merged_adapters import require_unmerged
from hushgrad.errors import ArgumentError
from hushgrad.guarantee import Guarantee
from hushgrad.integrations._arguments import as_planned, refuse_search, require_fitting, require_known
from hushgrad.integrations._batches import Batches, drawn
from hushgrad.integrations._texts import require_apart, require_numbered, require_padding_apart, require_texts
from hushgrad.integrations._token_loss import MODELS_MEAN, OWN_MEAN, ExampleLoss, checked, token_loss
from hushgrad.integrations._trainer_helpers import Saves, TrainerPasses
from hushgrad.release.keys import RunKey
from hushgrad.sampling.units import Grouping
from hushgrad.train.batch_means import Means, Rows
from hushgrad.train.checkpoint import Checkpoint
from hushgrad.train.plan import Plan
from hushgrad.train.private import Private, make_private
from hushgrad.train.progress import EpsilonSoFar
from hushgrad.train.trial_passes import aside, packing

__all__ = ["PrivateTrainer", "token_loss"]


class PrivateTrainer(Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` with a plan: its arguments, callbacks, evaluation and logs; private steps.

    **Formal guarantee.** As :func:`hushgrad.make_private`: all parameter values are private as :meth:`spent` says. The logged
    training loss is computed from private data without noise; do not publish it.

    The plan says how batches are drawn and how many steps there are, so ``num_train_epochs`` is not used;
    ``per_device_train_batch_size`` is the size of the parts in which a batch is run, and changes nothing else. Trainer's own
    gradient clipping is switched off, because the plan clips. Frozen parameters (``requires_grad_(False)``, LoRA) cost
    nothing. Trainer's step counter and its logs count the steps of one call of ``train``, ``private.steps`` counts those of the run.

    Several processes (torchrun, ``accelerate launch``) share each batch, and the weights are those of one process. The model is not
    wrapped in ``DistributedDataParallel``; to shard it, call ``fully_shard(model)`` before, and leave ``args.fsdp`` out.

    | what an example's labels are | its loss |
    |---|---|
    | one class, one number, or a row of numbers | the model's own, if it is a mean over examples; a class of -100 is refused |
    | a class for each token | :func:`token_loss` of the model's scores, shifted if the model's own loss is |
    | anything else, or a loss from other inputs | refused: override ``compute_loss`` with a mean over the examples |

    Args:
        model: the model; freeze or wrap it (peft) before.
        args: Trainer's own arguments; ``save_strategy="no"``, see ``checkpoint``.
        plan: what to run; calibrated.
        train_dataset: the private data, map-style.
        eval_dataset: data that the guarantee does not cover.
        data_collator: makes a batch of examples.
        processing_class: tokenizer or processor, for Trainer.
        compute_metrics: for evaluation, as in Trainer.
        callbacks: Trainer's callbacks.
        optimizers: (optimizer, scheduler) as in Trainer.
        groups: user of each example, for a plan with ``unit="user"``.
        identity: a name of the data and their version, where their content cannot be compared: copies on several machines.
        checkpoint: folder for the run's own checkpoint, saved every ``args.save_steps`` steps; an interrupted run goes on.
        key: 32 secret bytes of your own that the run's key is made of, beside fresh ones: no two runs share it.
        seed: instead of a key, for experiments.
        max_epsilon: stop before more than this is spent.
        check_isolation: test on the first batch that no example influences another; False: you vouch for it.
        others: ``preprocess_logits_for_metrics``, for evaluation, as in Trainer. Its other arguments are refused.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        plan: Plan,
        *,
        train_dataset: Any,
        eval_dataset: Any = None,
        data_collator: Callable[..., Any] | None = None,
        processing_class: Any = None,
        compute_metrics: Callable[..., Any] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        groups: Grouping | None = None,
        identity: str | None = None,
        checkpoint: str | Path | None = None,
        key: bytes | None = None,
        seed: int | None = None,
        max_epsilon: float | None = None,
        check_isolation: bool = True,
        **others: Any,
    ) -> None:
        require_known(others)
        self.plan = _check.instance(Plan, plan=plan)
        require_fitting(args, plan)
        require_numbered(train_dataset)
        super().__init__(
            model=model,
            args=as_planned(args),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            data_collator=data_collator,
            processing_class=processing_class,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            **others,
        )
        self.model_accepts_loss_kwargs = False  # the loss is per example, never divided by the tokens of a whole batch
        self._given = key, seed
        self._options: dict[str, Any] = {"max_epsilon": max_epsilon, "check_isolation": check_isolation}
        self._own_loss = type(self).compute_loss is not PrivateTrainer.compute_loss  # whose terms are not known
        if not self._own_loss and not plan.certified:
            self._options["loss_reduction"] = "sum"  # nobody's gradient is divided by how many there are, and rounded
        self._groups, self._identity, self._folder = groups, identity, checkpoint
        self._example_loss = ExampleLoss()
        self._private: Private | None = None
        self._stepping = False  # inside of this class's training_step, which runs what compute_loss returns and nothing else
        self._schedule: Any = None
        self._means: Means | None = None  # of a loss of the user's own
        self._checkpoint: Checkpoint | None = None
        self.add_callback(Saves(self))

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "compute_loss" in vars(cls):
            cls.compute_loss = checked(cls.compute_loss)  # type: ignore[method-assign]

    @property
    def private(self) -> Private:
        """The attached run, available from the first :meth:`train` on."""
        if self._private is None:
            raise ArgumentError("Expected train() to have been called: before it nothing is private yet.")
        return self._private

    def spent(self) -> Guarantee:
        """What the steps taken so far cost."""
        return self.private.spent()

    def audit(self, **options: Any) -> Any:
        """The deep audit of this run: :meth:`hushgrad.train.Private.audit`, with Trainer's own passes, data and collator."""
        loader = {"collate_fn": self._collator()}
        return self.private.audit(self.train_dataset, TrainerPasses(self), groups=self._groups, loader_options=loader, **options)

    def save_checkpoint(self) -> None:
        """Save the run in the folder ``checkpoint``, if there is one."""
        if self._checkpoint is not None:
            self._checkpoint.save()

    def create_accelerator_and_postprocess(self) -> None:
        """Accelerate must not wrap the model for parallel training: the run adds up the clipped sums itself, with their noise."""
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)

    # What Trainer calls -------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None) -> Any:
        """Take the remaining steps. An interrupted run with ``checkpoint=`` continues by itself."""
        if resume_from_checkpoint:
            remedy = "Give checkpoint=FOLDER: Trainer's own checkpoints hold neither the books nor the noise."
            _check.fail("resume_from_checkpoint", resume_from_checkpoint, "to be left out", remedy)
        return super().train(trial=trial, ignore_keys_for_eval=ignore_keys_for_eval)

    def get_train_dataloader(self) -> Any:
        """The run's own batches, from the next step on; Trainer would let accelerate redistribute them."""
        if self._private is None:
            require_apart(self.train_dataset)
            self._require_padding_apart()
            self._private = self._attached()
            if self._own_loss and self._options["check_isolation"]:
                self._means = Means(self._private.losses, OWN_MEAN)
            self._private.losses.remedy = MODELS_MEAN
            self.create_scheduler(self.plan.steps, self.optimizer)
            self._epsilon = EpsilonSoFar(self.plan, steps=self._private.steps_allowed)
            if self._folder is not None:
                self._checkpoint = Checkpoint(self._folder, self._private, extras={"scheduler": self._schedule})
        options = {"collate_fn": self._collator(), "num_workers": self.args.dataloader_num_workers, "identity": self._identity}
        run = self._private
        return Batches(lambda: run, self.plan, self.train_dataset, self._groups, **options)

    def _collator(self) -> Any:
        return self._get_collator_with_removed_columns(self.data_collator, description="training")

    def _require_padding_apart(self) -> None:
        model = _check.instance(nn.Module, model=self.model)
        kinds = {p.dtype for p in model.parameters()} | {getattr(module, "compute_dtype", None) for module in model.modules()}
        half = self.args.bf16 or not kinds.isdisjoint((torch.bfloat16, torch.float16))

        def loss_of(inputs: Any) -> Tensor:
            with aside(model):
                return self._own_of(model, self._prepare_inputs(inputs))

        if self._options["check_isolation"]:
            require_padding_apart(self.train_dataset, self._collator(), loss_of, half=half, model=model)

    def _attached(self) -> Private:
        optimizer: Any = self.create_optimizer()
        # Trainer asks once more, and a subclass may make another one each time, whose steps would not be those of the run.
        self.create_optimizer = lambda model=None: optimizer  # type: ignore[method-assign]
        key = RunKey.mixed(*self._given)
        return make_private(_check.instance(nn.Module, model=self.model), optimizer, self.plan, key=key, **self._options)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The schedule over all steps of the plan, however many remain. It is created once."""
        self._schedule = self._schedule or super().create_scheduler(self.plan.steps, optimizer)
        self.lr_scheduler = self._schedule
        return self._schedule

    def hyperparameter_search(self, *given: Any, **named: Any) -> Any:
        """Refused: choosing by the results of private runs has to be paid for."""
        refuse_search()

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward for one batch of the plan, part by part; its loss, of which Trainer takes the mean over all processes.

        Each part's mean counts by its examples, those that fill it up left out; that of nobody is 0.
        """
        batch = drawn(inputs)
        require_texts(inputs, batch.examples)
        require_unmerged(model)
        total, world = torch.zeros((), device=self.args.device, dtype=torch.float32), self.private.placement.world
        part: Any
        for part in self.private.split(batch, self.args.train_batch_size):
            with self._tried():
                loss = super().training_step(model, dict(part), None)
            if self._means is not None:
                rows = Rows(part.examples, part.examples - part.padding)
                self._means.look(partial(self._own_of, model), model, self._prepare_inputs(dict(part)), rows)
            summed = self.private.losses.capture.loss_reduction == "sum"
            counted = part.examples - part.padding
            total += loss * (counted / (part.examples if summed else 1)) if counted else 0.0
        return total * (world.size / max(1, world.total(batch.examples - batch.padding)))

    @contextmanager
    def _tried(self) -> Iterator[None]:
        """Inside, what ``compute_loss`` returns is run backward as it is, and tried behind the pass if it is the user's own."""
        losses = self.private.losses
        before, self._stepping, losses.tried = losses.tried, True, self._means is not None
        try:
            yield
        finally:
            self._stepping, losses.tried = False, before

    def _own_of(self, model: nn.Module, inputs: Any) -> Tensor:
        with self.compute_loss_context_manager():
            made = self.compute_loss(model, dict(inputs))
        return made[0] if isinstance(made, tuple) else made  # type: ignore[no-any-return]

    def prediction_step(self, model: nn.Module, *given: Any, **named: Any) -> Any:
        """Trainer's own. Quantised layers stay as in training: else they pack their frozen weights anew, which the next step refuses."""
        for module in packing(model):
            module.training = True
        return super().prediction_step(model, *given, **named)

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        """The mean over the examples of each one's own loss; see the table above."""
        loss, outputs = self._example_loss(model, inputs, filled=0 if self._private is None else self._private.losses.padding)
        if self._private is not None and torch.is_grad_enabled():
            self._require_exact(inputs)
            losses = self._private.losses
            loss = losses.covered(losses.summed(loss, len(inputs["labels"])), alone=self._stepping and not self._own_loss)
        return (loss, outputs) if return_outputs else loss

    def _require_exact(self, inputs: Any) -> None:
        if self.plan.certified and inputs["labels"].is_floating_point():
            remedy = "A mean of squares divides each by how many there are at once. Override compute_loss with a sum."
            _check.fail("labels", "numbers", "to be classes in a certified run", remedy)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Trainer's logs with the epsilon so far (an upper bound), without a norm: raw gradients have left by then."""
        if self._private is not None and self._private.steps and "loss" in logs:
            logs = {name: value for name, value in logs.items() if name != "grad_norm"}
            logs["epsilon"] = self._epsilon.after(self._private.steps)
        super().log(logs, start_time)
