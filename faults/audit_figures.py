"""Lower bounds beside certified intervals, for every kind of run: what ``make audit-power`` writes into docs/audit-power.md."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict

from hushgrad.accounting import epsilon_interval
from hushgrad.audit import LowerBound, audit_run, step_bounds
from hushgrad.audit.composed_bounds import StepScores, composed_bounds, contribution_lower, noise_upper
from hushgrad.denoise import Laplacian
from hushgrad.estimators import DPLogisticRegression
from hushgrad.estimators.randomness import Randomness
from hushgrad.events import Gaussian
from hushgrad.federated.aggregate import Aggregator
from hushgrad.federated.layout import Layout
from hushgrad.release.keys import RunKey
from hushgrad.testing.defects import DEFECTS, bench, patched
from hushgrad.train import Plan

__all__ = ["Figure", "figures"]

DELTA = 1e-5


class Figure(NamedTuple):
    """One run: its certified interval, the bounds, the larger bound with half of the noise, and who the attacker is."""

    name: str
    lower: float
    upper: float
    fdp: float | None
    gdp: float
    halved: float
    seconds: float
    threat: str


def _figure(
    name: str, interval: tuple[float, float], attack: Callable[[], tuple[LowerBound, ...]], halve: Callable[[], object]
) -> Figure:
    began = time.process_time()
    found = attack()
    seconds = time.process_time() - began
    with halve():  # type: ignore[attr-defined]
        halved = attack()
    by = {bound.method: bound.epsilon for bound in found}
    gdp = max(value for method, value in by.items() if "gdp" in method)
    most = max(bound.epsilon for bound in halved)
    return Figure(name, *interval, by.get("steps f-dp"), gdp, most, seconds, found[0].threat)


def _interval(plan: Plan) -> tuple[float, float]:
    return epsilon_interval(plan.event(), delta=plan.delta, relation=plan.relation)


def _sampled(name: str, **arguments: object) -> Figure:
    plan = Plan.dpsgd(epsilon=3.0, delta=DELTA, **arguments)  # type: ignore[arg-type]
    return _figure(name, _interval(plan), lambda: step_bounds(plan), DEFECTS["noise halved"].plant)


def _deep(name: str, bed: str, change: Callable[[Plan], Plan] = lambda plan: plan) -> Figure:
    own = bench(bed)
    own = replace(own, plan=change(own.plan))
    return _figure(name, _interval(own.plan), lambda: audit_run(own).lower_bounds, DEFECTS["noise halved"].plant)


def _federated() -> Figure:
    """A server's rounds with canary clients whose updates are far above the clip norm, along a coordinate each."""
    plan = Plan.dpsgd(epsilon=3.0, delta=DELTA, batch_size=50, dataset_size=2000, steps=200, unit="user")

    def attack() -> tuple[LowerBound, ...]:
        clients, rounds = 400, 40
        server = Aggregator(plan, RunKey.make(seed=5))
        arrays = ArrayRecord({"model": Array(np.zeros(2 * clients))})
        layout, inside, outside = Layout.of(arrays), [], []
        for step in range(rounds):
            server.begin(step, layout, layout.flat(arrays))
            for client in range(clients):
                update = np.zeros(2 * clients)
                update[client] = 5.0 * plan.max_grad_norm
                server.add(RecordDict({"arrays": ArrayRecord({"model": Array(update)})}))
            row = server.release(step).numpy() * float(plan.batch_size) / plan.max_grad_norm
            inside.append(row[:clients])
            outside.append(row[clients:])
        scores = StepScores(inside=np.concatenate(inside), outside=np.concatenate(outside))
        return composed_bounds(plan, scores, confidence=0.95)

    return _figure("federated averaging, Poisson 1/40", _interval(plan), attack, DEFECTS["noise halved"].plant)


def _objective() -> Figure:
    """Objective perturbation: b = -grad of the rest of the objective at the released weights, with and without one record."""
    rows, labels = np.tile([1.0, 0.0], (400, 1)), np.ones(400, dtype=int)
    rows[::2, 0], labels[::2] = -1.0, 0  # the data agree, and the canary says the opposite
    with_it = np.vstack([rows, [[1.0, 0.0]]]), np.append(labels, 0)

    def released(data: tuple[np.ndarray, np.ndarray], seed: int) -> float:
        model = DPLogisticRegression(
            4.0, delta=DELTA, data_norm=1.0, method="objective", l2=1.0, fit_intercept=False, classes=[0, 1], random_state=seed
        ).fit(*data)
        theta, sign = model.coef_[0], 2.0 * labels - 1.0
        gradient = -(sign / (1.0 + np.exp(sign * (rows @ theta)))) @ rows + model.l2_ * theta
        return float(-gradient[0] / model.noise_scale_)

    def attack() -> tuple[LowerBound, ...]:
        outside = np.array([released((rows, labels), seed) for seed in range(600)])
        inside = np.array([released(with_it, 10_000 + seed) for seed in range(600)])
        side = 1.0 if inside.mean() > outside.mean() else -1.0
        scores = StepScores(inside=side * inside, outside=side * outside)
        mu = contribution_lower(scores, confidence=0.975) / noise_upper(outside - outside.mean(), confidence=0.975)
        epsilon = 0.0 if mu <= 0 else epsilon_interval(Gaussian(1.0 / mu), delta=DELTA)[0]
        threat = "sees the released weights and knows all records but one, which contradicts them"
        return (
            LowerBound(method="gdp", epsilon=epsilon, confidence=0.95, assumption="a Gaussian trade-off curve", threat=threat),
        )

    fitted = DPLogisticRegression(
        4.0, delta=DELTA, data_norm=1.0, method="objective", l2=1.0, fit_intercept=False, classes=[0, 1], random_state=0
    )
    upper = fitted.fit(rows, labels).guarantee_.epsilon
    normal = Randomness.normal
    return _figure(
        "objective perturbation",
        (0.0, upper),
        attack,
        lambda: patched(Randomness, "normal", lambda self, size: 0.5 * normal(self, size)),
    )


def figures() -> Iterator[Figure]:
    """All of them, one after the other; each takes seconds."""
    yield _sampled("README's plan: DP-SGD, rate 0.0043, 2344 steps", batch_size=256, dataset_size=60_000, epochs=10)
    yield _sampled("DP-SGD, rate 0.1, 100 steps", batch_size=100, dataset_size=1000, epochs=10)
    yield _sampled("DP-SGD, rate 0.01, 1000 steps", batch_size=100, dataset_size=10_000, epochs=10)
    yield _sampled("DP-SGD, rate 0.004, 2500 steps", batch_size=100, dataset_size=25_000, epochs=10)
    yield _deep("DP-FTRL, banded, 3 epochs of 20 steps", "correlated")
    yield _deep("DP-SGD with Laplacian smoothing", "layers", lambda plan: replace(plan, denoise=Laplacian(1.0)))
    yield _federated()
    yield _objective()
