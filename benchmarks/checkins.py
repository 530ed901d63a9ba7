"""The federated server's book of participations with a million users: what min-separation costs, in time and in cohorts.

    python benchmarks/checkins.py [--users 1000000] [--rounds 2000] [--quick] [--json out.json]

Every round a random part of the users is reachable (a phone that is idle, charging and on a free network), more of them at
night than by day. The server takes a cohort at random from those whose turn it is, by :class:`hushgrad.federated.CheckIns`.
Asked is: can every round be filled, how long does the book take for a round, and does the promise hold that the privacy
theorem needs (checked from the list of all participations, apart from the book itself).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from hushgrad.federated import CheckIns

ROUNDS_A_DAY = 48
SECONDS = 0.5  # target for the book's part of a round


@dataclass(frozen=True)
class Case:
    """One simulated run. ``reach``: the mean part of the users that a round can reach."""

    users: int
    rounds: int
    cohort: int
    gap: int
    times: int
    reach: float


@dataclass(frozen=True)
class Outcome:
    """What came of it; ``seconds``: the book's part of the slowest round."""

    filled: float
    short: int
    least_gap: int | None  # None: nobody took part twice
    most_times: int
    seconds: float
    mean_seconds: float


def reachable(case: Case, round: int, rng: np.random.Generator) -> np.ndarray:
    """Who could be asked in this round: a random part of the users, five times as many at night as by day."""
    daily = math.cos(2 * math.pi * round / ROUNDS_A_DAY)
    share = case.reach * (1 + 2 / 3 * daily)
    count = int(rng.binomial(case.users, share))
    return rng.integers(case.users, size=count).astype(np.uint64)  # with a few repetitions: devices call in twice


def simulate(case: Case, seed: int = 0) -> Outcome:
    """Run the server's choice of cohorts for all rounds."""
    rng = np.random.default_rng(seed)
    book = CheckIns(gap=case.gap, times=case.times)
    who: list[np.ndarray] = []
    spent: list[float] = []
    for t in range(case.rounds):
        asked = reachable(case, t, rng)
        began = time.process_time()
        eligible = book.eligible(asked, round=t)
        cohort = rng.choice(eligible, size=min(case.cohort, len(eligible)), replace=False)
        book.enter(cohort, round=t)
        spent.append(time.process_time() - began)
        who.append(cohort)
    sizes = np.array([len(cohort) for cohort in who])
    gap, times = promise(who)
    return Outcome(
        float(sizes.mean() / case.cohort), int((sizes < case.cohort).sum()), gap, times, max(spent), float(np.mean(spent))
    )


def promise(who: list[np.ndarray]) -> tuple[int | None, int]:
    """(the smallest distance between two rounds of one user, the most rounds of one user), from the lists themselves."""
    users = np.concatenate(who)
    rounds = np.repeat(np.arange(len(who)), [len(cohort) for cohort in who])
    order = np.lexsort((rounds, users))
    users, rounds = users[order], rounds[order]
    same = users[1:] == users[:-1]
    gaps = (rounds[1:] - rounds[:-1])[same]
    return int(gaps.min()) if len(gaps) else None, int(np.unique(users, return_counts=True)[1].max())


def cases(users: int, rounds: int) -> list[Case]:
    """From far apart and rarely to as tight as the users allow."""
    cohort = users // 1000
    return [
        Case(users, rounds, cohort, gap=ROUNDS_A_DAY, times=10, reach=0.02),
        Case(users, rounds, cohort, gap=7 * ROUNDS_A_DAY, times=6, reach=0.02),
        Case(users, rounds, cohort, gap=14 * ROUNDS_A_DAY, times=3, reach=0.02),
        Case(users, rounds, cohort, gap=20 * ROUNDS_A_DAY, times=1, reach=0.02),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--users", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--quick", action="store_true", help="100 rounds")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    rounds = 100 if arguments.quick else arguments.rounds
    rows = []
    print(f"{arguments.users:,} users, {rounds} rounds, cohorts of {arguments.users // 1000:,}; the book's CPU time for a round")
    print("gap  times   filled  short rounds   least gap  most times   mean ms  max ms")
    for case in cases(arguments.users, rounds):
        out = simulate(case)
        kept = (out.least_gap is None or out.least_gap >= case.gap) and out.most_times <= case.times
        passed = kept and out.seconds < SECONDS
        print(
            f"{case.gap:>4}{case.times:>6}{100 * out.filled:>8.1f}%{out.short:>12}{out.least_gap or '-':>13}{out.most_times:>11}"
            f"{1e3 * out.mean_seconds:>12.1f}{1e3 * out.seconds:>9.1f}  {'PASS' if passed else 'MISS'}",
            flush=True,
        )
        rows.append({**asdict(case), **asdict(out), "passed": passed})
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
