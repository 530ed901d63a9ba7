"""The program of the tests of denoisers over shards, in one or several processes: argv[1] is a JSON object of options."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from hushgrad.denoise import Chain, DebiasedSecondMoment, JamesStein, Kalman, Laplacian, LowPass, SoftThreshold
from hushgrad.denoise.svrg import SVRG
from hushgrad.train import Checkpoint, Plan, make_private

sys.path.insert(0, str(Path(__file__).parent))
import train_fsdp_program
from train_fsdp_program import data, model_of, whole


@dataclass(frozen=True)
class Torn(Laplacian):
    """Planted: smooths each shard as if it were the tensor."""

    @property
    def needs_whole_tensor(self) -> bool:
        return False


DENOISERS = {
    "low pass": LowPass((-0.5, 0.1), (0.3, 0.3)),
    "second moment": DebiasedSecondMoment(),
    "soft threshold": SoftThreshold(scale=0.2),
    "james-stein": JamesStein(),
    "laplacian": Laplacian(2.0, skip_1d=False),
    "grid": Laplacian(1.0, scope="grid", grid=(7,)),
    "one probe": Kalman.one_probe(0.7),
    "two probes": Kalman(0.7, 0.5),
    "svrg": SVRG(period=4),
    "chain": Chain([Kalman.one_probe(0.6), Laplacian(1.0), LowPass()]),
    "torn": Torn(2.0, skip_1d=False),
}


def train(name: str, options: dict) -> dict:
    rank = dist.get_rank() if dist.is_initialized() else 0
    train_fsdp_program.Scale = nn.LayerNorm  # probes move parameters, so every layer is one with a rule of its own
    model = model_of(options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    common = {"noise_multiplier": 0.7, "delta": 1e-5, "batch_size": 6, "dataset_size": 60}
    plan = Plan.dpsgd(steps=10, denoise=DENOISERS[name], **common)
    private = make_private(model, optimizer, plan, key=bytes(range(32)) if rank == 0 else None)
    checkpoint = Checkpoint(f"{options['directory']}/{name}", private) if "directory" in options else None
    for batch in private.loader(data()):
        if private.steps == options.get("stop"):
            break

        def closure(batch=batch):
            optimizer.zero_grad()
            x, y = batch
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
        if options.get("look"):  # an evaluation leaves the root's parameters gathered
            with torch.no_grad():
                model(batch[0])
        if checkpoint is not None and private.steps == options.get("stop"):
            checkpoint.save()
    weights = torch.cat([whole(p).flatten() for p in model.parameters()]).tolist()
    kept = sum(value.to_local().numel() for value in private._release.filter_state.values() if hasattr(value, "to_local"))
    result = {"weights": weights, "steps": private.steps, "kept": kept, "resumed": bool(checkpoint and checkpoint.resumed)}
    private.detach()
    return result


def main(options: dict) -> dict:
    return {name: train(name, options) for name in options["denoisers"]}
