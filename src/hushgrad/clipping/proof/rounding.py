"""Compares outputs relative to the size of the terms that they were summed from, since rounding errors scale with those.

Two passes over different numbers of examples add in different orders. Where the terms of an output cancel (equal inputs, a sum that happens
to be close to 0), the results differ by more than any relative tolerance, though no example influences another.
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


def same_as_made(made: Tensor, again: Tensor, *, scale: float | None = None) -> bool:
    """Whether ``again`` equals a pass's output up to the rounding of its terms.

    Args:
        made: a part of the output, with its graph.
        again: the same part in another pass.
        scale: the size of the numbers that it is a part of.
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
    """How far a number moves if each parameter moves by a random fraction of itself: about the size of its terms; 0 if not finite."""
    leaves = [leaf for node in Graph([get_gradient_edge(y)]).nodes if (leaf := accumulated(node)) is not None]
    with randomness_fixed():
        grads = torch.autograd.grad(y, leaves, retain_graph=True, allow_unused=True)
    parts = [(g.to_dense() * leaf.detach()).abs() for g, leaf in zip(grads, leaves, strict=True) if g is not None]
    size = math.hypot(*(float(part.double().norm()) for part in parts))
    return size if math.isfinite(size) else 0.0
