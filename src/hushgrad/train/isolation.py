"""The gate that a model must pass with its first batch: no example influences another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hushgrad.clipping import Capture
from hushgrad.clipping.isolated import _examples
from hushgrad.errors import NotIsolated
from hushgrad.release.placement.together import CheckedTogether, isolated_pass
from hushgrad.release.placement.world import World

__all__ = ["IsolationGate"]


class IsolationGate:
    """Runs the isolation check on the first batch, and refuses every step of a model that failed it or went around it.

    The model is tested in training mode, and in evaluation mode too if the run's batches are passed in it: layers may do
    different things in each. An evaluation between two steps is not tested.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._failed = False
        self._together: CheckedTogether | None = None
        self._tested: set[bool] = set()  # the modes (training or not) that have passed
        self._due = False  # attached, and not yet passed in training mode
        self._issued = self._entered = False  # since the last step: a batch was handed out; its pass came through the hook

    def attach(self, world: World, *, sharded: bool) -> Any:
        """Have the first batch checked; the handle to remove the hook with."""
        if sharded:
            self._together = CheckedTogether(self._capture.model, world, self._checking)
            return self._together
        model = self._capture.model

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if module is model and torch.is_grad_enabled():  # a copy of the model has the hook as well
                self._enter(args, kwargs)

        self._due = True
        self._handle = model.register_forward_pre_hook(enter, with_kwargs=True)
        return self._handle

    def before(self, examples: int) -> None:
        """The next pass is over this many examples in this process."""
        self._issued = True
        if self._together is not None:
            self._together.before(examples)

    def require_passed(self) -> None:
        """Raise if the check has failed.

        Raises:
            NotIsolated: for good, also if the check's own error was caught.
        """
        if self._failed:
            raise NotIsolated(
                "This model lets examples influence each other, as the first batch showed. Replace the layer first."
            )

    def require_entered(self) -> None:
        """Raise if the passes of this step went around the check.

        Raises:
            NotIsolated: until a batch has passed through the model as a whole.
        """
        if self._due and not self._entered and self._capture.check():
            raise NotIsolated(
                "Whether examples influence each other could not be tested: the run's batch did not pass through model(x). Call "
                "the model itself, not its forward or its parts, or vouch for it with check_isolation=False."
            )
        self._issued = self._entered = False

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is called: test it, if it was not yet in this mode; one example alone cannot be influenced."""
        model = self._capture.model
        mode = model.training
        if self._failed or not (mode or self._issued):  # the check's own passes; an evaluation
            return
        if mode not in self._tested and (_examples((args, kwargs), 0) or 0) >= 2:
            with self._checking():
                isolated_pass(model, args, kwargs)
            self._tested.add(mode)
            if mode:
                self._due = False
                self._handle.remove()
        self._entered = True

    @contextmanager
    def _checking(self) -> Iterator[None]:
        self._failed = True
        with self._capture.pause():
            yield
        self._failed = False
