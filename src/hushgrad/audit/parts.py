"""What every deep audit has, of a run or of a server: parts that are tried one by one, noise, batches, a bound, a report."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from hushgrad.accounting import epsilon_interval
from hushgrad.audit import composed
from hushgrad.audit.checks import FALSE_ALARM, Check, batches_check
from hushgrad.audit.dealt import dealt, fresh_batches_check, rates_check, spread, taken
from hushgrad.audit.drawn import Field
from hushgrad.audit.field import Long, field_checks
from hushgrad.audit.report import DeepReport, LowerBound
from hushgrad.audit.scores import Scorer
from hushgrad.errors import ArgumentError, HushgradError
from hushgrad.events import Everyone, MinSep, Once, Poisson
from hushgrad.release.keys import RunKey
from hushgrad.train import Plan

BATCHES = 200  # that are compared with another run's
_TABLE = 20_000_000  # participations to look at
_DEALT = 4000  # batches of many runs in which every record is counted
_OWNER = "the attacker sees every released gradient, knows the model and all records but one, which is the worst one"


class Parts:
    """The parts of one deep audit, and what they have found so far."""

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
        """Run one part; what the library refuses, and a model that cannot be run on one example, are findings too."""
        began = time.process_time()
        try:
            run()
        except HushgradError as error:
            self.checks.append(Check(name=name, passed=False, seen=f"refused: {error}"))
        except (ValueError, RuntimeError) as error:  # the user's own code
            self.checks.append(Check(name=name, passed=False, seen=f"failed with {type(error).__name__}: {error}"))
        self.seconds.append((name, round(time.process_time() - began, 3)))

    def field(self, drawn: Field) -> None:
        """What the noise as a field says."""
        self._long = drawn.long
        self.checks += [drawn.rows, drawn.steps, *field_checks(drawn.wides, drawn.long, drawn.runs, on_grid=self.plan.secure)]

    def batches(self) -> None:
        """The sampler's batches of the data set's own size, over as much of the run as there is room for."""
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
        ratio = composed.noise_upper(long.white, confidence=level) / max(self.contribution, 1e-9)
        rate = composed.rate_lower(*self._taken, confidence=level)
        reach = self._reach() if isinstance(plan.participation, (Everyone, MinSep, Once)) else 1.0
        return LowerBound(
            method="run gdp",
            epsilon=composed.step_gdp(plan, ratio=ratio, rate=rate, reach=reach),
            confidence=confidence,
            assumption="normal noise, independent of the steps' batches (both are tested)",
            threat=_OWNER,
        )

    def _reach(self) -> float:
        """The largest |L⁻¹p| of the steps p in which a record took part."""
        scorer = Scorer(self.plan, len(self._present))
        patterns = np.unique(self._present, axis=1).astype(np.float64)
        return float(np.linalg.norm(scorer.whitened(patterns) * scorer.noise, axis=0).max())
