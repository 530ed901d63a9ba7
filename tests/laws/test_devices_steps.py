"""A private step on an accelerator is the step in main memory: every clipper, rule, mechanism, denoiser and unit, on a pretend device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hushgrad
from hushgrad import clipping, denoise, noise
from hushgrad.events import Relation
from hushgrad.testing import devices

N, B, STEPS = 24, 8, 3


class Tokens(nn.Module):
    """Embedding, positions, a block, a head that may share the table."""

    def __init__(self, *, tied: bool = False, padding: int | None = None) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(11, 8, padding_idx=padding), nn.Embedding(5, 8)
        self.norm, self.attend = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids) + self.places(torch.arange(ids.shape[1], device=ids.device).expand(ids.shape))
        h = self.norm(h)
        return self.head(h + self.attend(h, h, h, need_weights=False)[0])


class Sequences(nn.Module):
    """A recurrent layer and its last state."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layer, self.head = kind(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 6, device=x.device, dtype=x.dtype)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.head(h)


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(11, 6, mode="mean"), nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.bag(ids))


class Own(nn.Module):
    """A parameter of its own, which no rule knows, and a shared bias."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.linspace(0.5, 1.5, 6)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x * self.scale))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))


def images(*layers: nn.Module, out: int) -> nn.Module:
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(out, 3))


def features(*shape: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    return lambda g: (torch.randn(N, *shape, generator=g), torch.randint(3, (N,), generator=g))


FEATURES = features(6)


def ids(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randint(11, (N, 5), generator=g), torch.randint(11, (N, 5), generator=g)


def bags(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randint(11, (N, 5), generator=g), torch.randint(3, (N,), generator=g)


def token_loss(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1).mean()


def summed(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="sum")


def sgd(params: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.2)


def adam(params: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-2)


def plan(**options: Any) -> hushgrad.Plan:
    make = hushgrad.Plan.dpftrl if isinstance(options.get("noise"), noise.Mechanism) else hushgrad.Plan.dpsgd
    if "clip" not in options:
        options["max_grad_norm"] = 0.5
    if not options.get("secure"):
        options.setdefault("cipher", "chacha20")
    sizes = {"batch_size": B, "dataset_size": N, **options.pop("sizes", {})}
    return make(noise_multiplier=0.7, delta=1e-5, steps=STEPS, **sizes, **options)


@dataclass(frozen=True)
class Case:
    """A run of three steps."""

    model: Callable[[], nn.Module] = mlp
    data: Callable[[torch.Generator], tuple[Tensor, Tensor]] = FEATURES
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    plan: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[..., torch.optim.Optimizer] = sgd
    micro: int | None = None
    closure: bool = False
    users: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    dtype: torch.dtype = torch.float32
    close: float = 1e-6


TEXT: dict[str, Any] = {"model": Tokens, "data": ids, "loss": token_loss}
USERS: dict[str, Any] = {"users": True, "plan": {"unit": "user", "sizes": {"batch_size": 3, "dataset_size": 6}}}
CASES = {
    "mlp": Case(options={"check_isolation": True}),
    "adam": Case(optimizer=adam),
    "drawn by the host": Case(plan={"cipher": "aes256"}),
    "micro-batches": Case(micro=3),
    "text": Case(**TEXT),
    "tied": Case(**TEXT | {"model": lambda: Tokens(tied=True)}),
    "padding": Case(**TEXT | {"model": lambda: Tokens(padding=3)}),
    "bags": Case(model=Bags, data=bags),
    "lstm": Case(model=lambda: Sequences(nn.LSTM), data=features(5, 4)),
    "gru cell": Case(model=Cells, data=features(4, 4)),
    "own parameter": Case(model=Own),
    "conv1d": Case(model=lambda: images(nn.Conv1d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), out=24), data=features(2, 6)),
    "conv2d": Case(
        model=lambda: images(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.GroupNorm(2, 4), out=36), data=features(2, 6, 6)
    ),
    "conv2d wide": Case(model=lambda: images(nn.Conv2d(16, 4, 3, padding=1), out=64), data=features(16, 4, 4)),
    "conv3d": Case(model=lambda: images(nn.Conv3d(1, 2, 2), out=16), data=features(1, 3, 3, 3)),
    "conv transpose": Case(
        model=lambda: images(nn.ConvTranspose2d(2, 3, 2), nn.InstanceNorm2d(3, affine=True), out=48), data=features(2, 3, 3)
    ),
    "rms norm": Case(model=lambda: nn.Sequential(nn.Linear(6, 6), nn.RMSNorm(6), nn.Linear(6, 3))),
    "positions": Case(
        model=lambda: nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3), nn.Flatten(), nn.Linear(12, 3)),
        data=features(4, 6),
    ),
    "automatic": Case(plan={"clip": clipping.Automatic(0.5)}),
    "per layer": Case(plan={"clip": clipping.PerLayer(0.5)}),
    "adaptive": Case(plan={"clip": clipping.Adaptive(0.5, batch_size=B)}),
    "tree": Case(plan={"noise": noise.Tree()}),
    "honaker tree": Case(plan={"noise": noise.Tree(honaker=True)}) if "honaker" in noise.Tree.__dataclass_fields__ else Case(),
    "blt": Case(plan={"noise": noise.BLT(buffers=2)}),
    "banded": Case(plan={"noise": noise.Banded(bands=2)}),
    "banded inverse": Case(plan={"noise": noise.BandedInverse(bands=2)}),
    "toeplitz": Case(plan={"noise": noise.Nu()}) if "Nu" in noise.__all__ else Case(),
    "users": Case(**USERS),
    "users, text": Case(**TEXT | USERS),
    "users, images": Case(model=lambda: images(nn.Conv2d(1, 2, 3), out=8), data=features(1, 4, 4), **USERS),
    "users, micro-batches": Case(micro=3, **USERS),
    "probes": Case(plan={"denoise": denoise.Kalman()}, closure=True),
    "low pass": Case(plan={"denoise": denoise.LowPass()}),
    "james-stein": Case(plan={"denoise": denoise.JamesStein()}),
    "soft threshold": Case(plan={"denoise": denoise.SoftThreshold()}),
    "second moment": Case(plan={"denoise": denoise.DebiasedSecondMoment()}, optimizer=adam),
    "delayed": Case(plan={"denoise": denoise.DelayedPreconditioner(delay=1)}),
    "scaled first": Case(plan={"denoise": denoise.ScaleThenPrivatise()}, optimizer=adam),
    "laplacian": Case(plan={"denoise": denoise.Laplacian(1.0)}),
    "averaging": Case(plan={"average": "ema"}),
    "lazy": Case(**TEXT, options={"lazy_tables": True}),
    "certified": Case(
        model=lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16)),
        plan={"certified": True},
        loss=summed,
        options={"loss_reduction": "sum", "check_isolation": True},
    ),
    "secure": Case(plan={"secure": True}, loss=partial(F.cross_entropy, reduction="sum"), options={"loss_reduction": "sum"}),
    "bfloat16": Case(dtype=torch.bfloat16, close=2e-3),
    "float64": Case(dtype=torch.float64),
    "autocast": Case(autocast=torch.bfloat16, close=2e-3),
}


def trained(case: Case, device: devices.PretendDevice | None, *, meters: list[devices.Meter] | None = None) -> dict[str, Any]:
    """Weights, norms and what else is read after the steps, in main memory."""
    torch.manual_seed(0)
    model = case.model().to(case.dtype)
    x, y = case.data(torch.Generator().manual_seed(1))
    if x.is_floating_point():
        x = x.to(case.dtype)
    if device is not None:
        device.put(model)
    optimizer = case.optimizer(list(model.parameters()))
    private = hushgrad.make_private(model, optimizer, plan(**case.plan), seed=0, **{"check_isolation": False, **case.options})
    there = "cpu" if device is None else "pretend"

    def passed(part: Any) -> Tensor:
        bx, by = (t.to(there) for t in part)
        with torch.autocast("cpu", dtype=case.autocast or torch.bfloat16, enabled=case.autocast is not None):
            return case.loss(model(bx), by)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        if case.closure:
            optimizer.step(lambda: _backward(passed(batch)))
            return
        for part in batch.split(case.micro) if case.micro else [batch]:
            passed(part).backward()
        optimizer.step()

    groups = {"groups": [i // 4 for i in range(N)]} if case.users else {}
    for batch in private.loader(TensorDataset(x, y), **groups):
        if device is not None and meters is not None:
            with device.counting() as meter:
                step(batch)
            meters.append(meter)
        else:
            step(batch)
    private.settle()
    read = {"norms": private.raw_norms, "rejected": private.rejected, "clip": private.clip}
    if case.plan.get("average"):
        with private.averaged():
            read["average"] = [devices.on_host(p.detach()).clone() for p in model.parameters()]
    read["state"] = private.state_dict()
    private.detach()
    return read | {"weights": [devices.on_host(p.detach()).clone() for p in model.parameters()]}


def _backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss


def distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    return max(float((u.double() - v.double()).abs().max()) for u, v in zip(a, b, strict=True))


def test_what_meets_main_memory_is_refused_and_what_waits_is_counted_by_its_line():
    with devices.pretend() as device:
        x = torch.ones(3).to("pretend")
        with pytest.raises(devices.WrongDevice, match=r"test_devices_steps\.py"):
            x + torch.ones(3)
        with device.counting() as meter:
            (x * 2).view(3, 1).cpu()
            x[x > 0]
            float(x.sum())
            torch.ones(3).to("pretend")
    assert sum(meter.launches.values()) == 4 and sum(meter.syncs.values()) == 3 and sum(meter.copies.values()) == 2
    assert sum(meter.bytes.values()) == 24 and all("test_devices_steps.py" in place for place in meter.syncs)


@pytest.mark.parametrize("mechanism", [noise.Independent(), noise.BLT(buffers=2), noise.Tree()], ids=lambda m: type(m).__name__)
def test_a_run_moves_between_main_memory_and_a_device(mechanism):
    """Two steps here, the third there, and the other way round: the same weights as three in one place."""

    def run(first: devices.PretendDevice | None, second: devices.PretendDevice | None) -> list[Tensor]:
        state: dict[str, Any] = {}
        for device, steps in ((first, 2), (second, STEPS)):
            torch.manual_seed(0)
            model = mlp()
            if state:
                model.load_state_dict(state["model"])
            if device is not None:
                device.put(model)
            optimizer = sgd(list(model.parameters()))
            private = hushgrad.make_private(model, optimizer, plan(noise=mechanism), seed=0, check_isolation=False)
            if state:
                private.load_state_dict(state["private"])
            x, y = features(6)(torch.Generator().manual_seed(1))
            for bx, by in private.loader(TensorDataset(x, y)):
                there = "cpu" if device is None else "pretend"
                F.cross_entropy(model(bx.to(there)), by.to(there)).backward()
                optimizer.step()
                if private.steps == steps:
                    break
            weights = {name: devices.on_host(p.detach()).clone() for name, p in model.named_parameters()}
            state = {"model": weights, "private": private.state_dict(with_key=True)}
            private.detach()
        return list(state["model"].values())

    with devices.pretend() as device:
        expected = run(None, None)
        assert distance(run(None, device), expected) <= 1e-6
        assert distance(run(device, None), expected) <= 1e-6


# Those whose way through the house another case takes too; `make test-all` runs them.
SLOW = {
    "adam", "float64", "conv1d", "conv3d", "automatic", "low pass", "soft threshold", "banded inverse", "toeplitz", "honaker tree",
    "users, micro-batches", "users, images", "second moment", "gru cell", "bags", "rms norm", "positions", "james-stein", "padding",
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CASES])
def test_a_step_on_a_device_is_the_step_in_main_memory(name):
    same_there(CASES[name], double=True)


@pytest.mark.parametrize(
    "name", ["mlp", "tied", "conv2d", "positions", "lstm", "users", "adaptive", "james-stein", "drawn by the host"]
)
def test_a_device_without_double_precision_takes_the_same_step(name):
    same_there(CASES[name], double=False)


def test_what_needs_double_precision_is_refused_where_there_is_none():
    with devices.pretend(double=False) as device:
        model = device.put(mlp())
        with pytest.raises(hushgrad.errors.ArgumentError, match="double precision for certified sums"):
            hushgrad.make_private(model, sgd(list(model.parameters())), plan(certified=True), seed=0)


def test_trainable_parameters_on_two_devices_are_refused_and_frozen_ones_are_not():
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.relu(self.first(x)).to(self.second.weight.device))

    with devices.pretend() as device:
        model = Halves()
        device.put(model.second)
        with pytest.raises(
            hushgrad.errors.ArgumentError, match=r"\['cpu', 'pretend:0'\] to have its trainable parameters on one device"
        ):
            hushgrad.make_private(model, sgd(list(model.parameters())), plan(), seed=0)
        model.first.requires_grad_(False)
        optimizer = sgd(list(model.second.parameters()))
        private = hushgrad.make_private(model, optimizer, plan(), seed=0)
        for x, y in private.loader(TensorDataset(*FEATURES(torch.Generator().manual_seed(1)))):
            F.cross_entropy(model(x), y.to("pretend")).backward()
            optimizer.step()
        private.detach()


def same_there(case: Case, *, double: bool) -> None:
    """Three steps in main memory and on the device."""
    here = trained(case, None)
    with devices.pretend(double=double) as device:
        there = trained(case, device)
        norms = devices.on_host(there["norms"])
    assert distance(there["weights"], here["weights"]) <= case.close
    assert norms.shape == here["norms"].shape and torch.allclose(norms, here["norms"], rtol=20 * case.close)
    assert there["rejected"] == here["rejected"] == 0
    clip, expected = (run["clip"].sensitivity(Relation.ADD_REMOVE) for run in (there, here))
    assert math.isclose(clip, expected, rel_tol=1e-6)
    if "average" in here:
        assert distance(there["average"], here["average"]) <= case.close
