"""What all examples share and the loop gives to the model: masks of infinities, on which a forward branches, and sparse matrices."""

from random import Random

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from zoo.examine import Verdict, examine
from zoo.specimen import Specimen

from hushgrad import Plan, make_private

POSITIONS, VOCABULARY = 7, 11
CAUSAL = nn.Transformer.generate_square_subsequent_mask(POSITIONS).double()
WINDOW = CAUSAL.masked_fill(torch.ones(POSITIONS, POSITIONS).tril(-3).bool(), -torch.inf)
MASKS = {"causal": CAUSAL, "causal, of truth values": CAUSAL < 0, "window": WINDOW, "zeros": torch.zeros_like(CAUSAL)}


class _Encoder(nn.Module):
    """torch's own layers, which compare the mask with a causal one."""

    def __init__(self, *, batch_first):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=batch_first)
        self.layers, self.first = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), batch_first
        self.out = nn.Linear(8, VOCABULARY)

    def forward(self, ids, mask):
        found = self.out(self.layers(self.words(ids if self.first else ids.t()), mask=mask))
        return found if self.first else found.transpose(0, 1)


def _texts(sizes):
    lot = torch.Generator().manual_seed(2)
    return [torch.randint(VOCABULARY, (POSITIONS,), generator=lot) for _ in range(sizes.batch)]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_on_which_the_forward_branches(mask, batch_first):
    def loss(model, ids):
        return F.cross_entropy(model(ids, MASKS[mask]).transpose(1, 2), ids)

    specimen = Specimen("own/mask", lambda: _Encoder(batch_first=batch_first), _texts, loss)
    assert examine(specimen).verdict is Verdict.EXACT


def _graph():
    lot = Random(5)
    return torch.tensor([[float(lot.random() < 0.5) for _ in range(POSITIONS)] for _ in range(POSITIONS)]).double()


class _Diffusion(nn.Module):
    """One graph for all examples, wherever the model keeps it."""

    def __init__(self, graph, place):
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 2)
        if place == "buffer":
            self.register_buffer("graph", graph)
        else:
            self.graph = graph

    def forward(self, x, graph=None):
        graph = self.graph if graph is None else graph
        spread = torch.sparse.mm(graph, x.transpose(0, 1).flatten(1)).unflatten(1, (len(x), -1)).transpose(0, 1)
        return self.last(self.first(spread).relu().mean(1))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("place", ["input", "buffer", "attribute"])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_matrix_that_all_share(place, layout):
    graph = _graph().to_sparse(layout=layout)
    torch.manual_seed(4)
    model, data = _Diffusion(graph, place).double(), torch.randn(5, POSITIONS, 3, dtype=torch.float64)

    def loss(x):
        return model(x, *([graph] if place == "input" else ())).square().sum(1).mean()

    weights = [p.detach().clone() for p in model.parameters()]
    single = [torch.autograd.grad(loss(one[None]), list(model.parameters())) for one in data]
    norms = [sum(float(g.square().sum()) for g in one) ** 0.5 for one in single]
    plan = Plan.dpgd(noise_multiplier=1e-13, delta=1e-5, dataset_size=len(data), steps=3, max_grad_norm=min(norms) / 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    private = make_private(model, optimizer, plan)
    for (x,) in private.loader(TensorDataset(data)):
        optimizer.zero_grad()
        loss(x).backward()
        optimizer.step()
        if private.steps == 1:
            stepped = [p.detach().clone() for p in model.parameters()]
    private.detach()
    for k, (before, after) in enumerate(zip(weights, stepped, strict=True)):
        clipped = sum(g[k] * (min(norms) / 2 / norm) for g, norm in zip(single, norms, strict=True))
        torch.testing.assert_close((before - after) * len(data), clipped, rtol=1e-6, atol=1e-9)
