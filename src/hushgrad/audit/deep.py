"""The deep audit: somebody's own run, with everything that its theorem assumes looked at one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hushgrad.accounting import epsilon_interval
from hushgrad.audit import composed, exact
from hushgrad.audit.bench import Bench, Build, copied
from hushgrad.audit.checks import FALSE_ALARM, Check, batches_check
from hushgrad.audit.dealt import dealt, fresh_batches_check, rates_check, spread
from hushgrad.audit.debts import debts_check
from hushgrad.audit.drawn import draw_field
from hushgrad.audit.field import Long, field_checks
from hushgrad.audit.report import DeepReport, LowerBound
from hushgrad.audit.scores import Scorer
from hushgrad.audit.worst import Record, Worst, worst_record
from hushgrad.clipping import Capture, self_check
from hushgrad.errors import ArgumentError, HushgradError
from hushgrad.events import Everyone, MinSep, Once, Poisson
from hushgrad.release.keys import RunKey
from hushgrad.release.placement.world import World
from hushgrad.sampling import Draws
from hushgrad.sampling.batch import stamp
from hushgrad.sampling.units import Grouping
from hushgrad.train.fit import LossFunction, Passes
from hushgrad.train.private import Private

__all__ = ["audit_private", "audit_run"]

_FEW = 8  # examples that a search or a self-check is made on
_TABLE = 20_000_000  # participations to look at
_BATCHES = 200  # of which the smallest and the largest are looked for
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
    max_physical_batch: int | None = None,
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
        max_physical_batch=max_physical_batch,
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
    audit = _Audit(bench, seed, World.here().share_key(RunKey.make(key)), list(journal))
    if bench.is_whole:
        audit.part("layers", audit.layers)
        audit.part("worst record", lambda: audit.worst(tries))
    else:
        audit.notes.append("layers and releases were not compared: give whole= to build the model without its sharding")
    if bench.is_whole:
        audit.part("releases", lambda: audit.releases(steps))
    audit.part("noise", audit.noise)
    audit.part("batches", audit.batches)
    return audit.report(confidence)


class _Audit:
    """The parts of one deep audit, and what they have found so far."""

    def __init__(self, bench: Bench, seed: int, key: RunKey, journal: list[bytes]) -> None:
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
        """Steps at the beginning, at the end and between, computed a second time."""
        key, found = self.key.secret, list[exact.Compared]()
        for first, count, size in self._stretches(steps):
            if first <= count or self._is_reachable(first):
                found += exact.compare(self.bench, key, first=first, count=count, size=size)
            if first == 0 and self.journal:
                self.checks.append(exact.journal_check(found, self.journal))
        self._contribution = max(self._contribution, *(min(one.contribution, 1.0) for one in found))
        self.checks += exact.exact_checks(found)
        debts = debts_check(self.bench, key)
        self.checks += [] if debts is None else [debts]

    def _stretches(self, steps: int) -> list[tuple[int, int, int | None]]:
        """(first step, how many, examples of a part): the first, the last, the smallest and the largest batch, one in parts."""
        plan, rng = self.bench.plan, np.random.default_rng([self.seed, 7])
        deal = plan.sampler.dealer(self.bench.records, Draws(self.key.sampling))
        some = np.unique(rng.integers(0, plan.steps, size=_BATCHES)).tolist()
        sizes = [len(deal(step)) for step in some]
        parts = max(1, round(float(plan.batch_size) / 3))
        chosen: dict[int, tuple[int, int | None]] = {0: (steps, None), max(0, plan.steps - steps): (steps, None)}
        for step in (some[int(np.argmin(sizes))], some[int(np.argmax(sizes))]):
            chosen.setdefault(step, (1, None))
        chosen.setdefault(int(rng.integers(0, plan.steps)), (1, parts))
        return [(first, count, size) for first, (count, size) in sorted(chosen.items())]

    def _is_reachable(self, step: int) -> bool:
        size = sum(p.numel() for p in self.bench.plain().parameters())
        return size * step <= 4e8

    def noise(self) -> None:
        """The noise as a field."""
        with self.bench.run(self.key.secret) as live:
            plan, private = live.private.plan, live.private
            drawn = draw_field(plan, private.placement, private._capture, seed=self.seed)
        self._long = drawn.long
        self.checks += [drawn.rows, *field_checks(drawn.wides, drawn.long, drawn.runs, on_grid=plan.secure)]

    def batches(self) -> None:
        """The sampler's batches of the data set's own size, over as much of the run as there is room for."""
        plan, how = self.bench.plan, self.bench.plan.participation
        records = self.bench.records
        count = min(plan.steps, max(1, _TABLE // max(1, records)))
        chosen = list(spread(count, plan.steps))
        present, twice = dealt(plan, records, chosen)
        other, _ = dealt(plan, records, chosen[:_BATCHES])
        self.checks.append(fresh_batches_check(how, present[: len(other)], other))
        if twice:
            self.checks.append(Check(name="records", passed=False, seen=f"a record is in the batch of step {twice[0]} twice"))
        ordered = count == plan.steps
        self._taken, self._present = (int(present.sum()), present.size), present if ordered else present[: count // 2]
        self.checks.append(batches_check(how, self._present))
        if isinstance(how, Poisson):
            self.checks.append(rates_check(how.rate, present))

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
