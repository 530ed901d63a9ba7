"""The live average of a model that is being trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hushgrad import _check
from hushgrad.errors import ArgumentError
from hushgrad.train.after.averaging import Average


class Averaged:
    """The live average of a model's trainable parameters, fed after every step."""

    def __init__(self, rule: Average, params: dict[str, Tensor], steps: int) -> None:
        self._rule, self._params, self._steps = rule, params, steps
        self._means: dict[str, Tensor] = {}
        self._inside = 0  # blocks in which the model has the averages

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the parameters after ``step``."""
        weight = self._rule.weight(step, self._steps)
        for name, p in self._params.items():
            if weight == 1.0 or name not in self._means:
                self._means[name] = p.detach().clone()
            else:
                self._means[name].lerp_(p.detach(), weight)

    @contextmanager
    def swapped_in(self, moved: Callable[[], None]) -> Iterator[None]:
        """Inside, the model has the averaged parameters; afterwards, and after an interrupt, exactly those that it had before.

        ``moved`` is called after they have changed.
        """
        kept = {name: p.detach().clone() for name, p in self._params.items()}
        self._inside += 1
        try:
            self._write(self._means)
            moved()
            yield
        finally:
            try:
                self._write(kept)
            except BaseException:  # a second interrupt
                self._write(kept)
                raise
            finally:
                self._inside -= 1
                moved()

    def require_outside(self, what: str) -> None:
        """Refuse ``what`` while the model has the averages.

        Raises:
            ArgumentError: inside of :meth:`swapped_in`.
        """
        if self._inside:
            raise ArgumentError(
                f"Expected {what} outside of private.averaged(): inside, the model has the averages, not the weights of the run. Leave "
                "the block first; model.state_dict() saves the averages themselves."
            )

    @torch.no_grad()
    def _write(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self._params[name].copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """The means by parameter name."""
        return {name: mean.clone() for name, mean in self._means.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was taken."""
        if not set(state) <= set(self._params):
            _check.fail("state", sorted(state), "to hold averages of this model's parameters")
        self._means = {name: mean.detach().clone() for name, mean in state.items()}
