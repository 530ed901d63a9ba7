"""What the hall adds to clipping and noise: books, guard, stamps, budget.

    python benchmarks/hall.py [--quick] [--json out.json]

Both loops run the same forward and backward, the same capture and the same noise, and the same SGD. "bare" calls them by hand
and guards nothing; "hall" is a private run on batches that were issued to it. CPU time of one thread; the figure is the median of
the ratios in interleaved rounds. The target: the hall's part is under 5 % of a step.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from models import CASES, Case
from torch import Tensor, nn
from torch.nn import functional as F

from hushgrad.clipping import Capture, Flat
from hushgrad.noise import Source
from hushgrad.noise.streams import IndependentStream
from hushgrad.sampling.batch_loader import stamp
from hushgrad.train import Plan, make_private

TARGET = 0.05
STEPS = 1_000_000  # never reached
Step = Callable[[], None]


def bare(case: Case, model: nn.Module, x: Tensor, y: Tensor) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    capture, stream, clipper = Capture(model), IndependentStream(Source(seed=0), steps=STEPS), Flat(1.0)
    capture.attach()
    params = dict(model.named_parameters())
    taken = 0

    def step() -> None:
        nonlocal taken
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        sums = {name: stream.row(taken, i, p.detach(), scale=1 / case.size) for i, (name, p) in enumerate(params.items())}
        capture.collect(clipper, out=sums, scale=1 / case.size)
        for name, p in params.items():
            p.grad = sums[name]
        optimizer.step()
        taken += 1

    return step


def hall(case: Case, model: nn.Module, x: Tensor, y: Tensor) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=case.size, dataset_size=60_000, steps=STEPS)
    private = make_private(model, optimizer, plan, seed=0)

    def step() -> None:
        # What the loader does for every batch, without the data: its stamp is checked and the capture is told.
        private._on_issue(stamp((x, y), step=private.steps, examples=len(x)))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def seconds(step: Step, repeats: int) -> float:
    begin = time.process_time()
    for _ in range(repeats):
        step()
    return (time.process_time() - begin) / repeats


def compare(case: Case, rounds: int) -> dict[str, float | str]:
    torch.manual_seed(0)
    x, y = case.batch(case.size)
    steps = {"bare": bare(case, case.model(), x, y), "hall": hall(case, case.model(), x, y)}
    for step in steps.values():
        seconds(step, 2)  # warm up
    repeats = max(1, int(0.02 / max(seconds(steps["bare"], 1), 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        for name in steps if turn % 2 else reversed(steps):
            times[name].append(seconds(steps[name], repeats))
    overhead = median(h / b for h, b in zip(times["hall"], times["bare"], strict=True)) - 1
    return {
        "case": case.name,
        "bare_ms": median(times["bare"]) * 1e3,
        "hall_ms": median(times["hall"]) * 1e3,
        "overhead": overhead,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, help="write the results there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [case for case in CASES if case.name.split("-")[0] in ("logreg", "logistic", "mlp", "cnn")]
    results = [compare(case, 20 if arguments.quick else 80) for case in chosen]
    print(f"{'case':<16}{'bare ms':>10}{'hall ms':>10}{'overhead':>10}  target {TARGET:.0%}")
    for row in results:
        verdict = "PASS" if float(row["overhead"]) < TARGET else "MISS"
        print(f"{row['case']:<16}{row['bare_ms']:>10.3f}{row['hall_ms']:>10.3f}{float(row['overhead']):>10.1%}  {verdict}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
