"""Trial passes: on some examples alone and together, without a trace in the model or in the random state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hushgrad.clipping.proof.fixed_randomness import FixedRandomness, as_it_was

_DRAWN = {torch.ops.aten.randint, torch.ops.aten.randint_like, torch.ops.aten.random_}


class Constant(FixedRandomness):
    """Replaces every random number by one constant (integers by the least possible), so that an example draws the same alone and together.

    Random numbers for each example (noise, the time of a diffusion) then do not depend on others. A permutation stays random: it mixes.
    """

    def __init__(self) -> None:
        super().__init__(uniform=0.4, normal=0.7)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if func.overloadpacket not in _DRAWN:
            return made
        bounds = [bound for bound in args if type(bound) is int]  # (high) or (low, high)
        return made.fill_(bounds[0] if len(bounds) > 1 else 0)


def packing(model: nn.Module) -> list[nn.Module]:
    """Layers with quantised frozen weights: bitsandbytes repacks them for a pass outside of training."""
    return [m for m in model.modules() if any(not p.is_floating_point() for p in m.parameters(recurse=False))]


@contextmanager
def aside(model: nn.Module) -> Iterator[None]:
    """A pass without a trace: no gradients, no dropout; buffers, attributes, random states and the modules' modes are restored."""
    packed = set(packing(model))
    training = [module for module in model.modules() if module.training and module not in packed]
    with as_it_was(model), torch.no_grad():
        try:
            for module in training:
                module.training = False
            yield
        finally:
            for module in training:
                module.training = True
