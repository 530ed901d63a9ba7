"""The deep audit: checks everything that the theorem assumes of a user's own run, one assumption at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf, nan
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hushgrad.audit import exact_check
from hushgrad.audit.bench import HALVES, Bench, Build, copied, row_std, single
from hushgrad.audit.checks import Check
from hushgrad.audit.deep_audit_base import BATCHES, Parts
from hushgrad.audit.noise_samples import draw_field
from hushgrad.audit.recompute import contributions, distance, drawn
from hushgrad.audit.report import DeepReport
from hushgrad.audit.worst_record_search import Record, Worst, worst_record
from hushgrad.clipping import Capture, self_check
from hushgrad.clipping.clipper import Clipper
from hushgrad.clipping.record import clipped
from hushgrad.errors import ArgumentError
from hushgrad.events import Relation
from hushgrad.release.keys import RunKey
from hushgrad.release.placement.world import World
from hushgrad.sampling import Draws
from hushgrad.sampling.batch_loader import stamp
from hushgrad.sampling.units import Grouping
from hushgrad.train.fitting import LossFunction
from hushgrad.train.loop import Loop
from hushgrad.train.private import Private

_FEW = 8  # examples for a search or a self-check


def audit_private(
    private: Private,
    dataset: Any,
    loss_fn: LossFunction | Loop,
    options: Mapping[str, Any],
    *,
    build: Build | None = None,
    whole: Callable[[], nn.Module] | None = None,
    groups: Grouping | None = None,
    max_physical_batch: int | None = None,
    loader_options: Mapping[str, Any] | None = None,
    **audit: Any,
) -> DeepReport:
    """The deep audit of an attached run, on copies of its model and optimizer or on those that ``build`` returns."""
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
    """Audit a run on its bench: its layers, noise, batches and releases, and a lower bound on epsilon from these.

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
            (:func:`hushgrad.release.journal_history.shown`), which the compared steps must repeat.
    """
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


class _Audit(Parts):
    """The parts of one deep audit of a run on its bench."""

    def __init__(self, bench: Bench, seed: int, key: RunKey, journal: list[bytes]) -> None:
        super().__init__(bench.plan, bench.records, seed=seed, key=key)
        self.bench, self.journal = bench, journal

    # The parts ---------------------------------------------------------------------------------------------------------

    def layers(self) -> None:
        """Compare captured sums of the user's own layers with passes on single examples."""
        records, loss_fn = self._records(), self.bench.loss_fn
        if records is None or len(records[0]) != 2 or isinstance(loss_fn, Loop):
            self.notes.append("layers were compared in the releases only: a self-check takes (input, target)")
            return
        batch = tuple(torch.stack(parts) for parts in zip(*records, strict=True))
        errors = self_check(single(self.bench.plain()), lambda out, y: loss_fn(out, y).mean(), batch)
        self.checks.append(
            Check(name="layers", passed=True, seen=f"{len(errors)} parameters, error {max(errors.values()):.1e} at most")
        )

    def worst(self, tries: int) -> None:
        """Search for the record that moves the clipped sum of the user's own layers most."""
        records = self._records()
        if records is None:
            self.notes.append("no search for the worst record: the data are not tuples of tensors")
            return
        found = self._search(records, tries)
        self.contribution = max(self.contribution, min(found.moved, 1.0))
        self.checks.append(
            Check(
                name="worst record",
                passed=found.moved <= 1 + 1e-4,
                seen=f"{tries} records tried beside {len(records) - 1} others: the sum moves by {found.moved:.4f} clip norms at most",
            )
        )

    def _search(self, records: list[Record], tries: int) -> Worst:
        bench, model = self.bench, single(self.bench.plain())
        reduction = bench.options.get("loss_reduction", "mean")
        capture = Capture(model, loss_reduction=reduction, unused=bench.options.get("unused", "raise"), check_isolation=False)
        capture.attach()

        def total(record: Record | None) -> dict[str, Tensor]:
            chosen = records[1:] if record is None else [*records[1:], record]
            batch = stamp([torch.stack(parts) for parts in zip(*chosen, strict=True)], step=0, examples=len(chosen))
            mean = bench.loss(model, batch)
            (mean * len(chosen) if reduction == "sum" else mean).backward()  # type: ignore[no-untyped-call]
            return capture.collect(bench.plan.clip).raw_sums

        try:
            return worst_record(
                total, records[0], clip_norm=bench.plan.max_grad_norm, tries=tries, seed=self.seed, others=records[1:]
            )
        finally:
            capture.detach()

    def releases(self, steps: int) -> None:
        """Recompute steps at the beginning, at the end and in between."""
        key, found = self.key.secret, list[exact_check.Compared]()
        for first, count, size in self._stretches(steps):
            if first <= count or self._is_reachable(first):
                found += exact_check.compare(self.bench, key, first=first, count=count, size=size)
            if first == 0 and self.journal:
                self.checks.append(exact_check.journal_check(found, self.journal))
        if self.bench.whole is None:  # at perturbed weights, too
            found += exact_check.compare(self.bench, key, first=0, count=1, size=1, shake=self.seed)
        self.contribution = max(self.contribution, *(min(one.contribution, 1.0) for one in found))
        self.checks += exact_check.exact_checks(found)
        names = [name for name, p in self.bench.plain().named_parameters() if p.requires_grad]
        self.checks.append(weights_check(self.bench.plan.clip, names, seed=self.seed))
        debts = debts_check(self.bench, key)
        self.checks += [] if debts is None else [debts]

    def _stretches(self, steps: int) -> list[tuple[int, int, int | None]]:
        """(first step, count, micro-batch size) of the steps to compare: first, last, smallest and largest batch; one of them split."""
        plan, rng = self.bench.plan, np.random.default_rng([self.seed, 7])
        deal = plan.sampler.dealer(self.bench.records, Draws(self.key.sampling))
        some = np.unique(rng.integers(0, plan.steps, size=BATCHES)).tolist()
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
        """Test samples of the run's noise."""
        with self.bench.run(self.key.secret) as live:
            private = live.private
            self.field(draw_field(private.plan, private.placement, private._capture.scattered, seed=self.seed))

    def _records(self) -> list[Record] | None:
        """A few records of the data, if they are tuples of tensors or numbers."""
        rng = np.random.default_rng([self.seed, 5])
        chosen = rng.choice(len(self.bench.dataset), size=min(_FEW, len(self.bench.dataset)), replace=False)
        records = [self.bench.dataset[int(i)] for i in chosen]
        if self.bench.loader_options.get("collate_fn") is not None or not all(isinstance(r, (tuple, list)) for r in records):
            return None
        records = [tuple(part if isinstance(part, Tensor) else torch.tensor(part) for part in record) for record in records]
        return [tuple(part.float() if part.dtype in HALVES else part for part in record) for record in records]


