"""Small runs on which defects show: a model, its data, its optimizer, its loss and a plan."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from hushgrad.audit import Bench, DeepReport, audit_run
from hushgrad.clipping import Adaptive, PerLayer
from hushgrad.denoise import SVRG, Kalman, Laplacian
from hushgrad.noise import BLT, Banded, Tree
from hushgrad.train import Plan

_N = 300
_COMMON: dict[str, Any] = {"delta": 1e-5, "dataset_size": _N, "max_grad_norm": 2.0}


def _layers() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 64), nn.Tanh(), nn.LayerNorm(64), nn.Linear(64, 72), nn.Tanh(), nn.Linear(72, 3)
    )  # 64 x 72 = 4608 numbers in one tensor


class _Tied(nn.Module):
    """An embedding table whose transpose is the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(40, 12), nn.Linear(12, 40, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(ids).sum(1)))  # type: ignore[no-any-return]


class _Table(nn.Module):
    """An embedding table followed by a separate layer."""

    def __init__(self, rows: int = 40) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(rows, 12), nn.Linear(12, 40)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(ids).sum(1)))  # type: ignore[no-any-return]


class Mixing(nn.Module):
    """Two layers with a function between them, which a defect may make depend on the whole batch or on earlier ones."""

    between: Callable[[nn.Module, Tensor], Tensor] = staticmethod(lambda module, h: h)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 3)
        self.register_buffer("kept", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        """first, between, last."""
        return self.last(type(self).between(self, torch.tanh(self.first(x))))  # type: ignore[no-any-return]


def _vectors(generator: torch.Generator) -> TensorDataset:
    return TensorDataset(3 * torch.randn(_N, 6, generator=generator), torch.randint(3, (_N,), generator=generator))


def _halves(generator: torch.Generator) -> TensorDataset:
    inputs, targets = _vectors(generator).tensors
    return TensorDataset(inputs.bfloat16(), targets)


def _many(generator: torch.Generator) -> TensorDataset:
    return TensorDataset(3 * torch.randn(4000, 6, generator=generator), torch.randint(3, (4000,), generator=generator))


def _words(generator: torch.Generator) -> TensorDataset:
    return TensorDataset(torch.randint(40, (_N, 5), generator=generator), torch.randint(40, (_N,), generator=generator))


def _sequences(generator: torch.Generator) -> TensorDataset:
    return TensorDataset(torch.randn(_N, 16, 64, generator=generator), torch.randn(_N, 16, 64, generator=generator))


def _squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().flatten(1).sum(1)


def _dpsgd(**changes: Any) -> Plan:
    return Plan.dpsgd(**{"noise_multiplier": 1.0, "batch_size": 12, "steps": 64, **_COMMON, **changes})


def _dpftrl(noise: Any) -> Plan:
    return Plan.dpftrl(noise_multiplier=2.0, batch_size=15, epochs=3, noise=noise, **_COMMON)


class _Adapted(nn.Module):
    """A frozen layer with a low-rank adapter."""

    def __init__(self, *, new: bool = False) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(6, 24), nn.Linear(6, 2, bias=False), nn.Linear(2, 24, bias=False)
        self.head = nn.Linear(24, 3)
        self.base.requires_grad_(False)
        if new:  # as adapters begin
            nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Base + up(down), then the head."""
        return self.head(torch.tanh(self.base(x) + self.up(self.down(x))))  # type: ignore[no-any-return]


Bed = tuple[Callable[[], nn.Module], Callable[[torch.Generator], TensorDataset], Callable[[], Plan], dict[str, Any]]

BEDS: dict[str, Bed] = {
    "layers": (_layers, _vectors, _dpsgd, {}),
    "rare": (_layers, _many, partial(_dpsgd, batch_size=16, dataset_size=4000, steps=400), {}),
    "correlated": (_layers, _vectors, lambda: _dpftrl(Banded(bands=5)), {}),
    "blt": (_layers, _vectors, lambda: _dpftrl(BLT(buffers=3)), {}),
    "tree": (_layers, _vectors, lambda: _dpftrl(Tree()), {}),
    "averaged": (_layers, _vectors, partial(_dpsgd, average="ema"), {}),
    "smoothed": (_layers, _vectors, partial(_dpsgd, denoise=Laplacian(1.0)), {}),
    "filtered": (_layers, _vectors, partial(_dpsgd, denoise=Kalman(0.7)), {}),
    "corrected": (_layers, _vectors, partial(_dpsgd, denoise=SVRG(period=8)), {}),
    "half": (lambda: _layers().bfloat16(), _halves, _dpsgd, {}),
    "one step": (_layers, _vectors, partial(_dpsgd, steps=1), {}),
    "in parts": (_layers, _vectors, _dpsgd, {"max_physical_batch": 5}),
    "broad": (lambda: nn.Sequential(nn.Linear(6, 1200), nn.Tanh(), nn.Linear(1200, 3)), _vectors, _dpsgd, {}),
    "secure": (_layers, _vectors, partial(_dpsgd, secure=True), {}),
    "adapter": (_Adapted, _vectors, _dpsgd, {}),
    "new adapter": (partial(_Adapted, new=True), _vectors, _dpsgd, {}),
    "lazy": (partial(_Table, 400), _words, _dpsgd, {"options": {"lazy_tables": True}}),
    "by layer": (_layers, _vectors, lambda: _dpsgd(clip=PerLayer(2.0), max_grad_norm=None), {}),
    "adaptive": (_layers, _vectors, lambda: _dpsgd(clip=Adaptive(2.0, batch_size=12, count_noise=5.0), max_grad_norm=None), {}),
    "tied": (_Tied, _words, _dpsgd, {}),
    "table": (_Table, _words, _dpsgd, {}),
    "sequences": (lambda: nn.Sequential(nn.Linear(64, 64, bias=False)), _sequences, _dpsgd, {"loss_fn": _squares}),
    "users": (
        _layers,
        _vectors,
        partial(_dpsgd, unit="user", batch_size=6, dataset_size=100),
        {"groups": [i % 100 for i in range(_N)]},
    ),
    "vouched": (Mixing, _vectors, _dpsgd, {"options": {"check_isolation": False}}),
}
"""(model, data, plan, further arguments of a bench) by name."""


def bench(name: str, *, seed: int = 0) -> Bench:
    """The bench of one bed; weights and data follow from ``seed``."""
    make, data, plan, more = BEDS[name]

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = make()
        momentum = 0.0 if name == "lazy" else 0.9
        return model, torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1, momentum=momentum)

    arguments = {"loss_fn": F.cross_entropy, **more}
    return Bench(build=build, plan=plan(), dataset=data(torch.Generator().manual_seed(seed + 1)), **arguments)


_USERS: dict[str, Any] = {"unit": "user", "batch_size": 50, "dataset_size": 1000}
SERVERS: dict[str, Callable[[], Plan]] = {
    "server": partial(_dpsgd, **_USERS),
    "adaptive server": partial(_dpsgd, **_USERS, clip=Adaptive(2.0, batch_size=50, count_noise=5.0), max_grad_norm=None),
    "correlated server": lambda: Plan.dpftrl(
        noise_multiplier=2.0, delta=1e-5, epochs=3, noise=BLT(buffers=3), relation="zero_out", **_USERS
    ),
}
"""Plans of federated servers by name; they need the extra ``federated``."""


def audited(name: str, *, seed: int = 0) -> DeepReport:
    """The deep audit of one bed, or of one server."""
    if name in BEDS:
        return audit_run(bench(name, seed=seed), seed=seed)
    import numpy as np
    from flwr.app import Array, ArrayRecord
    from flwr.serverapp.strategy import FedAvg

    from hushgrad.federated import DPFTRL, DPFedAvg

    arrays = ArrayRecord({"table": Array(np.zeros((30, 40), np.float32)), "bias": Array(np.zeros(40))})
    plan = SERVERS[name]()
    if name == "correlated server":
        return DPFTRL(FedAvg(), plan).audit(arrays, users=1000, seed=seed)  # type: ignore[no-any-return]
    return DPFedAvg(FedAvg(), plan, population=range(1000)).audit(arrays, seed=seed)  # type: ignore[no-any-return]
