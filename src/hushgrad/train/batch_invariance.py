"""Checks, on a certified run's first batch of each size, that an example's activations have the same bits whatever the other rows are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from hushgrad.clipping import Capture
from hushgrad.clipping.batch_invariance import PART, require_batch_invariance
from hushgrad.release.placement.world import World


class BatchInvariance:
    """Runs the check before the first pass of each size, and wherever torch's settings have changed.

    With sharded parameters all processes make the same passes: if one of them meets a new size, on equally many examples.

    Args:
        capture: pauses during the check.
        world: the processes of the run.
        multiple: what the run's batches are padded to multiples of.
        dim: asked for the dimension that holds the examples.
    """

    def __init__(self, capture: Capture, world: World, multiple: int, dim: Callable[[], int | None]) -> None:
        self._capture, self._world, self._multiple, self._dim = capture, world, multiple, dim
        self._rows, self._seen = 0, set[tuple[Any, ...]]()

    def attach(self, model: nn.Module) -> Any:
        """Hook the model, before FSDP's own hook and the capture's, which ignore the check's passes."""
        return model.register_forward_pre_hook(self._check, with_kwargs=True, prepend=True)

    def before(self, examples: int) -> None:
        """The next pass is over this many examples here."""
        self._rows = examples
        if not self._capture.whole:
            new = self._world.largest(examples not in {rows for rows, *_ in self._seen})
            self._seen.add((examples,))
            self._rows = self._world.least(examples) if new else 0

    @property
    def notes(self) -> tuple[str, ...]:
        """What was found, for the guarantee."""
        if not self._seen:
            return ()
        return (
            "Batches are filled up to public numbers of rows; then each row of this model has bits of its own on this machine",
        )

    def _check(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._rows < PART or self._capture.aside or not torch.is_grad_enabled():
            return
        met = self._rows, *_settings()
        if self._capture.whole and met in self._seen:
            return
        self._seen.add(met)  # first: the check's own passes come through here
        rows, self._rows = self._rows, self._rows if self._capture.whole else 0
        try:
            with self._capture.pause(), nullcontext() if self._capture.whole else self._world.together():
                require_batch_invariance(model, *args, named=kwargs, rows=rows, multiple=self._multiple, dim=self._dim() or 0)
        except BaseException:
            self._seen.discard(met)
            raise


def _settings() -> tuple[Any, ...]:
    """Those of torch that choose kernels."""
    cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    precision, onednn = torch.get_float32_matmul_precision(), torch.backends.mkldnn
    return cast, precision, onednn.is_available() and torch._C._get_mkldnn_enabled(), torch.are_deterministic_algorithms_enabled()
