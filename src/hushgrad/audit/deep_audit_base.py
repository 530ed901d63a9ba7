"""The common part of deep audits of runs and of servers: checks of noise and batches, a lower bound, and the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hushgrad.accounting import epsilon_interval
from hushgrad.audit import composed_bounds
from hushgrad.audit.checks import FALSE_ALARM, Check, batches_check, binomial_tail
from hushgrad.audit.noise_samples import Field
from hushgrad.audit.noise_tests import Long, field_checks
from hushgrad.audit.report import DeepReport, LowerBound
from hushgrad.audit.scores import Scorer
from hushgrad.errors import ArgumentError, HushgradError
from hushgrad.events import Everyone, MinSep, Once, Participation, Poisson
from hushgrad.release.keys import RunKey
from hushgrad.sampling import Draws
from hushgrad.train import Plan

BATCHES = 200  # batches that are compared with another run's
_TABLE = 20_000_000  # largest table of steps x records
_DEALT = 4000  # batches, over many runs, in which every record is counted
_OWNER = "the attacker sees every released gradient, knows the model and all records but one, which is the worst one"


class Parts:
    """Runs the parts of a deep audit and collects their results."""

    def __init__(self, plan: Plan, records: int, *, seed: int, key: RunKey) -> None:
        if not plan.noise_multiplier:
            raise ArgumentError("Expected a plan with noise: without any it claims nothing that an audit could refute.")
        self.plan, self.records, self.seed, self.key = plan, records, seed, key
        self.checks: list[Check] = []
        self.notes: list[str] = []
        self.seconds: list[tuple[str, float]] = []
        self.contribution, self._taken = 0.0, (0, 1)
        self._long: Long | None = None
        self._present: np.ndarray = np.zeros((1, 1), dtype=bool)

    def part(self, name: str, run: Callable[[], None]) -> None:
        """Run one part; errors of the library, and of models that cannot process one example, become failed checks."""
        began = time.process_time()
        try:
            run()
        except HushgradError as error:
            self.checks.append(Check(name=name, passed=False, seen=f"refused: {error}"))
        except (ValueError, RuntimeError) as error:  # the user's own code
            self.checks.append(Check(name=name, passed=False, seen=f"failed with {type(error).__name__}: {error}"))
        self.seconds.append((name, round(time.process_time() - began, 3)))

    def field(self, drawn: Field) -> None:
        """Add the checks of noise samples."""
        self._long = drawn.long
        self.checks += [drawn.rows, drawn.steps, *field_checks(drawn.wides, drawn.long, drawn.runs, on_grid=self.plan.secure)]

    def batches(self) -> None:
        """Check the sampler's batches at the data set's real size, over as many steps as memory allows."""
        plan, how = self.plan, self.plan.participation
        records = self.records
        count = min(plan.steps, max(1, _TABLE // max(1, records)))
        chosen = list(spread(count, plan.steps))
        present, twice = dealt(plan, records, chosen)
        other, _ = dealt(plan, records, chosen[:BATCHES])
        self.checks.append(fresh_batches_check(how, present[: len(other)], other))
        if twice:
            self.checks.append(Check(name="records", passed=False, seen=f"a record is in the batch of step {twice[0]} twice"))
        ordered = count == plan.steps
        self._taken, self._present = (int(present.sum()), present.size), present if ordered else present[: count // 2]
        self.checks.append(batches_check(how, self._present))
        if isinstance(how, Poisson):
            many = max(1, min(_DEALT, int(_TABLE / max(1.0, how.rate * records))))
            self.checks.append(rates_check(how.rate, present, taken(plan, records, batches=many)))

    # The report --------------------------------------------------------------------------------------------------------

    def report(self, confidence: float) -> DeepReport:
        """The verdict, and the bounds that it rests on."""
        plan = self.plan
        claimed = plan.guarantee()
        began = time.process_time()
        low = epsilon_interval(claimed.event, delta=plan.delta, relation=plan.relation)[0]
        bounds = () if self._long is None else (self._bound(self._long, confidence),)
        sure = 0.0 if self._long is None else self._bound(self._long, 1 - FALSE_ALARM).epsilon
        self.seconds.append(("bound", round(time.process_time() - began, 3)))
        refuted_by = (*(["bound"] if sure > claimed.epsilon else []), *(check.name for check in self.checks if not check.passed))
        return DeepReport(
            claimed=claimed,
            certified_low=low,
            lower_bounds=bounds,
            checks=tuple(self.checks),
            verdict="refuted" if refuted_by else "not refuted",
            refuted_by=refuted_by,
            seconds=tuple(self.seconds),
            notes=tuple(self.notes),
        )

    def _bound(self, long: Long, confidence: float) -> LowerBound:
        plan, level = self.plan, 1.0 - (1.0 - confidence) / 2
        ratio = composed_bounds.noise_upper(long.white, confidence=level) / max(self.contribution, 1e-9)
        rate = composed_bounds.rate_lower(*self._taken, confidence=level)
        reach = self._reach() if isinstance(plan.participation, (Everyone, MinSep, Once)) else 1.0
        return LowerBound(
            method="run gdp",
            epsilon=composed_bounds.step_gdp(plan, ratio=ratio, rate=rate, reach=reach),
            confidence=confidence,
            assumption="normal noise, independent of the steps' batches (both are tested)",
            threat=_OWNER,
        )

    def _reach(self) -> float:
        """The largest |L⁻¹p| of the steps p in which a record took part."""
        scorer = Scorer(self.plan, len(self._present))
        patterns = np.unique(self._present, axis=1).astype(np.float64)
        return float(np.linalg.norm(scorer.whitened(patterns) * scorer.noise, axis=0).max())


def spread(count: int, steps: int) -> Iterator[int]:
    """``count`` steps: half from the beginning, the others at the end."""
    yield from range(count // 2)
    yield from range(steps - (count - count // 2), steps)


def dealt(plan: Plan, records: int, steps: Sequence[int]) -> tuple[np.ndarray, list[int]]:
    """Which records are drawn in these steps under a fresh key, and the steps in which a record occurs twice."""
    present, twice = np.zeros((len(steps), records), dtype=bool), []
    deal = plan.sampler.dealer(records, Draws(RunKey.make().sampling))
    for row, step in enumerate(steps):
        batch = deal(step)
        present[row, batch] = True
        if int(present[row].sum()) != len(batch):
            twice.append(step)
    return present, twice


def taken(plan: Plan, records: int, *, batches: int) -> tuple[np.ndarray, int]:
    """How often each record is drawn in ``batches`` batches, taken from many runs; and that number."""
    counts, left = np.zeros(records, np.int64), batches
    while left > 0:
        deal, here = plan.sampler.dealer(records, Draws(RunKey.make().sampling)), min(left, plan.steps)
        for step in spread(here, plan.steps):
            counts[deal(step)] += 1
        left -= here
    return counts, batches


def fresh_batches_check(how: Participation, first: np.ndarray, second: np.ndarray) -> Check:
    """If participation is secret, test that the batches of two runs are independent."""
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
    """Test the counts of every record, every step, and pairs of either up to eight apart against their binomial distributions."""
    problems = []
    for what, axis in (("record", 0), ("step", 1)):
        counts = present.sum(axis=axis)
        trials = present.shape[axis]
        for extreme in (int(counts.argmin()), int(counts.argmax())):
            if binomial_tail(int(counts[extreme]), trials, rate) < FALSE_ALARM / (16 * len(counts)):
                problems.append(f"{what} {extreme}: {counts[extreme]} of {trials}")
        table = present.T if axis == 0 else present  # one row for each record, or each step
        for lag in range(1, min(8, len(table) - 1) + 1):
            first = np.flatnonzero((np.arange(len(table) - lag) // lag) % 2 == 0)  # disjoint pairs
            both, trials = int((table[first] & table[first + lag]).sum()), first.size * table.shape[1]
            if binomial_tail(both, trials, rate**2) < FALSE_ALARM / 32:
                problems.append(f"{what}s {lag} apart meet {both} times instead of {trials * rate**2:.1f}")
    many, batches = counted
    for extreme in (int(many.argmin()), int(many.argmax())):
        if binomial_tail(int(many[extreme]), batches, rate) < FALSE_ALARM / (8 * len(many)):
            problems.append(f"record {extreme}: {many[extreme]} of {batches} batches of many runs")
    seen = f"{present.shape[0]} steps and {present.shape[1]} records one by one and in pairs, at rate {rate:g}"
    return Check(name="rates", passed=not problems, seen=", ".join([seen, *problems[:3]]))
