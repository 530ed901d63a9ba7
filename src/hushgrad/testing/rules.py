"""Conformance of layer rules: norms and sums equal a loop of single-example backward passes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hushgrad.clipping import Capture, Flat
from hushgrad.clipping.outputs import tensors_of

Loss = Callable[[Any], Tensor]


def one_by_one(
    model: nn.Module, inputs: tuple[Any, ...], loss: Loss, *, examples: int | None = None, batch_dim: int = 0
) -> dict[str, Tensor]:
    """The oracle: per-example gradients (B, *shape) of ``loss(model(example))`` by a loop of ordinary backward passes."""
    B = inputs[0].shape[batch_dim] if examples is None else examples
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = []
    for i in range(B):
        example = [_row(v, i, B, batch_dim) for v in inputs]
        grads = torch.autograd.grad(loss(model(*example)), list(params.values()), allow_unused=True)
        rows.append([torch.zeros_like(p) if g is None else g for g, p in zip(grads, params.values(), strict=True)])
    if not rows:
        return {name: p.detach().new_zeros(0, *p.shape) for name, p in params.items()}
    return {name: torch.stack(column) for name, column in zip(params, zip(*rows, strict=True), strict=True)}


def _row(value: Any, i: int, B: int, batch_dim: int) -> Any:
    batched = isinstance(value, Tensor) and value.dim() > batch_dim and value.shape[batch_dim] == B
    return value.narrow(batch_dim, i, 1) if batched else value


def sum_of_sines(output: Any) -> Tensor:
    """A loss that is a plain sum over examples and has a different gradient at every output."""
    return sum((t.float() if t.dtype == torch.bfloat16 else t).mul(0.7).sin().sum() for t in tensors_of(output))  # type: ignore[return-value]


def check_rule(
    module_factory: Callable[[], nn.Module],
    inputs: tuple[Any, ...] | Tensor,
    *,
    loss: Loss = sum_of_sines,
    dtype: torch.dtype = torch.float64,
    tolerance: float | None = None,
    batch_dim: int = 0,
) -> None:
    """Check norms and clipped sums of the layer on these inputs: floating-point inputs and the layer are cast to ``dtype``.

    They are compared with a loop in float64, for whatever ``dtype``. ``tolerance`` bounds the error of the norms, and that of each
    parameter's sum, relative to the norm of the whole sum (or of its parts, where they cancel): 1e-12 for float64, else 1e-6 by default.

    ``inputs`` have the examples in dimension ``batch_dim``; tensors of another size there are shared by all examples. The loss
    must be a sum over examples. Raises AssertionError.

    Args:
        module_factory: makes the layer.
        inputs: of the layer, examples in dimension ``batch_dim``.
        loss: a sum over examples.
        dtype: in which the rule runs.
        tolerance: the largest relative error that passes.
        batch_dim: where the examples are.
    """
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    module = module_factory().to(dtype)
    inputs = tuple(v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for v in inputs)
    exact = module if dtype == torch.float64 else copy.deepcopy(module).double()
    exact_inputs = tuple(v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for v in inputs)
    expected = one_by_one(exact, exact_inputs, loss, batch_dim=batch_dim)
    B = inputs[0].shape[batch_dim]
    tolerance = tolerance if tolerance is not None else (1e-12 if dtype == torch.float64 else 1e-6)
    sq = sum(G.reshape(B, G[0].numel() if B else 0).square().sum(1) for G in expected.values())
    norms = sq.sqrt() if isinstance(sq, Tensor) else torch.zeros(B)
    clipper = Flat(max(float(norms.median()) if B else 1.0, 1e-3))  # half of the examples are clipped
    capture = Capture(module, loss_reduction="sum")
    capture.attach()
    try:
        capture.examples(B, dim=batch_dim)
        torch.autograd.backward(loss(module(*inputs)))
        assert all(p.grad is None for p in module.parameters()), "p.grad must stay None"
        clipped = capture.collect(clipper)
    finally:
        capture.detach()
    weights = clipper.weights(norms.square())
    sums = {name: torch.tensordot(weights.to(G.dtype), G, dims=1) for name, G in expected.items()}
    whole = torch.stack([torch.linalg.vector_norm(total) for total in sums.values()]).norm()
    # Contributions may cancel to almost nothing, of which no rounding error is a small part: then their own size counts.
    whole = torch.maximum(whole.double(), torch.linalg.vector_norm((weights * norms).double()))
    _close("norms", clipped.raw_norms, norms, tolerance, torch.linalg.vector_norm(norms))
    for name, total in sums.items():
        _close(name, clipped.raw_sums[name], total, tolerance, whole)


def _close(what: str, found: Tensor, expected: Tensor, tolerance: float, scale: Tensor) -> None:
    assert found.shape == expected.shape, f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    error = float(torch.linalg.vector_norm(found.double() - expected.double())) / max(float(scale), 1e-12)
    assert error <= tolerance, f"{what}: relative error {error:.2e} exceeds {tolerance:.0e}"
