"""Helpers of ``PrivateTrainer``: its passes for an audit, and its checkpoints."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import TrainerCallback

from hushgrad.sampling.batch import Batch
from hushgrad.train.loop import Loop
from hushgrad.train.private import Private

if TYPE_CHECKING:
    from hushgrad.integrations.huggingface import PrivateTrainer


class TrainerPasses(Loop):
    """Trainer's passes, for a run that takes the place of its own."""

    def __init__(self, trainer: PrivateTrainer) -> None:
        self._trainer = trainer

    def run(self, private: Private, batch: Batch, size: int | None) -> None:
        """Trainer's own step, in its own parts."""
        self._beside(private, private.model).training_step(private.model, batch)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The result of ``compute_loss`` for these examples."""
        trainer = self._beside(None, model)
        with trainer.compute_loss_context_manager():
            return trainer.compute_loss(model, trainer._prepare_inputs(dict(batch)))  # type: ignore[no-any-return]

    def _beside(self, private: Private | None, model: nn.Module) -> PrivateTrainer:
        trainer = copy.copy(self._trainer)
        trainer._private, trainer.model = private, model
        if private is not None:
            trainer.optimizer = private.optimizer
        return trainer


class Saves(TrainerCallback):  # type: ignore[misc]
    """Saves the run's checkpoint as often as ``args.save_steps`` says, and at the end."""

    def __init__(self, trainer: PrivateTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save now and then."""
        if self._trainer.private.steps % max(1, int(state.save_steps)) == 0:
            self._trainer.save_checkpoint()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save at the end."""
        self._trainer.save_checkpoint()
