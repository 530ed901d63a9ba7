"""A differentially private linear support vector classifier with scikit-learn's conventions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hushgrad import _check
from hushgrad.estimators.automatic import drawn_line, together
from hushgrad.estimators.linear_classifier import INTERCEPT, LinearClassifier
from hushgrad.estimators.logistic_regression import DPLogisticRegression
from hushgrad.estimators.losses import HuberHinge, LinearLoss
from hushgrad.estimators.methods import Budget, Problem, Release
from hushgrad.estimators.randomness import Randomness
from hushgrad.estimators.rules import LINE_SHARE
from hushgrad.events import Compose, PureDP


@dataclass(kw_only=True, eq=False, repr=False)
class DPLinearSVC(LinearClassifier):
    """Differentially private linear support vector classifier: the hinge loss with its corner rounded over ``width``.

    Arguments, guarantee and methods are those of :class:`DPLogisticRegression`, and ``width``: how far from the corner its rounding
    reaches, in margins. More than two classes are fitted one against the rest. With ``method="auto"`` and two classes a share of epsilon
    chooses the threshold.

        >>> from sklearn.datasets import make_classification
        >>> X, y = make_classification(n_samples=2000, random_state=0)
        >>> model = DPLinearSVC(epsilon=1.0, data_norm=5.0, out_of_bounds="clip", random_state=0).fit(X, y)
        >>> bool(model.score(X, y) > 0.8)
        True
    """

    papers = DPLogisticRegression.papers

    width: float = 1.0

    def _binary_loss(self) -> LinearLoss:
        return HuberHinge(_check.positive(width=self.width))

    def _release(self, problem: Problem, budget: Budget, random: Randomness) -> Release:
        """With ``method="auto"``, choose the threshold again after objective perturbation, whose regulariser makes it count the classes."""
        if self.method != "auto" or not self.fit_intercept or len(self.classes_) != 2:
            return super()._release(problem, budget, random)
        descends, left, counted = self._choice(problem, budget, random)
        if descends:
            release = self._by("gd", problem, left, random)
            return release if counted is None else together(release, counted, budget)
        spent = LINE_SHARE * budget.epsilon
        release = self._by("objective", problem, Budget(left.epsilon - spent, left.delta, left.relation), random)
        theta, reach = release.theta.copy(), float(np.linalg.norm(release.theta)) * problem.row_norm
        scores, relation = problem.X @ theta[0], budget.relation
        line = drawn_line(scores, problem.y > 0, reach=reach, epsilon=spent, relation=relation, random=random)
        theta[0, -1] -= line / (INTERCEPT * float(self.data_norm))  # type: ignore[arg-type]  # the constant column
        beside = PureDP(spent) if counted is None else Compose([counted, PureDP(spent)])
        return together(replace(release, theta=theta), beside, budget)
