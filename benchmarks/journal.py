"""What the journal costs: the MLP of the step benchmark at B = 64, with the journal on disk and without any; bytes a step.

    python benchmarks/journal.py

One run with batches of one size, so that all steps are alike and everything lies in the same places of the memory. Of every four steps
the first and the last are taken with the journal and the other two without, or the other way round. The figure is the median over
these fours of (with - without), in parts of a median step without, of processor time and of time on the wall; beside it the interval
that covers the median with 95 % (order statistics). Flushing waits for the disk, which only the wall shows.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from models import CASES
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from hushgrad.train import Checkpoint, Plan, make_private
from hushgrad.train.private import Private

_WARM, _FOURS = 10, 300
_STEPS = 4 * (_WARM + _FOURS)


class _NoJournal:
    """What a step asks of a journal, without one."""

    chain, durable = bytes(16), True

    def begin(self, step: int) -> None: ...

    def released(self, step: int, witness: bytes) -> None: ...

    def read_all_before(self, step: int) -> bool:
        return False

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class _NoWitness:
    """Nothing is hashed."""

    hashed = None

    def of(self, *_: Any) -> bytes:
        return bytes(32)


def _run(folder: str) -> tuple[Private, Checkpoint, Iterator[Any]]:
    case = next(c for c in CASES if c.name == "mlp" and c.size == 64)
    torch.manual_seed(0)
    model, (x, y) = case.model(), case.batch(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    plan = Plan.dpsgd(
        noise_multiplier=1.0,
        delta=1e-5,
        batch_size=64,
        dataset_size=6400,
        steps=_STEPS,
        sampling="fixed_size",
        relation="replace_one",
    )
    private = make_private(model, optimizer, plan, seed=1)
    checkpoint = Checkpoint(folder, private)
    data = TensorDataset(x.repeat(100, 1), y.repeat(100))
    return private, checkpoint, iter(private.loader(data))


def _step(private: Private, batches: Iterator[Any]) -> tuple[float, float]:
    inputs, targets = next(batches)
    began = time.process_time(), time.perf_counter()
    private.optimizer.zero_grad()
    F.cross_entropy(private.model(inputs), targets).backward()
    private.optimizer.step()
    return time.process_time() - began[0], time.perf_counter() - began[1]


def _measured(private: Private, batches: Iterator[Any]) -> tuple[list[Any], list[Any]]:
    """The times of all steps with the journal and of all without, four by four."""
    ways = [(private._journal, private._release._witness), (_NoJournal(), _NoWitness())]
    times: tuple[list[Any], list[Any]] = ([], [])
    for four in range(_STEPS // 4):
        for which in (0, 1, 1, 0) if four % 2 else (1, 0, 0, 1):
            _take(private, *ways[which])
            took = _step(private, batches)
            if four >= _WARM:
                times[which].append(took)
    _take(private, *ways[0])
    return times


def _take(private: Private, journal: Any, witness: Any) -> None:
    """Have the next step use these."""
    private._journal, private._release._witness = journal, witness
    private._release.source.hashed = witness.hashed


def _cost(with_it: list[float], without: list[float]) -> tuple[float, float, float]:
    """The median difference of neighbours, in parts of a step, and the interval of its median."""
    pairs = zip(zip(with_it[::2], with_it[1::2], strict=True), zip(without[::2], without[1::2], strict=True), strict=True)
    differences = sorted(sum(a) / 2 - sum(b) / 2 for a, b in pairs)
    n = len(differences)
    low = int(n / 2 - 0.98 * math.sqrt(n))
    return tuple(
        x / statistics.median(without) for x in (statistics.median(differences), differences[low], differences[-1 - low])
    )  # type: ignore[return-value]


def main() -> None:
    """Print one line."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        private, _checkpoint, batches = _run(folder)
        journal = Path(folder) / "journal"
        before = journal.stat().st_size
        times = _measured(private, batches)
        size = (journal.stat().st_size - before) / (_STEPS // 2)
    columns = [[list(column) for column in zip(*way, strict=True)] for way in times]
    words = [
        "{:+.2%} ({:+.2%} to {:+.2%}) {}".format(*_cost(with_it, without), of)
        for with_it, without, of in zip(*columns, ("of a step's processor time", "on the wall"), strict=True)
    ]
    print(f"journal: {', '.join(words)}; a step without {statistics.median(columns[1][0]) * 1e3:.1f} ms; {size:.1f} bytes a step")


if __name__ == "__main__":
    main()
