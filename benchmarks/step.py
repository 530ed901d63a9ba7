"""What a private step costs: plain PyTorch, hushgrad and Opacus, interleaved in one run.

    python benchmarks/step.py [--quick] [--case mlp] [--json out.json] [--memory] [--growth] [--jax-python PATH]

Each figure is CPU time (one thread) or wall time (two threads) of a whole step, noise multiplier 1 and SGD included, divided by
that of plain PyTorch in the same round; of the rounds the median is taken. A round is short, so that what else the machine does
meets all alike; the quotient of two minima is that of two lucky moments, and differs more from run to run.
jax-privacy runs in an interpreter of its own (--jax-python) and is divided by jitted plain JAX there.

Peak memory is measured twice: as it is, and with a C library that gives freed blocks back at once (MALLOC_MMAP_THRESHOLD_), for all alike.
The second figure is what is alive; the difference is the heap's fragmentation. Both are held to the target.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from models import CASES, GPT, Case, memory
from torch import Tensor, nn
from torch.nn import functional as F

warnings.filterwarnings("ignore")
CLIP, SIGMA, RATE = 1.0, 1.0, 0.01
Step = Callable[[], None]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """The mean over examples of each example's mean."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


# The implementations ---------------------------------------------------------------------------------------------------


def plain(case: Case, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(batch[0]), batch[1]).backward()
        optimizer.step()

    return step


