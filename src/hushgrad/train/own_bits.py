"""What a certified run assumes of model and machine, looked at on the first batch: each example's activations have bits of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hushgrad.clipping import Capture
from hushgrad.clipping.bits import least_rows

__all__ = ["OwnBits"]

_ENOUGH = 8  # rows of the batch that is looked at, at least: fewer may have a kernel of their own


class OwnBits:
    """Runs the check before the first pass over enough examples; from then on ``notes`` say what it found."""

    def __init__(self, capture: Capture) -> None:
        self._capture, self._least = capture, 0

    def attach(self, model: nn.Module) -> Any:
        """Watch the model; before the capture's own hooks, so that it sees the check's passes from their beginning."""
        return model.register_forward_pre_hook(self._check, with_kwargs=True)

    @property
    def notes(self) -> tuple[str, ...]:
        """The least batch whose rows have the usual bits here."""
        if not self._least:
            return ()
        return (
            f"On this machine batches from {self._least} rows on give every row of this model the same bits, smaller ones may not",
        )

    def _check(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rows = next((len(v) for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.dim()), 0)
        if self._least or rows < _ENOUGH or not torch.is_grad_enabled():
            return
        self._least = 1  # the check's own passes come by here
        try:
            with self._capture.pause():
                self._least = least_rows(model, *args, named=kwargs)
        except BaseException:
            self._least = 0
            raise
