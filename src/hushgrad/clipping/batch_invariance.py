"""Batch invariance: does an example's row have the same bits whatever the other rows of its batch are? A certificate relies on it.

Libraries choose kernels by shape: batches of one to three rows may round differently from larger ones, convolutions of fewer than sixteen
images from those of more, and the last rows of a batch differently from the first. Then removing one record changes the rounding of all
others' gradients, and a network may amplify that without bound. So a certified run pads its batches to multiples of :data:`ROWS` rows,
asks the library for products that do not depend on a row's position, and refuses a model whose rows differ nevertheless. Several threads
share a batch, so they need larger multiples.

Functions of single numbers (exp, pow, a sigmoid) are computed for 32 numbers at a time with vectors of 512 bits, and what is left at the
end of a tensor one by one, by another formula: in batches of a multiple of 32 rows nothing is left.
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

ROWS = 32  # a batch of a certified run on one thread has a multiple of so many
PART = 8  # a micro-batch is not filled up beyond the size that it is cut to, rounded up to a multiple of so many
_MOST = 64  # rows of the smaller batches that are tried, or two multiples
_ASKED_FIRST = "MKL_CBWR" in os.environ  # by whoever started the process

Change = Callable[[Tensor], Tensor]


def invariant_rows(threads: int) -> int:
    """What a certified run's batches are padded to multiples of: whole blocks of 8 rows for a power of two of threads.

    Threads divide a batch among them, and the rows at the end of a part that is no whole block are rounded differently. Two threads share
    single numbers, too; how more of them do cannot be foreseen.

        >>> [invariant_rows(threads) for threads in (1, 2, 3, 4, 8, 16)]
        [32, 64, 64, 64, 64, 128]
    """
    return max(ROWS * min(threads, 2), PART << (threads - 1).bit_length())


def request_batch_invariance() -> None:
    """Ask MKL, before its first product, for its strict mode: a row's bits then depend on neither alignment nor position.

    Nor on how many rows there are; without ``STRICT`` they do for a third of all shapes on processors with 512-bit vectors. With other
    libraries this does nothing, and a setting of the user's is kept.
    """
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def require_batch_invariance(
    model: nn.Module,
    *inputs: Any,
    named: Mapping[str, Any] | None = None,
    rows: int | None = None,
    multiple: int = ROWS,
    dim: int = 0,
) -> None:
    """Refuse a model in which an example's activations or their gradients depend on other rows, in batches of ``multiple`` rows.

    Outputs, the inputs of every layer with parameters, and the gradients of their outputs are compared, bit for bit, with runs on the
    rows in another order, with one row of zeros among them, and on as many rows as batches of a few more or fewer examples have.

        >>> require_batch_invariance(nn.Tanh(), torch.randn(8, 3))

    Args:
        model: run in evaluation mode; its state is restored.
        inputs: positional inputs.
        named: inputs by name.
        rows: how many of the examples to use, for processes that must make the same passes; all by default.
        multiple: what batches are padded to multiples of. Batches of another size are those of a run in which all have that size.
        dim: the dimension of the inputs that holds the examples.

    Raises:
        CaptureError: if they do.
    """
    passes = _Passes(model, inputs, dict(named or {}), rows, dim)
    B = passes.rows
    changes: dict[str, tuple[Change, int]] = {
        "another place": (lambda t: t.roll(1, 0), B),
        "others": (lambda t: torch.cat([torch.zeros_like(t[:1]), t[1:]]), B),
        **{f"{k} rows": (_first(k), k) for k in _beside(B, multiple)},
    }
    with _evaluated(model):
        whole, twice = passes.run(_first(B), B), passes.run(_first(2 * B), 2 * B)
        views = [_views(a, b, B) for a, b in zip(whole, twice, strict=False)]
        wrong = [] if len(whole) == len(twice) else [f"{2 * B} rows"]
        for what, (
            change,
            size,
        ) in changes.items():  # all runs are made, whatever is found: processes may have to make them together
            made = passes.run(change, size)
            held = [_held(a, b, change, what == "others", fit, B, size) for a, b, fit in zip(whole, made, views, strict=False)]
            if len(made) != len(whole) or any(fit and not still for fit, still in zip(views, held, strict=False)):
                wrong.append(what)
            else:
                views = held
    if wrong:
        _refuse(wrong[0])


def _first(rows: int) -> Change:
    """The first rows; the same ones again where there are fewer."""
    return lambda t: t[:rows] if rows <= len(t) else torch.cat([t, t[: rows - len(t)]])


def _beside(B: int, multiple: int) -> list[int]:
    """The other numbers of rows that a batch may have: smaller ones, the next smaller and the next larger one."""
    smaller = {*range(multiple, min(B, max(_MOST, 2 * multiple) + 1), multiple), *range(B - multiple, B, multiple)}
    return [k for k in sorted({*smaller, B + multiple}) if k > 0] if B % multiple == 0 else []


def _refuse(what: str) -> None:
    remedy = "Start Python with MKL_CBWR=AUTO,STRICT and OMP_NUM_THREADS=1 in its environment, or say certified=False."
    if _ASKED_FIRST and torch.get_num_threads() == 1:
        remedy = "A layer of this model is computed by another formula there, and no setting is known to end that. Say certified=False."
    raise CaptureError(
        f"An example's activations or gradients have other last bits with {what} in its batch on this machine, so that a certified sum "
        f"cannot be had. {remedy}"
    )


class _Passes:
    """Passes of a model over its examples, changed."""

    def __init__(self, model: nn.Module, args: Any, named: dict[str, Any], rows: int | None, dim: int) -> None:
        self._model, self._inputs, self._dim = model, (args, named), dim
        self._held = next(t.shape[dim] for t in (*args, *named.values()) if isinstance(t, Tensor) and t.dim() > dim)
        self.rows = self._held if rows is None else min(rows, self._held)

    def run(self, change: Change, size: int) -> list[Tensor]:
        """Outputs, layer inputs and gradients of layer outputs of ``size`` examples, in a fixed order."""
        args, kwargs = tree_map(lambda value: self._moved(value, change), self._inputs)
        return _traced(self._model, args, kwargs, size, lambda y: self._cotangent(y, change, size))

    def _moved(self, value: Any, change: Change) -> Any:
        if not isinstance(value, Tensor):
            return value
        dim = self._dim if value.dim() > self._dim else 0
        if not value.dim() or value.shape[dim] != self._held:
            return value
        return change(value.movedim(dim, 0)[: self.rows]).movedim(0, dim).contiguous()

    def _cotangent(self, y: Tensor, change: Change, size: int) -> Tensor | None:
        """A gradient for an output, by rows, so that it is changed like the inputs; None if it has none for each example."""
        dim = next((d for d in dict.fromkeys((self._dim, 0)) if y.dim() > d and y.shape[d] == size), None)
        if dim is None:
            return None
        shape = y.movedim(dim, 0).shape[1:]
        drawn = torch.randn((self.rows, *shape), generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        return change(drawn.to(y)).movedim(0, dim)


def _traced(model: nn.Module, args: Any, kwargs: Any, size: int, cotangent: Callable[[Tensor], Tensor | None]) -> list[Tensor]:
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
    through = [(y, g) for y in outputs if y.requires_grad and (g := cotangent(y)) is not None]
    grads: tuple[Tensor | None, ...] = (None,) * len(made)
    if through and made:  # of each example's own gradient, the same whoever else is there; parameters get none
        grads = torch.autograd.grad([y for y, _ in through], made, [g for _, g in through], allow_unused=True)
    return [
        t.detach() for t in (*outputs, *given, *(y.new_zeros(()) if g is None else g for y, g in zip(made, grads, strict=True)))
    ]


# Where a tensor holds the examples: what doubles with their number ---------------------------------------------------------

View = Callable[[Tensor, int], Tensor]


def _views(once: Tensor, twice: Tensor, B: int) -> list[View]:
    """How to see a tensor with the examples first, from one of ``B`` and one of twice as many; several rows of each may lie in two ways."""
    if once.dim() != twice.dim():
        return []
    grown = [d for d in range(once.dim()) if once.shape[d] != twice.shape[d]]
    if len(grown) != 1 or 2 * once.shape[grown[0]] != twice.shape[grown[0]] or once.shape[grown[0]] % B:
        return []
    (d,) = grown
    if once.shape[d] == B:
        return [lambda t, size: t.movedim(d, 0)]
    return [
        lambda t, size: t.movedim(d, 0).unflatten(0, (size, -1)),
        lambda t, size: t.movedim(d, 0).unflatten(0, (-1, size)).transpose(0, 1),
    ]


def _held(a: Tensor, b: Tensor, change: Change, blanked: bool, views: list[View], B: int, size: int) -> list[View]:
    """The views in which every example has the same bits in both passes; the one whose inputs were replaced is left out."""
    return [v for v in views if _equal(change(v(a, B))[int(blanked) :], v(b, size)[int(blanked) :])]


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
