"""What `hushgrad plan --model --processes 2` predicts, beside measurements: one step of a private run in two processes of one machine.

    python benchmarks/resources_processes.py [--mode lora full] [--placement replicated sharded]

Time is CPU time of a process (one thread, packing and sending included, waiting not), memory what it holds at most above what it held after
its imports, both with a C library that keeps what was freed. Nothing here was fitted.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import peft  # noqa: F401 (before memory is looked at)
import torch
import torch.distributed as dist
from language import Setting, loss_of, optimizer_of
from models import memory
from resources import work_of
from step import Step
from torch import nn

from hushgrad.sampling.batch_loader import stamp
from hushgrad.train import Plan, make_private

WORLD = 2
SETTINGS = [  # ``size``: of all processes together
    Setting(hidden=256, layers=4, size=32),
    Setting(hidden=320, layers=3, vocabulary=8192, part=4, size=16),
    Setting(hidden=192, layers=4, vocabulary=1024, length=128, part=4, size=16),
]
KEPT = {"MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_MMAP_THRESHOLD_": "4000000000"}


def sharded(model: nn.Module) -> nn.Module:
    """Each layer by itself, and the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in next(m for m in model.modules() if isinstance(m, nn.ModuleList)):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def stepping(setting: Setting, placement: str) -> Step:
    """A step of this process, on its share of the texts."""
    model = sharded(setting.model()) if placement == "sharded" else setting.model()
    optimizer, own = optimizer_of(model), replace(setting, size=setting.size // WORLD)
    common: dict[str, Any] = {"noise_multiplier": 1.0, "delta": 1e-6, "max_grad_norm": 1.0, "batch_size": setting.size}
    run = make_private(model, optimizer, Plan.dpsgd(**common, dataset_size=10**6, steps=10**6), seed=0)
    batch = own.texts()

    def step() -> None:
        issued = stamp(batch, step=run.steps, examples=own.size, issue=run._on_issue)
        run._on_issue(issued)
        for part in run.split(issued, setting.part):
            loss_of(model, part).backward()
        optimizer.step()

    return step


def one_of_two(setting: Setting, placement: str, steps: int) -> dict[str, float]:
    """What this process takes: seconds of a step, and megabytes at most."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    step = stepping(setting, placement)
    step(), step()
    times = []
    for _ in range(steps):
        began = time.process_time()
        step()
        times.append(time.process_time() - began)
    found = {"seconds": median(times), "megabytes": memory("VmHWM") - before}
    dist.destroy_process_group()
    return found


def measured(setting: Setting, placement: str, steps: int, environment: dict[str, str]) -> dict[str, float]:
    """The larger of the two processes' figures."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(WORLD), "OMP_NUM_THREADS": "1", **environment}
    told = json.dumps({"setting": asdict(setting), "placement": placement, "steps": steps})
    command = [sys.executable, __file__, "--one", told]
    children = [
        subprocess.Popen(command, env={**os.environ, **own, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(WORLD)
    ]
    found = [json.loads(child.communicate()[0].strip().splitlines()[-1]) for child in children]
    return {name: max(one[name] for one in found) for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", nargs="+", default=["lora", "full"])
    parser.add_argument("--placement", nargs="+", default=["replicated", "sharded"])
    parser.add_argument("--settings", nargs="+", type=int, default=range(len(SETTINGS)), help="numbers of them")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one = args.one
        print(json.dumps(one_of_two(Setting(**one["setting"]), one["placement"], one["steps"])))
        return
    for number in args.settings:
        for mode in args.mode:
            for placement in args.placement:
                setting = replace(SETTINGS[number], mode=mode)
                work = replace(work_of(setting), processes=WORLD, placement=placement)
                found = measured(setting, placement, args.steps, KEPT)
                seconds, peak = found["seconds"], found["megabytes"]
                told = work.seconds(), work.peak() / 2**20
                shown = f"{setting.hidden} x {setting.layers}, {setting.vocabulary} tokens, length {setting.length}"
                print(
                    f"{shown}, {mode}, {placement}: {seconds:.3f} s (predicted {told[0] / seconds - 1:+.0%}), "
                    f"{peak:.0f} MB (predicted {told[1] / peak - 1:+.0%})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
