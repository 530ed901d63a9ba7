"""Random calibrations: does each end with its certificate, and how long do they take?

    python tests/rigorous/calibrations.py --count 10000 --docs docs/accounting-truth.md

A certificate is a noise that suffices and one smaller by the tolerance that does not; both are asked again, apart from the search.
A missing or wrong one is printed with its question; then the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from pages import written

from hushgrad.accounting import certified_calibration, epsilon
from hushgrad.accounting.calibration_target import likely_noise
from hushgrad.errors import HushgradError
from hushgrad.events import Event, Gaussian

__all__ = ["Calibrated", "Run", "drawn", "main", "tried"]

TOLERANCE = 2e-5
SLOW = 1.0  # seconds


@dataclass(frozen=True)
class Run:
    """A question: the smallest noise for ``steps`` Poisson samples at ``rate``."""

    epsilon: float
    delta: float
    rate: float
    steps: int
    relation: str

    def event(self, noise: float) -> Event:
        """The run with that noise."""
        return Gaussian(noise).sampled(rate=self.rate) * self.steps


@dataclass(frozen=True)
class Calibrated:
    """What one calibration took, and what is wrong with its certificate ("" if nothing)."""

    seconds: float
    evaluations: int
    wrong: str = ""


def drawn(rng: random.Random) -> Run:
    """A question of any size: epsilon 0.03 to 20, delta 1e-3 to 1e-12, rates 1e-4 to 1, up to 30,000 steps, all relations.

    Where a record takes part with a probability of at most delta no noise is needed, and there is nothing to calibrate.
    """
    while True:
        run = _any(rng)
        if 1 - (1 - run.rate) ** run.steps > 1.1 * run.delta:
            return run


def _any(rng: random.Random) -> Run:
    return Run(
        epsilon=10 ** rng.uniform(-1.5, 1.3),
        delta=10 ** rng.uniform(-12, -3),
        rate=min(1.0, 10 ** rng.uniform(-4, 0.2)),
        steps=int(10 ** rng.uniform(0, 4.5)),
        relation=rng.choice(["add_remove", "add_remove", "zero_out", "replace_one"]),
    )


def tried(run: Run) -> Calibrated:
    """Calibrate, and check the certificate by two questions of its own."""
    start = time.process_time()
    try:
        found = certified_calibration(
            run.event,
            epsilon=run.epsilon,
            delta=run.delta,
            relation=run.relation,
            tolerance=TOLERANCE,
            start=likely_noise(run.epsilon, run.delta, run.steps, run.rate, run.relation),
        )
    except HushgradError as error:
        return Calibrated(time.process_time() - start, 0, f"{type(error).__name__}: {error}")
    seconds = time.process_time() - start
    if found.neighbour is None:
        return Calibrated(seconds, found.evaluations, "no neighbour")

    def asked(noise: float) -> float:
        return epsilon(run.event(noise), delta=run.delta, relation=run.relation)

    near = found.value * (1 - 1.0001 * TOLERANCE) <= found.neighbour < found.value
    holds = near and asked(found.value) <= run.epsilon < asked(found.neighbour)
    return Calibrated(seconds, found.evaluations, "" if holds else f"not a certificate: {found}")


def main() -> int:
    """Calibrate, and print medians and what went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--docs", type=Path, default=None)
    parser.add_argument(
        "--notes", type=Path, default=None, help="keep results here, and go on where a run with this seed stopped"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so long, if there are notes to go on from")
    options = parser.parse_args()
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    results = [] if options.notes is None or not options.notes.exists() else _noted(options.notes)
    rng, end = random.Random(seed), time.monotonic() + options.seconds
    for done in range(1, options.count + 1):
        run = drawn(rng)
        if done <= len(results):
            continue
        if options.notes is not None and time.monotonic() > end:
            return 2
        results.append(tried(run))
        if options.notes is not None:
            with options.notes.open("a") as notes:
                notes.write(json.dumps(asdict(results[-1])) + "\n")
        if results[-1].wrong:
            print(f"WRONG {run}: {results[-1].wrong}", flush=True)
        elif results[-1].seconds > SLOW:
            print(f"slow, {results[-1].seconds:.2f} s, {results[-1].evaluations} evaluations: {run}", flush=True)
        if done % 500 == 0:
            print(f"{done} done", flush=True)
    table = _table(results)
    print("\n".join(table))
    if options.docs is not None:
        command = f"`make calibrations COUNT={options.count} SEED={seed}`:"
        options.docs.write_text(written(options.docs.read_text(), "calibrations", [command, "", *table]))
    return 1 if any(result.wrong for result in results) else 0


def _noted(notes: Path) -> list[Calibrated]:
    return [Calibrated(**json.loads(line)) for line in notes.read_text().splitlines()]


def _table(results: list[Calibrated]) -> list[str]:
    seconds, asked = sorted(r.seconds for r in results), sorted(r.evaluations for r in results)

    def at(of: list[float] | list[int], share: float) -> float:
        return of[min(len(of) - 1, int(share * len(of)))]

    def row(name: str, form: Callable[[float], str], of: list[float] | list[int]) -> str:
        return f"| {name} | {' | '.join(form(at(of, share)) for share in (0.5, 0.99, 1.0))} |"

    wrong = sum(bool(r.wrong) for r in results)
    return [
        f"{len(results)} calibrations, {len(results) - wrong} with their certificate, {wrong} without.",
        "",
        "| | median | 99 % | most |",
        "|---|---|---|---|",
        row("CPU seconds", lambda x: f"{x:.3f}", seconds),
        row("evaluations of epsilon", lambda x: f"{x:.0f}", asked),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
