"""Lightning: a callback that makes ``Trainer.fit`` private, and what Fabric needs (nothing).

    private = PrivateFit(plan, dataset)
    Trainer(callbacks=[private], max_epochs=1).fit(module, private.loader)
    print(private.spent())

With Fabric, ``make_private`` comes before ``fabric.setup``, and the run's loader is used as it is:

    private = make_private(model, optimizer, plan)
    model, optimizer = fabric.setup(model, optimizer)
    for x, y in private.loader(dataset):
        optimizer.zero_grad()
        fabric.backward(loss_fn(model(x), y))
        optimizer.step()
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from torch import Tensor, nn

try:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
except ImportError as error:  # pragma: no cover
    raise ImportError("hushgrad.integrations.lightning needs lightning: pip install 'hushgrad[lightning]'.") from error

from hushgrad import _check
from hushgrad.errors import ArgumentError
from hushgrad.guarantee import Guarantee
from hushgrad.integrations._batches import Batches
from hushgrad.release.keys import RunKey
from hushgrad.sampling.batch import Batch
from hushgrad.sampling.units import Grouping
from hushgrad.train.batch_means import Means, Rows
from hushgrad.train.checkpoint import Checkpoint
from hushgrad.train.loop import Loop
from hushgrad.train.plan import Plan
from hushgrad.train.private import Private, make_private
from hushgrad.train.progress import EpsilonSoFar

_OWN_MEAN = (
    "It is that of training_step. Return the mean over the examples of what depends on one alone: of classes "
    "cross_entropy(..., reduction='none').mean(), of texts the mean of each one's own mean over its tokens."
)


class PrivateProcesses(DDPStrategy):
    """Lightning's strategy for several processes that share a private fit, without the wrapper that would add up raw gradients.

    The run deals one batch to all of them and adds up their clipped sums, with the noise. Metrics are reduced as usual.
    """

    def configure_ddp(self) -> None:
        """Leave the module as it is."""


class PrivateFit(Callback):
    """A callback that attaches a plan when ``Trainer.fit`` begins; pass its ``loader`` to ``fit`` as training data.

    **Formal guarantee.** As :func:`hushgrad.make_private`: all parameter values are private as :meth:`spent` says. What the
    module logs in ``training_step`` is computed from private data without noise; do not publish it. ``epsilon`` is logged, too.

    One loop over the loader is the whole run, so ``max_epochs=1``; a scheduler that should follow the steps has
    ``"interval": "step"``. ``training_step`` returns the mean loss over the examples of its batch and calls ``self(x)``, where
    the first batch is tested for examples that influence each other. Lightning's gradient clipping, accumulation and fp16
    scaling are refused. One object, one fit.

    Several processes share each batch with ``Trainer(strategy=PrivateProcesses(), ...)``, and the weights are those of one process. So
    they are where each holds a part of the parameters: ``ModelParallelStrategy(data_parallel_size=PROCESSES, tensor_parallel_size=1)``,
    with ``fully_shard`` in ``configure_model``, of the module itself as well.

    Args:
        plan: what to run; calibrated.
        dataset: the private data, map-style.
        groups: user of each example, for a plan with ``unit="user"``.
        checkpoint: folder for the run's own checkpoint, saved every ``save_every`` steps; an interrupted run goes on.
        save_every: how many steps lie between two checkpoints.
        key: 32 secret bytes of your own that the run's key is made of, beside fresh ones: no two runs share it.
        seed: instead of a key, for experiments.
        max_epsilon: stop before more than this is spent.
        check_isolation: test on the first batch that no example influences another; False: you vouch for it.
        loss_reduction: "sum" where ``training_step`` returns the sum of its examples' losses, as a certified plan needs it.
        dataloader_options: options of torch's ``DataLoader``, such as ``num_workers`` or ``collate_fn``.
    """

    def __init__(
        self,
        plan: Plan,
        dataset: Any,
        *,
        groups: Grouping | None = None,
        checkpoint: str | Path | None = None,
        save_every: int = 100,
        key: bytes | None = None,
        seed: int | None = None,
        max_epsilon: float | None = None,
        check_isolation: bool = True,
        loss_reduction: str | None = None,
        **dataloader_options: Any,
    ) -> None:
        self.plan = _check.instance(Plan, plan=plan)
        self.loader = Batches(lambda: self._private, plan, dataset, groups, **dataloader_options)
        self._given = key, seed
        self._options: dict[str, Any] = {"max_epsilon": max_epsilon, "check_isolation": check_isolation}
        self._options["loss_reduction"] = loss_reduction
        self._folder, self._save_every = checkpoint, _check.positive_int(save_every=save_every)
        self._private: Private | None = None
        self._means: Means | None = None
        self._batch: tuple[Any, int] = (), 0
        self._checkpoint: Checkpoint | None = None
        self._vouched = not check_isolation

    @property
    def private(self) -> Private:
        """The attached run, available from the beginning of ``fit`` on."""
        if self._private is None:
            raise ArgumentError("Expected Trainer.fit to have begun: give it this callback and private.loader.")
        return self._private

    def spent(self) -> Guarantee:
        """What the steps taken so far cost."""
        return self.private.spent()

    def audit(self, **options: Any) -> Any:
        """The deep audit of this run: :meth:`hushgrad.train.Private.audit`, with the module's own ``training_step``, and its data."""
        passes = _Passes(summed=self.private.losses.capture.loss_reduction == "sum")
        return self.private.audit(
            self.loader.dataset, passes, groups=self.loader.groups, loader_options=self.loader.options, **options
        )

    # What Lightning calls -----------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """The optimizer exists from here on; the loader is not asked before."""
        _require_fitting(trainer)
        if not pl_module.automatic_optimization:
            remedy = (
                "Lightning takes the step then, after the backward pass. For steps by hand use Fabric, or a loop of your own."
            )
            _check.fail("automatic_optimization", False, "to be True", remedy)
        if self._private is not None:
            raise ArgumentError("Expected a PrivateFit for each fit: it holds the books of one run.")
        (optimizer,) = trainer.optimizers
        # Before the run's own hooks: if those refuse the call, it was a call nevertheless.
        self._handle = pl_module.register_forward_pre_hook(self._called)
        self._private = make_private(pl_module, optimizer, self.plan, key=RunKey.mixed(*self._given), **self._options)
        if not self._vouched:
            self._means, self._private.losses.tried = Means(self._private.losses, _OWN_MEAN), True
        self._epsilon = EpsilonSoFar(self.plan, steps=self._private.steps_allowed)
        if self._folder is not None:
            schedules = {f"scheduler {i}": config.scheduler for i, config in enumerate(trainer.lr_scheduler_configs)}
            self._checkpoint = Checkpoint(self._folder, self._private, extras=schedules)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning has its data from here on."""
        if trainer.train_dataloader is not self.loader:
            raise ArgumentError("Expected fit(module, private.loader): other batches are not those of the plan.")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """The batch as ``training_step`` is given it."""
        self._batch = batch, batch_idx

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """After the first backward pass, and before anything is released."""
        if not self._vouched:
            raise ArgumentError(
                "Expected training_step to call self(x): there the first batch is tested for examples that influence each "
                "other. Let forward hold the model, or vouch for it with check_isolation=False."
            )
        self._look(trainer, pl_module)

    def _look(self, trainer: Any, pl_module: Any) -> None:
        """Test ``training_step`` on some examples, once the model is proved and occasionally afterwards."""
        losses, (batch, number) = self.private.losses, self._batch
        if self._means is None or losses.examples is None:
            return

        def loss_of(some: Any) -> Tensor:
            with trainer.precision_plugin.train_step_context():
                return _made(pl_module, some, number)

        pl_module.log = pl_module.log_dict = _unsaid  # what is logged of a trial is no training
        try:
            self._means.look(loss_of, pl_module, batch, Rows(losses.examples, losses.examples - losses.padding))
        finally:
            del pl_module.log, pl_module.log_dict

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the epsilon so far; save; end the fit when the budget is spent."""
        pl_module.log("epsilon", self._epsilon.after(self.private.steps), prog_bar=True, batch_size=1)
        if self._checkpoint is not None and self.private.steps % self._save_every == 0:
            self._checkpoint.save()
        trainer.should_stop = trainer.should_stop or self.private.steps >= self.private.steps_allowed

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach model and optimizer; ``spent`` still tells what the fit cost."""
        if self._checkpoint is not None:
            self._checkpoint.save()
        self._detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End an interrupted fit in the same way, but keep the checkpoint."""
        self._detach()

    def _called(self, module: Any, args: Any) -> None:
        self._vouched = self._vouched or module.training

    def _detach(self) -> None:
        if self._private is not None:
            self._private.detach()
            self._handle.remove()


