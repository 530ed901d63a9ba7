r"""The rules by which estimators choose settings from public facts, with the measurements behind them.

Notation: n records (their noisy count), d parameters, rows of norm at most R, μ the Gaussian budget of (epsilon, delta), c = 2 under
replace-one and 1 otherwise.

**The step size** (:func:`descent_rate`). A hundred noisy steps are a random walk of length ∝ √d R/μ next to a signal ∝ n R, which
fades as margins are reached: if n μ/√d is small, long steps trade signal for noise. So steps are shortened in proportion below 45.

**Objective perturbation or gradient descent** (:data:`PLENTY`). The first needs a regulariser ∝ R²/epsilon; the second stops early, which
acts like one ∝ n R²/1000. So the first is better if n epsilon is large. How large depends on the loss: the curvature of
logistic regression is free, that of the others costs a part of epsilon.

**Evidence.** Points of accuracy relative to full steps of descent; eight seeds, each with its own split, paired; ± are two standard errors.

* Steps were chosen on spambase, MAGIC and bank, centred and in [0, 1], at n epsilon/√d from 14 to 483, and tried on others: SMS texts,
  breast cancer, families of ``make_classification`` with 6 to 257 parameters. There 24 of 44 are better beyond two standard errors (up to
  +6.8 ± 3), none is worse.
* Objective perturbation of logistic regression was worse below 6,000 (SMS at 4,459: -0.8 ± 0.4; 6 parameters at 3,674: -0.3 ± 0.2). Above,
  9 of 21 are better, one is worse by 0.12 ± 0.12; Adult at 6,512: +0.5. Hinge: worse up to 20,000 (breast cancer at 13,650:
  -2.5 ± 1.1), none of 4 above 30,000. Softmax (digits, MNIST in 14 x 14): worse at 4,800, better from 14,400 on.
* Both rules as they stand, where they perturb the objective, on data that were not used for them (two pairs of Fashion-MNIST, four more
  families; and Adult in two other codings; six seeds; 8,000 to 100,000): 40 of 48 better, 7 alike, one worse by 0.15 ± 0.14.
"""

from __future__ import annotations

from hushgrad.estimators.losses import HuberHinge, LinearLoss, Logistic, Softmax

PLENTY: dict[type[LinearLoss], float] = {Logistic: 6_000.0, Softmax: 15_000.0, HuberHinge: 30_000.0}
"""From this n epsilon / c on the objective is perturbed; below, descent."""

COUNT_SHARE = 0.001
"""The share of epsilon for a count of the records: Laplace noise of scale 1000 in n epsilon, a sixth of the smallest threshold."""

LINE_SHARE = 0.05
"""The share of epsilon for a support vector machine's threshold, where its objective is perturbed."""

_FULL, _SHORTEST = 45.0, 0.05


def descent_rate(signal: float) -> float:
    """The step size of gradient descent in units of 1/R², for ``signal`` = n μ / (c √d).

    >>> [descent_rate(signal) for signal in (0.1, 9.0, 45.0, 1e9)]
    [0.05, 0.2, 1.0, 1.0]
    """
    return min(1.0, max(_SHORTEST, signal / _FULL))
