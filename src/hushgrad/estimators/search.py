"""Private hyper-parameter selection: try random candidates a random number of times, and release only the best."""

from __future__ import annotations

import warnings
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np
from sklearn.base import MetaEstimatorMixin, clone, is_classifier
from sklearn.dummy import DummyClassifier
from sklearn.model_selection import ParameterGrid
from sklearn.utils import _safe_indexing, indexable
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, check_X_y

from hushgrad import _check
from hushgrad.accounting import calibrate
from hushgrad.accounting.trial_counts import number_at
from hushgrad.errors import HushgradError
from hushgrad.estimators.base import LABELS, PUBLIC, DPEstimator
from hushgrad.estimators.bounded import RowTooLong, unquoted
from hushgrad.estimators.linear_classifier import LABELS_FROM_DATA, class_numbers
from hushgrad.estimators.logistic_regression import DPLogisticRegression
from hushgrad.estimators.methods import Budget
from hushgrad.estimators.randomness import Randomness, randomness
from hushgrad.events import Event, PureDP, Relation, RepeatAndSelect

_Part = tuple[Any, np.ndarray]  # rows and labels

_LOST = (HushgradError, ValueError, ArithmeticError, np.linalg.LinAlgError)  # what a candidate that cannot be trained raises
_NEEDED = {"epsilon", "delta", "relation", "classes", "random_state"}  # what the search sets in a candidate


def _best_has(name: str):
    return available_if(lambda search: name in dir(search.estimator))


