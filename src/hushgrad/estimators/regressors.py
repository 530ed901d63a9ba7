"""Private linear regression with scikit-learn's conventions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_is_fitted

from hushgrad import _check
from hushgrad._papers import Paper
from hushgrad.accounting.gaussian import gaussian_mu
from hushgrad.estimators.base import PUBLIC, OnBoundedRows
from hushgrad.estimators.bounded import (
    bounded_rows,
    bounded_values,
    finite,
    regulariser,
    representable,
    validated,
    with_intercept,
)
from hushgrad.estimators.logistic_regression import CHAUDHURI_2011_ERM
from hushgrad.estimators.losses import HuberResidual
from hushgrad.estimators.methods import Budget, Problem, objective_perturbation
from hushgrad.estimators.randomness import Randomness, randomness
from hushgrad.events import Gaussian, Relation
from hushgrad.guarantee import Guarantee

_WANG_2018_REVISITING = Paper(
    "wang2018revisiting",
    "Wang, Yu-Xiang",
    "Revisiting Differentially Private Linear Regression: Optimal and Adaptive Prediction and Estimation in Unbounded Domain",
    "UAI",
    arxiv="1803.02596",
)


@dataclass(kw_only=True, eq=False, repr=False)
class _LinearRegressor(RegressorMixin, OnBoundedRows):
    released: ClassVar = {
        **OnBoundedRows.released,
        "coef_": "the theorem of the method",
        "intercept_": "the theorem of the method",
        "n_iter_": PUBLIC,
    }

    target_bounds: tuple[float, float] | None = None
    fit_intercept: bool = True

    @classmethod
    def examples(cls):
        (by_itself,) = super().examples()
        return (by_itself.set_params(target_bounds=(-5.0, 5.0)),)

    def fit(self, X, y):
        """Fit on rows ``X`` with targets ``y``, which are clipped to ``target_bounds``; the guarantee is in ``guarantee_``."""
        X, y = validated(self, X, y, y_numeric=True)
        budget = Budget(self.epsilon, self.delta, Relation.of(self.relation))
        random = randomness(self.random_state)
        rows = bounded_rows(X, self.data_norm, out_of_bounds=self.out_of_bounds)
        targets = bounded_values(y, self.target_bounds, "target_bounds")
        norm: float = self.data_norm  # type: ignore[assignment]  # refused above where it is None
        low, high = self.target_bounds  # type: ignore[misc]  # the same
        # Centred targets make the bound on |y|, hence the noise, as small as the public interval allows.
        middle, reach = (low + high) / 2, (high - low) / 2
        constant = norm if self.fit_intercept else 0.0
        augmented, row_norm = with_intercept(rows, norm, constant)
        with representable():
            theta, self.guarantee_, self.n_iter_ = self._solve(augmented, targets - middle, row_norm, reach, budget, random)
        finite(theta=theta)
        self.coef_ = theta[: X.shape[1]]
        self.intercept_ = middle + (theta[-1] * constant if self.fit_intercept else 0.0)
        return self

    def predict(self, X):
        """The predicted targets, within ``target_bounds``."""
        check_is_fitted(self)
        X = validated(self, X, reset=False)
        return np.clip(X @ self.coef_ + self.intercept_, *self.target_bounds)  # type: ignore[misc]  # fit refuses None

    def _solve(
        self, X, y, row_norm: float, reach: float, budget: Budget, random: Randomness
    ) -> tuple[np.ndarray, Guarantee, int]:
        raise AssertionError("a final class defines its solver")


@dataclass(kw_only=True, eq=False, repr=False)
class DPRidge(_LinearRegressor):
    """Differentially private ridge regression: noisy sufficient statistics (AdaSSP), or objective perturbation of a Huber loss.

    ``method="adassp"`` releases XᵀX, Xᵀy and the smallest eigenvalue with Gaussian noise, the last to choose the regularisation (Wang
    2018, algorithm 2). ``method="objective"`` minimises the Huber loss of width ``huber`` x the targets' half-range, see
    :mod:`hushgrad.estimators.objective`.

    **Formal guarantee.** (epsilon, delta)-DP under ``relation`` with respect to one row (x, y), ‖x‖ <= ``data_norm``, y in
    ``target_bounds`` (values outside are clipped), both chosen without looking at the data.

        >>> rng = np.random.default_rng(0)
        >>> X = rng.uniform(-1, 1, (20_000, 2)) / 2**0.5
        >>> y = X @ [0.5, -0.2] + 0.1
        >>> model = DPRidge(epsilon=1.0, data_norm=1.0, target_bounds=(-1, 1), random_state=0).fit(X, y)
        >>> bool(np.abs(model.coef_ - [0.5, -0.2]).max() < 0.05)
        True

    Args:
        epsilon: The privacy budget.
        delta: The failure probability; 0 for pure differential privacy ("objective" only).
        data_norm: A public bound on the L2 norm of a row. Required.
        target_bounds: The ends of a public interval of targets. Required.
        method: "adassp" or "objective".
        l2: λ of the summed objective, or "auto".
        huber: Where "objective" turns from a square to a line, in half-ranges of the targets.
        fit_intercept: Whether to fit a constant; it is regularised, and costs a little sensitivity.
        relation: "add_remove", "replace_one" or "zero_out".
        out_of_bounds: What to do with rows longer than ``data_norm``: "raise" or "clip".
        tol: The certified gradient norm of the minimiser of "objective", in units of row norm times half-range; its effect is paid for.
        max_iter: The most iterations of the minimiser.
        random_state: None draws from the operating system; an int makes the fit reproducible.

    References:
        Wang 2018, "Revisiting differentially private linear regression", theorem 3.
    """

    papers = (_WANG_2018_REVISITING, CHAUDHURI_2011_ERM)

    method: str = "adassp"
    l2: float | str = "auto"
    huber: float = 0.5
    tol: float = 1e-7
    max_iter: int = 1000

    @classmethod
    def examples(cls):
        (by_itself,) = super().examples()
        return (by_itself, cls(**by_itself.get_params() | {"method": "objective"}))

    def _solve(self, X, y, row_norm, reach, budget, random):
        if _check.one_of(("adassp", "objective"), method=self.method) == "adassp":
            return _adassp(X, y, row_norm, reach, budget, random, regulariser(self.l2, zero=True))
        l2 = regulariser(self.l2)
        tol, max_iter = _check.positive(tol=self.tol) * row_norm * reach, _check.positive_int(max_iter=self.max_iter)
        loss = HuberResidual(_check.positive(huber=self.huber) * reach)
        problem = Problem(loss, X, y, row_norm)
        release = objective_perturbation(problem, budget, random, l2=l2, tol=tol, max_iter=max_iter)
        return release.theta[0], release.guarantee, release.iterations


class DPLinearRegression(_LinearRegressor):
    """Differentially private least squares: :class:`DPRidge` with noisy sufficient statistics and the least regularisation they allow.

    Arguments and guarantee are those of :class:`DPRidge`.

        >>> X = np.linspace(-1, 1, 20_000)[:, None]
        >>> model = DPLinearRegression(epsilon=1.0, data_norm=1.0, target_bounds=(-1, 1), random_state=0).fit(X, 0.5 * X[:, 0])
        >>> bool(abs(model.coef_[0] - 0.5) < 0.05)
        True
    """

    papers = (_WANG_2018_REVISITING,)

    def _solve(self, X, y, row_norm, reach, budget, random):
        return _adassp(X, y, row_norm, reach, budget, random, None)


def _adassp(X, y, row_norm: float, reach: float, budget: Budget, random: Randomness, l2: float | None):
    """Wang 2018, algorithm 2, with the three releases composed exactly as Gaussians (a third of μ² each).

    One row moves XᵀX by at most ‖x‖² in Frobenius norm, its smallest eigenvalue by at most ‖x‖², and Xᵀy by at most ‖x‖ |y|.
    """
    if budget.delta == 0:
        _check.fail("delta", 0.0, 'to be positive for method="adassp"', "Gaussian noise needs a delta.")
    d = X.shape[1]
    multiplier = budget.relation.contributions * math.sqrt(3) / gaussian_mu(budget.epsilon, budget.delta)
    gram, moment = X.T @ X, X.T @ y
    # Off the diagonal an entry stands twice in the Frobenius norm, so 1/sqrt(2) of the noise is enough there.
    upper = np.triu(random.normal(d * d).reshape(d, d), 1) / math.sqrt(2)
    noise = upper + upper.T + np.diag(random.normal(d))
    smallest = float(np.linalg.eigvalsh(gram)[0]) + multiplier * row_norm**2 * float(random.normal(1)[0])
    if l2 is None:
        # What the noise in the Gram matrix could take away from the smallest eigenvalue must be given back.
        unsure = multiplier * row_norm**2 * math.sqrt(d * math.log(2 * d**2 / 0.05))
        l2 = max(0.0, unsure - max(smallest - multiplier * row_norm**2 * 1.96, 0.0))
    noisy_gram = gram + multiplier * row_norm**2 * noise + l2 * np.eye(d)
    noisy_moment = moment + multiplier * row_norm * reach * random.normal(d)
    # The noisy Gram matrix may be indefinite: its eigenvalues are raised to what the noise could hide (post-processing).
    values, vectors = np.linalg.eigh(noisy_gram)
    floor = multiplier * row_norm**2
    theta = vectors @ ((vectors.T @ noisy_moment) / np.maximum(values, floor))
    guarantee = budget.guarantee(Gaussian(multiplier) * 3, "gdp", random.notes)
    return theta, guarantee, 1