_STEPS = 3
_TOLERANCE = 1e-3


def debts_check(bench: Bench, key: bytes) -> Check | None:
    """Check that rows of lazy tables that three steps do not read have the noise of all three afterwards; None without such tables."""
    if not bench.options.get("lazy_tables"):
        return None
    model, worst, rows = bench.plain(), 0.0, 0
    with bench.run(key) as live:
        private = live.private
        before, touched = live.parameters(), dict[str, Tensor]()
        for seen in live.steps(_STEPS, settle=False):
            for row in contributions(model, bench.loss, seen.batch):
                for name in private._release.lazy:
                    mine = row[name].flatten(1).abs().amax(1) > 0
                    touched[name] = touched[name] | mine if name in touched else mine
        private.settle()
        after, rate = live.parameters(), float(private.optimizer.param_groups[0]["lr"])
        std = _STEPS**0.5 * rate * row_std(bench.plan, bench.plan.clip) / float(bench.plan.batch_size)
        for index, (name, table) in enumerate(before.items()):
            if name not in private._release.lazy:
                continue
            z = drawn(private.plan, key, private.steps - 1, index, table.numel(), table.dtype)
            must = std * torch.from_numpy(z).reshape(table.shape)
            free = ~touched.get(name, torch.zeros(len(table), dtype=torch.bool))
            moved, must = (table.double() - after[name].double())[free], must[free]
            rows += len(must)
            error = distance(moved, must) / (std * max(1, must.numel()) ** 0.5)
            worst = max(worst, error if error == error else float("inf"))
    seen_text = f"{rows} rows that nobody read in {_STEPS} steps: their noise differs from what they owe by {worst:.1e}"
    return Check(name="lazy noise", passed=worst <= _TOLERANCE, seen=seen_text)


_NORMS = (0.0, 1e-160, 1e-30, 1e-3, 0.999, 1.0, 1.001, 2.0, 30.0, 1e3, 1e5, 1e10, 1e19, 1e30, 1e75, 1e150, inf, nan)
_SIZES = (1, 2, 3, 8, 33)
_SLACK = 1e-4


def weights_check(clip: Clipper, names: Sequence[str], *, seed: int) -> Check:
    """Check that no example weighs more than the sensitivity allows, whatever its norm and its batch.

    Norms range from 0 to 1e150 clip norms, and include infinity and NaN, which must weigh nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    groups, norm = clip.groups(list(names)), float(clip.sensitivity(Relation.ADD_REMOVE))
    columns = 1 if groups is None else max(groups) + 1
    most, problems = 0.0, []
    for size in _SIZES:
        for first in range(0, len(_NORMS), size):
            chosen = torch.randint(len(_NORMS), (size, columns), generator=generator)
            chosen[:, 0] = torch.arange(first, first + size) % len(_NORMS)
            squares = (torch.tensor(_NORMS, dtype=torch.float64)[chosen] * norm).square()
            for weights in _weighed(clip, squares, grouped=groups is not None):
                whole = squares.isfinite()
                moved = (weights.square() * squares)[whole.all(1)].sum(1).sqrt() / norm
                most = max(most, float(moved.nan_to_num(nan=torch.inf).max()) if len(moved) else 0.0)
                if not bool((weights[~whole] == 0).all()):
                    problems.append(f"a norm that is no number weighs something in a batch of {size}")
    if most > 1 + _SLACK:
        problems.append("which is too much")
    seen = f"norms from 0 to infinity in batches of {_SIZES[0]} to {_SIZES[-1]}: {most:.4f} clip norms at most"
    return Check(name="clip weights", passed=not problems, seen=", ".join([seen, *problems[:2]]))


def _weighed(clip: Clipper, squares: Tensor, *, grouped: bool) -> Iterator[Tensor]:
    """The weights by each code path that computes them."""
    yield clip.weights((squares if grouped else squares[:, 0]).clone()).double().reshape(squares.shape)
    if not grouped:
        yield clipped(clip, [squares[:, 0] / 4, squares[:, 0] / 4], 2.0).weights.double().reshape(squares.shape)
