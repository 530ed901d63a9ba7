"""``assert_private``: a privacy claim as an assertion in your own tests. It can refute a claim, never prove one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hushgrad import _check
from hushgrad._printed import at_least, at_most
from hushgrad.accounting import epsilon as accounted
from hushgrad.accounting import epsilon_interval
from hushgrad.audit import Auditor, bounds
from hushgrad.audit.bounds import ClaimedCurve
from hushgrad.errors import NoTheorem
from hushgrad.events import ApproxDP, Event, Relation
from hushgrad.train import Plan, Private

Mechanism = Callable[[Any, int], Any]
"""From a data set and a seed to an output: a number, or an array of one shape."""


def assert_private(
    mechanism: Plan | Private | Mechanism,
    *,
    epsilon: float,
    delta: float,
    neighbours: tuple[Any, Any] | None = None,
    event: Event | None = None,
    relation: Relation | str = Relation.ADD_REMOVE,
    runs: int = 1000,
    steps: int = 50,
    confidence: float = 0.95,
    seed: int = 0,
) -> None:
    """Raise AssertionError if the claim that ``mechanism`` is (``epsilon``, ``delta``)-DP is refuted.

    | ``mechanism`` | what is done |
    |---|---|
    | a plan, or a running ``Private`` | its own accounting (a certified lower bound), then canaries through its real path |
    | ``mechanism(dataset, seed)`` | ``runs`` runs on each of the two ``neighbours``, then exact bounds on an attack's errors |

    For a callable, half of the runs choose the attack (the direction in which the outputs differ, and a threshold) and the other
    half are counted, so the result holds with ``confidence`` for any mechanism; choose neighbours that are as far apart as the
    data may be. ``event`` is a finer claim than (epsilon, delta), such as ``guarantee_.event``, stated under ``relation``: more can
    be refuted with it.

    Args:
        mechanism: a plan, a running ``Private``, or a function of a data set and a seed.
        epsilon: of the claim.
        delta: of the claim.
        neighbours: two neighbouring data sets, for a function.
        event: a finer claim than (epsilon, delta), for a function.
        relation: under which the event is stated.
        runs: runs on each neighbour, or canaries.
        steps: of the audited run, for a plan.
        confidence: with which a claim is refuted.
        seed: of everything random in the test.

        >>> mean = lambda data, seed: sum(data) + np.random.default_rng(seed).laplace(scale=2.0)  # 0.5-DP for data in [0, 1]
        >>> assert_private(mean, epsilon=0.5, delta=1e-6, neighbours=([0, 1, 1], [0, 1]))
        >>> assert_private(mean, epsilon=0.1, delta=1e-6, neighbours=([0, 1, 1], [0, 1]), runs=2000)
        Traceback (most recent call last):
        ...
        AssertionError: (0.1, 1e-06)-DP is refuted at 95% confidence...
    """
    _check.non_negative(epsilon=epsilon)
    _check.delta(delta=delta)
    if isinstance(mechanism, (Plan, Private)):
        plan = mechanism.plan if isinstance(mechanism, Private) else mechanism
        _assert_accounted(plan, epsilon, delta)
        _assert_audited(plan, epsilon, delta, canaries=runs, steps=steps, confidence=confidence, seed=seed)
        return
    if neighbours is None:
        _check.fail("neighbours", None, "to be two neighbouring data sets", "Choose them as far apart as the data may be.")
    claim = ClaimedCurve(ApproxDP(epsilon, delta) if event is None else event, relation=relation)
    _assert_told_apart(mechanism, neighbours, claim, (epsilon, delta), runs, confidence, seed)


def _assert_accounted(plan: Plan, epsilon: float, delta: float) -> None:
    event = plan.event()
    try:
        least, _ = epsilon_interval(event, delta=delta, relation=plan.relation)
    except NoTheorem:
        least = accounted(event, delta=delta, relation=plan.relation)
    assert least <= epsilon, (
        f"({at_most(epsilon, 6)}, {at_most(delta, 6)})-DP is refuted: the plan's own event, {event}, costs {at_least(least)} at least."
    )


def _assert_audited(plan: Plan, epsilon: float, delta: float, *, canaries: int, steps: int, confidence: float, seed: int) -> None:
    report = Auditor(plan, canaries=canaries, steps=steps, confidence=confidence, seed=seed).run()
    assert not report.refuted, str(report)
    rates = report.rates
    fitted = bounds.epsilon_gaussian(rates, delta=delta) if report.bound_is_exact else 0.0
    least = max(bounds.epsilon_clopper_pearson(rates, delta=delta), fitted)
    assert least <= epsilon, (
        f"({at_most(epsilon, 6)}, {at_most(delta, 6)})-DP is refuted at {100 * confidence:g}% confidence: "
        f"epsilon >= {at_least(least)}. {report}"
    )


def _assert_told_apart(
    mechanism: Mechanism,
    neighbours: tuple[Any, Any],
    claim: ClaimedCurve,
    stated: tuple[float, float],
    runs: int,
    confidence: float,
    seed: int,
) -> None:
    runs = _check.integer(20, runs=runs)
    seeds = np.random.default_rng(seed).integers(2**31, size=(2, runs)).tolist()
    first, second = (
        np.stack([np.asarray(mechanism(data, s), dtype=np.float64).ravel() for s in mine])
        for data, mine in zip(neighbours, seeds, strict=True)
    )
    half = runs // 2
    direction, threshold = _attack(first[:half], second[:half], confidence)
    rates = bounds.error_rates(first[half:] @ direction, second[half:] @ direction, threshold=threshold, confidence=confidence)
    gap = bounds.curve_gap(rates, claim)
    least = bounds.epsilon_clopper_pearson(rates, delta=stated[1])
    assert gap <= 0, (
        f"({stated[0]:g}, {stated[1]:g})-DP is refuted at {100 * confidence:g}% confidence: "
        f"an attack has {rates.false_alarms:.3f} false alarms and {rates.misses:.3f} misses in {2 * (runs - half)} runs, "
        f"which needs epsilon >= {at_least(least)}."
    )


def _attack(first: np.ndarray, second: np.ndarray, confidence: float) -> tuple[np.ndarray, float]:
    """Fisher's direction with one variance per number, and the threshold that separates best along it."""
    spread = np.sqrt((first.var(axis=0) + second.var(axis=0)) / 2)
    spread[spread == 0] = max(float(spread.max()), 1.0) * 1e-6  # a number without any noise tells everything
    direction = (first.mean(axis=0) - second.mean(axis=0)) / spread**2
    a, b = first @ direction, second @ direction
    tried = np.quantile(np.concatenate([a, b]), np.linspace(0.01, 0.99, 99))
    rates = [bounds.error_rates(a, b, threshold=float(t), confidence=confidence) for t in tried]
    return direction, max(rates, key=bounds.mu_lower_bound).threshold
