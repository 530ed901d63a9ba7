"""The tensors in what a module returns: a tensor, or a tuple, list, dict or dataclass of such."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hushgrad.clipping.site import Call

__all__ = ["Outputs", "is_reshape", "tensors_of", "with_tensors"]


def tensors_of(output: Any) -> list[Tensor]:
    """The differentiable tensors in a layer's output, in a fixed order."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() or output.is_complex() else []
    if isinstance(output, dict):
        return [t for value in output.values() for t in tensors_of(value)]
    if isinstance(output, (tuple, list)):
        return [t for value in output for t in tensors_of(value)]
    if is_dataclass(output) and not isinstance(output, type):
        return [t for field in fields(output) for t in tensors_of(getattr(output, field.name))]
    return []


def with_tensors(output: Any, tensors: Iterator[Tensor]) -> Any:
    """The same structure with other tensors, given in the order of :func:`tensors_of`."""
    made: Any
    if isinstance(output, Tensor):
        return next(tensors) if output.is_floating_point() or output.is_complex() else output
    if isinstance(output, dict):
        made = copy.copy(output)  # whatever kind of dict it is
        for key, value in output.items():
            made[key] = with_tensors(value, tensors)
        return made
    if isinstance(output, (tuple, list)):
        values = [with_tensors(value, tensors) for value in output]
        return type(output)(values) if type(output) in (tuple, list) else type(output)(*values)  # a named tuple
    if is_dataclass(output) and not isinstance(output, type):
        made = copy.copy(output)
        for field in fields(output):
            object.__setattr__(made, field.name, with_tensors(getattr(output, field.name), tensors))
        return made
    return output


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
        """What came back, to the call and further."""
        ctx.call.arrive(*grads)
        return None, None, *grads


def is_reshape(y: Tensor, base: Tensor, args: tuple[Any, ...]) -> bool:
    """Whether a view has all numbers of its base in the same order, and none of the module's inputs shares them."""
    whole = base.numel() == y.numel() and base.is_contiguous() and y.is_contiguous()
    return whole and not any(isinstance(a, Tensor) and (a is base or a._base is base) for a in args)
