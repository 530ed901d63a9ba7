"""Lazy tables: noise that is added later is the noise of all steps that it was owed for."""

from __future__ import annotations

import torch
from torch import Tensor

from hushgrad.audit.again import contributions, distance, drawn
from hushgrad.audit.bench import Bench, row_std
from hushgrad.audit.checks import Check

_STEPS = 3
_TOLERANCE = 1e-3


def debts_check(bench: Bench, key: bytes) -> Check | None:
    """Rows that nobody reads in three steps have afterwards the noise of all three, at the last one's address; None without such tables."""
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
