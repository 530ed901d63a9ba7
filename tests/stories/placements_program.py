"""Steps of every kind, for one placement of the parameters; the program that ``test_release_placements`` starts.

A case is a model, a plan and a way to run its batches. ``main`` runs all of them where it is: in one process or in several,
with whole parameters or with sharded ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import hushgrad.release.placement.sharded_sums as sharded_sums
from hushgrad.clipping import Adaptive, Automatic, PerLayer
from hushgrad.denoise import SVRG, Chain, ExponentialAverage, Kalman, Laplacian, ScaleThenPrivatise
from hushgrad.errors import HushgradError
from hushgrad.events import Relation
from hushgrad.noise import BLT, Banded, Tree
from hushgrad.train import Box, Plan, make_private

WIDTH, KINDS, RECORDS = 6, 5, 24


class Twice(nn.Module):
    """``times`` layers on one weight, or one layer called so often: the parts of its gradient are equal, so they add up."""

    def __init__(self, times: int, *, layers: bool):
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, KINDS)
        first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.many = nn.ModuleList([first, *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(times - 1 if layers else 0))])
        for other in self.many:
            other.weight = first.weight
        self.times = 1 if layers else times

    def forward(self, x):
        x = self.enter(x)
        for _ in range(self.times):
            x = x + sum(layer(x) for layer in self.many)
        return self.leave(x)


class Language(nn.Module):
    """An embedding, tied to the head or not."""

    def __init__(self, *, tied: bool):
        super().__init__()
        self.table, self.inner = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=not tied)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.inner(self.table(ids))))


class Plain(nn.Module):
    """Seven rows do not divide by two, and ``gate`` has one row: other processes hold nothing of it."""

    def __init__(self):
        super().__init__()
        self.enter, self.norm, self.gate, self.leave = nn.Linear(WIDTH, 7), nn.LayerNorm(7), nn.Linear(7, 1), nn.Linear(7, KINDS)

    def forward(self, x):
        x = torch.relu(self.norm(self.enter(x)))
        return self.leave(x * self.gate(x).sigmoid())


class Around(Plain):
    """Uses a weight without calling the layer that owns it."""

    def forward(self, x):
        return super().forward(x) + nn.functional.linear(x, self.enter.weight)[:, :KINDS]


def _dpsgd(**options: Any) -> Plan:
    common = {"noise_multiplier": 0.5, "delta": 1e-5, "batch_size": 6, "dataset_size": RECORDS, "steps": 4, "max_grad_norm": 0.3}
    return Plan.dpsgd(**{**common, **options})


def _dpftrl(noise: Any) -> Plan:
    return Plan.dpftrl(
        noise_multiplier=0.5, delta=1e-5, batch_size=6, dataset_size=RECORDS, epochs=2, max_grad_norm=0.3, noise=noise
    )


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    plan: Callable[[], Plan] = _dpsgd
    micro: int = 1000
    users: bool = False
    lazy: bool = False
    dtype: torch.dtype = torch.float32
    close: float = 1e-6  # how far weights may differ between placements
    contributes: float | None = 1.0  # what one record with a large gradient moves the sum by, in clip norms

    @property
    def language(self) -> bool:
        return isinstance(self.model(), Language)


CASES: dict[str, Case] = {
    "plain": Case(lambda: Plain()),
    "micro-batches": Case(lambda: Plain(), micro=2),
    "tied twice": Case(lambda: Twice(2, layers=True)),
    "tied nine times": Case(lambda: Twice(9, layers=True)),
    "called twice": Case(lambda: Twice(2, layers=False)),
    "called six times": Case(lambda: Twice(6, layers=False), micro=3),
    "tied embedding": Case(lambda: Language(tied=True)),
    "tied embedding, micro-batches": Case(lambda: Language(tied=True), micro=2),
    "embedding": Case(lambda: Language(tied=False)),
    "users": Case(lambda: Plain(), lambda: _dpsgd(unit="user"), users=True),
    "users, micro-batches, tied": Case(lambda: Twice(2, layers=True), lambda: _dpsgd(unit="user"), users=True, micro=2),
    "per layer": Case(lambda: Plain(), lambda: _dpsgd(clip=PerLayer(0.3))),
    "automatic": Case(lambda: Plain(), lambda: _dpsgd(clip=Automatic(0.3)), contributes=None),
    "adaptive": Case(lambda: Plain(), lambda: _dpsgd(clip=Adaptive(0.3, batch_size=6)), contributes=None),
    "adaptive, tied, micro-batches": Case(
        lambda: Twice(2, layers=True), lambda: _dpsgd(clip=Adaptive(0.3, batch_size=6)), micro=2, contributes=None
    ),
    "kalman": Case(lambda: Plain(), lambda: _dpsgd(denoise=Kalman(0.6)), contributes=None),
    "kalman, tied": Case(lambda: Twice(2, layers=True), lambda: _dpsgd(denoise=Kalman(0.6)), contributes=None),
    "svrg": Case(lambda: Plain(), lambda: _dpsgd(denoise=SVRG(period=3)), contributes=None),
    "chain": Case(
        lambda: Plain(),
        lambda: _dpsgd(denoise=Chain([SVRG(period=3), Laplacian(0.5), ExponentialAverage(0.5)])),
        contributes=None,
    ),
    "scaled": Case(
        lambda: Twice(2, layers=True), lambda: _dpsgd(denoise=ScaleThenPrivatise(beta=0.5)), micro=2, contributes=None
    ),
    "average and box": Case(lambda: Plain(), lambda: _dpsgd(average="tail", projection=Box(-0.4, 0.4)), contributes=None),
    "blt": Case(lambda: Plain(), lambda: _dpftrl(BLT(buffers=2))),
    "banded": Case(lambda: Language(tied=True), lambda: _dpftrl(Banded(bands=2))),
    "tree": Case(lambda: Plain(), lambda: _dpftrl(Tree()), micro=2),
    "double": Case(lambda: Twice(2, layers=True), dtype=torch.float64),
    "half": Case(lambda: Language(tied=False), dtype=torch.bfloat16, close=2e-2, contributes=None),
    "certified": Case(lambda: Plain(), lambda: _dpsgd(certified=True), micro=4),
    "certified, users, micro-batches": Case(
        lambda: Twice(2, layers=True), lambda: _dpsgd(certified=True, unit="user"), users=True, micro=2
    ),
    "secure": Case(lambda: Plain(), lambda: _dpsgd(secure=True), close=1e-3, contributes=None),
    "secure, tied, adaptive, micro-batches": Case(
        lambda: Language(tied=True),
        lambda: _dpsgd(secure=True, clip=Adaptive(0.3, batch_size=6)),
        micro=2,
        close=1e-3,  # another order of additions may round to the next point of the grid
        contributes=None,
    ),
    "around": Case(lambda: Around()),
    "lazy": Case(lambda: Language(tied=False), lazy=True, contributes=None),
}


def data(case: Case, scale: float = 1.0) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    if case.language:
        return TensorDataset(
            torch.randint(11, (RECORDS, 4), generator=generator), torch.randint(11, (RECORDS, 4), generator=generator)
        )
    x = scale * torch.randn(RECORDS, WIDTH, generator=generator, dtype=torch.float64)
    return TensorDataset(x.to(case.dtype), torch.randint(KINDS, (RECORDS,), generator=generator))


def model_of(case: Case, *, sharded: bool) -> nn.Module:
    torch.manual_seed(3)
    model = case.model().to(case.dtype)
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor, *, summed: bool) -> torch.Tensor:
    scores = model(x).double().flatten(0, -2)
    if summed:
        return nn.functional.cross_entropy(scores, y.flatten(), reduction="sum") / y[:1].numel()
    return nn.functional.cross_entropy(scores, y.flatten())


def run(case: Case, plan: Plan, dataset: TensorDataset, *, sharded: bool, rate: float = 0.1) -> dict[str, Any]:
    """All steps of the plan; weights, norms, the clip norm at the end."""
    model = model_of(case, sharded=sharded)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    summed = {"loss_reduction": "sum"} if plan.certified else {}
    about = {"key": bytes(range(32)), "check_isolation": False, "lazy_tables": case.lazy, **summed}
    private = make_private(model, optimizer, plan, **about)
    groups = torch.arange(len(dataset)) // 3 if case.users else None
    norms: list[float] = []
    for batch in private.loader(dataset, groups=groups) if case.users else private.loader(dataset):

        def closure(batch=batch):
            optimizer.zero_grad()
            for x, y in private.split(batch, case.micro):
                if len(x) or private.spread:
                    _loss(model, x, y, summed=bool(summed)).backward()

        if plan.denoise is not None and plan.denoise.needs_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        norms += private.raw_norms.tolist()
    state = model.state_dict()
    found = {"weights": _flat(state.values()), "norms": sorted(norms), "clip": plan_norm(private), "rejected": private.rejected}
    if plan.average is not None:
        with private.averaged():
            found["average"] = _flat(model.parameters())
    private.detach()
    return found


def plan_norm(private: Any) -> float:
    return private.clip.sensitivity(Relation.ADD_REMOVE)


def _flat(tensors: Any) -> list[float]:
    whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]
    return torch.cat([t.detach().double().flatten() for t in whole]).tolist()


def contribution(case: Case, *, sharded: bool) -> float:
    """What a single record, whose gradient is far above the clip norm, moves the sum by; in clip norms, without noise."""
    plan = case.plan()
    unit = {"unit": "user"} if case.users else {}
    unit |= {"certified": plan.certified}
    alone = Plan.dpgd(noise_multiplier=0.0, delta=1e-5, dataset_size=1, steps=1, clip=_tiny(plan.clip), **unit)
    dataset = data(case, scale=3.0)
    one = TensorDataset(*(t[: 3 if case.users else 1] for t in dataset.tensors))
    after = run(case, alone, one, sharded=sharded, rate=1.0)["weights"]
    before = _flat(model_of(case, sharded=sharded).state_dict().values())
    moved = torch.tensor(after, dtype=torch.float64) - torch.tensor(before, dtype=torch.float64)
    return float(_unique(case, moved).norm()) / alone.max_grad_norm


def _unique(case: Case, moved: torch.Tensor) -> torch.Tensor:
    """Each parameter once: a state dict repeats tied ones."""
    model = model_of(case, sharded=False)
    seen, kept, start = set(), [], 0
    for tensor in model.state_dict(keep_vars=True).values():
        if id(tensor) not in seen:
            kept.append(moved[start : start + tensor.numel()])
        seen.add(id(tensor))
        start += tensor.numel()
    return torch.cat(kept)


def _tiny(clip: Any) -> Any:
    return type(clip)(1e-3)


def one(case: Case, *, sharded: bool) -> dict[str, Any]:
    try:
        found = run(case, case.plan(), data(case), sharded=sharded)
        if case.contributes is not None:
            found["contributes"] = contribution(case, sharded=sharded)
    except HushgradError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    return found


def main(options: dict[str, Any]) -> dict[str, Any]:
    sharded_sums.BUCKET = 60  # several buckets in a small model
    return {name: one(case, sharded=options["sharded"]) for name, case in CASES.items()}
