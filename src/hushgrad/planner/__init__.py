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
| ``users`` | ``compare_users``: sampling of users against sampling of examples, under a budget for each user |
| ``rehearsal`` | ``dry_run``: one real step on a copy, then time and memory of the run |
"""

from hushgrad.planner.question import Question
from hushgrad.planner.ranking import Candidate, Comparison, Dropped, compare, plan_for
from hushgrad.planner.rehearsal import DryRun, dry_run
from hushgrad.planner.sweeps import EpochCost, Point, one_more_epoch, sweep
from hushgrad.planner.users import UserCandidate, compare_users

__all__ = [
    "Candidate",
    "Comparison",
    "Dropped",
    "DryRun",
    "EpochCost",
    "Point",
    "Question",
    "UserCandidate",
    "compare",
    "compare_users",
    "dry_run",
    "one_more_epoch",
    "plan_for",
    "sweep",
]
