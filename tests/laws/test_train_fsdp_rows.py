"""Under ``fully_shard`` a row is an example's because its gradient says so: never because there are as many rows as examples."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from hushgrad.errors import CaptureError, NotIsolated
from hushgrad.train import Plan, make_private

dist = pytest.importorskip("torch.distributed")


@pytest.fixture(scope="module")
def mesh():
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class _Shared(nn.Module):
    """A layer on a constant of so many rows, that all examples use."""

    def __init__(self, rows: int, how: str) -> None:
        super().__init__()
        self.shared, self.out, self.how = nn.Linear(6, 6), nn.Linear(6, 4), how
        constant = torch.ones(rows, 6) if how == "alike" else torch.randn(rows, 6)
        self.register_buffer("constant", constant)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.shared(self.constant)
        if self.how == "products":
            return self.out(x + F.softmax(x @ rows.T, -1) @ rows)
        return self.out(x * (rows.softmax(0).cumsum(0)[-1] if self.how == "softmax" else rows.mean(0)))


class _Own(_Shared):
    """The same rows, one for each example: as positions of (B, T) are."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x * self.shared(self.constant[:1].expand(len(x), -1)))


class _Tied(nn.Module):
    """A layer whose weight is used once more, beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(6, 5), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.linear(self.inner(x).tanh(), self.inner.weight.t()))


def _released(model: nn.Module, x: Tensor, y: Tensor, clip: float) -> Tensor:
    plan = Plan.dpgd(noise_multiplier=0.0, delta=1e-5, dataset_size=len(x), steps=1, max_grad_norm=clip)
    private = make_private(model, torch.optim.SGD(model.parameters(), lr=1.0), plan, seed=0)
    before = [p.full_tensor().detach().clone() for p in model.parameters()]
    loss = private.loss(F.cross_entropy)
    try:
        for bx, by in private.loader(TensorDataset(x, y)):
            loss(model(bx), by).backward()
            private.optimizer.step()
    finally:
        private.detach()
    return torch.cat([(b - p.full_tensor().detach()).flatten() for b, p in zip(before, model.parameters(), strict=True)]) * len(x)


def _sharded(model: nn.Module, mesh) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=mesh)


def _data(examples: int, seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(examples, 6), torch.randint(4, (examples,))


@pytest.mark.parametrize("how", ["mean", "softmax", "products", "alike"])
def test_rows_that_all_examples_use_are_nobodys_however_many_they_are(mesh, how):
    """With as many rows as examples each row's gradient was taken for one example's: one record moved the sum by 1.7 C."""
    for seed in range(3):
        examples = random.Random(seed).randint(2, 9)
        for rows in (examples, examples + 1):
            with pytest.raises((NotIsolated, CaptureError), match="fully_shard"):
                _released(_sharded(_Shared(rows, how), mesh), *_data(examples, seed), 0.1)


def test_a_use_beside_the_layer_is_not_lost(mesh):
    """The check's passes came first, without gradients, and whole tensors kept that: what a weight gave elsewhere was left out."""
    with pytest.raises(CaptureError, match=r"inner\.weight got a gradient"):
        _released(_sharded(_Tied(), mesh), *_data(5, 0), 0.1)


def test_rows_of_each_example_are_its_own(mesh):
    x, y = _data(5, 1)
    torch.manual_seed(2)
    model = _Own(3, "mean")
    alone = []
    for i in range(len(x)):
        found = torch.autograd.grad(F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), [*model.parameters()])
        alone.append(torch.cat([g.flatten() for g in found]))
    expected = sum(g * min(1.0, 0.1 / float(g.norm())) for g in alone)
    torch.testing.assert_close(_released(_sharded(model, mesh), x, y, 0.1), expected, rtol=1e-4, atol=1e-6)


class _Capacity(nn.Module):
    """Experts with so many places, taken in turn; or an example that counts if none before it is larger."""

    def __init__(self, places: int | None) -> None:
        super().__init__()
        self.expert, self.out, self.places = nn.Linear(6, 6), nn.Linear(6, 4), places

    def forward(self, x: Tensor) -> Tensor:
        asks = x[:, :1] > 0
        kept = x[:, :1] >= x[:, :1].cummax(0).values if self.places is None else asks & (asks.long().cumsum(0) <= self.places)
        return self.out(x + self.expert(x) * kept)


