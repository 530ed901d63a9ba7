"""The program that the distributed tests start in one or several processes: argv[1] is a JSON object of options."""

from __future__ import annotations

import os
import signal
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import hushgrad.release.placement.sharded_sums as sharded_capture
from hushgrad.noise import BLT, Banded, Tree
from hushgrad.train import Checkpoint, Plan, make_private


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Scale(nn.Module):  # has no rule of its own: the fallback must see whole parameters
    def __init__(self, width):
        super().__init__()
        self.factor = nn.Parameter(torch.linspace(0.5, 1.5, width))

    @torch.compiler.disable  # compiled together with the examples its parameter is refused, see test_train_compiled.py
    def forward(self, x):
        return x * self.factor.tanh()


class Net(nn.Module):
    """7 rows do not divide by 2 or 3, and ``gate`` has one row: all processes but the first hold nothing of it."""

    def __init__(self):
        super().__init__()
        self.enter, self.blocks = nn.Linear(6, 7), nn.ModuleList([Block(7), nn.Sequential(Block(7), Scale(7))])
        self.gate, self.leave = nn.Linear(7, 1), nn.Linear(7, 3)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x * self.gate(x).sigmoid())


def plan_of(name: str) -> Plan:
    common = {"noise_multiplier": 0.7, "delta": 1e-5, "batch_size": 6, "dataset_size": 60}
    if name == "independent":
        return Plan.dpsgd(steps=10, average="tail", **{**common, "batch_size": 2})  # so small that parts of batches are empty
    if name == "secure":
        return Plan.dpsgd(steps=10, secure=True, **common)
    mechanisms = {"blt": BLT(buffers=2), "banded": Banded(bands=3), "tree": Tree()}
    return Plan.dpftrl(epochs=1, noise=mechanisms[name], **common)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(60, 6, generator=generator), torch.randint(3, (60,), generator=generator))


def model_of(options: dict) -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    if options.get("sharded"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def record(private, defect: bool = False) -> dict[str, list]:
    """Notes every row of noise as it is drawn: by step and tensor, the position and the numbers."""
    noted, stream = {}, private._release.stream
    draw = stream.rows

    def rows(step, likes, *, indices, offsets=None, out=None, scale=1.0):
        offsets = [0] * len(likes) if defect or offsets is None else offsets
        drawn = draw(step, likes, indices=indices, offsets=offsets, scale=scale)
        for index, offset, row in zip(indices, offsets, drawn, strict=True):
            noted[f"{step} {index}"] = [offset, row.flatten().tolist()]
        return drawn if out is None else [total.add_(row) for total, row in zip(out, drawn, strict=True)]

    stream.rows = rows
    return noted


def train(name: str, options: dict) -> dict:
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = model_of(options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    plan = plan_of(name)
    reduction = "sum" if plan.secure else "mean"
    key = blake2b(name.encode(), digest_size=32).digest() if rank == 0 else None  # one for each run
    private = make_private(model, optimizer, plan, key=key, loss_reduction=reduction)
    checkpoint = Checkpoint(f"{options['directory']}/{name}", private) if "directory" in options else None
    run = torch.compile(model, backend=options["compile"]) if "compile" in options else model
    examples, norms = [], []
    noise = {} if plan.secure else record(private, options.get("defect", False))
    for batch in private.loader(data()):
        if private.steps == options.get("stop"):
            break
        optimizer.zero_grad()
        examples.append(batch.examples - batch.padding)
        for x, y in private.split(batch, options.get("micro", 1000)):
            if len(x) or private.sharding is not None:
                nn.functional.cross_entropy(run(x), y, reduction=reduction).backward()
            if [rank, private.steps] == options.get("die"):
                os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        norms += private.raw_norms.tolist()
        if checkpoint is not None and private.steps % options.get("every", 1) == 0:
            checkpoint.save()
    weights = torch.cat([whole(p).flatten() for p in model.parameters()]).tolist()
    mean = []
    if private.plan.average is not None and private.steps:
        with private.averaged():
            mean = torch.cat([whole(p).flatten() for p in model.parameters()]).tolist()
    result = {"weights": weights, "average": mean, "noise": noise, "examples": examples, "norms": sorted(norms)}
    result |= {"steps": private.steps, "ledger": str(private.ledger.event()), "resumed": bool(checkpoint and checkpoint.resumed)}
    private.detach()
    return result


def main(options: dict) -> dict:
    sharded_capture.BUCKET = 200  # several buckets in a small model
    return {name: train(name, options) for name in options["plans"]}
