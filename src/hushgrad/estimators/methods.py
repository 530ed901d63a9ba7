"""Three ways to a private linear predictor: perturb the objective, the output, or the steps of gradient descent.

Each returns a :class:`Release`: the parameters, what was spent, and how. All of them bound one record's influence by the loss's
slopes and the public row norm, so nothing is clipped and nothing is estimated from the data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hushgrad import _check
from hushgrad.accounting.gaussian import gaussian_mu
from hushgrad.estimators.losses import LinearLoss
from hushgrad.estimators.objective import objective_noise, profile, pure_noise
from hushgrad.estimators.randomness import Randomness
from hushgrad.estimators.rules import descent_rate
from hushgrad.estimators.solver import Objective, minimum
from hushgrad.events import ApproxDP, Event, Gaussian, PureDP, Relation
from hushgrad.guarantee import Guarantee

# The share of (epsilon, delta) that pays for the minimiser's inexactness; at the default tol it buys negligible noise.
_INEXACT = 1e-3
_EPSILONS = (1e-12, 1e6)  # further out the formulas leave double precision, or mean nothing
_DELTAS = (1e-200, 1 - 1e-9)
# For logistic regression the curvature is free from l2 = R²/epsilon on; a little more regularisation also helps against the noise.
_FREE_RATIO = 1.5
# However large epsilon is, some regularisation keeps the minimum within reach of the solver.
_LARGEST_RATIO = 100.0
# The share of the squared Gaussian budget that gradient descent spends on a noisy count of the records.
_COUNT_SHARE = 0.01
_MOMENTUM = 0.9  # of gradient descent


@dataclass(frozen=True)
class Budget:
    """The (epsilon, delta) to spend, and under which relation."""

    epsilon: float
    delta: float
    relation: Relation

    def __post_init__(self) -> None:
        _check.between(*_EPSILONS, closed="both", epsilon=_check.positive(epsilon=self.epsilon))
        if _check.between(0, 1, closed="left", delta=self.delta) != 0:
            _check.between(*_DELTAS, closed="both", remedy="0 is pure differential privacy.", delta=self.delta)

    def part(self, share: float) -> Budget:
        """A share of both epsilon and delta; shares add up by basic composition."""
        return Budget(share * self.epsilon, share * self.delta, self.relation)

    def guarantee(self, event: Event, how: str, notes: tuple[str, ...]) -> Guarantee:
        """The guarantee for having spent this budget."""
        return Guarantee(
            epsilon=self.epsilon, delta=self.delta, event=event, accountant=how, relation=self.relation, unit="row", notes=notes
        )


@dataclass(frozen=True)
class Problem:
    """A convex problem on bounded rows."""

    loss: LinearLoss
    X: np.ndarray
    y: np.ndarray
    row_norm: float

    @property
    def size(self) -> int:
        """The number of parameters."""
        return self.loss.outputs * self.X.shape[1]


@dataclass(frozen=True)
class Release:
    """The output of a method: private parameters of shape (outputs, features).

    ``iterations`` is the number that was allowed. The number that was needed depends on the data, and no noise hides it.
    """

    theta: np.ndarray
    guarantee: Guarantee
    l2: float
    noise_scale: float
    iterations: int


def objective_perturbation(
    problem: Problem, budget: Budget, random: Randomness, *, l2: float | None, tol: float, max_iter: int
) -> Release:
    """Objective perturbation by the vertex theorem (Gaussian noise), or its pure form where delta is 0.

    **Formal guarantee.** (epsilon, delta)-DP under the relation: the exact minimum spends (1 - 0.001) of both, and the released
    point is the minimum plus its numerical error, at most tol/l2, hidden by Gaussian (pure: Gamma-length) noise that spends the rest.
    """
    main = budget.part(1 - _INEXACT)
    l2 = l2 if l2 is not None else _objective_l2(problem, main)
    if budget.delta > 0:
        terms = profile(problem.loss, row_norm=problem.row_norm, l2=l2, relation=budget.relation, epsilon=main.epsilon)
        scale = objective_noise(main.epsilon, main.delta, terms=terms)
        tilt = scale * random.normal(problem.size)
        event: Event = ApproxDP(budget.epsilon, budget.delta)
    else:
        scale = pure_noise(main.epsilon, loss=problem.loss, row_norm=problem.row_norm, l2=l2, relation=budget.relation)
        tilt = scale * random.spherical(problem.size)
        event = PureDP(budget.epsilon)
    found = minimum(Objective(problem.loss, problem.X, problem.y, l2, tilt), tol=tol, max_iter=max_iter)
    theta = found.theta + _hiding_noise(2 * tol / l2, budget.part(_INEXACT), random, problem.size)
    guarantee = budget.guarantee(event, "objective perturbation", random.notes)
    return Release(theta.reshape(problem.loss.outputs, -1), guarantee, l2, scale, max_iter)


def _objective_l2(problem: Problem, budget: Budget) -> float:
    """The default l2; it depends on public facts only, so it costs nothing."""
    if problem.loss.curvature_vanishes_at_vertex:
        ratio = budget.epsilon / (_FREE_RATIO * budget.relation.contributions)
    else:
        ratio = problem.loss.largest_ratio(min(problem.loss.curvature_share(budget.epsilon) * budget.epsilon, 5.0))
    return problem.row_norm**2 / min(ratio, _LARGEST_RATIO)


def output_perturbation(
    problem: Problem, budget: Budget, random: Randomness, *, l2: float | None, tol: float, max_iter: int
) -> Release:
    """Output perturbation: the regularised minimum plus noise.

    **Formal guarantee.** The minimum of a λ-strongly convex sum moves by at most L/λ when a record of slope at most L joins or
    leaves, and by 2L/λ when it is replaced (the lectures' 2L/(μn), with λ = μn); the numerical error adds 2 tol/λ. On top comes the
    analytic Gaussian mechanism, or noise of density exp(-epsilon ‖z‖/sensitivity) for delta = 0.
    """
    lipschitz = problem.loss.lipschitz * problem.row_norm
    if l2 is None:
        # Noise of about unit length in all: larger would drown a predictor on unit rows, smaller would over-regularise.
        strength = (
            gaussian_mu(budget.epsilon, budget.delta) / math.sqrt(problem.size) if budget.delta else budget.epsilon / problem.size
        )
        l2 = lipschitz / strength
    found = minimum(Objective(problem.loss, problem.X, problem.y, l2, np.zeros(problem.size)), tol=tol, max_iter=max_iter)
    step = (lipschitz + 2 * tol) / l2  # one contribution's reach; replace-one moves two of them
    sensitivity = budget.relation.contributions * step
    theta = found.theta + _hiding_noise(sensitivity, budget, random, problem.size)
    event, scale = _hiding_event(sensitivity, step, budget)
    guarantee = budget.guarantee(event, "analytic Gaussian" if budget.delta else "pure output perturbation", random.notes)
    return Release(theta.reshape(problem.loss.outputs, -1), guarantee, l2, scale, max_iter)


def gradient_descent(
    problem: Problem, budget: Budget, random: Randomness, *, l2: float | None, steps: int, learning_rate: float | None
) -> Release:
    """Full-batch DP-GD with momentum and an average over the second half of the iterates.

    **Formal guarantee.** Each step releases the summed gradient with Gaussian noise, sensitivity L; one more release is a noisy
    count of the records, so that the step size needs no secret. Gaussians compose exactly: μ² = Σ μ_t². Where noise would outweigh
    the records, steps are shorter (:func:`hushgrad.estimators.rules.descent_rate`).
    """
    if budget.delta == 0:
        _check.fail("delta", 0.0, 'to be positive for method="gd"', 'Gaussian noise needs a delta; use method="objective".')
    lipschitz = problem.loss.lipschitz * problem.row_norm
    mu = gaussian_mu(budget.epsilon, budget.delta)  # of everything together, in units of the relation's distance
    noise_multiplier = budget.relation.contributions * math.sqrt(steps / ((1 - _COUNT_SHARE) * mu**2))
    count_multiplier = budget.relation.contributions / math.sqrt(_COUNT_SHARE * mu**2)
    count = max(1.0, len(problem.X) + count_multiplier * float(random.normal(1)[0]))
    signal = count * mu / (budget.relation.contributions * math.sqrt(problem.size))
    rate = learning_rate if learning_rate is not None else descent_rate(signal) / problem.row_norm**2
    theta = np.zeros(problem.size)
    velocity, tail = np.zeros_like(theta), np.zeros_like(theta)
    objective = Objective(problem.loss, problem.X, problem.y, l2 or 0.0, np.zeros(problem.size))
    for step in range(steps):
        noisy = objective.value_and_gradient(theta)[1] + noise_multiplier * lipschitz * random.normal(problem.size)
        velocity = _MOMENTUM * velocity + noisy / count
        theta = theta - rate * velocity
        if step >= steps // 2:
            tail += theta
    event = Gaussian(noise_multiplier) * steps + Gaussian(count_multiplier)
    guarantee = budget.guarantee(event, "gdp", random.notes)
    averaged = (tail / (steps - steps // 2)).reshape(problem.loss.outputs, -1)
    return Release(averaged, guarantee, l2 or 0.0, noise_multiplier * lipschitz, steps)


def _hiding_event(sensitivity: float, step: float, budget: Budget) -> tuple[Event, float]:
    if budget.delta == 0:
        return PureDP(budget.epsilon), sensitivity / budget.epsilon
    scale = sensitivity / gaussian_mu(budget.epsilon, budget.delta)
    return Gaussian(scale / step), scale


def _hiding_noise(sensitivity: float, budget: Budget, random: Randomness, size: int) -> np.ndarray:
    """Noise that makes a vector of this L2 sensitivity private within the budget."""
    if budget.delta == 0:
        return sensitivity / budget.epsilon * random.spherical(size)
    return sensitivity / gaussian_mu(budget.epsilon, budget.delta) * random.normal(size)