@dataclass(eq=False, repr=False)
class DPGridSearch(MetaEstimatorMixin, DPEstimator):
    r"""Grid search whose privacy cost does not grow with the number of candidates.

    Every record goes, at random, into a training or a scoring part; a row of zeros of each class, which belongs to nobody, joins the
    first. K times, K random, a random candidate is trained on the first part, epsilon_0-DP with delta 0, and its number of correct
    predictions on the second is released with Laplace noise 1/epsilon_0; only the model with the best score is kept.

    **Formal guarantee.** Each trial is epsilon_0-DP (a record is in one part only, and the training part is never empty: that would be a
    lost trial, with a probability that a record changes fivefold). With K truncated negative binomial of shape η the selection
    is (2 + η) epsilon_0-DP, and (epsilon, delta)-DP for the smaller epsilon that the Rényi analysis gives (Papernot and Steinke 2022,
    corollary 4 and theorem 2). epsilon_0 is chosen so that the total is ``epsilon``. The winner was chosen by its
    score, so its own ``guarantee_`` is that of the selection, too.

    **K is a secret** of the theorem, as are the scores, the losers and how often each candidate was drawn: together with the winner they
    would cost more (delta 0.12 at a claimed (3, 1e-6)-DP for the default K). None of them is kept in an attribute, a warning or a log.
    *Time* is not hidden: anyone who can measure how long ``fit`` took learns K roughly, and no theorem here covers that.

    A candidate that cannot be trained (an l2 that leaves nothing of epsilon, a minimum out of reach) is a lost trial: it loses against
    every other one. If all trials of a search are lost, ``best_params_`` is None and the model predicts ``classes_[0]``; if no candidate
    could be trained on any data, its own error is raised.

        >>> from sklearn.datasets import make_classification
        >>> from hushgrad.estimators import DPLogisticRegression
        >>> X, y = make_classification(n_samples=4000, random_state=0)
        >>> base = DPLogisticRegression(data_norm=5.0, out_of_bounds="clip")
        >>> search = DPGridSearch(base, {"l2": [1.0, 10.0, 1e5]}, epsilon=3.0, delta=1e-6, random_state=0).fit(X, y)
        >>> round(search.base_epsilon_, 2) >= 1.0, search.guarantee_.epsilon
        (True, 3.0)

    Args:
        estimator: A classifier of this package, or one with the parameters ``epsilon``, ``delta``, ``relation``, ``classes`` and
            ``random_state``. The labels of all of ``y`` are taken for public unless ``classes`` are given.
        param_grid: The candidates, as for scikit-learn's GridSearchCV.
        epsilon: The budget of everything together.
        delta: Of everything together; 0 for pure differential privacy.
        mean_trials: The mean of K.
        shape: η > -1; smaller is cheaper and more variable (0: logarithmic, 1: geometric).
        scoring_share: The probability that a record is used for scoring.
        relation: "add_remove", "replace_one" or "zero_out".
        random_state: None draws from the operating system.
    """

    papers = RepeatAndSelect.papers
    released: ClassVar = {
        "best_estimator_": "Papernot and Steinke 2022, theorem 2 and corollary 4, K hidden",
        "best_params_": "the same release",
        "base_epsilon_": PUBLIC,
        "classes_": LABELS,
        "guarantee_": PUBLIC,
    }

    estimator: Any
    param_grid: dict[str, list] | list[dict[str, list]]
    _: KW_ONLY
    epsilon: float = 1.0
    delta: float = 0.0
    mean_trials: float = 10.0
    shape: float = 0.0
    scoring_share: float = 0.2
    relation: str | Relation = "add_remove"
    random_state: Any = None

    @classmethod
    def examples(cls):
        base = DPLogisticRegression(data_norm=1.0, out_of_bounds="clip")
        return (cls(base, {"l2": [10.0, 100.0]}, epsilon=3.0, delta=1e-6, mean_trials=3.0, random_state=0),)

    def fit(self, X, y):
        """Select and fit; the winner is ``best_estimator_``, the cost of the whole selection ``guarantee_``."""
        budget = Budget(self.epsilon, self.delta, Relation.of(self.relation))
        random = randomness(self.random_state)
        self._check_estimator()
        self.base_epsilon_ = base_epsilon(budget, mean=self.mean_trials, shape=self.shape)
        X, y = indexable(X, np.asarray(y))
        with unquoted():
            y = check_X_y(X, y)[1]  # in one dimension: a column beside predictions would be compared with all of them
            check_classification_targets(y)
        scoring = random.uniform(len(y)) < _check.between(0, 1, scoring_share=self.scoring_share)
        self.classes_ = np.unique(y if self.estimator.classes is None else list(self.estimator.classes))
        class_numbers(self.classes_, y)  # of all rows: a candidate that finds an unknown label would be a lost trial
        train, held = ((_safe_indexing(X, part), y[part]) for part in (~scoring, scoring))
        train = _with_nobody(*train, self.classes_)
        self.best_params_, self.best_estimator_ = self._selected(train, held, np.shape(X)[1], budget, random)
        event = RepeatAndSelect(of=PureDP(self.base_epsilon_), mean=self.mean_trials, shape=self.shape)
        self.guarantee_ = budget.guarantee(
            event, "rdp", random.notes if self.estimator.classes is not None else (*random.notes, LABELS_FROM_DATA)
        )
        self.best_estimator_.guarantee_ = self.guarantee_  # its own would be that of a model that was not chosen among others
        return self

    def _selected(
        self, train: _Part, held: _Part, features: int, budget: Budget, random: Randomness
    ) -> tuple[dict[str, Any] | None, Any]:
        """The winner of K trials. K, scores and losers stay inside: a warning or attribute would reveal more than the theorem allows."""
        candidates = list(ParameterGrid(self.param_grid))
        best, winner = -np.inf, (None, None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one for each trial would count them
            for _ in range(trials(random, mean=self.mean_trials, shape=self.shape)):
                params = candidates[int(random.uniform(1)[0] * len(candidates))]
                try:
                    model = self._trial(params, train, None if not random.notes else int(random.bits(1)[0] >> np.uint64(32)))
                    score = self._noisy_score(model, *held, budget, random)
                except RowTooLong:  # the user's promise about the data is broken, as in a fit without a search
                    raise
                except _LOST:
                    continue
                if score > best:
                    best, winner = score, (params, model)
        return winner if winner[0] is not None else (None, self._nothing(candidates, features))

    def _nothing(self, candidates: list[dict[str, Any]], features: int):
        """The release if every trial was lost: a constant model, or an error if public facts alone rule out all candidates."""
        rows, labels = np.zeros((2 * len(self.classes_), features)), np.tile(self.classes_, 2)
        for params in candidates:
            try:
                self._trial(params, (rows, labels), 0)
                break
            except _LOST as problem:
                impossible = problem
        else:
            raise impossible
        warnings.warn(
            "Every trial of this search was lost: the model predicts one class. Drop candidates that cannot be trained.",
            stacklevel=3,
        )
        return DummyClassifier(strategy="constant", constant=self.classes_[0]).fit(rows, labels)

    def _check_estimator(self) -> None:
        remedy = "Use one of hushgrad.estimators: candidates are trained privately and scored by counting correct predictions."
        if not is_classifier(self.estimator):
            _check.fail("estimator", self.estimator, "to be a classifier", remedy)
        missing = sorted(_NEEDED - self.estimator.get_params().keys())
        if missing:
            _check.fail("estimator", self.estimator, f"to have the parameters {', '.join(missing)}", remedy)
        for name in sorted({name for params in ParameterGrid(self.param_grid) for name in params}):
            if name not in self.estimator.get_params() or name in _NEEDED:
                _check.fail("param_grid", name, "to be a parameter of the estimator that the search does not set itself")

    def _trial(self, params: dict[str, Any], train: _Part, seed: int | None):
        fixed = {"epsilon": self.base_epsilon_, "delta": 0.0, "relation": self.relation, "random_state": seed}
        return clone(self.estimator).set_params(**({"classes": self.classes_} | params), **fixed).fit(*train)

    def _noisy_score(self, model, X, y, budget: Budget, random: Randomness) -> float:
        correct = float((model.predict(X) == y).sum()) if len(y) else 0.0
        a, b = random.exponential(2)
        scale = budget.relation.contributions / self.base_epsilon_
        return correct + scale * (a - b)  # a difference of exponentials is Laplace

    @_best_has("predict")
    def predict(self, X):
        """The winner's predictions."""
        check_is_fitted(self)
        return self.best_estimator_.predict(X)

    @_best_has("predict_proba")
    def predict_proba(self, X):
        """The winner's class probabilities."""
        check_is_fitted(self)
        return self.best_estimator_.predict_proba(X)

    @_best_has("decision_function")
    def decision_function(self, X):
        """The winner's scores."""
        check_is_fitted(self)
        return self.best_estimator_.decision_function(X)

    def score(self, X, y):
        """The winner's accuracy on other data."""
        check_is_fitted(self)
        return self.best_estimator_.score(X, y)


def _with_nobody(X: Any, y: np.ndarray, classes: np.ndarray) -> _Part:
    """The training part preceded by a row of zeros for each class; column names are kept."""
    rows = np.vstack([np.zeros((len(classes), np.shape(X)[1])), np.asarray(X)])
    return type(X)(rows, columns=X.columns) if hasattr(X, "iloc") else rows, np.concatenate([classes, y])


def base_epsilon(budget: Budget, *, mean: float, shape: float) -> float:
    """What one trial may spend so that the selection stays within the budget."""
    pure = budget.epsilon / (2 + shape)
    if budget.delta == 0:
        return pure

    def event(epsilon: float) -> Event:
        return RepeatAndSelect(of=PureDP(epsilon), mean=mean, shape=shape)

    renyi = calibrate(event, epsilon=budget.epsilon, delta=budget.delta, accountant="rdp", relation=budget.relation)
    return max(pure, renyi)


def trials(random: Randomness, *, mean: float, shape: float) -> int:
    """A draw of K, see :mod:`hushgrad.accounting.trial_counts`.

    >>> trials(randomness(0), mean=1.0, shape=1.0)
    1
    """
    mean = _check.between(1, 1e9, closed="left", mean=mean)
    return number_at(float(random.uniform(1)[0]), mean=mean, shape=shape)
