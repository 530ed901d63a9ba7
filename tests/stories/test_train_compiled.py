"""A step under torch.compile: the number of graph breaks is known, and with batches of one size nothing is compiled a second time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo as dynamo
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hushgrad

BREAKS = 3  # where the model is called, at backward, and where the optimizer's step is released
GRAPHS = 4  # each of the two layers, the loss, and the optimizer's update


def run(*, compiled: bool) -> tuple[list[Tensor], list[dict[str, int]]]:
    """Weights after four steps, and what the compiler did in each."""
    torch.manual_seed(0)
    dynamo.reset()
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    plan = hushgrad.Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=8, dataset_size=40, steps=4, pad_to=14)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = hushgrad.make_private(model, optimizer, plan, seed=0)
    g = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(40, 6, generator=g), torch.randint(3, (40,), generator=g))

    def step(x: Tensor, y: Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    whole: Any = torch.compile(step, backend="eager") if compiled else step
    seen = []
    for x, y in private.loader(data):
        dynamo.utils.counters.clear()
        whole(x, y)
        found = dynamo.utils.counters
        seen.append({"breaks": sum(found["graph_break"].values()), "graphs": found["stats"]["unique_graphs"]})
    private.detach()
    return [p.detach().clone() for p in model.parameters()], seen


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_is_the_step_with_three_breaks_and_is_compiled_once():
    weights, seen = run(compiled=True)
    assert seen[0] == {"breaks": BREAKS, "graphs": GRAPHS}
    assert all(later == {"breaks": 0, "graphs": 0} for later in seen[1:])
    assert all(torch.equal(a, b) for a, b in zip(weights, run(compiled=False)[0], strict=True))


class _Scale(nn.Module):
    """Without a rule: its parameter meets the examples in an operation of its own, which the compiler puts together with others."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor.tanh()


class _Product(nn.Module):
    """Uses the parameters of a layer, and not the layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.layer.bias, x, self.layer.weight.t()).tanh()


class _Positions(nn.Module):
    """A table that all examples share."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.table(torch.arange(x.shape[1])).squeeze(1)).tanh()


class _Attention(nn.Module):
    """Functions with arguments that nobody has given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 4), nn.Linear(4, 4)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.unsqueeze(2))
        near = F.softmax(self.second(h) @ h.transpose(1, 2), dim=-1)
        return self.encoder(F.dropout(near @ h, 0.0))[:, :, 0]


def _trained(layer: type[nn.Module], compiled: str, remedy: str = "") -> Tensor:
    """All weights after four steps of a model with this layer."""
    torch.manual_seed(0)
    dynamo.reset()
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), layer(5), nn.Linear(5, 3))
    if remedy:
        exec(remedy, {"model": model, "torch": torch})  # what a person would paste
    plan = hushgrad.Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=8, dataset_size=40, steps=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = hushgrad.make_private(model, optimizer, plan, seed=0)
    g = torch.Generator().manual_seed(1)
    called: Any = torch.compile(model, backend=compiled) if compiled else model
    try:
        for x, y in private.loader(TensorDataset(torch.randn(40, 6, generator=g), torch.randint(3, (40,), generator=g))):
            F.cross_entropy(called(x), y).backward()
            optimizer.step()
    finally:
        private.detach()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layer", [_Scale, _Product, _Positions])
def test_what_was_compiled_together_with_the_examples_is_refused_with_a_remedy_that_works(layer):
    with pytest.raises(hushgrad.errors.CaptureError, match=r"Keep the forward that does so out of it, ") as refused:
        _trained(layer, "aot_eager")
    remedy = str(refused.value).partition("out of it, ")[2].partition(", or compile parts")[0]
    torch.testing.assert_close(_trained(layer, "aot_eager", remedy), _trained(layer, ""), rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_what_the_compiled_code_calls_by_itself_is_no_other_course(backend):
    torch.testing.assert_close(_trained(_Attention, backend), _trained(_Attention, ""), rtol=1e-5, atol=1e-6)
