"""Runs a layer on an inner graph, if it computes differently when its parameters do not require gradients.

torch folds (B, T, d) @ (d, p) into one matrix product if the second factor requires a gradient; otherwise, for a strided first factor, it
multiplies batch by batch, with other roundings. Such a call keeps its parameters as they are and runs on detached inputs. Gradients go
back through the inner graph to the inputs alone, so torch computes no weight gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hushgrad.clipping._torch import packing_on, retains
from hushgrad.clipping.proof.saved_tensors import Packing


class Inner:
    """The inputs of one call: the caller's, and the detached ones that the layer gets."""

    __slots__ = ("_inside", "_made", "_ys", "outside")

    def __init__(self) -> None:
        self._made: dict[int, Tensor] = {}
        self.outside: list[Tensor] = []
        self._inside: list[Tensor] = []
        self._ys: list[Tensor] = []

    @staticmethod
    def possible() -> bool:
        """Whether no checkpoint is active: it would run the forward once more for each inner graph."""
        hooks = packing_on()
        return hooks is None or isinstance(getattr(hooks[0], "__self__", None), Packing)

    def given(self, value: Any) -> Any:
        """The same inputs as leaves; an input that is passed twice stays one."""
        if isinstance(value, Tensor):
            if not value.requires_grad:
                return value
            if id(value) not in self._made:
                self._made[id(value)] = value.detach().requires_grad_()
                self.outside.append(value)
                self._inside.append(self._made[id(value)])
            return self._made[id(value)]
        if isinstance(value, Mapping):
            return {key: self.given(one) for key, one in value.items()}
        return tuple(map(self.given, value)) if type(value) is tuple else value

    def handed_out(self, ys: list[Tensor]) -> list[Tensor]:
        """The outputs, in the caller's graph."""
        self._ys = ys
        return list(_Inner.apply(self, *self.outside)) if self.outside else list(self.outputs())  # type: ignore[no-untyped-call]

    def outputs(self) -> tuple[Tensor, ...]:
        """The outputs without a graph."""
        return tuple(y.detach() for y in self._ys)

    def pulled(self, grads: tuple[Tensor | None, ...], *, last: bool) -> tuple[Tensor | None, ...]:
        """The gradients of the inputs; after the last call the inner graph is freed."""
        live = [(y, g) for y, g in zip(self._ys, grads, strict=True) if g is not None and y.requires_grad]
        if not live:
            return (None,) * len(self._inside)
        ys, gs = zip(*live, strict=True)
        return torch.autograd.grad(ys, self._inside, gs, retain_graph=not last, allow_unused=True)


class _Inner(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: Inner, *outside: Tensor) -> tuple[Tensor, ...]:
        ctx.inner = inner
        ctx.set_materialize_grads(False)
        return inner.outputs()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.inner.pulled(grads, last=not retains())
