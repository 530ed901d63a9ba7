"""Private hyper-parameter selection: try random candidates a random number of times, and release only the best."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, MetaEstimatorMixin, clone, is_classifier
from sklearn.model_selection import ParameterGrid
from sklearn.utils import _safe_indexing, indexable
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

from hushgrad import _check
from hushgrad.accounting import calibrate
from hushgrad.accounting.trials import number_at
from hushgrad.estimators.classifiers import LABELS_FROM_DATA
from hushgrad.estimators.methods import Budget
from hushgrad.estimators.randomness import Randomness, randomness
from hushgrad.events import Event, PureDP, Relation, RepeatAndSelect

__all__ = ["DPGridSearch"]

_NEEDED = {"epsilon", "delta", "relation", "classes", "random_state"}  # what the search sets in a candidate


def _best_has(name: str):
    return available_if(lambda search: name in dir(search.estimator))


class DPGridSearch(MetaEstimatorMixin, BaseEstimator):
    r"""Grid search whose privacy cost does not grow with the number of candidates.

    Every record is put, by a coin, into a training or a scoring part. A random number K of times a random candidate is trained on the
    one part, epsilon_0-DP with delta 0, and its number of correct predictions on the other is released with Laplace noise 1/epsilon_0;
    only the best scored model is kept.

    **Formal guarantee.** Each trial is epsilon_0-DP (a record is in one part only). With K truncated negative binomial of shape η the
    selection is (2 + η) epsilon_0-DP, and (epsilon, delta)-DP for the smaller epsilon that the Rényi analysis gives (Papernot and Steinke
    2022, corollary 4 and theorem 2). epsilon_0 is chosen so that the total is the ``epsilon`` asked for. The winner was chosen by its
    score, so its own ``guarantee_`` is that of the selection, too.

        >>> from sklearn.datasets import make_classification
        >>> from hushgrad.estimators import DPLogisticRegression
        >>> X, y = make_classification(n_samples=4000, random_state=0)
        >>> base = DPLogisticRegression(data_norm=5.0, out_of_bounds="clip")
        >>> search = DPGridSearch(base, {"l2": [1.0, 10.0, 1e5]}, epsilon=3.0, delta=1e-6, random_state=0).fit(X, y)
        >>> round(search.base_epsilon_, 2) >= 1.0, search.guarantee_.epsilon
        (True, 3.0)

    Args:
        estimator: A private classifier of this room, or one with its parameters ``epsilon``, ``delta``, ``relation``, ``classes`` and
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

    def __init__(
        self,
        estimator: Any,
        param_grid: dict[str, list] | list[dict[str, list]],
        *,
        epsilon: float = 1.0,
        delta: float = 0.0,
        mean_trials: float = 10.0,
        shape: float = 0.0,
        scoring_share: float = 0.2,
        relation: str | Relation = "add_remove",
        random_state: Any = None,
    ) -> None:
        self.estimator = estimator
        self.param_grid = param_grid
        self.epsilon = epsilon
        self.delta = delta
        self.mean_trials = mean_trials
        self.shape = shape
        self.scoring_share = scoring_share
        self.relation = relation
        self.random_state = random_state

    def fit(self, X, y):
        """Select and fit; the winner is ``best_estimator_``, the cost of the whole selection ``guarantee_``."""
        budget = Budget(self.epsilon, self.delta, Relation.of(self.relation))
        random = randomness(self.random_state)
        self._check_estimator()
        self.base_epsilon_ = base_epsilon(budget, mean=self.mean_trials, shape=self.shape)
        X, y = indexable(X, np.asarray(y))
        scoring = random.uniform(len(y)) < _check.between(0, 1, scoring_share=self.scoring_share)
        train, held = ((_safe_indexing(X, part), y[part]) for part in (~scoring, scoring))
        public = {} if self.estimator.classes is not None else {"classes": np.unique(y)}
        candidates = list(ParameterGrid(self.param_grid))
        self.trials_ = trials(random, mean=self.mean_trials, shape=self.shape)
        best = -np.inf
        for _ in range(self.trials_):
            params = candidates[int(random.uniform(1)[0] * len(candidates))]
            model = self._trial(params, public, train, random)
            score = self._noisy_score(model, *held, budget, random)
            if score > best:
                best, self.best_estimator_, self.best_params_ = score, model, params
        event = RepeatAndSelect(of=PureDP(self.base_epsilon_), mean=self.mean_trials, shape=self.shape)
        self.classes_ = self.best_estimator_.classes_
        self.guarantee_ = budget.guarantee(event, "rdp", (*random.notes, LABELS_FROM_DATA) if public else random.notes)
        self.best_estimator_.guarantee_ = self.guarantee_  # its own would be that of a model that was not chosen among others
        return self

    def _check_estimator(self) -> None:
        remedy = "Use one of hushgrad.estimators: candidates are trained privately and scored by counting correct predictions."
        if not is_classifier(self.estimator):
            _check.fail("estimator", self.estimator, "to be a classifier", remedy)
        missing = sorted(_NEEDED - self.estimator.get_params().keys())
        if missing:
            _check.fail("estimator", self.estimator, f"to have the parameters {', '.join(missing)}", remedy)

    def _trial(self, params: dict[str, Any], public: dict[str, Any], train: tuple[Any, np.ndarray], random: Randomness):
        seed = None if not random.notes else int(random.bits(1)[0] >> np.uint64(32))
        fixed = {"epsilon": self.base_epsilon_, "delta": 0.0, "relation": self.relation, "random_state": seed}
        for name in params:
            if name in fixed:
                _check.fail("param_grid", name, "not to set what the search sets itself")
        return clone(self.estimator).set_params(**(public | params), **fixed).fit(*train)

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
    """A draw of K, see :mod:`hushgrad.accounting.trials`.

    >>> trials(randomness(0), mean=1.0, shape=1.0)
    1
    """
    mean = _check.between(1, 1e9, closed="left", mean=mean)
    return number_at(float(random.uniform(1)[0]), mean=mean, shape=shape)
