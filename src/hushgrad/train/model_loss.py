"""Tests, before a step, a loss that the model computes itself (``outputs.loss`` of transformers' models).

The proof of a model is about outputs with a row for each example. A scalar for the whole batch has none, and is usually a mean over all
labels of the batch, whatever example they belong to.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hushgrad.clipping.proof.inputs import tensors_in
from hushgrad.train.batch_means import Means, Rows
from hushgrad.train.loss_tracking import Losses

_OF_LOGITS = (
    "It is the model's own loss, of all labels together. Take it of the model's other outputs: loss = private.loss(lambda scores, labels: "
    "torch.nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), per_example=True), and "
    'loss(model(**batch).logits, batch["labels"]).backward() for each batch of texts.'
)
_OF_OTHERS = (
    "It is the model's own loss, of all labels together. Take it of the model's other outputs, with each example's mean over its own "
    "labels: loss = private.loss(lambda scores, labels: torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), "
    "ignore_index=-100), per_example=True), with your labels' ignore_index, and loss(scores, labels).backward() for each batch."
)


class _Otherwise(Exception):
    """Raised if the model gives something else outside of training."""


class Inside:
    """Watches for scalar outputs that get a gradient."""

    def __init__(self, model: nn.Module, losses: Losses) -> None:
        self._model, self._losses = model, losses
        self._means = Means(losses, _OF_OTHERS, either=True)
        self._used: dict[int, tuple[Any, Rows]] = {}  # by their place among those of a pass: its inputs

    def attach(self) -> None:
        """Look at the model's passes."""
        self._losses.handed.also = self._passed

    def check(self) -> None:
        """Before a step: refuse one whose loss, computed by the model, is not a mean over the examples.

        Raises:
            NotIsolated: with the remedy.
        """
        if not self._used:
            return
        places = sorted(self._used)
        inputs, rows = self._used[places[0]]
        self._used = {}

        def loss_of(some: Any) -> Tensor:
            args, kwargs = some
            made = _scalars(self._model(*args, **kwargs))
            if len(made) <= places[-1]:
                raise _Otherwise
            return torch.stack([made[k] for k in places])

        with suppress(_Otherwise):  # nothing is shown, and the user vouches for it
            self._means.look(loss_of, self._model, inputs, rows)

    def _passed(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        losses, capture = self._losses, self._losses.capture
        if losses.handed.is_seen or capture.aside:
            return
        losses.padded.passed((args, kwargs), losses.examples or 0)
        if losses.tried or (type(output) is Tensor and output.dim()):
            return
        self._means.remedy = _OF_LOGITS if hasattr(output, "logits") else _OF_OTHERS
        examples, reading = losses.examples or 0, capture.reading
        rows = Rows(examples, examples - losses.padding, reading)
        for k, made in enumerate(_scalars(output)) if examples and reading is not None else ():
            if made.requires_grad:
                made.register_hook(partial(self._reached, k, ((args, kwargs), rows)))

    def _reached(self, place: int, given: tuple[Any, Rows], _: Tensor) -> None:
        self._used[place] = given
        self._losses.to_check = True


def _scalars(output: Any) -> list[Tensor]:
    made = [output] if type(output) is Tensor else tensors_in(output)
    return [t for t in made if t.dim() == 0 and t.is_floating_point()]
