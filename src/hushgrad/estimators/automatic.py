r"""What ``method="auto"`` decides: objective perturbation or gradient descent, and the threshold of a support vector machine.

**Which method.** Gradient descent, or objective perturbation if there are many records for epsilon; :mod:`hushgrad.estimators.rules` says
how many, and how that was measured. A small share of epsilon pays for a noisy count of the records; under replace-one and zero-out their
number is public. With the user's own ``l2``, and with delta = 0, the objective is perturbed.

**Which threshold.** A hinge loss that is regularised as strongly as objective perturbation needs ranks well, but its threshold is
arbitrary: it counts the classes. A share of epsilon chooses a better one among a few public multiples of the largest possible
score, by the number of records on their right side. Staying at 0 has as much weight as all others together, so little is lost if the
threshold was good. Gradient descent has no such regulariser and keeps its threshold.

**Formal guarantee.** A count moves by at most 1 with one record, added, removed or replaced; so does the number of records on their right
side of any threshold. Laplace noise and the exponential mechanism (McSherry and Talwar 2007, theorem 6; a constant added to one candidate's
score does not change its sensitivity) are pure, and the parts of epsilon add up. Under add/remove the choice P(i) ∝ exp(ε u_i) needs no
factor of 1/2: a record that joins raises each score by 0 or 1 and lowers none, so that exp(ε u_i) and the sum of all of them both grow by
a factor between 1 and e^ε, and their quotient moves by at most e^ε either way.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from hushgrad.estimators.exponential import selected
from hushgrad.estimators.losses import LinearLoss
from hushgrad.estimators.methods import Budget, Release
from hushgrad.estimators.randomness import Randomness
from hushgrad.estimators.rules import COUNT_SHARE, PLENTY
from hushgrad.events import Compose, Event, PureDP, Relation

_LINES = 2.0 ** (-np.arange(17) / 2)  # from the largest possible score down to 1/256 of it


def prefers_descent(budget: Budget, loss: LinearLoss, records: int, random: Randomness) -> tuple[bool, Budget, Event | None]:
    """Whether to use gradient descent, the remaining budget, and what was spent on the decision."""
    if budget.delta == 0:
        return False, budget, None
    if budget.relation is not Relation.ADD_REMOVE:  # the number of records is the same in both data sets
        return _few(budget, loss, records), budget, None
    spent = COUNT_SHARE * budget.epsilon
    a, b = random.beside().exponential(2)  # a stream of its own, so that descent draws what it would draw without it
    count = records + (a - b) / spent  # a difference of exponentials is Laplace
    return _few(budget, loss, count), Budget(budget.epsilon - spent, budget.delta, budget.relation), PureDP(spent)


def _few(budget: Budget, loss: LinearLoss, count: float) -> bool:
    return count * budget.epsilon < PLENTY[type(loss)] * budget.relation.contributions


def drawn_line(
    scores: np.ndarray, positive: np.ndarray, *, reach: float, epsilon: float, relation: Relation, random: Randomness
) -> float:
    """A threshold for ``scores``, ``epsilon``-DP in the scored records.

    Args:
        scores: of the records, at most ``reach`` in size.
        positive: which of the records are.
        reach: a released number.
        epsilon: what the choice costs.
        relation: of two data sets; add/remove has the smaller sensitivity.
        random: where the noise comes from.
    """
    sensitivity = 0.5 if relation is Relation.ADD_REMOVE else 1.0
    lines = np.concatenate([[0.0], reach * _LINES, -reach * _LINES])
    above, below = np.sort(scores[positive]), np.sort(scores[~positive])
    right = len(above) - np.searchsorted(above, lines, "right") + np.searchsorted(below, lines, "right").astype(float)
    right[0] += 2 * sensitivity * math.log(len(lines) - 1) / epsilon
    return float(lines[selected(right, epsilon=epsilon, sensitivity=sensitivity, method="gumbel", random=random)])


def together(release: Release, spent: Event, budget: Budget) -> Release:
    """The release together with what was spent before it; by basic composition both cost ``budget``."""
    first = release.guarantee
    how = f"{first.accountant}, basic composition"
    return replace(release, guarantee=budget.guarantee(Compose([first.event, spent]), how, first.notes))