def hushgrad(case: Case, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
    """Capture, clip, noise from the keyed source in one pass (written first under scattered rows), SGD by the user's optimizer."""
    from hushgrad.clipping import Capture, Flat
    from hushgrad.noise import Source

    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    capture, source, clipper = Capture(model), Source(seed=0), Flat(CLIP)
    capture.attach()
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    names, scale = list(params), SIGMA * CLIP / case.size
    first = [i for i, name in enumerate(names) if name in capture.scattered]
    rest = [i for i, name in enumerate(names) if name not in capture.scattered]
    taken = 0

    def step() -> None:
        nonlocal taken
        optimizer.zero_grad()
        loss_of(model(batch[0]), batch[1]).backward()
        begun = {names[i]: source.z(taken, i, params[names[i]], scale=scale) for i in first}
        sums = capture.collect(clipper, out=begun, scale=1 / case.size).raw_sums
        dense = [sums[names[i]] for i in rest]
        source.z_all(taken, dense, indices=rest, out=dense, scale=scale)
        for name, p in params.items():
            p.grad = sums[name]
        optimizer.step()
        taken += 1

    return step


def certified(case: Case, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
    """The same with sums in double precision, added to their noise when they are complete; the loss is a sum, as that needs it."""
    from hushgrad.clipping import Capture, Flat
    from hushgrad.clipping.certificate import Certificate
    from hushgrad.noise import Source

    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    capacity = 4 * case.size + 1000
    capture = Capture(model, loss_reduction="sum", certificate=Certificate(capacity, capacity, usual=case.size))
    capture.attach()
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    source, clipper = Source(seed=0), Flat(CLIP)
    likes, scale, taken = list(params.values()), SIGMA * CLIP / case.size, 0

    def step() -> None:
        nonlocal taken
        optimizer.zero_grad()
        (loss_of(model(batch[0]), batch[1]) * case.size).backward()
        rows = dict(zip(params, source.z_all(taken, likes, scale=scale), strict=True))
        for name, total in capture.collect(clipper, out=rows, scale=1 / case.size).raw_sums.items():
            params[name].grad = total
        optimizer.step()
        taken += 1

    return step


def lazy(case: Case, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
    """A whole private run with lazy tables: noise for the rows that the batch reads, none for the others."""
    from hushgrad.sampling.batch_loader import stamp
    from hushgrad.train import Plan, make_private

    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    plan = Plan.dpsgd(
        noise_multiplier=SIGMA, delta=1e-5, max_grad_norm=CLIP, batch_size=case.size, dataset_size=60_000, steps=10**6
    )
    private = make_private(model, optimizer, plan, seed=0, lazy_tables=True)

    def step() -> None:
        private._on_issue(stamp(batch, step=private.steps, examples=len(batch[0])))  # what the loader does, without the data
        optimizer.zero_grad()
        loss_of(model(batch[0]), batch[1]).backward()
        optimizer.step()

    return step


def opacus(mode: str) -> Callable[[Case, nn.Module, tuple[Tensor, Tensor]], Step]:
    """Opacus' own engine in one of its gradient modes; batches come from the same tensors as everybody's."""

    def make(case: Case, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
        from opacus import PrivacyEngine

        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch), batch_size=case.size)
        options: dict[str, Any] = {"noise_multiplier": SIGMA, "max_grad_norm": CLIP, "poisson_sampling": False}
        ghost = mode == "ghost"
        criterion = nn.CrossEntropyLoss()
        engine = PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=data, grad_sample_mode=mode, criterion=criterion, **options
        )
        model, optimizer = engine[0], engine[1]
        criterion = engine[2] if ghost else loss_of

        def step() -> None:
            optimizer.zero_grad()
            output = model(batch[0])
            if ghost and output.dim() == 3:  # one loss per sequence, as in hushgrad's capture
                criterion(output.flatten(0, 1), batch[1].flatten(), shape=output.shape).backward()
            else:
                criterion(output, batch[1]).backward()
            optimizer.step()

        return step

    return make


IMPLEMENTATIONS: dict[str, Callable[[Case, nn.Module, tuple[Tensor, Tensor]], Step]] = {
    "plain": plain,
    "hushgrad": hushgrad,
    "hushgrad certified": certified,
    "hushgrad lazy": lazy,
    **{f"opacus {mode}": opacus(mode) for mode in ("hooks", "functorch", "ew", "ghost")},
}


# Measuring -----------------------------------------------------------------------------------------------------------


def build(name: str, case: Case) -> Step:
    torch.manual_seed(0)
    model = case.model()
    return IMPLEMENTATIONS[name](case, model, case.batch(case.size))


def interleaved(steps: dict[str, Step], rounds: int, clock: Callable[[], float], seconds: float) -> dict[str, list[float]]:
    """The times of each step, of rounds in which every implementation takes one step."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    began, done = time.monotonic(), 0
    while done < rounds or time.monotonic() - began < seconds:
        for name, step in steps.items():
            start = clock()
            step()
            times[name].append(clock() - start)
        done += 1
        if done >= 3 and time.monotonic() - began > 4 * seconds + 20:
            break
    return times


def measure(case: Case, peers: list[str], threads: int, seconds: float) -> dict[str, float]:
    """Ratios to plain PyTorch."""
    torch.set_num_threads(threads)
    steps, failed = {}, []
    for name in ("plain", "hushgrad", "hushgrad certified", *(["hushgrad lazy"] if case.lazy_target else []), *peers):
        try:
            steps[name] = build(name, case)
            steps[name]()
        except Exception as error:  # noqa: BLE001 (a peer that cannot run the case is a result)
            failed.append(name)
            steps.pop(name, None)
            print(f"  {name}: {type(error).__name__}: {str(error)[:80]}", file=sys.stderr)
    times = interleaved(steps, case.rounds, time.process_time if threads == 1 else time.perf_counter, seconds)
    plain = times.pop("plain")
    ratios = {name: median(t / p for t, p in zip(each, plain, strict=True)) for name, each in times.items()}
    return {"plain ms": median(plain) * 1e3, **ratios}


def peak_memory(case: Case, name: str, *, alive: bool) -> float:
    """Megabytes above the model, its data and its buffers while two steps run, in a process of its own."""
    command = [sys.executable, __file__, "--peak", name, "--case", f"{case.name}:{case.size}"]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "500000"} if alive else None
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return float(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else float("nan")


def _peak(name: str, case: Case) -> float:
    torch.set_num_threads(1)
    step = build(name, case)
    small = case._replace(size=2)
    build(name, small)()  # what is loaded once: libraries, kernels
    clear = Path("/proc/self/clear_refs")
    clear.write_text("5")  # reset the high-water mark of the resident set
    before = memory("VmRSS")
    step()
    step()
    return memory("VmHWM") - before


def jax_peer(case: Case, python: str, seconds: float) -> dict[str, float]:
    """The ratio of jax-privacy to plain JAX, from the other interpreter; empty, with a message, where it has none."""
    if case.name not in ("logreg", "mlp", "cnn"):
        return {}
    command = [python, str(Path(__file__).with_name("step_jax.py")), case.name, str(case.size), "--seconds", str(seconds)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"  jax-privacy left out: {type(error).__name__}", file=sys.stderr)
        return {}
    return {"jax-privacy": float(json.loads(done.stdout.strip().splitlines()[-1])["jax-privacy"])}


def growth() -> list[tuple[str, list[float]]]:
    """CPU time of a private step as the batch and the depth double; linear growth doubles the time."""
    torch.set_num_threads(1)
    rows = []
    mlp = next(c for c in CASES if c.name == "mlp")
    sizes = (128, 256, 512, 1024)
    rows.append((f"mlp, B = {sizes}", [_time(mlp._replace(size=B)) for B in sizes]))
    gpt = next(c for c in CASES if c.name == "gpt")
    depths = (1, 2, 4, 8)
    rows.append((f"gpt without its head's vocabulary, layers = {depths}", [_time(_deep(gpt, n)) for n in depths]))
    return rows


def _deep(case: Case, layers: int) -> Case:
    text = lambda B: tuple(t % 50 for t in case.batch(B))  # noqa: E731
    return case._replace(model=lambda: GPT(layers=layers, vocabulary=50), batch=text, size=8)  # type: ignore[arg-type]


def _time(case: Case) -> float:
    return min(interleaved({"hushgrad": build("hushgrad", case)}, 5, time.process_time, 1.0)["hushgrad"]) * 1e3


# The report ------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", help="only this case, e.g. mlp or mlp:256")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and no peer that takes minutes")
    parser.add_argument("--alone", action="store_true", help="plain PyTorch and hushgrad only")
    parser.add_argument("--memory", action="store_true", help="also peak memory, each in a process of its own")
    parser.add_argument("--growth", action="store_true", help="also growth in batch size and depth")
    parser.add_argument("--wall", action="store_true", help="also wall time with two threads")
    parser.add_argument("--jax-python", metavar="PATH", help="also jax-privacy, in this interpreter")
    parser.add_argument("--json", metavar="PATH", help="write the figures as JSON")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    args = parser.parse_args()
    wanted = [c for c in CASES if not args.case or c.name in args.case or f"{c.name}:{c.size}" in args.case]
    if args.peak:
        print(_peak(args.peak, wanted[0]))
        return
    figures: dict[str, Any] = {}
    for case in wanted:
        figures[f"{case.name} B={case.size}"] = report(case, args)
    if args.growth:
        for title, times in growth():
            figures[title] = times
            # Linear with a fixed cost: each doubling at most doubles the time, up to 15 % of noise.
            steps = [later / earlier for earlier, later in pairwise(times)]
            shown = ", ".join(f"{t:.1f} ms" for t in times) + "; doubling costs x " + ", ".join(f"{s:.2f}" for s in steps)
            print(f"{title}: {shown}  {'PASS' if max(steps) <= 2.3 else 'MISS'}")
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1))


def report(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    peers = (
        [] if args.alone else [n for n in IMPLEMENTATIONS if n.startswith("opacus") and not (args.quick and n in case.slow_peers)]
    )
    seconds = 2.0 if args.quick else 10.0
    result: dict[str, Any] = {"cpu": measure(case, peers, 1, seconds)}
    if args.jax_python:
        result["cpu"] |= jax_peer(case, args.jax_python, seconds)
    print(_line(f"{case.name} B={case.size}, CPU, 1 thread", result["cpu"], case.target))
    if case.lazy_target:
        good = result["cpu"]["hushgrad lazy"] <= case.lazy_target
        print(
            f"   with lazy tables: {result['cpu']['hushgrad lazy']:.2f}; target {case.lazy_target}  {'PASS' if good else 'MISS'}"
        )
    if args.wall and case.wall_target:
        result["wall"] = measure(case, [p for p in peers if p == "opacus ghost"], 2, seconds)
        print(_line("   wall, 2 threads", result["wall"], case.wall_target))
    if args.memory:
        others = [p for p in peers if p == "opacus ghost" or not args.quick] + (["hushgrad lazy"] if case.lazy_target else [])
        for alive in (False, True):
            memory = {name: peak_memory(case, name, alive=alive) for name in ("plain", "hushgrad", *others)}
            result["memory alive" if alive else "memory"] = memory
            shown = ", ".join(f"{k} {v:.0f}" for k, v in memory.items())
            good = memory["hushgrad"] <= 2 * memory["plain"] and not memory["hushgrad"] > memory.get("opacus ghost", float("inf"))
            print(f"   peak MB, {'alive' if alive else 'with the heap as it is'}: {shown}  {'PASS' if good else 'MISS'}")
    return result


def _line(title: str, ratios: dict[str, float], target: float) -> str:
    shown = ", ".join(f"{name} {value:.2f}" for name, value in ratios.items())
    return f"{title}: {shown}; target {target}  {'PASS' if ratios['hushgrad'] <= target else 'MISS'}"


if __name__ == "__main__":
    main()
