"""How large the terms are that a number is the sum of: its rounding follows them, not what they leave.

Two passes over other numbers of examples add in another order. Where the terms of an output cancel (all inputs alike, one output, by chance
a sum of nearly 0), what is left differs by more than any part of itself, though nobody influences anybody.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from hushgrad.clipping._torch import accumulated
from hushgrad.clipping.proof.fixed_randomness import randomness_fixed
from hushgrad.clipping.proof.graph import Graph
from hushgrad.clipping.runs import largest, same

__all__ = ["same_as_made"]


def same_as_made(made: Tensor, again: Tensor, *, scale: float | None = None) -> bool:
    """Whether ``again`` equals a pass's output, up to rounding of what it was made of; ``made`` has its graph.

    Args:
        made: some of the output.
        again: the same, of another pass.
        scale: how large numbers are of which these are a part.
    """
    found = made.detach()
    scale = largest(found) if scale is None else scale
    if same(found, again, scale=scale):
        return True
    if not made.requires_grad or made.shape != again.shape:
        return False
    worst = (found.double() - again.detach().double()).nan_to_num(0, 0, 0).abs().argmax()
    return same(found, again, scale=max(scale, _terms(made.flatten()[worst])))


def _terms(y: Tensor) -> float:
    """How far a number moves when each parameter moves at random, in relation to its own size; 0 if that is no number."""
    leaves = [leaf for node in Graph([get_gradient_edge(y)]).nodes if (leaf := accumulated(node)) is not None]
    with randomness_fixed():
        grads = torch.autograd.grad(y, leaves, retain_graph=True, allow_unused=True)
    parts = [(g.to_dense() * leaf.detach()).abs() for g, leaf in zip(grads, leaves, strict=True) if g is not None]
    size = math.hypot(*(float(part.double().norm()) for part in parts))
    return size if math.isfinite(size) else 0.0
