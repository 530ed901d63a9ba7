"""The batches of a run: who is dealt in which step, held against the participation that the claim is made for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hushgrad.audit.checks import FALSE_ALARM, Check
from hushgrad.audit.tails import binomial_tail
from hushgrad.events import Everyone, MinSep, Once, Participation, Poisson
from hushgrad.release.keys import RunKey
from hushgrad.sampling import Draws
from hushgrad.train import Plan


def spread(count: int, steps: int) -> Iterator[int]:
    """The first half of ``count`` steps from the beginning, the others up to the end."""
    yield from range(count // 2)
    yield from range(steps - (count - count // 2), steps)


def dealt(plan: Plan, records: int, steps: Sequence[int]) -> tuple[np.ndarray, list[int]]:
    """Who is dealt in these steps under a fresh key, and the steps in which somebody is twice."""
    present, twice = np.zeros((len(steps), records), dtype=bool), []
    deal = plan.sampler.dealer(records, Draws(RunKey.make().sampling))
    for row, step in enumerate(steps):
        batch = deal(step)
        present[row, batch] = True
        if int(present[row].sum()) != len(batch):
            twice.append(step)
    return present, twice


def taken(plan: Plan, records: int, *, batches: int) -> tuple[np.ndarray, int]:
    """How often each record is dealt in so many batches, those of many runs, and how many these are."""
    counts, left = np.zeros(records, np.int64), batches
    while left > 0:
        deal, here = plan.sampler.dealer(records, Draws(RunKey.make().sampling)), min(left, plan.steps)
        for step in spread(here, plan.steps):
            counts[deal(step)] += 1
        left -= here
    return counts, batches


def fresh_batches_check(how: Participation, first: np.ndarray, second: np.ndarray) -> Check:
    """Where who takes part is a secret, the batches of two runs have nothing to do with each other."""
    seen = f"{len(first)} batches of two runs with fresh keys"
    if isinstance(how, (Everyone, MinSep, Once)) or first.all() or not (first.any() or second.any()):
        return Check(name="fresh batches", passed=True, seen=f"{seen}: not a secret of this plan")
    passed = not np.array_equal(first, second)
    if isinstance(how, Poisson):
        both = int((first & second).sum())
        passed = binomial_tail(both, first.size, how.rate**2) >= FALSE_ALARM
        seen = f"{seen} share {both} records ({first.size * how.rate**2:.1f} expected)"
    return Check(name="fresh batches", passed=passed, seen=seen)


def rates_check(rate: float, present: np.ndarray, counted: tuple[np.ndarray, int]) -> Check:
    """Every record, in these steps and in batches of many runs; every step; pairs of both up to eight apart: all are binomial."""
    problems = []
    for what, axis in (("record", 0), ("step", 1)):
        counts = present.sum(axis=axis)
        trials = present.shape[axis]
        for extreme in (int(counts.argmin()), int(counts.argmax())):
            if binomial_tail(int(counts[extreme]), trials, rate) < FALSE_ALARM / (16 * len(counts)):
                problems.append(f"{what} {extreme}: {counts[extreme]} of {trials}")
        table = present.T if axis == 0 else present  # one row for each record, or each step
        for lag in range(1, min(8, len(table) - 1) + 1):
            first = np.flatnonzero((np.arange(len(table) - lag) // lag) % 2 == 0)  # no row is in two pairs
            both, trials = int((table[first] & table[first + lag]).sum()), first.size * table.shape[1]
            if binomial_tail(both, trials, rate**2) < FALSE_ALARM / 32:
                problems.append(f"{what}s {lag} apart meet {both} times instead of {trials * rate**2:.1f}")
    many, batches = counted
    for extreme in (int(many.argmin()), int(many.argmax())):
        if binomial_tail(int(many[extreme]), batches, rate) < FALSE_ALARM / (8 * len(many)):
            problems.append(f"record {extreme}: {many[extreme]} of {batches} batches of many runs")
    seen = f"{present.shape[0]} steps and {present.shape[1]} records one by one and in pairs, at rate {rate:g}"
    return Check(name="rates", passed=not problems, seen=", ".join([seen, *problems[:3]]))
