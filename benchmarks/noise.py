"""Errors of the mechanisms and times of their optimisers, beside jax-privacy where there is an interpreter with it.

    python benchmarks/noise.py [--quick] [--json PATH] [--jax-python PATH]

Every row is one mechanism for one run: the error at noise calibrated to the sensitivity (clip norm 1), how far it can be above
the best possible at most, and the time to find it. Times are the minimum over repeats, of both contestants in the same
process; wall time for the one-off optimisations, since that is what a user waits for. For the cost of drawing the noise see
noise_speed.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # threads that wait for each other on a busy machine measure the machine

from hushgrad.events import BallsInBins, MinSep, Once, Participation
from hushgrad.noise import BLT, AntiPGD, Banded, BandedInverse, Dense, Independent, Mechanism, Nu, Toeplitz, Tree, dense
from hushgrad.noise.optimise_banded import optimise_banded
from hushgrad.noise.optimise_blt import optimise_blt

TEN_EPOCHS = MinSep(gap=100, times=10)
FIXED = BallsInBins(bins=20, epochs=10)


@dataclass
class Line:
    """One row of the table."""

    mechanism: str
    steps: int
    participation: str
    rmse: float
    max: float
    above_best: float
    seconds: float
    target: str = ""
    verdict: str = ""
    peer: str = ""


@dataclass
class Case:
    """A mechanism to resolve and judge, with the figure that it has to reach."""

    name: str
    make: Callable[[], Mechanism]
    steps: int
    who: Participation
    measure: str = "rmse"
    at_most: float | None = None
    within: float | None = None
    slow: bool = False


CASES = [
    Case("Independent", Independent, 1024, Once()),
    Case("Tree plain", lambda: Tree(variant="plain"), 1024, Once(), "rmse", 7.4175),
    Case("Tree online Honaker", Tree, 1024, Once(), "rmse", 5.6505),
    Case("Tree full Honaker", lambda: Tree(variant="full"), 1024, Once(), "rmse", 3.6865),
    Case("AntiPGD tuned", AntiPGD, 1024, Once()),
    Case("Banded square root (64)", lambda: Banded.square_root(bands=64), 1024, Once()),
    Case("Banded optimised (8)", lambda: Banded(bands=8), 1024, Once(), "rmse", 8.4444),
    Case("Banded optimised (64)", lambda: Banded(bands=64), 1024, Once(), "rmse", 4.0660),
    Case("BandedInverse (64)", lambda: BandedInverse(bands=64), 1024, Once()),
    Case("Nu tuned", Nu, 1024, Once()),
    Case("Toeplitz square root", Toeplitz, 1024, Once(), "rmse", 3.1105),
    Case("Toeplitz square root", Toeplitz, 1024, Once(), "max", 3.2735),
    Case("Toeplitz square root", Toeplitz, 16384, Once(), "rmse", 3.9935),
    Case("Toeplitz square root", Toeplitz, 16384, Once(), "max", 4.1555),
    Case("BLT(2) mean", lambda: BLT(buffers=2), 1024, Once()),
    Case("BLT(3) mean", lambda: BLT(buffers=3), 1024, Once(), "rmse", 3.0588, 0.5),
    Case("BLT(4) max", lambda: BLT(buffers=4, loss="max"), 10**6, Once(), "max", 5.548, 1.0),
    Case("BLT(8) mean", lambda: BLT(buffers=8), 10**6, Once()),
    Case("Dense optimal mean", lambda: Dense.optimal(steps=256), 256, Once(), "rmse", 2.5245, 60),
    Case("Dense optimal mean", lambda: Dense.optimal(steps=1024), 1024, Once(), "rmse", 2.9556, 60, slow=True),
    Case("Toeplitz square root", Toeplitz, 1000, TEN_EPOCHS),
    Case("Tree online, restarted", lambda: Tree(restart=100), 1000, TEN_EPOCHS),
    Case("Tree online, restarted, completed", lambda: Tree(restart=100, completion=True), 1000, TEN_EPOCHS),
    Case("BandedInverse (64)", lambda: BandedInverse(bands=64), 1000, TEN_EPOCHS),
    Case("BLT(2) mean", lambda: BLT(buffers=2), 1000, TEN_EPOCHS, "rmse", 12.20, 1.0),
    Case("Banded optimised (100)", lambda: Banded(bands=100), 1000, TEN_EPOCHS),
    Case("Dense optimal, fixed order", lambda: Dense.optimal(steps=200, participation=FIXED), 200, FIXED, "rmse", 9.1701),
    Case("BLT(3) mean, fixed order", lambda: BLT(buffers=3), 200, FIXED),
]


def run(case: Case, repeats: int) -> Line:
    seconds = float("inf")
    for _ in range(1 if case.slow else repeats):
        for cached in (optimise_blt, optimise_banded, dense._optimum):
            cached.cache_clear()
        begin = time.perf_counter()
        mechanism = case.make().resolved(steps=case.steps, participation=case.who)
        seconds = min(seconds, time.perf_counter() - begin)
    error = mechanism.error(steps=case.steps, participation=case.who)
    line = Line(case.name, case.steps, str(case.who), error.rmse, error.max, error.gap, seconds)
    if case.at_most is not None:
        value = {"rmse": error.rmse, "max": error.max}[case.measure]
        line.target = f"{case.measure} <= {case.at_most:g}" + (f" in {case.within:g} s" if case.within else "")
        line.verdict = "PASS" if value <= case.at_most and seconds <= (case.within or float("inf")) else "MISS"
    return line


def certificate(steps: int) -> Line:
    """The dense optimum with its own, tighter certificate: both bounds are computed by the optimiser."""
    dense._optimum.cache_clear()
    begin = time.perf_counter()
    found = Dense.optimum(steps=steps)
    seconds = time.perf_counter() - begin
    verdict = "PASS" if found.gap <= 1e-3 else "MISS"
    text = f"gap <= 1e-3: {found.lower:.5f} <= optimum <= {found.upper:.5f}"
    return Line("Dense optimal certificate", steps, "Once()", found.upper, float("nan"), found.gap, seconds, text, verdict)


def jax_privacy_times(lines: list[Line], python: str) -> None:
    """The peer's BLT and banded optimisers on the same problems, in the same run, in the interpreter that has them."""
    command = [python, str(Path(__file__).with_name("noise_jax.py")), "optimisers"]
    seconds = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    for line in lines:
        if line.steps == 1024 and line.mechanism in seconds:
            peer = seconds[line.mechanism]
            line.peer = f"jax-privacy {peer:.2f} s, {peer / line.seconds:.0f} x"


