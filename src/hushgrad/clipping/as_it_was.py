"""A model as it was before a check that runs it: its buffers, its flags and the random state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Inside, parameters do not require gradients; buffers, flags and random state are restored."""
    start, random = buffers_of(model), random_state()
    trainable = _trainable(model)
    for p in trainable:
        p.requires_grad = False
    try:
        with torch.enable_grad():
            yield
    finally:
        for p in trainable:
            p.requires_grad = True
        restore(model, start)
        set_random_state(random)


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that require gradients, including the whole ones that ``fully_shard`` swaps in."""
    found = [p for p in model.parameters() if p.requires_grad]
    units: Iterator[Any] = (m for m in model.modules() if hasattr(m, "unshard") and hasattr(m, "reshard"))
    for unit in units:
        unit.unshard()
        found += [p for p in unit.parameters() if p.requires_grad]
        unit.reshard()
    return found


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Copies of its buffers."""
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def restore(module: nn.Module, values: dict[str, Tensor]) -> None:
    """Put its buffers back."""
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(values[name])


def random_state() -> tuple[Tensor, list[Tensor]]:
    """Of torch's generators."""
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def set_random_state(state: tuple[Tensor, list[Tensor]]) -> None:
    """Put it back."""
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])
