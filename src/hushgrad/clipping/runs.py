"""Runs a module while tracking where the examples are in each tensor, and what depends on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from hushgrad._precision import widest
from hushgrad.clipping.proof.fixed_randomness import FixedRandomness
from hushgrad.clipping.proof.inputs import tensors_in

Call = tuple[nn.Module, int]  # a module, and how often it was called before
_SAME = 1e-4  # relative: far above rounding, far below what a batch statistic does
_SAME_HALF = 2e-2  # of numbers with eight bits: a few roundings, each of 1/256
_PIECE = 1 << 16  # numbers that are compared at once


# What a model or a module raises for inputs that it does not take: cut in the wrong place, or of other sizes.
UNCALLABLE = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AssertionError)


class Batch(NamedTuple):
    """Where the examples are: in dimension ``dim``, else in the first or second dimension that has their number."""

    examples: int
    dim: int

    def axis(self, t: Any) -> int | None:
        """The dimension of the examples; None if the tensor has none."""
        if not isinstance(t, Tensor):
            return None
        for d in (self.dim, 0, 1):
            # A second dimension that happens to have their number, after a first one of 1, is broadcast: position ids, masks.
            if d < t.dim() and t.shape[d] == self.examples and (d == self.dim or t.shape[0] != 1):
                return d
        return None

    def of(self, value: Any) -> list[Tensor]:
        """All tensors in a nested value that hold examples."""
        return [t for t in tensors_in(value) if self.axis(t) is not None]

    def row(self, t: Tensor, i: int) -> Tensor:
        """One example."""
        axis = self.axis(t)
        assert axis is not None
        return t.select(axis, i)

    def rows(self, t: Tensor) -> Tensor:
        """(examples, all the rest)."""
        axis = self.axis(t)
        assert axis is not None
        return t.movedim(axis, 0).flatten(1) if t.dim() > 1 else t.unsqueeze(1)

    def without(self, t: Tensor, i: int) -> Tensor:
        """All examples but one."""
        axis = self.axis(t)
        assert axis is not None
        return t.index_select(axis, torch.tensor([j for j in range(self.examples) if j != i], device=t.device))


class Run(NamedTuple):
    """One run of a module: outputs with examples, and the leaves of the graph: inputs, and what calls inside returned."""

    outputs: list[Tensor]
    inputs: list[Tensor]
    inner: dict[Call, list[Tensor]]

    def roots(self, other: Run | None = None, batch: Batch | None = None) -> list[Tensor]:
        """The leaves; with another run over other examples, without activations that are the same there.

        Positions are the same, and may be as many as there are examples. Where nothing changes, the examples are all alike.
        """
        every = [(call, k, y) for call, made in self.inner.items() for k, y in enumerate(made)]
        if other is None or batch is None:
            return self.inputs + [y for _, _, y in every]
        varying = [y for call, k, y in every if not _repeated(y, other.inner.get(call, [])[k:], batch)]
        return self.inputs + varying if self.inputs or varying else [y for _, _, y in every]


def _repeated(y: Tensor, again: list[Tensor], batch: Batch) -> bool:
    return bool(again) and y.shape == again[0].shape and same(batch.without(y, 0), batch.without(again[0], 0))


def traced_run(module: nn.Module, args: Any, kwargs: Any, batch: Batch) -> Run:
    """Run with the inputs as leaves; of integer inputs, the first floating-point activations (embeddings)."""
    run = Run([], [], {})

    def rooted(value: Any, roots: list[Tensor]) -> Any:
        if batch.axis(value) is None or not value.is_floating_point() or value.requires_grad:
            return value
        roots.append(value.detach().requires_grad_())
        return roots[-1].clone()  # a leaf itself may not be changed in place

    def see(call: Call, output: Any) -> Any:
        roots: list[Tensor] = []
        made = tree_map(lambda t: rooted(t, roots), output)
        if not roots:
            return output
        run.inner[call] = roots
        return made

    with _each_call(module, see):
        args, kwargs = tree_map(lambda t: rooted(t, run.inputs), (args, kwargs))
        run.outputs.extend(batch.of(_called(module, args, kwargs)))
    return run


def run_with_others(
    module: nn.Module, args: Any, kwargs: Any, batch: Batch, *, factor: float | None, own: int = 0, inner: Collection[Call] = ()
) -> Run:
    """Run with all examples but ``own`` permuted, and their floats perturbed and multiplied by ``factor``; None: all equal to ``own``.

    ``inner`` are the calls whose outputs are returned as well.
    """
    others, run = torch.tensor([j for j in range(batch.examples) if j != own]), Run([], [], {})
    order = torch.full((batch.examples,), own)
    if factor is not None:
        order[others] = torch.cat([others[1:], order[:1]])

    def replaced(t: Any) -> Any:
        axis = batch.axis(t)
        if axis is None:
            return t
        other = t.detach().index_select(axis, order.to(t.device))
        if factor is not None and other.is_floating_point() and other.numel():
            rest = other.index_select(axis, others.to(t.device))
            change = (
                torch.linspace(0.05, 0.15, rest.numel(), device=rest.device, dtype=torch.float32).view(rest.shape).to(rest.dtype)
            )
            other.index_copy_(axis, others.to(t.device), rest.add_(change * (1 + rest.abs())).mul_(factor))
        return other

    def keep(call: Call, output: Any) -> Any:
        if call in inner:
            run.inner[call] = [y.clone() for y in batch.of(output) if y.is_floating_point()]
        return output

    with torch.no_grad(), _each_call(module, keep):
        run.outputs.extend(batch.of(_called(module, *tree_map(replaced, (args, kwargs)))))
    return run


def run_turned(module: nn.Module, args: Any, kwargs: Any, batch: Batch) -> list[tuple[Tensor, Tensor]]:
    """The outputs for the examples in their order, and for the reversed order with rows put back; without randomness."""

    def turned(t: Any) -> Any:
        axis = batch.axis(t)
        return t if axis is None else t.flip(axis)

    with torch.no_grad(), FixedRandomness():
        # Copies: a model may write to its inputs.
        given = [y.clone() for y in batch.of(_called(module, *tree_map(detached, (args, kwargs))))]
        made = batch.of(_called(module, *tree_map(turned, tree_map(detached, (args, kwargs)))))
    return [(y, turned(z)) for y, z in zip(given, made, strict=True)]


@contextmanager
def _each_call(module: nn.Module, see: Callable[[Call, Any], Any]) -> Iterator[None]:
    """``see(call, output)`` gives the output to go on with."""
    calls: Counter[nn.Module] = Counter()

    def hook(child: nn.Module, args: Any, output: Any) -> Any:
        calls[child] += 1
        return see((child, calls[child] - 1), output)

    handles = [child.register_forward_hook(hook) for child in module.modules() if child is not module]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# Tensors -------------------------------------------------------------------------------------------------------------------


def same(a: Tensor, b: Tensor, *, scale: float | None = None) -> bool:
    """Equal up to the rounding of sums in another order, for numbers of this size (``scale``: of the numbers that these are a part of)."""
    if a.layout is not torch.strided or b.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if not a.is_floating_point():
        return torch.equal(a, b)
    half = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda") or a.element_size() < 4
    tolerance = _SAME_HALF if half else _SAME
    pieces = (
        list(zip(_pieces(a.detach()), _pieces(b.detach()), strict=True)) if a.shape == b.shape else [(a.detach(), b.detach())]
    )
    scale = max((largest(x) for x, _ in pieces), default=0.0) if scale is None else scale
    close = partial(torch.allclose, rtol=tolerance, atol=tolerance * scale + 1e-12, equal_nan=True)
    return all(close(widest(x), widest(y)) for x, y in pieces)


def largest(t: Tensor) -> float:
    """The largest absolute value among the finite numbers."""
    return float(t.nan_to_num(0, 0, 0).abs().max()) if t.numel() else 0.0


def _pieces(t: Tensor) -> Sequence[Tensor]:
    """Rows in chunks: outputs are large, and double precision copies them."""
    return t.split(max(1, _PIECE * len(t) // max(1, t.numel()))) if t.dim() and len(t) else (t,)


def detached(value: Any) -> Any:
    """A copy; NaN and infinity, which would turn an exact 0 into NaN on the way back, are replaced."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach().clone()
    return value.nan_to_num_(0.0, 1e4, -1e4) if value.is_floating_point() else value


class _Shared:
    """A tensor that counts as shared by all examples."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def with_squares_shared(args: Any, kwargs: Any, examples: int) -> tuple[Any, Any] | None:
    """The inputs with all square tensors but the first tensor shared; None if there is none."""
    leaves, structure = tree_flatten((args, kwargs))
    tensors = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    squares = [k for k in tensors[1:] if leaves[k].shape == (examples, examples)]
    for k in squares:
        leaves[k] = _Shared(leaves[k])
    return tree_unflatten(leaves, structure) if squares else None


def _called(module: nn.Module, args: Any, kwargs: Any) -> Any:
    args, kwargs = tree_map(lambda value: value.tensor if isinstance(value, _Shared) else value, (args, kwargs))
    return module(*args, **kwargs)
