r"""A search before it begins: its candidates, their noise, and the cost.

Candidates may differ in their event (batch size, steps, mechanism): a trial is then *one of* them, and its Rényi divergence at each
order is at most the largest of theirs, because the candidate is drawn without looking at the data. Each candidate has the noise s_i with
which a search over it alone would meet the budget, times one common factor, at least 1, with which the search over all meets it.

What the encoder learns from the records is released once, before the first trial, and shared by all: its event is added to the
search, not in each trial.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hushgrad import _check
from hushgrad.errors import ArgumentError
from hushgrad.events import Event, OneOf
from hushgrad.recipes.dataset import Data
from hushgrad.recipes.learned_encoder import LearnedEncoder
from hushgrad.recipes.recipe import Recipe
from hushgrad.train.plan import Plan
from hushgrad.train.plan_checks import require_room
from hushgrad.tuning.cost import ACCOUNTANT, TuningCost, calibrated_noise, tuning_cost
from hushgrad.tuning.score import trial_event
from hushgrad.tuning.space import Settings, settings_of, with_candidate


@dataclass(frozen=True, kw_only=True)
class Priced:
    """The candidates of a search, their noise and the cost; ``plans`` has one for each candidate, in order."""

    recipe: Recipe
    settings: Settings
    plans: tuple[Plan, ...]
    cost: TuningCost
    noise_without_tuning: tuple[float, ...] = ()

    @property
    def plan(self) -> Plan:
        """The plan of the first candidate; unit, relation and delta are the same in all."""
        return self.plans[0]

    @property
    def digest(self) -> str:
        """The digest of the plan, or of all of them."""
        digests = list(dict.fromkeys(plan.digest for plan in self.plans))
        return digests[0] if len(digests) == 1 else hashlib.sha256("/".join(digests).encode()).hexdigest()

    def trial(self, candidate: int) -> Recipe:
        """The recipe of a trial with that candidate, which has its own noise."""
        recipe = with_candidate(self.recipe, self.settings.candidates[candidate])
        return replace(recipe, plan={**recipe.plan, "noise_multiplier": self.plans[candidate].noise_multiplier})

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        noises = sorted({plan.noise_multiplier or 0.0 for plan in self.plans})
        return {
            "candidates": len(self.settings.candidates),
            "over": {place: list(values) for place, values in self.settings.over.items()},
            "stopping": str(self.settings.stopping),
            "score": score_words(self.settings),
            "noise_multiplier": noises[0] if len(noises) == 1 else noises,
            "noise_multiplier_without_tuning": _one_or_all(self.noise_without_tuning),
            "naive_epsilon": max(plan.guarantee().epsilon for plan in _distinct(self.plans)),
            "epsilon": self.cost.epsilon,
            "delta": self.cost.delta,
            "event": self.cost.event.to_json(),
        }


def _one_or_all(noises: tuple[float, ...]) -> float | list[float] | None:
    distinct = sorted(set(noises))
    return (distinct[0] if len(distinct) == 1 else distinct) if distinct else None


def _distinct(plans: tuple[Plan, ...]) -> list[Plan]:
    """One plan for each distinct event: clip norms do not change the cost of a trial."""
    return list({plan.event(): plan for plan in plans}.values())


def priced(recipe: Recipe, *, settings: Settings | None = None, data: Data | None = None) -> Priced:
    """What a search by ``recipe`` would cost; nothing is trained.

    An ``epsilon`` in the recipe's plan is the budget of the *whole search*: the noise of the trials is calibrated so that it is
    met. A ``noise_multiplier`` is taken as it is.

    Args:
        recipe: with a ``[tune]`` table, unless ``settings`` are given.
        settings: that table, checked.
        data: what the recipe names, if it was read already.

    >>> from hushgrad.recipes import Recipe
    >>> plan = {"noise_multiplier": 2.0, "delta": 1e-5, "batch_size": 64, "steps": 10}
    >>> tables = {"model": {"name": "logistic"}, "data": {"name": "digits"}, "plan": plan}
    >>> found = priced(Recipe.from_tables({**tables, "tune": {"over": {"optimizer.lr": [0.1, 0.3]}, "mean": 5.0}}))
    >>> len(found.plans), found.cost.naive < found.cost.epsilon
    (2, True)

    Raises:
        ArgumentError: where candidates differ in what they promise.
    """
    settings = settings_of(recipe) if settings is None else settings
    data = recipe.make_data(LearnedEncoder(recipe, Path()).anew) if data is None else data  # what it learns stays in memory
    table = {key: value for key, value in recipe.plan.items() if key not in ("epsilon", "noise_multiplier")}
    if settings.score == "private" and "dataset_size" not in table:
        table["dataset_size"] = max(1, round((1 - settings.holdout) * len(data.train)))  # the coins decide the real, private size
    base = replace(recipe, plan={**table, "noise_multiplier": float(recipe.plan.get("noise_multiplier", 1.0))})
    plans = _plans(base, settings, data)
    alone: tuple[float, ...] = ()
    if "epsilon" in recipe.plan:
        goal = _check.positive(epsilon=recipe.plan["epsilon"])
        if (first := plans[0]).before is not None:
            require_room(first.before, epsilon=goal, delta=first.delta, relation=first.relation, accountant=ACCOUNTANT)
        alone = tuple(_each(plans, lambda plan: plan.calibrated(epsilon=goal).noise_multiplier or 0.0))
        plans = _calibrated(plans, settings, goal)
    return Priced(recipe=base, settings=settings, plans=plans, cost=_cost(plans, settings), noise_without_tuning=alone)


def _plans(base: Recipe, settings: Settings, data: Data) -> tuple[Plan, ...]:
    """The plan of each candidate, after checking that all make the same promise, under the relation that the data were split for."""
    made: dict[str, Plan] = {}
    plans = []
    for place in ("plan.certified", "plan.dataset_size", "plan.secure") if data.learned is not None else ():
        if place in settings.over:
            _check.fail(
                "over", place, "to be the same in all trials: the encoder, which they share, learns by it", "Set it in [plan]."
            )
    for candidate in settings.candidates:
        recipe = with_candidate(base, candidate)
        table = json.dumps(recipe.plan, sort_keys=True, default=repr)
        plans.append(made[table] if table in made else made.setdefault(table, recipe.make_plan(data)))
    first = plans[0]
    for plan in made.values():
        if (plan.delta, plan.relation, plan.unit, plan.before) != (first.delta, base.relation, first.unit, first.before):
            raise ArgumentError(
                f"Expected all candidates to promise the same: one protects a {first.unit} under {base.relation.value}, another a "
                f"{plan.unit} under {plan.relation.value}. Give each its own search."
            )
    return tuple(plans)


def _each(plans: tuple[Plan, ...], noise: Any) -> list[float]:
    """A noise multiplier for every plan, computed once for plans with the same event."""
    known = {plan.event(): noise(plan) for plan in _distinct(plans)}
    return [known[plan.event()] for plan in plans]


def _calibrated(plans: tuple[Plan, ...], settings: Settings, goal: float) -> tuple[Plan, ...]:
    """The plans with the noise that makes the whole search meet ``goal``."""
    about = {"epsilon": goal, **_about(plans, settings)}

    def alone(plan: Plan) -> float:
        return calibrated_noise(lambda s: trial_event(_steps(plan).event_with(s), settings), **about)

    noises = _each(plans, alone)
    if len(_distinct(plans)) > 1:
        factor = calibrated_noise(partial(_trial, plans, noises, settings), **about)
        noises = [factor * noise for noise in noises]
    return tuple(replace(plan, noise_multiplier=noise) for plan, noise in zip(plans, noises, strict=True))


def _trial(plans: tuple[Plan, ...], noises: list[float], settings: Settings, factor: float) -> Event:
    """The event of one trial in which each candidate has ``factor`` times its noise."""
    events = [_steps(plan).event_with(factor * noise) for plan, noise in zip(plans, noises, strict=True)]
    return trial_event(OneOf.of(events), settings)


def _cost(plans: tuple[Plan, ...], settings: Settings) -> TuningCost:
    event = trial_event(OneOf.of(_steps(plan).event() for plan in plans), settings)
    return tuning_cost(event, **_about(plans, settings))


def _about(plans: tuple[Plan, ...], settings: Settings) -> dict[str, Any]:
    """What all candidates have in common; what was released before the first trial is charged once."""
    first = plans[0]
    return {"delta": first.delta, "stopping": settings.stopping, "relation": first.relation, "before": first.before}


def _steps(plan: Plan) -> Plan:
    """The event of a trial itself."""
    return plan if plan.before is None else replace(plan, before=None)


def score_words(settings: Settings) -> str:
    """A description of how trials are compared."""
    if settings.score == "public":
        return f"{settings.metric} on the test set, which the guarantee does not cover"
    return f"hits on held-out private records with Gaussian noise {settings.score_noise:g}, covered by the guarantee"