@pytest.mark.parametrize("places", [1, 3, None])
def test_places_that_are_taken_in_turn_are_noticed(mesh, places):
    """Only the first example was compared: it is the one whom nobody's place is taken from."""
    for seed in range(3):
        x, y = _data(8, seed)
        with pytest.raises(NotIsolated):
            _released(_sharded(_Capacity(places), mesh), x.where(torch.tensor(seed > 0), x.abs()), y, 0.1)


class _Bare(nn.Module):
    """Owns a parameter itself, beside its layers, and perhaps asks for a value."""

    def __init__(self, *, asks: bool) -> None:
        super().__init__()
        self.own, self.inner, self.out, self.asks = nn.Parameter(torch.randn(6, 6)), nn.Linear(6, 6), nn.Linear(6, 4), asks

    def forward(self, x: Tensor) -> Tensor:
        factor = 1.0 + 0.0 * float(x.detach().sum()) if self.asks else 1.0
        return self.out(self.inner(x @ self.own).tanh()) * factor


def _weights_after_a_step(model: nn.Module, data: TensorDataset) -> Tensor:
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=1.0)
    plan = Plan.dpgd(noise_multiplier=1e-9, delta=1e-5, dataset_size=6, steps=2, max_grad_norm=0.5)
    private = make_private(model, optimizer, plan, seed=0)
    loss = private.loss(F.cross_entropy)
    try:
        for x, y in private.loader(data):
            loss(model(x), y).backward()
            optimizer.step()
    finally:
        private.detach()
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in params)
    return torch.cat([p.detach().flatten() for p in whole])


def test_a_sharded_module_that_owns_parameters_is_read_as_a_whole_one(mesh):
    """A hook of the run's own losses failed inside of vmap; the pass inside of the pass that came instead read freed memory."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    data, made = TensorDataset(torch.randn(6, 6), torch.randint(4, (6,))), []
    for sharded in (False, True):
        torch.manual_seed(1)
        model = _Bare(asks=False)
        made.append(_weights_after_a_step(fully_shard(model, mesh=mesh) if sharded else model, data))
    torch.testing.assert_close(made[1], made[0], rtol=0, atol=1e-5)


def test_one_that_asks_for_values_is_refused_before_it_reads_freed_memory(mesh):
    from torch.distributed.fsdp import fully_shard

    data = TensorDataset(torch.randn(6, 6), torch.randint(4, (6,)))
    with pytest.raises(CaptureError, match="sharded by fully_shard itself"):
        _weights_after_a_step(fully_shard(_Bare(asks=True), mesh=mesh), data)


class _Moved(nn.Module):
    """Words whose rows a layer gets by position, or sorted; or in their places, in an order of the layer's own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.e, self.a, self.out, self.how = nn.Embedding(12, 6), nn.Linear(6, 6), nn.Linear(6, 4), how
        self.rnn = nn.GRU(6, 6)

    def forward(self, words: Tensor) -> Tensor:
        x = self.e(words)
        if self.how == "time first":
            return self.out(self.a(x.transpose(0, 1)).tanh().transpose(0, 1).mean(1))
        if self.how == "sorted":
            order = words[:, 0].argsort(descending=True)
            return self.out(self.a(x.mean(1)[order]).tanh()[order.argsort()])
        return self.out(self.a(self.rnn(x.transpose(0, 1))[0][-1]))


@pytest.mark.parametrize("how", ["time first", "sorted", "kept"])
def test_rows_of_a_layer_within_the_model_are_the_examples_in_their_order(mesh, how):
    """As many positions as examples, or sorted examples, were read as the examples: one record moved the sum by 3.7 C, and 2.1 C."""
    torch.manual_seed(0)
    words = torch.stack([(torch.arange(6) * 5 + k) % 12 for k in range(6)])
    model = _sharded(_Moved(how).requires_grad_(True), mesh)
    if how != "kept":
        model.rnn.requires_grad_(False)
        with pytest.raises(NotIsolated, match="row i is not example i's"):
            _released(model, words, torch.zeros(6, dtype=torch.int64), 1e-3)
    else:
        assert float(_released(model, words[:6], torch.zeros(6, dtype=torch.int64), 1e-3).norm()) <= 6.001e-3
