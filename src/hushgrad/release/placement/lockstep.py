"""What processes of a sharded model must do in lockstep: the same number of passes, and the same checks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hushgrad.clipping import Capture, isolation
from hushgrad.clipping.proof.inputs import tensors_in
from hushgrad.clipping.rows_apart import require_own_rows
from hushgrad.clipping.runs import Batch as Examples
from hushgrad.errors import ArgumentError, CaptureError, NotIsolated
from hushgrad.release.placement.world import World
from hushgrad.sampling.batch import Batch


def split_evenly(batch: Batch, size: int, world: World) -> Iterator[Batch]:
    """Micro-batches of at most ``size`` examples, equally many in every process: one with fewer examples gets empty ones at the end."""
    parts = len(batch._cuts(size))
    rounds = world.largest(parts)
    yield from batch.split(size)
    for number in range(parts, rounds):
        yield batch._issued(0, 0, number, size)


SOMETIMES = (
    "Parameters are sharded: that no example influences another was tested in the first two batches, and again after about 20, 200, 2,000 "
    "and so on, not in all of them"
)


class CheckedTogether:
    """The isolation check on batches that have two examples or more *in every process*: the first, the second, about the 20th, 200th, ...

    A pass through a sharded model needs all processes, so all of them run the check's passes, or none does. A model may change what it
    does in the middle of a run, so the check is repeated.
    """

    def __init__(self, model: nn.Module, world: World, capture: Capture) -> None:
        self._model, self._world, self._capture = model, world, capture
        self._tested: set[bool] = set()  # in training mode or not: layers may do different things in each
        self._batches, self._next = 0, 1  # handed out so far; the check is due from this one on
        self._due, self._examples = False, 0
        # Before FSDP's own hook: the check's passes must be complete ones, outside of the pass that they precede.
        self._handle = model.register_forward_pre_hook(self._check, with_kwargs=True, prepend=True)

    def before(self, examples: int) -> None:
        """The next pass is over this many examples here; called by all processes for every batch that is handed out."""
        self._batches, self._examples = self._batches + 1, examples
        if self._batches >= self._next or self._model.training not in self._tested:
            self._due = self._world.least(examples) >= 2

    def remove(self) -> None:
        """Remove the hook."""
        self._handle.remove()

    def _check(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._due or not torch.is_grad_enabled() or self._capture.aside:
            return  # within another check's passes: it is due at the pass that they precede
        self._due, self._next = False, 2 if self._batches == 1 else 10 * self._batches
        again = model.training in self._tested
        self._tested.add(model.training)
        with self._capture.pause():
            try:
                with self._world.together():
                    _require_examples((args, kwargs), self._examples)
                with self._world.together():
                    dim = isolated_pass(model, args, kwargs, self._world)
                with self._world.together():
                    require_own_rows(model, args, kwargs, Examples(self._examples, dim), self._capture.sites)
            except NotIsolated as error:
                self._capture.not_isolated, self._capture.late = str(error), again
                raise


def _require_examples(inputs: Any, examples: int) -> None:
    """Refuse a pass over one example, or none, of a batch of more: the check's passes are over two or more in every process."""
    first = next((t for t in tensors_in(inputs) if t.dim()), None)
    if first is not None and len(first) < 2 <= examples:
        raise CaptureError(
            f"The batch has {examples} examples in one process, but the model was called with {len(first)}. Run each example forward and "
            "backward exactly once per step; cut a batch with private.split(batch, size)."
        )


def isolated_pass(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], world: World) -> int:
    """Raise NotIsolated if an example influences another in ``model(*args, **kwargs)``, or a layer's row belongs to no single example.

    Returns the dimension of the inputs that holds the examples.
    """

    def agreed(found: bool) -> bool:
        return world.largest(found) > 0

    try:
        isolation(model, *args, named=kwargs, apart=True, agreed=agreed)
    except ArgumentError:  # no output has as many rows as the first dimension: the inputs may have time first
        isolation(model, *args, named=kwargs, batch_dim=1, apart=True, agreed=agreed)
        return 1
    return 0
