"""Long runs: does anything grow? ``python faults/soak.py`` takes 10 000 steps of each kind and fits a line through them.

Memory and step time are read in windows; growth is what the second half has more than the first. A ledger takes a million
events and is written, read and asked for its epsilon.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import lives
import psutil
import torch
from table import Row, write_table
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from hushgrad import accounting
from hushgrad.events import Gaussian, Poisson, Sampled
from hushgrad.guarantee import Ledger
from hushgrad.noise import BLT
from hushgrad.train import Plan, make_private
from hushgrad.train.fitting import run_steps

_WINDOW = 250
_MOST_BYTES = 200.0  # growth of memory per step; a leaked tensor, norm or graph is more
_MOST_TIME = 0.10  # growth of the step time from the first half to the second, as a fraction


def steps(count: int, correlated: bool) -> tuple[bool, str]:
    """``count`` steps with all metrics: (nothing grew, what was seen)."""
    torch.manual_seed(0)
    common: dict[str, Any] = {"noise_multiplier": 2.0, "delta": 1e-6, "batch_size": 16}
    if correlated:
        plan = Plan.dpftrl(epochs=4, dataset_size=4 * count, noise=BLT(buffers=3), **common)
        data = TensorDataset(torch.randn(4 * count, 16), torch.randint(3, (4 * count,)))
    else:
        plan = Plan.dpsgd(steps=count, dataset_size=2000, **common)
        data = TensorDataset(torch.randn(2000, 16), torch.randint(3, (2000,)))
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 3))
    private = make_private(model, torch.optim.Adam(model.parameters(), lr=0.001), plan, seed=1)
    process, memory, times = psutil.Process(), [], []
    last = time.thread_time()

    def watch(metrics: dict[str, Any]) -> None:
        nonlocal last
        now = time.thread_time()
        times.append(now - last)
        last = now
        if metrics["step"] % _WINDOW == 0:
            gc.collect()
            memory.append(process.memory_info().rss)
            last = time.thread_time()

    run_steps(private, F.cross_entropy, data, callbacks=[watch])
    return _grew(memory[len(memory) // 5 :], times[len(times) // 5 :])


def _grew(memory: list[int], times: list[float]) -> tuple[bool, str]:
    slope = statistics.linear_regression(range(len(memory)), memory).slope / _WINDOW
    half = len(times) // 2
    # The lower decile: other programs on the machine make some steps slower, but none faster.
    first, second = (statistics.quantiles(part, n=10)[0] for part in (times[:half], times[half:]))
    seen = f"{slope:+.0f} bytes a step; a step takes {first * 1e3:.2f} ms, in the second half {second * 1e3:.2f} ms"
    return slope < _MOST_BYTES and second < (1 + _MOST_TIME) * first, seen


def ledger(events: int) -> tuple[bool, str]:
    """Many events of a few kinds, recorded one by one, written, read, and composed."""
    kinds = [Sampled(Poisson(0.001), Gaussian(1.0 + 0.01 * i)) for i in range(20)]
    began, book = time.monotonic(), Ledger()
    for i in range(events):
        book.record(kinds[i % len(kinds)])
    text = json.dumps(book.to_json())
    again = Ledger.from_json(text)
    spent = accounting.epsilon(again.event(), delta=1e-6)
    seconds = time.monotonic() - began
    return again == book and 0 < spent < float("inf"), f"{seconds:.1f} s, {len(text) / 1e6:.0f} MB as JSON, epsilon {spent:.3f}"


def heterogeneous(count: int) -> tuple[bool, str]:
    """As many steps with as many different (rate, noise) pairs."""
    book = Ledger()
    for i in range(count):
        book.record(Sampled(Poisson(0.001 * (1 + i / count)), Gaussian(1.0 + i / count)))
    began = time.process_time()
    spent = accounting.epsilon(book.event(), delta=1e-6)
    seconds = time.process_time() - began
    return 0 < spent < float("inf") and seconds < 60, f"{seconds:.1f} s of one core, epsilon {spent:.4f}"


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--docs", type=Path, default=None, help="page whose soak table is replaced")
    options = parser.parse_args()
    lives.warm_up()
    n = options.steps
    trials = {
        f"{n:,} steps of DP-SGD: memory and step time": lambda: steps(n, correlated=False),
        f"{n:,} steps of DP-FTRL (BLT): memory and step time": lambda: steps(n, correlated=True),
        f"{100 * n:,} events in a ledger": lambda: ledger(100 * n),
        f"accounting over {10 * n:,} different steps": lambda: heterogeneous(10 * n),
    }
    began, rows = time.monotonic(), []
    for name, trial in trials.items():
        fine, seen = trial()
        rows.append(Row(name).counted(fine, seen))
        print(f"{'fine' if fine else 'FAILED'}  {name}: {seen}", flush=True)
    if options.docs is not None:
        write_table(options.docs, "soak", rows, "make soak", time.monotonic() - began)
    return 0 if all(row.survived for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
