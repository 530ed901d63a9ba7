"""Batches that are filled up to a public size: the same sums, counts and norms, and on a device the same operations in every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hushgrad
from hushgrad import clipping, events, noise
from hushgrad.clipping.batch_invariance import invariant_rows
from hushgrad.errors import ArgumentError
from hushgrad.sampling import Units
from hushgrad.testing import devices

N, STEPS, ROOM = 40, 7, 14


class Tokens(nn.Module):
    """Two tables, of which one may be the head, too."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.table, self.places, self.norm = nn.Embedding(11, 8), nn.Embedding(5, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids) + self.places(torch.arange(ids.shape[1], device=ids.device).expand(ids.shape))
        return self.head(torch.tanh(self.norm(h)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def features(*shape: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    return lambda g: (torch.randn(N, *shape, generator=g), torch.randint(3, (N,), generator=g))


def ids(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randint(11, (N, 5), generator=g), torch.randint(11, (N, 5), generator=g)


def token_loss(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1).mean()


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module] = mlp
    data: Callable[[torch.Generator], tuple[Tensor, Tensor]] = field(default_factory=lambda: features(6))
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    plan: dict[str, Any] = field(default_factory=dict)
    micro: int | None = None
    users: bool = False
    own_loss: bool = False


USERS = {"unit": "user", "batch_size": 3, "dataset_size": 10, "pad_to": 6}
CASES = {
    "mlp": Case(),
    "images": Case(model=images, data=features(2, 4, 4)),
    "text": Case(model=Tokens, data=ids, loss=token_loss),
    "tied": Case(model=lambda: Tokens(tied=True), data=ids, loss=token_loss),
    "micro-batches": Case(micro=5),
    "adaptive": Case(plan={"clip": clipping.Adaptive(0.5, batch_size=8, count_noise=2.0)}),
    "per layer": Case(plan={"clip": clipping.PerLayer(0.5)}),
    "host draws": Case(plan={"cipher": "aes256"}),
    "users": Case(plan=USERS, users=True),
    "private.loss": Case(own_loss=True),
}


def plan_of(case: Case, *, padded: bool = True) -> hushgrad.Plan:
    options: dict[str, Any] = {"batch_size": 8, "dataset_size": N, "pad_to": ROOM, "cipher": "chacha20", **case.plan}
    if not padded:
        sampler = hushgrad.Plan.dpsgd(noise_multiplier=0.7, delta=1e-5, steps=STEPS, **options).sampler
        options |= {"pad_to": None, "sampling": sampler}
    return hushgrad.Plan.dpsgd(noise_multiplier=0.7, delta=1e-5, steps=STEPS, **options)


def trained(case: Case, *, there: bool, padded: bool = True) -> dict[str, Any]:
    """Weights, what is read in every step, and on the device the trace of every step."""
    torch.manual_seed(0)
    read: dict[str, Any] = {"norms": [], "traces": [], "sizes": []}
    with devices.pretend() as device:
        model = case.model()
        if there:
            device.put(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        private = hushgrad.make_private(model, optimizer, plan_of(case, padded=padded), seed=0, check_isolation=False)
        loss = private.loss(case.loss) if case.own_loss else case.loss
        groups = {"groups": Units([i // 4 for i in range(N)], examples=N, cap=4)} if case.users else {}
        kind = "pretend" if there else "cpu"
        for batch in private.loader(TensorDataset(*case.data(torch.Generator().manual_seed(1))), **groups):
            with device.counting() as meter:
                for part in batch.split(case.micro) if case.micro else [batch]:
                    x, y = (t.to(kind) for t in part)
                    loss(model(x), y).backward()
                optimizer.step()
            read["traces"].append(meter.trace)
            read["sizes"].append(batch.examples - batch.padding)
            read["norms"].append(devices.on_host(private.raw_norms).clone())
        read |= {"rejected": private.rejected, "clip": private.clip.sensitivity(events.Relation.ADD_REMOVE)}
        private.detach()
        return read | {"weights": [devices.on_host(p.detach()).clone() for p in model.parameters()]}


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert all(torch.allclose(u, v, atol=1e-6) for u, v in zip(a["weights"], b["weights"], strict=True))
    assert all(u.shape == v.shape and torch.allclose(u, v, rtol=1e-4) for u, v in zip(a["norms"], b["norms"], strict=True))
    assert a["rejected"] == b["rejected"] == 0 and a["clip"] == pytest.approx(b["clip"], rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_batch_that_is_filled_up_is_the_batch_and_every_step_is_the_same_graph(name):
    case = CASES[name]
    plain, here, there = (
        trained(case, there=there, padded=padded) for there, padded in ((False, False), (False, True), (True, True))
    )
    same(here, plain)
    same(there, plain)
    assert len(set(there["sizes"])) > 3
    # Steps 3, 5, 6, 7: the first makes constants, and in steps 1, 2, 4, 8, ... parameters are compared by value.
    third, *others = (there["traces"][k] for k in (2, 4, 5, 6))
    assert len(third) > 30 and all(trace == third for trace in others)


def test_without_it_shapes_change():
    third, *others = (trained(CASES["mlp"], there=True, padded=False)["traces"][k] for k in (2, 4, 5, 6))
    assert any(trace != third for trace in others)


def test_a_record_that_is_no_number_counts_once_however_often_it_fills_up():
    def count(there: bool) -> tuple[int, Tensor]:
        def spoilt(g: torch.Generator) -> tuple[Tensor, Tensor]:
            x, y = features(6)(g)
            x[::2] = torch.nan
            return x, y

        read = trained(Case(data=spoilt), there=there)
        return read["rejected"], read["weights"][0]

    here, weights = count(False)
    rejected, theirs = count(True)
    assert rejected == here > 0 and torch.allclose(weights, theirs, atol=1e-6)


def test_fit_tells_the_same_of_batches_that_are_filled_up():
    def told(*, padded: bool, size: int | None) -> list[dict[str, Any]]:
        torch.manual_seed(0)
        model, steps = mlp(), []
        plan = plan_of(Case(), padded=padded)
        data = TensorDataset(*features(6)(torch.Generator().manual_seed(1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        options: dict[str, Any] = {"seed": 0, "max_physical_batch": size, "progress": False, "callbacks": [steps.append]}
        hushgrad.fit(model, F.cross_entropy, optimizer, data, plan, **options)
        return steps

    expected = told(padded=False, size=None)
    for size in (None, 3):  # with 3, some parts are filled up altogether
        for step, other in zip(expected, told(padded=True, size=size), strict=True):
            assert step == pytest.approx(other, rel=1e-5)


def test_copies_and_certified_runs_are_filled_up_too():
    class Noisy(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
        def __len__(self) -> int:
            return N

        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            return torch.full((6,), float(i)) + torch.randn(6), torch.tensor(i % 3)

    for options, rows in (({"augmentations": 2}, 2 * ROOM), ({"certified": True}, invariant_rows(torch.get_num_threads()))):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        private = hushgrad.make_private(
            model, optimizer, plan_of(Case(plan={"cipher": None, **options})), seed=0, check_isolation=False
        )
        loss = private.loss(F.cross_entropy)
        for x, y in private.loader(Noisy()):
            assert x.shape == (rows, 6)
            loss(model(x), y).backward()
            optimizer.step()
            assert len(private.raw_norms) <= ROOM
        private.detach()


def test_truncation_is_counted_and_what_has_no_largest_batch_is_refused():
    plan = plan_of(CASES["mlp"])
    assert isinstance(plan.participation, events.TruncatedPoisson) and plan.participation.size == ROOM
    assert (
        plan.guarantee().epsilon
        > hushgrad.Plan.dpsgd(noise_multiplier=0.7, delta=1e-5, steps=STEPS, batch_size=8, dataset_size=N).guarantee().epsilon
    )
    assert hushgrad.Plan.from_json(plan.to_json()) == plan
    common: dict[str, Any] = {"noise_multiplier": 1.0, "delta": 1e-5, "batch_size": 8, "dataset_size": N}
    with pytest.raises(ArgumentError, match="pad_to=14"):
        hushgrad.Plan.dpsgd(**common, epochs=1, sampling="balls_in_bins", pad_to=14)
    with pytest.raises(ArgumentError, match="at least the sampler's largest batch of 8"):
        hushgrad.Plan.dpftrl(**common, epochs=1, noise=noise.BLT(buffers=2), pad_to=7)
    users = hushgrad.make_private(
        model := nn.Linear(6, 3), torch.optim.SGD(model.parameters(), lr=0.1), plan_of(CASES["users"]), seed=0
    )
    with pytest.raises(ArgumentError, match="cap"):
        users.loader(TensorDataset(torch.randn(N, 6)), groups=[i // 4 for i in range(N)])
