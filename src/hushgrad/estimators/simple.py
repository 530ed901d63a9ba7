"""Small textbook estimators: a private mean and a private median."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np

from hushgrad import _papers
from hushgrad._papers import Paper
from hushgrad.accounting.gaussian import gaussian_mu
from hushgrad.estimators.base import DPEstimator, OnBoundedRows
from hushgrad.estimators.bounded import bounded_rows, finite, representable, validated
from hushgrad.estimators.exponential import quantile
from hushgrad.estimators.methods import _COUNT_SHARE, Budget
from hushgrad.estimators.randomness import randomness
from hushgrad.events import Exponential, Gaussian, Relation


class DPMean(OnBoundedRows):
    """The mean of rows of bounded L2 norm, with Gaussian noise.

    **Formal guarantee.** (epsilon, delta)-DP. Under add/remove the number of rows is secret, so the sum and a noisy count are
    released; under replace-one and zero-out it is public and the mean moves by 2 data_norm/n and data_norm/n (the lectures' example).

        >>> X = np.ones((10_000, 3)) / 3**0.5
        >>> DPMean(epsilon=1.0, delta=1e-6, data_norm=1.0, random_state=0).fit(X).mean_.round(2)
        array([0.58, 0.58, 0.58])

    Args:
        epsilon: The privacy budget.
        delta: The failure probability.
        data_norm: A public bound on the L2 norm of a row. Required.
        relation: "add_remove", "replace_one" or "zero_out".
        out_of_bounds: What to do with rows longer than ``data_norm``: "raise" or "clip".
        random_state: None draws from the operating system; an int makes the fit reproducible.

    References:
        Dwork and Roth 2014, theorem A.1 (the mechanism); Balle and Wang 2018, theorem 8 (its noise).
    """

    papers = (_papers.DWORK_2014_FOUNDATIONS, _papers.BALLE_2018_IMPROVING)
    released: ClassVar = {**DPEstimator.released, "mean_": "Gaussian mechanism"}

    def fit(self, X, y=None):
        """Estimate the mean of the rows of ``X``; the result is in ``mean_``, the guarantee in ``guarantee_``."""
        X = validated(self, X)
        budget = Budget(self.epsilon, self.delta, Relation.of(self.relation))
        random = randomness(self.random_state)
        total = bounded_rows(X, self.data_norm, out_of_bounds=self.out_of_bounds).sum(axis=0)
        with representable():
            mu = gaussian_mu(budget.epsilon, budget.delta)
            if budget.relation is Relation.ADD_REMOVE:
                multiplier, counting = 1 / np.sqrt((1 - _COUNT_SHARE) * mu**2), 1 / np.sqrt(_COUNT_SHARE * mu**2)
                count = max(1.0, len(X) + counting * float(random.normal(1)[0]))
                event = Gaussian(multiplier) + Gaussian(counting)
            else:
                multiplier, count = budget.relation.contributions / mu, float(len(X))
                event = Gaussian(multiplier)
            self.mean_ = (total + multiplier * self.data_norm * random.normal(X.shape[1])) / count
        finite(mean=self.mean_)
        self.guarantee_ = budget.guarantee(event, "gdp", random.notes)
        return self


@dataclass(eq=False, repr=False)
class DPMedian(DPEstimator):
    """The median of each column by the exponential mechanism, exactly sampled; epsilon is divided by the number of columns.

    P(t) ∝ exp(ε u(t) / 2Δ) on ``bounds``: u(t) is minus the number of records that would have to move for t to be a median, and one
    record changes it by at most Δ (see :func:`quantile`).

    **Formal guarantee.** epsilon-DP (delta 0) under ``relation`` with respect to one row; values outside ``bounds`` are clipped.

        >>> DPMedian(epsilon=1.0, bounds=(0, 100), random_state=0).fit(np.arange(101.0)[:, None]).median_.round(-1)
        array([50.])

    Args:
        epsilon: The privacy budget, for all columns together.
        bounds: The ends between which the medians lie, chosen without looking at the data. Required.
        relation: "add_remove", "replace_one" or "zero_out".
        random_state: None draws from the operating system; an int makes the fit reproducible.

    References:
        McSherry and Talwar 2007, "Mechanism design via differential privacy", theorem 6.
    """

    papers = (
        Paper("mcsherry2007mechanism", "McSherry, Frank and Talwar, Kunal", "Mechanism Design via Differential Privacy", "FOCS"),
    )
    released: ClassVar = {**DPEstimator.released, "median_": "exponential mechanism"}

    epsilon: float = 1.0
    _: KW_ONLY
    bounds: tuple[float, float] | None = None
    relation: str | Relation = "add_remove"
    random_state: Any = None

    @classmethod
    def examples(cls):
        return (cls(epsilon=100.0, bounds=(-10.0, 10.0), random_state=0),)

    def fit(self, X, y=None):
        """Estimate the median of each column of ``X``; the result is in ``median_``, the guarantee in ``guarantee_``."""
        X = validated(self, X)
        budget = Budget(self.epsilon, 0.0, Relation.of(self.relation))
        random = randomness(self.random_state)
        seeds = [None if not random.notes else int(bits) for bits in random.bits(X.shape[1])]
        share = budget.epsilon / X.shape[1]
        medians = [
            quantile(column, epsilon=share, bounds=self.bounds, relation=budget.relation, random_state=seed)
            for column, seed in zip(X.T, seeds, strict=True)
        ]
        self.median_ = np.array(medians)
        self.guarantee_ = budget.guarantee(Exponential(share) * X.shape[1], "basic", random.notes)
        return self
