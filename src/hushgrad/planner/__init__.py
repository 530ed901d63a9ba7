"""Planner: which mechanism, noise and sampling for a budget, before any data is touched.

    >>> from hushgrad.planner import compare
    >>> best = compare(epsilon=2.0, delta=1e-6, dataset_size=10_000, batch_size=100, epochs=2)[0]
    >>> best.plan.guarantee().epsilon <= 2.0
    True

| file | what is in it |
|---|---|
| ``question`` | the question: budget, data, what is allowed |
| ``candidates`` | which plans are worth comparing |
| ``ranking`` | ``compare`` and ``plan_for``: predicted error, memory, work, reasons |
| ``sweeps`` | the answer as a function of epsilon, batch size or steps; one more epoch |
| ``user_sampling`` | ``compare_users``: sampling of users against sampling of examples, under a budget for each user |
| ``rehearsal`` | ``dry_run``: one real step on a copy, then time and memory of the run |
| ``model_shapes`` | language models by name or config: how many parameters, and where |
| ``resources`` | ``choices``: peak memory and time of a step of such a model, by placement, mechanism and micro-batch |
| ``scaling_law`` | ``allocations``: model size, batch size and steps for a budget of compute, by a published law |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hushgrad._lazy_import import later

if TYPE_CHECKING:
    from hushgrad.planner.model_shapes import shape_of
    from hushgrad.planner.question import Question
    from hushgrad.planner.ranking import Candidate, Comparison, compare, plan_for
    from hushgrad.planner.rehearsal import DryRun, dry_run
    from hushgrad.planner.resources import Choice, Work, choices
    from hushgrad.planner.scaling_law import Allocation, Law, allocations
    from hushgrad.planner.sweeps import one_more_epoch, sweep
    from hushgrad.planner.user_sampling import compare_users

__all__ = [
    "Allocation",
    "Candidate",
    "Choice",
    "Comparison",
    "DryRun",
    "Law",
    "Question",
    "Work",
    "allocations",
    "choices",
    "compare",
    "compare_users",
    "dry_run",
    "one_more_epoch",
    "plan_for",
    "shape_of",
    "sweep",
]

# Lazy: comparing plans needs no torch.
__getattr__, __dir__ = later(__name__)
