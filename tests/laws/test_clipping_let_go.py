"""What a pass holds is let go of: a proof keeps no activations, nor per-example gradients, of any of its passes."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from hushgrad.clipping import Capture, Flat


class Shared(nn.Module):
    """Its position table is read at the frontier, and its head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.position = nn.Parameter(torch.randn(5, 6))
        self.inner = nn.Linear(6, 6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.inner(self.table(ids) + self.position))
        return x @ self.table.weight.t()


MODELS = {
    "layers": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), lambda: torch.randn(4, 5, 6)),
    "shared": (Shared, lambda: torch.randint(7, (4, 5))),
}


@pytest.mark.parametrize("name", MODELS)
def test_nothing_of_a_pass_outlives_its_step(name: str) -> None:
    torch.manual_seed(0)
    make, data = MODELS[name]
    model = make()
    made: list[weakref.ref[torch.Tensor]] = []
    for module in model.modules():
        module.register_forward_hook(lambda _module, _args, output: made.append(weakref.ref(output)))
    capture = Capture(model)
    capture.attach()
    for _ in range(2):
        model(data()).pow(2).mean((1, 2)).mean().backward()
        capture.collect(Flat(1.0))
        gc.collect()  # it does not see circles through the graph
        assert made
        assert not [tuple(found.shape) for each in made if (found := each()) is not None]
