"""The fallback for layers without a rule: each example's gradient by running the layer again on that example alone.

The layer's forward is repeated inside ``torch.func.vmap(vjp)``; where an operation has no batching rule it is repeated example
by example. Either way the layer must be a pure function of its inputs and parameters: one that draws random numbers would
draw others the second time, so it is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from hushgrad.clipping.base import Record, Rule
from hushgrad.errors import CaptureError

__all__ = ["Vmap", "VmapTree"]


class Vmap(Rule):
    """Any layer: outputs a tensor, or a tuple or list or dict of tensors, with the examples first."""

    hot = False  # it runs autograd itself, which is better done outside of a running backward

    def per_example(self, record: Record) -> dict[str, Tensor]:
        """Map, over the examples, the vector-Jacobian product with this example's output gradient."""
        flat = [*record.args, *record.kwargs.values()]
        B = next(g.shape[0] for g in record.grads if g is not None)
        batched = [isinstance(v, Tensor) and v.dim() > 0 and v.shape[0] == B for v in flat]
        tensors = [v for v, b in zip(flat, batched, strict=True) if b]
        grads = [g for g in record.grads if g is not None]
        named = dict(record.module.named_parameters())
        params = {name: named[name].detach() for name in record.names}

        def one(tensors: list[Tensor], grads: list[Tensor]) -> dict[str, Tensor]:
            rows = iter(tensors)
            inputs = [next(rows).unsqueeze(0) if b else v for v, b in zip(flat, batched, strict=True)]
            return _pull_back(record, params, inputs, [g.unsqueeze(0) for g in grads], tied=self.subtree)

        if B == 0:
            return {name: p.new_zeros((0, *p.shape)) for name, p in params.items()}
        before, versions = torch.get_rng_state(), _versions(record.module)
        try:
            result = vmap(one)(tensors, grads)
        except RuntimeError as error:
            if "randomness" in str(error):
                raise _random(record.module) from error
            result = _loop(one, tensors, grads)
        if not torch.equal(before, torch.get_rng_state()):
            raise _random(record.module)
        if versions != _versions(record.module):
            raise CaptureError(
                f"{type(record.module).__name__} changes its buffers in forward, so it cannot be repeated for single examples. Put "
                "the part that changes them into evaluation mode (spectral norm: module.parametrizations.eval() after "
                "model.train()), or register a rule for the layer."
            )
        return result


class VmapTree(Vmap):
    """The same for a layer together with its children (a parametrised layer computes its weight in one)."""

    subtree = True


def _pull_back(
    record: Record, params: dict[str, Tensor], inputs: list[Any], grads: list[Tensor], *, tied: bool
) -> dict[str, Tensor]:
    """The parameters' gradient for one example, a batch of one; ``tied``: also through children that hold the same parameter.

    A child of its own site counts its use itself, and would be counted twice.
    """
    args, kwargs = inputs[: len(record.args)], dict(zip(record.kwargs, inputs[len(record.args) :], strict=True))

    def outputs(params: dict[str, Tensor]) -> list[Tensor]:
        out = tensors_of(functional_call(record.module, params, tuple(args), kwargs, tie_weights=tied))
        return [y for y, g in zip(out, record.grads, strict=True) if g is not None]

    return vjp(outputs, params)[1](grads)[0]  # type: ignore[no-any-return]


def _loop(one: Any, tensors: list[Tensor], grads: list[Tensor]) -> dict[str, Tensor]:
    rows = [one([t[i] for t in tensors], [g[i] for g in grads]) for i in range(grads[0].shape[0])]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _versions(module: nn.Module) -> list[int]:
    return [buffer._version for buffer in module.buffers()]


def _random(module: nn.Module) -> CaptureError:
    return CaptureError(
        f"{type(module).__name__} owns parameters, has no rule of its own and draws random numbers, so its forward cannot be "
        "repeated for single examples. Move the dropout into a submodule of its parent, or register a rule for the layer."
    )


def tensors_of(output: Any) -> list[Tensor]:
    """The differentiable tensors in a layer's output, in a fixed order."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() or output.is_complex() else []
    if isinstance(output, dict):
        return [t for value in output.values() for t in tensors_of(value)]
    if isinstance(output, (tuple, list)):
        return [t for value in output for t in tensors_of(value)]
    return []
