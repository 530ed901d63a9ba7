"""What the journal costs: the MLP of the step benchmark at B = 64, with the journal on disk and without any; bytes a step.

    python benchmarks/journal.py

Two runs under one seed, so that their batches are alike, block by block: one with its journal and the other without, in turns, for
they lie in different places of the memory, which alone makes a percent. The figure is the median over two blocks each of (with /
without), of processor time and of time on the wall. Flushing waits for the disk, which only the wall shows.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch
from models import CASES
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from hushgrad.noise.source import Source
from hushgrad.release.journal import Journal
from hushgrad.release.witness import Witness
from hushgrad.train import Checkpoint, Plan, make_private
from hushgrad.train.private import Private

_BLOCK, _ROUNDS = 10, 60
_NONE = [(Source, "seen", lambda self, hashed, work: work()), (Witness, "of", lambda *_: bytes(32))]
_NONE += [(Journal, name, lambda *_: None) for name in ("begin", "released")]


def _run(folder: str):
    case = next(c for c in CASES if c.name == "mlp" and c.size == 64)
    torch.manual_seed(0)
    model, (x, y) = case.model(), case.batch(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=64, dataset_size=6400, steps=2 * _BLOCK * (_ROUNDS + 1))
    private = make_private(model, optimizer, plan, seed=1)
    checkpoint = Checkpoint(folder, private)
    data = TensorDataset(x.repeat(100, 1), y.repeat(100))
    return private, checkpoint, iter(private.loader(data))


def _block(private: Private, batches) -> tuple[float, float]:
    began = time.process_time(), time.perf_counter()
    for _ in range(_BLOCK):
        inputs, targets = next(batches)
        private.optimizer.zero_grad()
        F.cross_entropy(private.model(inputs), targets).backward()
        private.optimizer.step()
    return time.process_time() - began[0], time.perf_counter() - began[1]


def _turn(runs, which: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """The next block of both runs, with the journal of the first and without that of the second; ``which`` is the first."""
    with ExitStack() as stack:
        for patched in _NONE:
            stack.enter_context(patch.object(*patched))
        without = _block(runs[1 - which][0], runs[1 - which][2])
    return _block(runs[which][0], runs[which][2]), without


def _sizes(folder: str) -> int:
    return sum((Path(folder) / str(number) / "journal").stat().st_size for number in range(2))


def main() -> None:
    """Print one line."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        runs = [_run(f"{folder}/{number}") for number in range(2)]
        before = _sizes(folder)
        ratios = []
        for number in range(_ROUNDS + 1):
            with_it, without = zip(*(_turn(runs, which) for which in range(2)), strict=True)
            if number:  # the first warms up
                ratios.append(
                    [sum(a) / sum(b) for a, b in zip(zip(*with_it, strict=True), zip(*without, strict=True), strict=True)]
                )
        cpu, wall = (statistics.median(column) - 1 for column in zip(*ratios, strict=True))
        size = (_sizes(folder) - before) / runs[0][0].steps  # half the steps of both
        step = without[0][0] / _BLOCK
    print(
        f"journal: {cpu:+.2%} of a step's processor time ({step * 1e3:.1f} ms), {wall:+.2%} on the wall, {size:.1f} bytes a step"
    )


if __name__ == "__main__":
    main()
