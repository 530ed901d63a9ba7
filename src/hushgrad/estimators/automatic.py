r"""What ``method="auto"`` decides: objective perturbation or gradient descent, and where a support vector machine draws its line.

**Which method.** Objective perturbation needs a regulariser of about R²/epsilon, which is too much where there is much data and little
epsilon; gradient descent needs none, and is noisier otherwise, the more so the more parameters there are. For at most 32 parameters and
epsilon below 0.5 a share of epsilon buys a noisy count of the records, and gradient descent is chosen where count x epsilon > 100 √d
(measured, see docs/estimators.md).

**Where the line is drawn.** A hinge loss that is regularised strongly, as objective perturbation needs it, ranks well and puts its
threshold anywhere: it counts the classes. A share of epsilon chooses a better one among a few public multiples of the largest possible
score, by the number of records on their right side. Staying at 0 has as much weight as all others together, so little is lost where the
line was good. Gradient descent has no such regulariser; its line stays.

**Formal guarantee.** A count moves by at most 1 with one record, added, removed or replaced; so does the number of records on their right
side of any line. Laplace noise and the exponential mechanism (McSherry and Talwar 2007, theorem 6; a constant added to one candidate's
score does not change its sensitivity) are pure, and the parts of epsilon add up. Under add/remove the choice P(i) ∝ exp(ε u_i) needs no
factor of 1/2: a record that joins raises each score by 0 or 1 and lowers none, so that exp(ε u_i) and the sum of all of them both grow by
a factor between 1 and e^ε, and their quotient moves by at most e^ε either way.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from hushgrad.estimators.exponential import selected
from hushgrad.estimators.methods import Budget, Release
from hushgrad.estimators.randomness import Randomness
from hushgrad.events import Compose, Event, PureDP, Relation

__all__ = ["COUNT_SHARE", "LINE_SHARE", "drawn_line", "prefers_descent", "together"]

COUNT_SHARE = 0.02
LINE_SHARE = 0.05
_LARGE = 0.5  # from here on the regulariser of objective perturbation is small enough
_MUCH_DATA, _FEW_PARAMETERS = 100.0, 32
_LINES = 2.0 ** (-np.arange(17) / 2)  # from the largest possible score down to 1/256 of it


def prefers_descent(budget: Budget, size: int, records: int, random: Randomness) -> tuple[bool, Budget, Event | None]:
    """(whether to descend, what is left of the budget, what was spent on finding out)."""
    if budget.delta == 0 or budget.epsilon >= _LARGE or size > _FEW_PARAMETERS:
        return False, budget, None
    spent = COUNT_SHARE * budget.epsilon
    a, b = random.exponential(2)
    count = records + (a - b) / spent  # a difference of exponentials is Laplace
    left = Budget(budget.epsilon - spent, budget.delta, budget.relation)
    return bool(count * budget.epsilon > _MUCH_DATA * math.sqrt(size)), left, PureDP(spent)


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
    """The release with what was spent beside it: by basic composition that is ``budget``."""
    first = release.guarantee
    how = f"{first.accountant}, basic composition"
    return replace(release, guarantee=budget.guarantee(Compose([first.event, spent]), how, first.notes))
