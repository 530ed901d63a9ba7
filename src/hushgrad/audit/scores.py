r"""Attack scores: one number per canary, the most powerful test statistic that the released rows allow.

Row t of a canary's coordinate is y_t = x p_t + s (N Z)_t: x is its side (1 in, 0 or -1 out), p_t whether it takes part, s the noise
multiplier. With N Nᵀ = L Lᵀ the rows w = L⁻¹ y / s have independent standard noise (*whitened over time*; for a square strategy
matrix this is C y / s up to a rotation), and the attack is a test between known Gaussians:

| participation | what the attacker knows | score |
|---|---|---|
| min-sep, once, full batch | the steps p | <L⁻¹p, w> / |L⁻¹p|: the Neyman-Pearson test |
| Poisson, fixed size, independent noise | the rate q | the log-likelihood ratio, a product over the steps |
| balls in bins | the bins | the log-likelihood ratio, a mixture over them |
| cyclic Poisson, others | the group; the rate | <L⁻¹p, w> / |L⁻¹p| with the expected p |
"""

from __future__ import annotations

from functools import singledispatch

import numpy as np
from scipy.linalg import solve_triangular
from scipy.special import logsumexp

from hushgrad.events import BallsInBins, CyclicPoisson, FixedSize, Participation, Poisson, Relation, TruncatedPoisson
from hushgrad.train import Plan


class Scorer:
    """The attack on one plan's first ``steps`` steps: from released rows to scores."""

    def __init__(self, plan: Plan, steps: int) -> None:
        self.plan, self.steps, self.noise = plan, steps, float(plan.noise_multiplier or 0.0)
        noising = np.asarray(plan.noise.noising(steps), dtype=np.float64)
        covariance = noising @ noising.T
        self.factor = np.linalg.cholesky(covariance)
        self.independent = bool(np.allclose(covariance, np.eye(steps)))
        self.opposite = plan.relation is Relation.REPLACE_ONE

    def whitened(self, rows: np.ndarray) -> np.ndarray:
        """L⁻¹ rows / s: the noise in it is independent and standard."""
        return np.asarray(solve_triangular(self.factor, rows, lower=True)) / self.noise

    def __call__(self, rows: np.ndarray, present: np.ndarray) -> np.ndarray:
        """The score of each column of ``rows``; NaN for a canary about which the audited steps can say nothing.

        ``present`` is used only where the claim does not rely on its secrecy.
        """
        return _score(self.plan.participation, self, rows, present)

    def matched(self, rows: np.ndarray, pattern: np.ndarray) -> np.ndarray:
        """<L⁻¹p, w> / |L⁻¹p| for each column: standard normal without the canary."""
        filters = self.whitened(pattern) * self.noise
        norms = np.linalg.norm(filters, axis=0)
        with np.errstate(invalid="ignore"):
            return np.asarray((filters * self.whitened(rows)).sum(axis=0) / norms)

    def sampled(self, rows: np.ndarray, rate: float) -> np.ndarray:
        """The log-likelihood ratio where each step takes a record with probability ``rate``; independent noise."""
        if not self.independent:
            return self.matched(rows, np.ones_like(rows))

        def log_ratio(side: float) -> np.ndarray:
            exponent = (side * 2.0 * rows - 1.0) / (2.0 * self.noise**2)
            log_out = np.log1p(-rate) if rate < 1 else -np.inf
            return np.asarray(np.logaddexp(log_out, np.log(rate) + exponent).sum(axis=0))

        return log_ratio(1.0) - (log_ratio(-1.0) if self.opposite else 0.0)

    def mixed(self, rows: np.ndarray, patterns: np.ndarray) -> np.ndarray:
        """The log-likelihood ratio where a record follows one of the columns of ``patterns``, all equally likely."""
        filters = self.whitened(patterns)
        inner, energy = filters.T @ self.whitened(rows), (filters**2).sum(axis=0)[:, None] / 2.0
        ratio = logsumexp(inner - energy, axis=0)
        return np.asarray(ratio - (logsumexp(-inner - energy, axis=0) if self.opposite else 0.0))


@singledispatch
def _score(how: Participation, scorer: Scorer, rows: np.ndarray, present: np.ndarray) -> np.ndarray:
    # Nothing about the steps is claimed to be secret (min-sep, once, full batch): the attacker knows them.
    return scorer.matched(rows, present.astype(np.float64))


@_score.register(Poisson)
@_score.register(TruncatedPoisson)
@_score.register(FixedSize)
def _(how: Poisson | TruncatedPoisson | FixedSize, scorer: Scorer, rows: np.ndarray, present: np.ndarray) -> np.ndarray:
    return scorer.sampled(rows, how.rate)


@_score.register
def _(how: BallsInBins, scorer: Scorer, rows: np.ndarray, present: np.ndarray) -> np.ndarray:
    steps = np.arange(scorer.steps)[:, None]
    patterns = (steps % how.bins == np.arange(how.bins)[None, :]).astype(np.float64)
    if not how.fresh:
        return scorer.mixed(rows, patterns)
    # drawn independently, so their log-likelihood ratios add up (for independent noise)
    epochs = range(-(-scorer.steps // how.bins))
    return np.asarray(sum(scorer.mixed(rows, patterns * (steps // how.bins == epoch)) for epoch in epochs))


@_score.register
def _(how: CyclicPoisson, scorer: Scorer, rows: np.ndarray, present: np.ndarray) -> np.ndarray:
    # The group is not secret. A canary that never took part has an unknown group, and any serves.
    group = np.where(present.any(axis=0), present.argmax(axis=0), 0) % how.period
    pattern = np.arange(scorer.steps)[:, None] % how.period == group[None, :]
    return scorer.matched(rows, pattern.astype(np.float64))
