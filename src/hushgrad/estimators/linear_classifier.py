"""Shared code of the private linear classifiers: validation, methods, and one joint predictor or one per class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from hushgrad import _check
from hushgrad.errors import ArgumentError
from hushgrad.estimators.automatic import prefers_descent, together
from hushgrad.estimators.base import LABELS, PUBLIC, OnBoundedRows
from hushgrad.estimators.bounded import bounded_rows, finite, regulariser, representable, validated, with_intercept
from hushgrad.estimators.losses import LinearLoss
from hushgrad.estimators.methods import Budget, Problem, Release, gradient_descent, objective_perturbation, output_perturbation
from hushgrad.estimators.randomness import Randomness, randomness
from hushgrad.events import Compose, Event, Relation
from hushgrad.guarantee import Guarantee

LABELS_FROM_DATA = "Class labels were taken from the data and assumed public"
_METHODS = ("auto", "objective", "output", "gd")
# The constant column, in units of data_norm: small enough to cost little sensitivity, large enough to fit the base rate.
INTERCEPT = 0.25


def class_numbers(classes: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The index of each label in the sorted ``classes``.

    Raises:
        ArgumentError: for a label that is none of them, or for a single class.
    """
    if len(classes) < 2:
        raise ArgumentError("Classifier can't train when only one class is present. Give classes= if the other is known.")
    numbers = np.searchsorted(classes, y).clip(max=len(classes) - 1)
    if (classes[numbers] != y).any():
        _check.fail("classes", list(classes), "to contain every label in y", "Add the missing label or drop its rows.")
    return numbers


@dataclass(kw_only=True, eq=False, repr=False)
class LinearClassifier(ClassifierMixin, OnBoundedRows):
    """A linear score per class, or one score for two classes; subclasses define the loss."""

    released: ClassVar = {
        **OnBoundedRows.released,
        "coef_": "the theorem of the method",
        "intercept_": "the theorem of the method",
        "classes_": LABELS,
        **dict.fromkeys(("l2_", "noise_scale_", "n_iter_"), f"{PUBLIC}, and of the noisy count of method auto"),
    }

    method: str = "auto"
    l2: float | str = "auto"
    fit_intercept: bool = True
    classes: Any = None
    tol: float = 1e-7
    max_iter: int = 1000
    gd_steps: int = 100
    learning_rate: float | None = None

    def fit(self, X, y):
        """Fit on rows ``X`` with labels ``y``; the guarantee is in ``guarantee_``.

        The class labels are taken from ``y`` unless ``classes`` are given; a guarantee assumes that they are public.
        """
        X, y = validated(self, X, y)
        check_classification_targets(y)
        self.classes_ = np.unique(y if self.classes is None else list(self.classes))
        numbers = class_numbers(self.classes_, y)
        budget = Budget(self.epsilon, self.delta, Relation.of(self.relation))
        rows = bounded_rows(X, self.data_norm, out_of_bounds=self.out_of_bounds)
        norm: float = self.data_norm  # type: ignore[assignment]  # refused above where it is None
        constant = INTERCEPT * norm if self.fit_intercept else 0.0
        augmented, row_norm = with_intercept(rows, norm, constant)
        with representable():
            releases = self._solve(augmented, numbers, row_norm, budget, randomness(self.random_state))
            theta = np.vstack([release.theta for release in releases])
        finite(theta=theta)
        self.coef_ = theta[:, : X.shape[1]]
        self.intercept_ = theta[:, -1] * constant if self.fit_intercept else np.zeros(len(theta))
        self.l2_, self.noise_scale_ = releases[0].l2, releases[0].noise_scale
        self.n_iter_ = releases[0].iterations
        self.guarantee_ = self._guarantee(budget, releases)
        return self

    def decision_function(self, X):
        """Signed distances for two classes, one score per class for more."""
        check_is_fitted(self)
        X = validated(self, X, reset=False)
        scores = X @ self.coef_.T + self.intercept_
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def predict(self, X):
        """The most likely class of each row."""
        scores = self.decision_function(X)
        return self.classes_[(scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)]

    def _solve(self, X, numbers, row_norm: float, budget: Budget, random: Randomness) -> list[Release]:
        joint = self._joint_loss(len(self.classes_))
        if joint is not None:
            targets = numbers if joint.outputs > 1 else 2.0 * numbers - 1
            return [self._release(Problem(joint, X, targets, row_norm), budget, random)]
        # One against the rest: every record is in every problem, so the budget is divided by basic composition.
        part = budget.part(1 / len(self.classes_))
        targets = [np.where(numbers == k, 1.0, -1.0) for k in range(len(self.classes_))]
        return [self._release(Problem(self._binary_loss(), X, target, row_norm), part, random) for target in targets]

    def _release(self, problem: Problem, budget: Budget, random: Randomness) -> Release:
        method = _check.one_of(_METHODS, method=self.method)
        if method != "auto":
            return self._by(method, problem, budget, random)
        descends, left, spent = self._choice(problem, budget, random)
        release = self._by("gd" if descends else "objective", problem, left, random)
        return release if spent is None else together(release, spent, budget)

    def _choice(self, problem: Problem, budget: Budget, random: Randomness) -> tuple[bool, Budget, Event | None]:
        """Whether to descend, the remaining budget and what was spent; with the user's own ``l2`` the objective is always perturbed."""
        if regulariser(self.l2) is not None:
            return False, budget, None
        return prefers_descent(budget, problem.loss, len(problem.X), random)

    def _by(self, method: str, problem: Problem, budget: Budget, random: Randomness) -> Release:
        # All of them, whichever method is chosen: a mistake is told whatever the count of the records is.
        l2, steps = regulariser(self.l2), _check.positive_int(gd_steps=self.gd_steps)
        rate = None if self.learning_rate is None else _check.positive(learning_rate=self.learning_rate)
        tol, max_iter = _check.positive(tol=self.tol) * self.data_norm, _check.positive_int(max_iter=self.max_iter)  # type: ignore[operator]
        if method == "gd":
            return gradient_descent(problem, budget, random, l2=l2, steps=steps, learning_rate=rate)
        how = output_perturbation if method == "output" else objective_perturbation
        return how(problem, budget, random, l2=l2, tol=tol, max_iter=max_iter)

    def _guarantee(self, budget: Budget, releases: list[Release]) -> Guarantee:
        first = releases[0].guarantee
        notes = first.notes if self.classes is not None else (*first.notes, LABELS_FROM_DATA)
        event = first.event if len(releases) == 1 else Compose([release.guarantee.event for release in releases])
        how = first.accountant if len(releases) == 1 else f"{first.accountant}, basic composition over classes"
        return budget.guarantee(event, how, notes)

    def _joint_loss(self, classes: int) -> LinearLoss | None:
        """One loss for all classes, or None for one against the rest."""
        return self._binary_loss() if classes == 2 else None

    def _binary_loss(self) -> LinearLoss:
        raise AssertionError("a final class defines its loss")
