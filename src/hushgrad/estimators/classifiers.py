"""Private linear classifiers with scikit-learn's conventions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from scipy.special import expit, softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from hushgrad import _check
from hushgrad.errors import ArgumentError
from hushgrad.estimators.automatic import drawn_line, prefers_descent, together
from hushgrad.estimators.bounded import bounded_rows, finite, regulariser, representable, validated, with_intercept
from hushgrad.estimators.losses import HuberHinge, LinearLoss, Logistic, Softmax
from hushgrad.estimators.methods import Budget, Problem, Release, gradient_descent, objective_perturbation, output_perturbation
from hushgrad.estimators.randomness import Randomness, randomness
from hushgrad.estimators.rules import LINE_SHARE
from hushgrad.events import Compose, Event, PureDP, Relation
from hushgrad.guarantee import Guarantee

LABELS_FROM_DATA = "Class labels were taken from the data and assumed public"
_METHODS = ("auto", "objective", "output", "gd")
# The constant column, in units of data_norm: small enough to cost little sensitivity, large enough to fit the base rate.
_INTERCEPT = 0.25


def class_numbers(classes: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The place of each label in ``classes``, which are sorted.

    Raises:
        ArgumentError: for a label that is none of them, or for a single class.
    """
    if len(classes) < 2:
        raise ArgumentError("Classifier can't train when only one class is present. Give classes= if the other is known.")
    numbers = np.searchsorted(classes, y).clip(max=len(classes) - 1)
    if (classes[numbers] != y).any():
        _check.fail("classes", list(classes), "to contain every label in y", "Add the missing label or drop its rows.")
    return numbers


class _LinearClassifier(ClassifierMixin, BaseEstimator):
    """What the private linear classifiers share: validation, methods, one predictor per class or one in all."""

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
        constant = _INTERCEPT * self.data_norm if self.fit_intercept else 0.0
        augmented, row_norm = with_intercept(rows, self.data_norm, constant)
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
        """Whether to descend, what is left, what was spent; who gives a regulariser asks for the minimum of that very objective."""
        if regulariser(self.l2) is not None:
            return False, budget, None
        return prefers_descent(budget, problem.loss, len(problem.X), random)

    def _by(self, method: str, problem: Problem, budget: Budget, random: Randomness) -> Release:
        # All of them, whichever method is chosen: a mistake is told whatever the count of the records is.
        l2, steps = regulariser(self.l2), _check.positive_int(gd_steps=self.gd_steps)
        rate = None if self.learning_rate is None else _check.positive(learning_rate=self.learning_rate)
        tol, max_iter = _check.positive(tol=self.tol) * self.data_norm, _check.positive_int(max_iter=self.max_iter)
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


