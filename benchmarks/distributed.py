"""Private steps on one and two processes beside plain PyTorch: time of a step, and peak memory of a process.

    python benchmarks/distributed.py [--quick] [--json out.json]

Each case starts its own processes (gloo, one thread each). In every process plain and private steps take turns on the same
batch; the minimum over the turns is taken, since other work on the machine only adds. "ratio" is private / plain in CPU time,
which includes packing, sending and receiving but not waiting; wall time is given as well. Every process has its own share of
the batch, of the same size on one process and on two. Target: the ratio on two processes is at most 1.1 times that on one.

Memory is the peak of the process during the steps above what it had after importing everything, with a C library that gives
freed blocks back at once (MALLOC_MMAP_THRESHOLD_), for all alike. Target: with fully_shard it
falls when a second process is added, BLT's buffers included.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import memory as resident
from torch import nn
from torch.nn import functional as F

TARGET = 1.10
STEPS = 100_000  # never reached
CLASSES = 10
NOISES = ("independent", "blt")


class Block(nn.Module):
    """A residual block, as in a transformer without its attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


def model_of(width: int, depth: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(width) for _ in range(depth)], nn.Linear(width, CLASSES))


def sharded(model: nn.Sequential) -> nn.Sequential:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in model:
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


# In a child process ----------------------------------------------------------------------------------------------------


def stepper(options: dict[str, Any], noise: str) -> Any:
    """A function that takes one step of private training with this noise, or of plain training."""
    from hushgrad.noise import BLT, Banded, Independent
    from hushgrad.sampling.batch_loader import stamp
    from hushgrad.train import Plan, make_private

    model: nn.Module = model_of(options["width"], options["depth"])
    share, world = options["batch"], dist.get_world_size()
    x, y = torch.randn(share, options["tokens"], options["width"]), torch.randint(CLASSES, (share, options["tokens"]))
    if options["parallel"] == "fsdp":
        model = sharded(model)  # type: ignore[arg-type]
    elif noise == "plain" and world > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    issue = None
    if noise != "plain":
        size = share * world
        mechanism = {"independent": Independent(), "blt": BLT(buffers=4), "banded": Banded(bands=8)}[noise]
        common: dict[str, Any] = {"noise_multiplier": 1.0, "delta": 1e-5, "batch_size": size, "dataset_size": 1000 * size}
        plan = Plan.dpsgd(steps=STEPS, **common) if noise == "independent" else Plan.dpftrl(epochs=1, noise=mechanism, **common)
        run = make_private(model, optimizer, plan, seed=0)
        issue, run._dim = run._on_issue, lambda: 0  # as its loader says: the examples come first

    def step() -> None:
        nonlocal taken
        if issue is not None:
            issue(stamp([x, y], step=taken, examples=share))
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        taken += 1

    taken = 0
    return step


def noise_part(options: dict[str, Any]) -> dict[str, float]:
    """CPU seconds of drawing one row of noise for all parameters."""
    from hushgrad.events import Once
    from hushgrad.noise import BLT, Independent, Source

    count = sum(p.numel() for p in model_of(options["width"], options["depth"]).parameters())
    out, best = torch.zeros(count), {}
    for name, mechanism in {"independent": Independent(), "blt": BLT(buffers=4)}.items():
        stream = mechanism.resolved(steps=20, participation=Once()).stream(Source(seed=0), steps=20)
        best[name] = float("inf")
        for step in range(10):
            began = time.process_time()
            stream.row(step, 0, out, out=out)
            best[name] = min(best[name], time.process_time() - began)
    return best


def child(options: dict[str, Any]) -> dict[str, float]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
    if options["measure"] == "memory":
        return memory(options)
    steps = {noise: stepper(options, noise) for noise in ("plain", *NOISES)}
    best = {f"{kind} {clock}": float("inf") for kind in steps for clock in ("cpu", "wall")}
    for turn in range(options["turns"] + 2):
        for kind, step in steps.items():
            dist.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            step()
            spent = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
            if turn >= 2:  # the first turns compile, gather and allocate
                for clock, seconds in spent.items():
                    best[f"{kind} {clock}"] = min(best[f"{kind} {clock}"], seconds)
    return {**best, "noise part": noise_part(options)}  # type: ignore[dict-item]


