"""The tensors in what a module returns: a tensor, or a tuple, list, mapping or dataclass of such."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hushgrad.clipping.proof.inputs import mapped, tensors_in

if TYPE_CHECKING:
    from hushgrad.clipping.site import Call


def tensors_of(output: Any) -> list[Tensor]:
    """The differentiable tensors in a layer's output, in a fixed order."""
    return [t for t in tensors_in(output) if t.is_floating_point() or t.is_complex()]


def with_tensors(output: Any, tensors: Iterator[Tensor]) -> Any:
    """The same structure with other tensors, given in the order of :func:`tensors_of`."""

    def other(leaf: Any) -> Any:
        if not tensors_of(leaf):
            return leaf
        return next(tensors) if isinstance(leaf, Tensor) else leaf._replace(data=next(tensors))

    return mapped(output, other)


class Outputs(torch.autograd.Function):
    """Hands out several outputs from one node of the graph, and their gradients to the call that made them.

    These are the gradients of what leaves the module. A hook on the outputs themselves would see more, if the module computes one
    from another (an LSTM cell its h from its c), or also returns its input.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: Call, *outputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs as they are."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(y.detach() for y in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Hand the gradients to the call, and pass them on."""
        ctx.call.arrive(*grads)
        return None, None, *grads


def is_reshape(y: Tensor, base: Tensor, args: tuple[Any, ...]) -> bool:
    """Whether a view has all numbers of its base in the same order, and shares memory with none of the module's inputs."""
    whole = base.numel() == y.numel() and base.is_contiguous() and y.is_contiguous()
    return whole and not any(isinstance(a, Tensor) and (a is base or a._base is base) for a in args)
