"""Checks, on the first batch of a certified run, that each example's activations have the same bits whatever the rest of the batch is."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from hushgrad.clipping import Capture
from hushgrad.clipping.batch_invariance import require_batch_invariance
from hushgrad.release.placement.world import World


class BatchInvariance:
    """Runs the check before the first pass; with sharded parameters, on equally many examples in every process.

    Args:
        capture: pauses during the check.
        world: the processes of the run.
        multiple: what the run's batches are padded to multiples of.
    """

    def __init__(self, capture: Capture, world: World, multiple: int) -> None:
        self._capture, self._world, self._multiple, self._rows, self._passed = capture, world, multiple, 0, False

    def attach(self, model: nn.Module) -> Any:
        """Hook the model, before FSDP's own hook and the capture's, which ignore the check's passes."""
        return model.register_forward_pre_hook(self._check, with_kwargs=True, prepend=True)

    def before(self, examples: int) -> None:
        """The next pass is over this many examples here; with sharded parameters all processes must make the same passes."""
        if not self._passed:
            self._rows = examples if self._capture.whole else self._world.least(examples)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was found, for the guarantee."""
        if not self._passed:
            return ()
        return (
            "Batches are filled up to public numbers of rows; then each row of this model has bits of its own on this machine",
        )

    def _check(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._passed or self._rows < self._multiple or self._capture.aside or not torch.is_grad_enabled():
            return
        self._passed = True  # set first: the check's own passes come through here
        try:
            with self._capture.pause(), nullcontext() if self._capture.whole else self._world.together():
                require_batch_invariance(model, *args, named=kwargs, rows=self._rows, multiple=self._multiple)
        except BaseException:
            self._passed = False
            raise