class DPLogisticRegression(_LinearClassifier):
    r"""Differentially private logistic regression.

    Minimises Σ log-loss + l2/2 ‖θ‖² privately. ``method="objective"`` perturbs the objective and is calibrated by the vertex theorem of
    :mod:`hushgrad.estimators.objective`; "output" adds noise to the minimum; "gd" is full-batch noisy gradient descent with tail
    averaging; "auto" is "gd", or "objective" where records are plenty for epsilon, see :mod:`hushgrad.estimators.rules`.

    **Formal guarantee.** ``fit`` is (epsilon, delta)-DP under ``relation`` with respect to one row, provided that ``data_norm`` (and
    ``classes``, where given) was chosen without looking at the data. With a ``random_state`` it is reproducible, hence not private
    against whoever knows the seed; ``guarantee_`` says so.

        >>> from sklearn.datasets import load_breast_cancer
        >>> from sklearn.preprocessing import normalize
        >>> X, y = load_breast_cancer(return_X_y=True)
        >>> X = normalize(X / X.shape[1])                    # rows of length 1: a bound that needs no look at the data
        >>> model = DPLogisticRegression(epsilon=5.0, delta=1e-4, data_norm=1.0, random_state=0).fit(X, y)
        >>> model.guarantee_.epsilon
        5.0

    Args:
        epsilon: The privacy budget.
        delta: The failure probability; 0 for pure differential privacy ("objective" and "output").
        data_norm: A public bound on the L2 norm of a row. Required.
        method: "auto", "objective", "output" or "gd".
        l2: λ of the summed objective, or "auto".
        multi_class: "multinomial" (one joint release) or "ovr" (one per class, the budget divided), for more than two classes.
        fit_intercept: Whether to fit a constant; it is regularised, and costs a little sensitivity.
        classes: The public class labels; taken from ``y`` if None.
        relation: "add_remove", "replace_one" or "zero_out".
        out_of_bounds: What to do with rows longer than ``data_norm``: "raise" or "clip".
        tol: The certified gradient norm of the minimiser, in units of ``data_norm``; its effect is paid for.
        max_iter: The most iterations of the minimiser.
        gd_steps: Steps of method "gd".
        learning_rate: Step size of method "gd"; None for one that suits the row norm and the noise.
        random_state: None draws from the operating system; an int makes the fit reproducible.

    References:
        Chaudhuri, Monteleoni, Sarwate 2011 (objective perturbation); Redberg, Koskela, Wang 2023 (tight profiles).
    """

    def __init__(
        self,
        epsilon: float = 1.0,
        *,
        delta: float = 1e-6,
        data_norm: float | None = None,
        method: str = "auto",
        l2: float | str = "auto",
        multi_class: str = "multinomial",
        fit_intercept: bool = True,
        classes: Any = None,
        relation: str | Relation = "add_remove",
        out_of_bounds: str = "raise",
        tol: float = 1e-7,
        max_iter: int = 1000,
        gd_steps: int = 100,
        learning_rate: float | None = None,
        random_state: Any = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.data_norm = data_norm
        self.method = method
        self.l2 = l2
        self.multi_class = multi_class
        self.fit_intercept = fit_intercept
        self.classes = classes
        self.relation = relation
        self.out_of_bounds = out_of_bounds
        self.tol = tol
        self.max_iter = max_iter
        self.gd_steps = gd_steps
        self.learning_rate = learning_rate
        self.random_state = random_state

    def predict_proba(self, X):
        """The probability of each class, in the order of ``classes_``."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            return np.column_stack([expit(-scores), expit(scores)])
        if self.multi_class == "multinomial":
            return softmax(scores, axis=1)
        p = expit(scores)
        return p / p.sum(axis=1, keepdims=True)

    def _joint_loss(self, classes: int) -> LinearLoss | None:
        if classes == 2:
            return Logistic()
        return Softmax(classes) if _check.one_of(("multinomial", "ovr"), multi_class=self.multi_class) == "multinomial" else None

    def _binary_loss(self) -> LinearLoss:
        return Logistic()


class DPLinearSVC(_LinearClassifier):
    """Differentially private linear support vector classifier: the hinge loss with its corner rounded over ``width``.

    Arguments, guarantee and methods as for :class:`DPLogisticRegression`; more than two classes are fitted one against the rest. With
    ``method="auto"`` and two classes a share of epsilon chooses the threshold.

        >>> from sklearn.datasets import make_classification
        >>> X, y = make_classification(n_samples=2000, random_state=0)
        >>> model = DPLinearSVC(epsilon=1.0, data_norm=5.0, out_of_bounds="clip", random_state=0).fit(X, y)
        >>> bool(model.score(X, y) > 0.8)
        True
    """

    def __init__(
        self,
        epsilon: float = 1.0,
        *,
        delta: float = 1e-6,
        data_norm: float | None = None,
        method: str = "auto",
        l2: float | str = "auto",
        width: float = 1.0,
        fit_intercept: bool = True,
        classes: Any = None,
        relation: str | Relation = "add_remove",
        out_of_bounds: str = "raise",
        tol: float = 1e-7,
        max_iter: int = 1000,
        gd_steps: int = 100,
        learning_rate: float | None = None,
        random_state: Any = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.data_norm = data_norm
        self.method = method
        self.l2 = l2
        self.width = width
        self.fit_intercept = fit_intercept
        self.classes = classes
        self.relation = relation
        self.out_of_bounds = out_of_bounds
        self.tol = tol
        self.max_iter = max_iter
        self.gd_steps = gd_steps
        self.learning_rate = learning_rate
        self.random_state = random_state

    def _binary_loss(self) -> LinearLoss:
        return HuberHinge(_check.positive(width=self.width))

    def _release(self, problem: Problem, budget: Budget, random: Randomness) -> Release:
        """With ``method="auto"`` objective perturbation's threshold is chosen anew: a strong regulariser makes it count the classes."""
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
        theta[0, -1] -= line / (_INTERCEPT * float(self.data_norm))  # type: ignore[arg-type]  # the constant column
        beside = PureDP(spent) if counted is None else Compose([counted, PureDP(spent)])
        return together(replace(release, theta=theta), beside, budget)