class _Passes(Loop):
    """The passes of a module's ``training_step``; ``summed``: it returns the sum over its examples."""

    def __init__(self, *, summed: bool) -> None:
        self._summed = summed

    def run(self, private: Private, batch: Batch, size: int | None) -> None:
        """As Lightning makes them; an empty batch is run as any other."""
        for part in [batch] if size is None else private.split(batch, size):
            _made(private.model, part, 0).backward()  # type: ignore[no-untyped-call]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """What ``training_step`` returns, as a mean."""
        made = _made(model, batch, 0)
        return made / max(1, batch.examples) if self._summed else made


def _made(module: Any, batch: Any, number: int) -> Tensor:
    """The loss that ``training_step`` returns."""
    numbered = len(signature(module.training_step).parameters) > 1
    made = module.training_step(batch, number) if numbered else module.training_step(batch)
    return made["loss"] if isinstance(made, Mapping) else made  # type: ignore[no-any-return]


def _unsaid(*_: Any, **__: Any) -> None:
    """A replacement for ``log`` that does nothing."""


def _require_fitting(trainer: Any) -> None:
    """Refuse settings of the Trainer that would change the plan behind its back."""
    if trainer.gradient_clip_val:
        _check.fail("gradient_clip_val", trainer.gradient_clip_val, "to be left out", "The plan clips, example by example.")
    if trainer.accumulate_grad_batches != 1:
        _check.fail("accumulate_grad_batches", trainer.accumulate_grad_batches, "to be 1", "The plan says how large a batch is.")
    if trainer.max_epochs != 1:
        remedy = "One loop over the plan's batches is the whole run, all epochs included."
        _check.fail("max_epochs", trainer.max_epochs, "to be 1", remedy)
    if str(trainer.precision).startswith("16"):
        _check.fail("precision", trainer.precision, 'to be "32-true" or "bf16-mixed"', "fp16 scales the loss, and every norm.")
    if trainer.world_size != 1:
        _require_strategy(trainer.strategy)
    if len(trainer.optimizers) != 1:
        _check.fail("optimizers", len(trainer.optimizers), "to be one", "A plan drives one optimizer.")
    if trainer.ckpt_path is not None:
        remedy = "Give PrivateFit checkpoint=FOLDER: Lightning's checkpoints hold neither the books nor the noise."
        _check.fail("ckpt_path", str(trainer.ckpt_path), "to be left out", remedy)


def _require_strategy(strategy: Any) -> None:
    """Several processes must share batches, and neither raw gradients nor examples."""
    if isinstance(strategy, ModelParallelStrategy):
        tensors = strategy.device_mesh["tensor_parallel"].size()
        if tensors != 1:
            remedy = "Use ModelParallelStrategy(data_parallel_size=PROCESSES, tensor_parallel_size=1)."
            _check.fail("tensor_parallel_size", tensors, "to be 1, since processes share a batch and not an example", remedy)
    elif not isinstance(strategy, PrivateProcesses):
        remedy = (
            "Use PrivateProcesses(), or ModelParallelStrategy with fully_shard in configure_model: others add up raw gradients."
        )
        _check.fail("strategy", type(strategy).__name__, "not to wrap the module", remedy)
