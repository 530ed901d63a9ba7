"""The deep audit: somebody's own run, with everything that its theorem assumes looked at one by one."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hushgrad.accounting import epsilon_interval
from hushgrad.audit import composed, exact
from hushgrad.audit.bench import Bench, Build, copied
from hushgrad.audit.checks import FALSE_ALARM, Check, batches_check
from hushgrad.audit.drawn import draw_field
from hushgrad.audit.field import Long, field_checks
from hushgrad.audit.report import DeepReport, LowerBound
from hushgrad.audit.scores import Scorer
from hushgrad.audit.tails import binomial_tail
from hushgrad.audit.worst import Record, Worst, worst_record
from hushgrad.clipping import Capture, self_check
from hushgrad.errors import ArgumentError, HushgradError
from hushgrad.events import Everyone, MinSep, Once, Poisson
from hushgrad.sampling import Draws
from hushgrad.sampling.batch import stamp
from hushgrad.sampling.units import Grouping
from hushgrad.train.fit import LossFunction, Passes
from hushgrad.train.private import Private

__all__ = ["audit_private", "audit_run"]

_FEW = 8  # examples that a search or a self-check is made on
_TABLE = 20_000_000  # participations to look at
_OWNER = "the attacker sees every released gradient, knows the model and all records but one, which is the worst one"


def audit_private(
    private: Private,
    dataset: Any,
    loss_fn: LossFunction,
    options: Mapping[str, Any],
    *,
    build: Build | None = None,
    whole: Callable[[], nn.Module] | None = None,
    groups: Grouping | None = None,
    loader_options: Mapping[str, Any] | None = None,
    **audit: Any,
) -> DeepReport:
    """The deep audit of a run that is attached: of copies of its model and optimizer, or of what ``build`` gives."""
    if build is None and private.sharding is not None:
        raise ArgumentError("Expected build=: a sharded model cannot be copied. Give a function that builds model and optimizer.")
    bench = Bench(
        build=copied(private.model, private.optimizer) if build is None else build,
        plan=private.plan,
        dataset=dataset,
        loss_fn=loss_fn,
        groups=groups,
        whole=whole,
        options=options,
        loader_options=loader_options or {},
    )
    return audit_run(bench, **audit)


def audit_run(
    bench: Bench,
    *,
    seed: int = 0,
    steps: int = 2,
    tries: int = 40,
    confidence: float = 0.95,
    key: bytes | None = None,
    journal: Sequence[bytes] = (),
) -> DeepReport:
    """Audit one run on its bench: its layers, its noise, its batches, its releases, and a bound on epsilon made of these.

    **What refutes.** A check that fails (each has a false-alarm rate of at most 1e-4, or is exact), a part that the library itself
    refuses, or a lower bound that exceeds the claim at a confidence of 0.9999. Nothing of the audited run is touched.

    Args:
        bench: the run.
        seed: of the choice of steps, columns and records; keys are fresh.
        steps: how many early and how many late steps are computed a second time, example by example.
        tries: records to try in the search for the one that moves the sum most.
        confidence: of the lower bounds.
        key: the key that the compared steps are taken under, for its owner; fresh by default.
        journal: with the run's own key and its first weights on the bench: the digests of its releases
            (:meth:`hushgrad.release.journal.Journal.digests`), which the compared steps must repeat.
    """
    if not bench.plan.noise_multiplier:
        raise ArgumentError("Expected a plan with noise: without any it claims nothing that an audit could refute.")
    audit = _Audit(bench, seed, key or secrets.token_bytes(32), list(journal))
    if bench.is_whole:
        audit.part("layers", audit.layers)
        audit.part("worst record", lambda: audit.worst(tries))
    else:
        audit.notes.append("layers and releases were not compared: give whole= to build the model without its sharding")
    if bench.is_whole and (bench.plan.denoise is None or not bench.plan.denoise.needs_closure) and not bench.plan.secure:
        audit.part("releases", lambda: audit.releases(steps))
    elif bench.is_whole:
        audit.notes.append(
            "releases were not computed a second time: the denoiser's own query, or secure rounding, has no second form here"
        )
    audit.part("noise", audit.noise)
    audit.part("batches", audit.batches)
    return audit.report(confidence)


class _Audit:
    """The parts of one deep audit, and what they have found so far."""

    def __init__(self, bench: Bench, seed: int, key: bytes, journal: list[bytes]) -> None:
        self.bench, self.seed, self.key, self.journal = bench, seed, key, journal
        self.checks: list[Check] = []
        self.notes: list[str] = []
        self.seconds: list[tuple[str, float]] = []
        self._contribution, self._taken = 0.0, (0, 1)
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

    # The parts ---------------------------------------------------------------------------------------------------------

    def layers(self) -> None:
        """Captured sums of the user's own layers against single passes."""
        records = self._records()
        if records is None or len(records[0]) != 2:
            self.notes.append("layers were compared in the releases only: a self-check takes (input, target)")
            return
        batch = tuple(torch.stack(parts) for parts in zip(*records, strict=True))
        errors = self_check(self.bench.plain(), lambda out, y: self.bench.loss_fn(out, y).mean(), batch)
        self.checks.append(
            Check(name="layers", passed=True, seen=f"{len(errors)} parameters, error {max(errors.values()):.1e} at most")
        )

    def worst(self, tries: int) -> None:
        """The record that moves the clipped sum of the user's own layers most."""
        records = self._records()
        if records is None:
            self.notes.append("no search for the worst record: the data are not tuples of tensors")
            return
        found = self._search(records, tries)
        self._contribution = max(self._contribution, min(found.moved, 1.0))
        self.checks.append(
            Check(
                name="worst record",
                passed=found.moved <= 1 + 1e-4,
                seen=f"{tries} records tried beside {len(records) - 1} others: the sum moves by {found.moved:.4f} clip norms at most",
            )
        )

    def _search(self, records: list[Record], tries: int) -> Worst:
        bench, model = self.bench, self.bench.plain()
        reduction = bench.options.get("loss_reduction", "mean")
        capture = Capture(model, loss_reduction=reduction, unused=bench.options.get("unused", "raise"), check_isolation=False)
        capture.attach()

        def total(record: Record | None) -> dict[str, Tensor]:
            chosen = records[1:] if record is None else [*records[1:], record]
            batch = stamp([torch.stack(parts) for parts in zip(*chosen, strict=True)], step=0, examples=len(chosen))
            loss = bench.loss_fn(*Passes.answered(model, batch))
            (loss if loss.dim() == 0 else loss.sum() if reduction == "sum" else loss.mean()).backward()  # type: ignore[no-untyped-call]
            return capture.collect(bench.plan.clip).raw_sums

        try:
            return worst_record(
                total, records[0], clip_norm=bench.plan.max_grad_norm, tries=tries, seed=self.seed, others=records[1:]
            )
        finally:
            capture.detach()

    def releases(self, steps: int) -> None:
        """Steps at the beginning and at the end, computed a second time."""
        last = max(0, self.bench.plan.steps - steps)
        found = list(exact.compare(self.bench, self.key, first=0, count=steps))
        if self.journal:
            self.checks.append(exact.journal_check(found, self.journal))
        if last >= steps and self._is_reachable(last):
            found += exact.compare(self.bench, self.key, first=last, count=steps)
        self._contribution = max(self._contribution, *(min(one.contribution, 1.0) for one in found))
        self.checks += exact.exact_checks(found)

    def _is_reachable(self, step: int) -> bool:
        size = sum(p.numel() for p in self.bench.plain().parameters())
        return size * step <= 4e8

    def noise(self) -> None:
        """The noise as a field."""
        with self.bench.run(secrets.token_bytes(32)) as live:
            wides, self._long, runs = draw_field(self.bench, live.private.placement, seed=self.seed)
        self.checks += field_checks(wides, self._long, runs)

    def batches(self) -> None:
        """The sampler's batches of the data set's own size, over as much of the run as there is room for."""
        plan, how = self.bench.plan, self.bench.plan.participation
        records = self.bench.records
        count = min(plan.steps, max(1, _TABLE // max(1, records)))
        present = np.zeros((count, records), dtype=bool)
        deal = plan.sampler.dealer(records, Draws(secrets.token_bytes(32)))
        for row, step in enumerate(_spread(count, plan.steps)):
            present[row, deal(step)] = True
        ordered = count == plan.steps
        self._taken, self._present = (int(present.sum()), present.size), present if ordered else present[: count // 2]
        self.checks.append(batches_check(how, self._present))
        if isinstance(how, Poisson):
            self.checks.append(_rates_check(how.rate, present))

    def _records(self) -> list[Record] | None:
        """A few records of the data, if they are tuples of tensors or numbers."""
        rng = np.random.default_rng([self.seed, 5])
        chosen = rng.choice(len(self.bench.dataset), size=min(_FEW, len(self.bench.dataset)), replace=False)
        records = [self.bench.dataset[int(i)] for i in chosen]
        if self.bench.loader_options.get("collate_fn") is not None or not all(isinstance(r, (tuple, list)) for r in records):
            return None
        return [tuple(part if isinstance(part, Tensor) else torch.tensor(part) for part in record) for record in records]

    # The report --------------------------------------------------------------------------------------------------------

    def report(self, confidence: float) -> DeepReport:
        plan = self.bench.plan
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
        plan, level = self.bench.plan, 1.0 - (1.0 - confidence) / 2
        ratio = composed.noise_upper(long.white, confidence=level) / max(self._contribution, 1e-9)
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
        scorer = Scorer(self.bench.plan, len(self._present))
        patterns = np.unique(self._present, axis=1).astype(np.float64)
        return float(np.linalg.norm(scorer.whitened(patterns) * scorer.noise, axis=0).max())


def _spread(count: int, steps: int) -> Iterator[int]:
    """The first half of ``count`` steps from the beginning, the others up to the end."""
    yield from range(count // 2)
    yield from range(steps - (count - count // 2), steps)


def _rates_check(rate: float, present: np.ndarray) -> Check:
    """Every record and every step by itself, and pairs of records and of steps up to eight apart: all are binomial."""
    problems = []
    for what, axis in (("record", 0), ("step", 1)):
        counts = present.sum(axis=axis)
        trials = present.shape[axis]
        for extreme in (int(counts.argmin()), int(counts.argmax())):
            if binomial_tail(int(counts[extreme]), trials, rate) < FALSE_ALARM / (8 * len(counts)):
                problems.append(f"{what} {extreme}: {counts[extreme]} of {trials}")
        table = present.T if axis == 0 else present  # one row for each record, or each step
        for lag in range(1, min(8, len(table) - 1) + 1):
            first = np.flatnonzero((np.arange(len(table) - lag) // lag) % 2 == 0)  # no row is in two pairs
            both, trials = int((table[first] & table[first + lag]).sum()), first.size * table.shape[1]
            if binomial_tail(both, trials, rate**2) < FALSE_ALARM / 32:
                problems.append(f"{what}s {lag} apart meet {both} times instead of {trials * rate**2:.1f}")
    seen = f"{present.shape[0]} steps and {present.shape[1]} records one by one and in pairs, at rate {rate:g}"
    return Check(name="rates", passed=not problems, seen=", ".join([seen, *problems[:3]]))