def memory(options: dict[str, Any]) -> dict[str, float]:
    import torch.distributed.fsdp  # noqa: F401

    import hushgrad.train  # noqa: F401

    before = resident("VmRSS")
    step = stepper(options, options["noise"])
    step()
    # The model was whole before it was sharded: give back what was freed since, and forget the peak so far.
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(3):
        step()
    return {"peak": resident("VmHWM") - before}


# In the parent ---------------------------------------------------------------------------------------------------------


def launch(world: int, options: dict[str, Any]) -> list[dict[str, float]]:
    """Run a case on ``world`` processes; each one's result."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
    }
    if options["measure"] == "memory":
        common["MALLOC_MMAP_THRESHOLD_"] = (
            "500000"  # freed blocks go back at once: what is alive is measured, not the heap's holes
        )
    command = [sys.executable, __file__, "--child", json.dumps(options)]
    children = [
        subprocess.Popen(command, env={**common, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True) for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=1200)[0] for process in children]
    finally:
        for process in children:
            process.kill()
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def times(case: dict[str, Any], worlds: list[int]) -> list[dict[str, Any]]:
    """Both kinds of noise beside plain training, all in the same processes."""
    rows: list[dict[str, Any]] = []
    alone: dict[str, float] = {}
    for world in worlds:
        results = launch(world, {**case, "measure": "time"})
        parts = [r.pop("noise part") for r in results]
        best = {key: max(r[key] for r in results) for key in results[0]}  # a step ends when its slowest process ends
        for noise in NOISES:
            cpu, wall = (best[f"{noise} {clock}"] / best[f"plain {clock}"] for clock in ("cpu", "wall"))
            more = cpu / alone.setdefault(noise, cpu)
            figures = {**best, "noise part": parts[0], "ratio": cpu, "more": more, "passed": more <= TARGET}
            rows.append({**case, "noise": noise, "world": world, **figures})
            print(
                f"{case['parallel']:<5}{noise:<12}{world:>2} {1e3 * best['plain cpu']:>10.1f}{1e3 * best[f'{noise} cpu']:>9.1f}"
                f"{cpu:>7.2f}{more:>7.2f}  {1e3 * best['plain wall']:>9.1f}{1e3 * best[f'{noise} wall']:>9.1f}{wall:>7.2f}"
                f"  {'' if world == 1 else 'PASS' if more <= TARGET else 'MISS'}",
                flush=True,
            )
    return rows


def memories(case: dict[str, Any], worlds: list[int]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for world in worlds:
        peak = max(r["peak"] for r in launch(world, {**case, "measure": "memory"}))
        passed = world == 1 or peak < rows[0]["peak"]
        rows.append({**case, "world": world, "peak": peak, "passed": passed})
        print(
            f"{case['parallel']:<5}{case['noise']:<12}{world:>2}  {peak:>8.0f} MB  {'' if world == 1 else 'PASS' if passed else 'MISS'}",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer turns")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--only", choices=("time", "memory"), help="measure one of the two")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2], help="numbers of processes; the first must be 1")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        print(json.dumps(child(arguments.child)))
        dist.destroy_process_group()
        return
    size = {"width": 128, "depth": 3, "turns": 5} if arguments.quick else {"width": 256, "depth": 6, "turns": 12}
    parameters = sum(p.numel() for p in model_of(size["width"], size["depth"]).parameters())
    case: dict[str, Any] = {**size, "batch": 16, "tokens": 16}
    print(f"{parameters / 1e6:.1f} M parameters, {case['batch']} examples of {case['tokens']} tokens in each process")
    rows: list[dict[str, Any]] = []
    print("time of a step, ms   CPU: plain  private  ratio  /one   wall: plain  private  ratio")
    if arguments.only != "memory":
        rows += [row for parallel in ("ddp", "fsdp") for row in times({**case, "parallel": parallel}, arguments.worlds)]
    # Parameters are to count here, not activations.
    large: dict[str, Any] = case if arguments.quick else {**case, "width": 768, "batch": 2, "tokens": 4}
    model = model_of(large["width"], large["depth"])
    parameters = sum(p.numel() for p in model.parameters())
    large |= {"parameter MB": 4 * parameters / 1e6, "unit MB": 4 * sum(p.numel() for p in model[0].parameters()) / 1e6}
    print(f"peak memory of a process during steps, above what was imported; {parameters / 1e6:.1f} M parameters")
    kinds = ("plain", *NOISES) if arguments.only != "time" else ()
    rows += [row for n in kinds for row in memories({**large, "parallel": "fsdp", "noise": n}, arguments.worlds)]
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