def table(lines: list[Line]) -> str:
    head = f"{'mechanism':34} {'steps':>8} {'participation':16} {'rmse':>9} {'max':>9} {'above best':>10} {'seconds':>8}  target"
    body = [
        f"{x.mechanism:34} {x.steps:8d} {x.participation:16} {x.rmse:9.4f} {x.max:9.4f} {x.above_best:10.2%} {x.seconds:8.3f}"
        f"  {x.target} {x.verdict} {x.peer}".rstrip()
        for x in lines
    ]
    return "\n".join([head, *body])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave out the slow cases")
    parser.add_argument("--json", metavar="PATH", help="also write the table as JSON")
    parser.add_argument("--jax-python", metavar="PATH", help="an interpreter with jax-privacy, to run it beside")
    options = parser.parse_args()
    lines = [run(case, repeats=1 if options.quick else 5) for case in CASES if not (options.quick and case.slow)]
    lines.append(certificate(256 if options.quick else 1024))
    if options.jax_python is not None:
        jax_privacy_times(lines, options.jax_python)
    print(table(lines))
    if options.jax_python is None:
        print("jax-privacy is left out: --jax-python PATH names an interpreter that has it.")
    if options.json:
        with open(options.json, "w") as file:
            json.dump([asdict(line) for line in lines], file, indent=1)
    return 1 if any(line.verdict == "MISS" for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
