"""Sweeps: the planner's answer as a function of epsilon, batch size or steps, and the price of one more epoch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hushgrad import _check
from hushgrad._printed import at_most
from hushgrad.accounting import calibrate, epsilon
from hushgrad.errors import ArgumentError
from hushgrad.planner.question import Question
from hushgrad.planner.ranking import answer
from hushgrad.sampling.base import Sampler
from hushgrad.train.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Point:
    """The best candidate at one value of what was swept.

    ``error`` is the rms noise in the iterate relative to its way: rmse x clip norm / (batch_size x steps), comparable between
    batch sizes and numbers of steps at equal learning rate x steps.
    """

    value: float
    best: str
    noise_multiplier: float
    rmse: float
    error: float
    plan: Plan

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {**vars(self), "plan": self.plan.to_json()}


def sweep(question: Question, *, over: str, values: Iterable[float]) -> list[Point]:
    """Ask ``question`` again with each of ``values`` for ``over``: "epsilon", "batch_size", "steps" or "epochs".

    If ``over`` is "epochs", a question in steps is asked in epochs, and the other way round.

    Args:
        question: what is asked again and again.
        over: the field that changes.
        values: of that field.

    >>> question = Question(epsilon=1.0, delta=1e-6, dataset_size=1000, batch_size=100, epochs=2)
    >>> points = sweep(question, over="epsilon", values=[0.5, 8.0])
    >>> points[0].error > points[1].error
    True
    """
    _check.instance(Question, question=question)
    over = _check.one_of(["epsilon", "batch_size", "steps", "epochs"], over=over)
    other = {"steps": {"epochs": None}, "epochs": {"steps": None}}.get(over, {})
    return [_point(dataclasses.replace(question, **{over: value}, **other), value) for value in values]  # type: ignore[arg-type]


def _point(question: Question, value: float) -> Point:
    best = answer(question)[0]
    error = best.rmse * question.max_grad_norm / (question.size * best.plan.steps)
    return Point(value=value, best=best.name, noise_multiplier=best.noise_multiplier, rmse=best.rmse, error=error, plan=best.plan)


@dataclass(frozen=True, kw_only=True)
class EpochCost:
    """What one more epoch costs, as more epsilon or as more noise; ``str()`` is one sentence."""

    epsilon: float
    longer_epsilon: float
    noise_multiplier: float
    longer_noise_multiplier: float
    steps: int
    longer_steps: int

    def __str__(self) -> str:
        return (
            f"One more epoch ({self.longer_steps - self.steps} steps) raises epsilon from {at_most(self.epsilon)} to "
            f"{at_most(self.longer_epsilon)} at the same noise, or needs noise multiplier {self.longer_noise_multiplier:.4g} "
            f"instead of {self.noise_multiplier:.4g} at the same epsilon."
        )


def one_more_epoch(plan: Plan, *, dataset_size: int) -> EpochCost:
    """What one more pass over the data would cost: more epsilon at the same noise, or more noise at the same epsilon.

    The mechanism is made anew for the longer run where it was optimised for its number of steps (BLT, banded).

    >>> plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=100, dataset_size=1000, epochs=2)
    >>> one_more_epoch(plan, dataset_size=1000).longer_steps
    30
    """
    plan = _check.instance(Plan, plan=plan)
    if plan.noise_multiplier is None:
        raise ArgumentError("Expected noise_multiplier=None to be a number. Call plan.calibrated(epsilon=...) first.")
    longer = _longer(plan, _check.positive_int(dataset_size=dataset_size))
    spent = plan.guarantee().epsilon
    question = {"delta": plan.delta, "relation": plan.relation}
    return EpochCost(
        epsilon=spent,
        longer_epsilon=epsilon(longer.event_with(plan.noise_multiplier), **question),  # type: ignore[arg-type]
        noise_multiplier=plan.noise_multiplier,
        longer_noise_multiplier=calibrate(longer.event_with, epsilon=spent, **question),  # type: ignore[arg-type]
        steps=plan.steps,
        longer_steps=longer.steps,
    )


def _longer(plan: Plan, dataset_size: int) -> Plan:
    sampler = _one_epoch_longer(plan, dataset_size)
    return dataclasses.replace(plan, steps=sampler.steps, sampler=sampler, noise=_reopened(plan), noise_multiplier=None)


def _one_epoch_longer(plan: Plan, dataset_size: int) -> Sampler:
    """The sampler has either epochs or steps among its fields."""
    names = {field.name for field in dataclasses.fields(plan.sampler) if field.init}  # type: ignore[arg-type]
    if "epochs" in names:
        return dataclasses.replace(plan.sampler, epochs=plan.sampler.epochs + 1)  # type: ignore[type-var,attr-defined]
    more = -(-dataset_size // max(1, round(plan.batch_size)))
    return dataclasses.replace(plan.sampler, steps=plan.steps + more)  # type: ignore[type-var]


def _reopened(plan: Plan) -> Any:
    """The mechanism without parameters that were optimised for the run's length; other mechanisms unchanged."""
    from hushgrad.noise import BLT, Dense

    if isinstance(plan.noise, Dense):
        raise ArgumentError("Expected noise of any length. A dense matrix has as many rows as its run: plan the longer run anew.")
    if isinstance(plan.noise, BLT):
        return BLT(buffers=plan.noise.buffers, loss=plan.noise.loss)
    return plan.noise
