"""Speed of the noise source and of the streams, beside torch.randn and, where there is an interpreter with it, jax-privacy.

    python benchmarks/noise_speed.py [--quick] [--json PATH] [--jax-python PATH]

All contestants take turns in one process; the figure is the smallest CPU time of the turns, in ns per number, and for
streams that work in blocks of rows the smallest mean over one whole block. Ratios count, absolute times are the machine's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from hushgrad.noise import _kernel
from hushgrad.noise.source import Source
from hushgrad.noise.streams import BandedStream, BufferStream, FilterStream, IndependentStream, TreeStream

STEPS = 1 << 20
BAND = 64
BLOCK = 16  # rows that the longest block of any stream holds
COLUMN = [1.0] + [0.5 / (j + 1) ** 1.5 for j in range(BAND - 1)]
DECAY, WEIGHT = (0.99, 0.9, 0.6, 0.2), (0.1, 0.1, 0.1, 0.1)


@dataclass
class Line:
    """One row of the table: a contestant and what it is held against."""

    size: int
    threads: int
    name: str
    nanoseconds: float
    against: str = ""
    ratio: float = 1.0
    target: float | None = None

    @property
    def verdict(self) -> str:
        """PASS or MISS where there is a target."""
        return "" if self.target is None else "PASS" if self.ratio <= self.target else "MISS"


def turns(contestants: dict[str, Callable[[int], object]], size: int, repeats: int) -> dict[str, float]:
    """Smallest CPU nanoseconds per number; the contestants alternate, ``BLOCK`` calls in a row each."""
    best = dict.fromkeys(contestants, float("inf"))
    warm = BAND // BLOCK if size <= 1_000_000 else 1  # until the histories are full
    for call in contestants.values():
        for step in range(warm * BLOCK):
            call(step)
    for repeat in range(warm, warm + repeats):
        for name, call in contestants.items():
            begin = time.process_time()
            for turn in range(BLOCK):
                call(repeat * BLOCK + turn)
            best[name] = min(best[name], (time.process_time() - begin) / BLOCK / size * 1e9)
    return best


def contestants(size: int) -> dict[str, Callable[[int], object]]:
    source, buffer = Source(seed=1), torch.zeros(size)

    def adding(stream: IndependentStream) -> Callable[[int], object]:
        return lambda step: stream.row(step, 0, buffer, out=buffer, scale=0.5)

    table: dict[str, Callable[[int], object]] = {
        "torch.randn": lambda step: torch.randn(size),
        "torch: out += 0.5 randn": lambda step: buffer.add_(torch.randn(size), alpha=0.5),
        "source.z": lambda step: source.z(step, 0, buffer),
        "independent row": adding(IndependentStream(source)),
        "BLT(4) row": adding(BufferStream(source, DECAY, WEIGHT)),
        "anti-PGD row": adding(FilterStream(source, [1.0, -0.9], steps=STEPS)),
        "tree row": adding(TreeStream(source, steps=4096)),
        "tree row, Honaker": adding(TreeStream(source, steps=4096, honaker=True)),
    }
    if size <= 1_000_000:
        table[f"banded({BAND}) row"] = adding(BandedStream(source, lambda t: COLUMN, steps=STEPS))
        table[f"filter({BAND}) row, memory 16"] = adding(FilterStream(source, COLUMN, steps=STEPS, memory=16))
    return table


def jax_privacy(size: int, python: str) -> dict[str, float]:
    """jax-privacy's rows at the same size, from the interpreter that has it: its own cipher-free draws, float32."""
    command = [python, str(Path(__file__).with_name("noise_jax.py")), "rows", "--size", str(size)]
    figures = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {f"jax-privacy {name}": figure for name, figure in figures.items()}


def small_tensors(repeats: int) -> tuple[float, float]:
    """CPU microseconds for each of 30 tensors of 64 numbers: one call for each, and one call for all."""
    source, tensors = Source(seed=1), [torch.zeros(64) for _ in range(30)]
    calls: dict[str, Callable[[int], object]] = {
        "each": lambda step: [source.z(step, k, t, out=t) for k, t in enumerate(tensors)],
        "all": lambda step: source.z_all(step, tensors, out=tensors),
    }
    best = turns(calls, 30 * 1000, 10 * repeats)  # per 30,000 numbers of a nanosecond: microseconds per tensor
    return best["each"], best["all"]


TARGETS = {
    "source.z": ("torch.randn", 1.0),
    "independent row": ("torch: out += 0.5 randn", 1.0),
    "BLT(4) row": ("independent row", 2.0),
    f"banded({BAND}) row": ("independent row", 5.0),
    "anti-PGD row": ("independent row", None),
    "tree row": ("independent row", None),
    "tree row, Honaker": ("independent row", None),
    f"filter({BAND}) row, memory 16": ("independent row", None),
    f"jax-privacy banded({BAND})": ("jax-privacy identity", None),
    "jax-privacy BLT(4)": ("jax-privacy identity", None),
    "jax-privacy identity": ("independent row", None),
}


def measure(size: int, threads: int, repeats: int, jax_python: str | None) -> list[Line]:
    torch.set_num_threads(threads)
    best = turns(contestants(size), size, repeats)
    if jax_python is not None and size <= 1_000_000:
        best.update(jax_privacy(size, jax_python))
    lines = []
    for name, nanoseconds in best.items():
        against, target = TARGETS.get(name, ("", None))
        ratio = nanoseconds / best[against] if against else 1.0
        lines.append(Line(size, threads, name, nanoseconds, against, ratio, target))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only 10^6 numbers, few turns")
    parser.add_argument("--json", metavar="PATH", help="write the figures there too")
    parser.add_argument("--jax-python", metavar="PATH", help="an interpreter with jax-privacy, to run it beside")
    options = parser.parse_args()
    plan = [(10**6, 1, 4), (10**6, 2, 4)] if options.quick else [(10**6, 1, 12), (10**6, 2, 12), (10**7, 1, 3), (10**7, 2, 3)]
    print(f"kernel: {_kernel.KERNEL.name}, torch {torch.__version__}")
    print(f"{'numbers':>9} {'threads':>7}  {'contestant':<32} {'ns/number':>9}  {'ratio':>6}  {'target':>6}")
    lines = []
    for size, threads, repeats in plan:
        for line in measure(size, threads, repeats, options.jax_python):
            lines.append(line)
            against = f"x {line.against}" if line.against else ""
            target = f"{line.target:g}" if line.target is not None else ""
            print(
                f"{size:>9} {threads:>7}  {line.name:<32} {line.nanoseconds:>9.2f}  "
                f"{line.ratio:>6.2f}  {target:>6}  {line.verdict:<4} {against}"
            )
    print(
        "torch.randn and source.z make a new tensor in every call; of 10^7 numbers its first touch (page faults) is part of the time."
    )
    torch.set_num_threads(1)
    each, together = small_tensors(4)
    print(
        f"30 tensors of 64 numbers: {each:.1f} us for each by source.z, {together:.1f} us by source.z_all, {each / together:.1f} x"
    )
    if options.jax_python is None:
        print("jax-privacy is left out: --jax-python PATH names an interpreter that has it.")
    if options.json:
        with open(options.json, "w") as file:
            json.dump([asdict(line) for line in lines], file, indent=1)
    return int(any(line.verdict == "MISS" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
