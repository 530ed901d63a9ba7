"""Batch invariance: does an example's row have the same bits whatever the other rows of its batch are? A certificate relies on it.

Libraries choose kernels by shape: batches of one to three rows may round differently from larger ones, and the last rows of a batch
differently from the first. Then removing one record changes the rounding of all others' gradients, and a network may amplify that without
bound. So a certified run pads its batches to multiples of :data:`ROWS` rows, asks the library for products that do not depend on a
row's position, and refuses a model whose rows differ nevertheless. Several threads share a batch, so they need larger multiples.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hushgrad.clipping.outputs import tensors_of
from hushgrad.errors import CaptureError

ROWS = 8  # a batch of a certified run on one thread has a multiple of so many
_MOST = 64  # rows of the smaller batches that are tried, or two multiples

Change = Callable[[Tensor], Tensor]


def invariant_rows(threads: int) -> int:
    """What a certified run's batches are padded to multiples of: whole blocks of :data:`ROWS` for a power of two of threads.

    Threads divide a batch among them, and the rows at the end of a part that is no whole block are rounded differently.

        >>> [invariant_rows(threads) for threads in (1, 2, 3, 4, 8)]
        [8, 16, 32, 32, 64]
    """
    return ROWS << (threads - 1).bit_length()


def request_batch_invariance() -> None:
    """Ask MKL, before its first product, for its strict mode: a row's bits then depend on neither alignment nor position.

    Nor on how many rows there are; without ``STRICT`` they do for a third of all shapes on processors with 512-bit vectors. With other
    libraries this does nothing, and a setting of the user's is kept.
    """
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def require_batch_invariance(
    model: nn.Module, *inputs: Any, named: Mapping[str, Any] | None = None, rows: int | None = None, multiple: int = ROWS
) -> None:
    """Refuse a model in which an example's activations or their gradients depend on other rows, in batches of ``multiple`` rows.

    Outputs, the inputs of every layer with parameters, and the gradients of their outputs are compared, bit for bit, with runs on the
    rows in another order, with one row of zeros among them, on all rows twice, and on the first of them alone.

        >>> require_batch_invariance(nn.Tanh(), torch.randn(8, 3))

    Args:
        model: run in evaluation mode; its state is restored.
        inputs: positional inputs; the examples are their first dimension.
        named: inputs by name.
        rows: how many of the examples to use, for processes that must make the same passes; all by default.
        multiple: what batches are padded to multiples of; other sizes are not tried, because no batch has them.

    Raises:
        CaptureError: if they do.
    """
    first = next(value for value in (*inputs, *(named or {}).values()) if isinstance(value, Tensor))
    held = first.shape[0]
    B = held if rows is None else min(rows, held)

    def run(change: Change, size: int) -> list[Tensor]:
        def moved(value: Any) -> Any:
            return change(value[:B]) if isinstance(value, Tensor) and value.dim() and value.shape[0] == held else value

        args, kwargs = tree_map(moved, (inputs, dict(named or {})))
        return _traced(model, args, kwargs, size, change, B)

    most = max(_MOST, 2 * multiple)
    with _evaluated(model):
        whole = run(lambda t: t, B)
        changes: dict[str, tuple[Change, int]] = {
            "another place": (lambda t: t.roll(1, 0), B),
            "others": (lambda t: torch.cat([torch.zeros_like(t[:1]), t[1:]]), B),
            "more rows": (lambda t: torch.cat([t, t]), 2 * B),
            **{f"{k} rows": (lambda t, k=k: t[:k], k) for k in range(multiple, min(B, most + 1), multiple)},  # type: ignore[misc]
        }
        wrong = []  # all runs are made, whatever is found: processes may be able to make them together only
        for what, (change, size) in changes.items():
            blanked = 1 if what == "others" else 0
            if not all(_equal(change(y)[blanked:], z[blanked:]) for y, z in zip(whole, run(change, size), strict=True)):
                wrong.append(what)
    if wrong:
        _refuse(wrong[0])


def _refuse(what: str) -> None:
    raise CaptureError(
        f"An example's activations or gradients have other last bits with {what} in its batch on this machine, so that a certified sum "
        "cannot be had. Start Python with MKL_CBWR=AUTO,STRICT and OMP_NUM_THREADS=1 in its environment, or say certified=False."
    )


def _traced(model: nn.Module, args: Any, kwargs: Any, size: int, change: Change, whole: int) -> list[Tensor]:
    """Outputs, layer inputs and gradients of layer outputs that have a row for each of ``size`` examples, in a fixed order."""
    given: list[Tensor] = []
    made: list[Tensor] = []

    def watch(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        given.extend(tensors_of(args))
        made.extend(y for y in tensors_of(output) if y.requires_grad)

    layers = [m for m in model.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
    handles = [layer.register_forward_hook(watch) for layer in layers]
    try:
        outputs = tensors_of(model(*args, **kwargs))
    finally:
        for handle in handles:
            handle.remove()
    through = [y for y in outputs if y.requires_grad and _holds(y, size)]
    grads: tuple[Tensor | None, ...] = ()
    if through and made:  # of each example's own gradient, the same whoever else is there; parameters get none
        grads = torch.autograd.grad(through, made, [change(_weights(y, whole)) for y in through], allow_unused=True)
    return [t.detach() for t in (*outputs, *given, *grads) if t is not None and _holds(t, size)]


def _holds(t: Tensor, size: int) -> bool:
    return t.dim() > 0 and t.shape[0] == size


def _weights(y: Tensor, rows: int) -> Tensor:
    """A gradient for an output, by rows, so that it can be reordered like the inputs."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn((rows, *y.shape[1:]), generator=generator, dtype=torch.float32).to(y)


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """Inside, evaluation mode; modes and random state are restored."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        for module in training:
            module.training = True


def _equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit equal; NaN equals NaN."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
