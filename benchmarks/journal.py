"""What the journal costs: the MLP of the step benchmark at B = 64, with the journal on disk and without any; bytes a step.

    python benchmarks/journal.py

The two runs alternate block by block in one process; the figure is the median of the blocks' ratios, of processor time and of time
on the wall. Flushing waits for the disk, which only the wall shows.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import torch
from models import CASES
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from hushgrad.release.journal import Journal
from hushgrad.release.witness import Witness
from hushgrad.train import Checkpoint, Plan, make_private
from hushgrad.train.private import Private

_BLOCK, _ROUNDS = 10, 40


def _run(folder: str | None):
    case = next(c for c in CASES if c.name == "mlp" and c.size == 64)
    torch.manual_seed(0)
    model, (x, y) = case.model(), case.batch(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=64, dataset_size=6400, steps=_BLOCK * (_ROUNDS + 1))
    private = make_private(model, optimizer, plan, seed=1)
    checkpoint = None if folder is None else Checkpoint(folder, private)
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


def main() -> None:
    """Print one line."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        kept, none = _run(folder), _run(None)
        before = (Path(folder) / "journal").stat().st_size
        ratios = []
        for number in range(_ROUNDS + 1):
            with patch.object(Witness, "of", lambda *_: bytes(32)), patch.object(Journal, "released", lambda *_: None):
                without = _block(none[0], none[2])
            with_it = _block(kept[0], kept[2])
            if number:  # the first warms up
                ratios.append([a / b for a, b in zip(with_it, without, strict=True)])
        cpu, wall = (statistics.median(column) - 1 for column in zip(*ratios, strict=True))
        size = ((Path(folder) / "journal").stat().st_size - before) / kept[0].steps
        step = without[0] / _BLOCK
    print(
        f"journal: {cpu:+.2%} of a step's processor time ({step * 1e3:.1f} ms), {wall:+.2%} on the wall, {size:.1f} bytes a step"
    )


if __name__ == "__main__":
    main()
