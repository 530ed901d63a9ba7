"""Data-parallel runs, in one process or in several: the program that ``test_train_distributed`` starts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from hushgrad.denoise import Laplacian
from hushgrad.errors import CaptureError
from hushgrad.noise import BLT
from hushgrad.train import Plan, make_private


def data() -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(60, 6), torch.randint(3, (60,)))


def plans() -> dict[str, Plan]:
    common = {"noise_multiplier": 0.7, "delta": 1e-5, "batch_size": 6, "dataset_size": 60}
    return {
        "dpsgd": Plan.dpsgd(steps=12, denoise=Laplacian(1.0), **common),
        "padded": Plan.dpsgd(steps=12, pad_to=15, **common),
        "dpftrl": Plan.dpftrl(epochs=2, noise=BLT(buffers=2), **common),
    }


def train(plan: Plan, rank: int, *, defect: bool) -> dict:
    torch.manual_seed(rank)  # every process starts elsewhere: the run must bring them together
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    private = make_private(model, optimizer, plan, key=bytes(range(32)) if rank == 0 else None)
    if defect:  # planted: each process draws a whole row, so that two make twice the noise
        private._release._scale *= dist.get_world_size()
    examples, sizes = 0, set()
    for batch in private.loader(data()):
        x, y = batch
        examples += batch.examples - batch.padding
        sizes.add(len(x))
        optimizer.zero_grad()
        if len(x):
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    found = {"weights": weights, "ledger": str(private.ledger.event()), "steps": private.steps}
    return {**found, "examples": examples, "sizes": sorted(sizes)}


def refused(rank: int) -> dict | None:
    """Process 1 runs its part of a batch twice; process 0 does nothing wrong."""
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = make_private(model, optimizer, plans()["dpsgd"], key=bytes(32) if rank == 0 else None)
    x, y = next(iter(private.loader(data())))
    for _ in range(1 + rank):
        nn.functional.cross_entropy(model(x), y).backward()
    try:
        optimizer.step()
    except CaptureError as error:
        return {"error": str(error), "steps": private.steps}
    return None


def main(options: dict) -> dict:
    rank = dist.get_rank() if dist.is_initialized() else 0
    found = {mode: train(plan, rank, defect=options.get("defect", False)) for mode, plan in plans().items()}
    return {**found, "refusal": refused(rank)} if dist.is_initialized() else found
