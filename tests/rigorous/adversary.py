"""A standing adversary: draws questions over the whole range, asks the accountant, and compares both ends of its interval with the truth.

    python tests/rigorous/adversary.py --seconds 600 --docs docs/accounting-truth.md

The truth comes from ball arithmetic, enumeration and contour inversion (beside this file), which share no code with the accountants.
An end that is refuted is a violation, printed with the question that found it; then the exit code is 1.
"""

from __future__ import annotations

import argparse
import math
import random
import secrets
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import inversion
from pages import between, written
from questions import KINDS, Question

from hushgrad.accounting import epsilon_interval
from hushgrad.errors import Contradiction, NoTheorem

__all__ = ["Found", "compare", "main"]

_LONGEST = 30.0  # CPU seconds of one question


@dataclass
class Found:
    """What one kind of questions gave."""

    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


def compare(question: Question, found: Found) -> None:
    """Ask the accountant, and try to refute either end."""
    found.counts["questions"] += 1
    try:
        low, high = epsilon_interval(question.event, delta=question.delta, relation=question.relation)
    except NoTheorem:
        found.counts["refused"] += 1
        return
    except Contradiction as error:
        found.violations.append(f"{error} {question}")
        return
    target = math.log(question.delta)
    try:
        if math.isfinite(high):
            found.counts["ends"] += 1
            if max(truth(high)[0] for truth in (*question.truths, *question.attained)) > target:
                found.violations.append(f"upper end {high!r} of {question}")
        if low > 0 and question.exact:
            found.counts["ends"] += 1
            if max(truth(low)[1] for truth in question.truths) < target:
                found.violations.append(f"lower end {low!r} of {question}")
    except inversion.Undecided:
        found.counts["undecided"] += 1


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """A truth that takes more CPU time than this is undecided."""

    def late(*_: object) -> None:
        raise inversion.Undecided(f"no answer in {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def main() -> int:
    """Ask until the time is up, in turns of equal time, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--docs", type=Path, default=None)
    parser.add_argument("--more", action="store_true", help="keep the tables that the page has")
    options = parser.parse_args()
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    rng, found, spent = random.Random(seed), {kind: Found() for kind in KINDS}, dict.fromkeys(KINDS, 0.0)
    print(f"seed {seed}")
    end = time.monotonic() + options.seconds
    while time.monotonic() < end:
        kind = min(spent, key=lambda name: spent[name])
        start = time.monotonic()
        before = len(found[kind].violations)
        try:
            with _at_most(_LONGEST):
                compare(KINDS[kind](rng), found[kind])
        except inversion.Undecided as error:
            found[kind].counts["undecided"] += 1
            print(f"{kind}: {error}", flush=True)
        spent[kind] += time.monotonic() - start
        for line in found[kind].violations[before:]:
            print(f"VIOLATION, {kind}: {line}", flush=True)
    rows = [
        (kind, of.counts["questions"], of.counts["refused"], of.counts["ends"], of.counts["undecided"], len(of.violations))
        for kind, of in found.items()
    ]
    table = ["| kind | questions | refused | ends compared | undecided | violations |", "|---|---|---|---|---|---|"]
    table += [f"| {' | '.join(map(str, row))} |" for row in rows]
    print("\n".join(table))
    if options.docs is not None:
        command = f"`make rigorous SECONDS={options.seconds:.0f} SEED={seed}`:"
        page = options.docs.read_text()
        before = [*between(page, "rigorous"), ""] if options.more else []
        options.docs.write_text(written(page, "rigorous", [*before, command, "", *table]))
    return 1 if any(of.violations for of in found.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
