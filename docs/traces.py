"""Writes the walks of one batch, one privacy question and one recipe into docs/explanation/design.md: ``make traces``.

A line is a call from one file of the house into another, indented under the one that made it, in the order of the first; how often it
was made follows. Before the calls of one batch stands the stage that begins with each. Calls inside a file are in the count at the head of
each walk, and so is everything deeper than what is shown.
"""

from __future__ import annotations

import re
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HOUSE = ROOT / "src" / "hushgrad"
PAGE = ROOT / "docs" / "explanation" / "design.md"

# Of one batch: the call with which each stage begins. Stage 6 is nothing in one process, and 9 the user's own optimizer.
STAGES = {
    "sampling/draws.py Draws.poisson_subset_at": 1,
    "train/stepping.py Stepping._on_issue": 2,
    "clipping/root.py Root._enter": 3,
    "clipping/site.py Call.arrive": 4,
    "train/stepping.py Stepping._before_step": 5,
    "noise/noise_rows.py Rows.rows": 7,
    "release/core.py Release.finished": 8,
    "train/stepping.py Stepping._after_step": 10,
}


@dataclass
class Call:
    """A call into another file, and those that it made."""

    file: str = ""
    depth: int = -1
    times: int = 0
    made: dict[str, Call] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """Itself left out: the calls below it, as far as they are shown."""
        for name, call in self.made.items():
            stage = f"{STAGES.get(name, ''):<4}"
            yield stage + "  " * call.depth + name + (f"  x {call.times}" if call.times > 1 else "")
            yield from call.lines()


class Walk:
    """The calls between files while something runs; ``deepest`` of them one inside the other are told apart."""

    def __init__(self, deepest: int) -> None:
        self.calls, self.changes, self.files = 0, 0, set[str]()
        self._top, self._deepest = Call(), deepest
        self._stack = [self._top]

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """For ``sys.setprofile``."""
        if event == "call":
            self._stack.append(self._entered(frame, self._stack[-1]))
        elif event == "return" and len(self._stack) > 1:
            self._stack.pop()

    def _entered(self, frame: FrameType, before: Call) -> Call:
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(HOUSE):
            return before
        self.calls += 1
        file = path.relative_to(HOUSE).as_posix()
        if before.file == file:
            return before
        self.files.add(file)
        self.changes += 1
        if before.depth + 1 >= self._deepest:
            return Call(file, before.depth + 1)
        name = f"{file} {re.sub(r'[.]?<.*', '', frame.f_code.co_qualname)}".rstrip()
        found = before.made.setdefault(name, Call(file, before.depth + 1))
        found.times += 1
        return found

    def __str__(self) -> str:
        head = f"{self.calls:,} calls, {len(self.files)} files, {self.changes:,} changes of file"
        return "\n".join([head, *textwrap.dedent("\n".join(self._top.lines())).splitlines()])


def walked(do: Callable[[], object], *, deepest: int = 4) -> str:
    """``do`` once to import and warm what is made once, then once more with its calls noted."""
    do()
    walk = Walk(deepest)
    sys.setprofile(walk)
    try:
        do()
    finally:
        sys.setprofile(None)
    return str(walk)


def batch() -> str:
    """A step of DP-SGD on a small network, after the first ones with their proofs."""
    import torch
    from torch.utils.data import TensorDataset

    from hushgrad import Plan, make_private

    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=8, dataset_size=64, steps=9)
    private = make_private(model, optimizer, plan, seed=0)
    batches = iter(private.loader(TensorDataset(torch.randn(64, 6), torch.randint(3, (64,)))))

    def step() -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    for _ in range(4):
        step()
    return walked(step)


def question() -> str:
    """What a run costs."""
    from hushgrad import epsilon
    from hushgrad.events import Gaussian

    return walked(lambda: epsilon(Gaussian(1.0).sampled(rate=0.01) * 1000, delta=1e-5))


def recipe() -> str:
    """``hushgrad train`` on the embedded digits, twelve steps."""
    from hushgrad.recipes import Recipe, train

    plan = {"noise_multiplier": 2.0, "delta": 1e-4, "batch_size": 128, "steps": 12}
    tables = {"model": {"name": "logistic"}, "data": {"name": "digits"}, "plan": plan, "optimizer": {"lr": 2.0}}

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            train(Recipe.from_tables(tables), Path(folder) / "run", progress=False)

    return walked(run, deepest=2)


def main() -> None:
    """Write all three between their marks."""
    page = PAGE.read_text()
    for name, walk in (("batch", batch), ("question", question), ("recipe", recipe)):
        block = f"<!-- walk: {name} -->\n```text\n{walk()}\n```\n<!-- end -->"
        page, count = re.subn(rf"<!-- walk: {name} -->.*?<!-- end -->", lambda _, block=block: block, page, flags=re.DOTALL)
        assert count == 1, name
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
