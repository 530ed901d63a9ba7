r"""Lower bounds on epsilon from one run with many canaries, without assuming that the scores are independent.

Each of m canaries is in the data by a fair coin of its own. The attacker sees the run's output and guesses r of the coins
(the r/2 highest scores "in", the r/2 lowest "out"), abstaining on the others. Privacy bounds how many guesses v can be right,
because the *coins* are independent, whatever the scores are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit, ndtr, ndtri
from scipy.stats import binom

from hushgrad import _check
from hushgrad.accounting import gaussian_epsilon
from hushgrad.audit.bounds import _scores

FRACTIONS = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
"""Which parts of the canaries are guessed; a bound over several pays for each of them."""

_LARGEST_MU = 60.0


def correct_guesses(scores: ArrayLike, members: ArrayLike, fraction: float) -> tuple[int, int]:
    """(right, made): guess "in" for the highest scores and "out" for the lowest, ``fraction`` of all canaries in all.

    >>> correct_guesses([0.1, 0.9, 0.4, 0.8], [False, True, True, False], 0.5)
    (2, 2)
    """
    values, truth = _scores(scores=scores), np.asarray(members, dtype=bool)
    if truth.shape != values.shape or truth.ndim != 1 or not truth.size:
        _check.fail("members", members, "to say of each canary whether it was in the data")
    # Ties are broken in an order independent of the list, whose order may reveal membership.
    ties = np.random.default_rng(0).permutation(len(values))
    truth = truth[np.lexsort((ties, values))]
    each = max(1, int(_check.rate(fraction=fraction) * len(truth)) // 2)
    return int((~truth[:each]).sum() + truth[len(truth) - each :].sum()), 2 * each


def one_run_p_value(right: int, made: int, canaries: int, *, epsilon: float, delta: float) -> float:
    r"""A bound on the probability that ``right`` of ``made`` guesses are right for an (epsilon, delta)-DP mechanism.

        P[B >= v] + 2 m delta max_{1 <= i <= v} P[v - i <= B < v] / i,      B ~ Binomial(r, e^epsilon / (1 + e^epsilon))

        >>> round(one_run_p_value(60, 100, 100, epsilon=0.0, delta=1e-9), 4)  # a fair coin
        0.0284

    Reference: Steinke, Nasr and Jagielski 2023, theorem 5.2.
    """
    law = binom(made, float(expit(epsilon)))
    tail = float(law.sf(right - 1))
    below = np.cumsum(law.pmf(np.arange(right - 1, -1, -1)))  # P[v - i <= B < v] for i = 1, 2, ...
    worst = float((below / np.arange(1, right + 1)).max()) if right else 0.0
    return min(1.0, tail + 2.0 * canaries * delta * worst)


def epsilon_one_run(
    scores: ArrayLike, members: ArrayLike, *, delta: float, confidence: float = 0.95, fractions: Sequence[float] = FRACTIONS
) -> float:
    """A lower bound on epsilon from one run, for every (epsilon, delta)-DP mechanism and every way of scoring.

    **Formal guarantee.** With probability ``confidence`` over the coins and the run, epsilon is at least this. Each of
    ``fractions`` pays its share (Bonferroni).

    Args:
        scores: one for each canary; high means "was in".
        members: which canaries the coins put in.
        delta: of the claim.
        confidence: probability with which the bounds hold.
        fractions: shares of the canaries with the most extreme scores on which a guess is made.

    >>> import numpy as np
    >>> members = np.random.default_rng(0).integers(2, size=200)
    >>> print(f"{epsilon_one_run(members, members, delta=1e-5):.2f}")
    3.34
    >>> epsilon_one_run(np.zeros(200), members, delta=1e-5)
    0.0

    Reference: Steinke, Nasr and Jagielski 2023, "Privacy auditing with one (1) training run", theorem 5.2.
    """
    delta, level = _check.delta(delta=delta), _share(confidence, fractions)
    guesses = [correct_guesses(scores, members, fraction) for fraction in fractions]
    count = int(np.size(np.asarray(scores)))

    def rejected(right: int, made: int, epsilon: float) -> bool:
        return one_run_p_value(right, made, count, epsilon=epsilon, delta=delta) <= level

    return _largest(rejected, guesses, 50.0)


def refutes_curve(right: int, made: int, canaries: int, curve: Callable[[np.ndarray], np.ndarray], *, level: float) -> bool:
    r"""Whether ``right`` of ``made`` right guesses are less probable than ``level`` for a mechanism with this trade-off curve.

    With f-bar^-1(x) = f(1 - x), the smallest false-alarm rate at detection rate x (f symmetric), the recursion

        r_v = level v / m,   h_v = level (r - v) / m
        h_i = max(h_{i+1}, f(1 - r_{i+1})),   r_i = r_{i+1} + i / (r - i) (h_i - h_{i+1}),      i = v - 1, ..., 0

    bounds from below how probable fewer right guesses must be; together with the guesses themselves they cannot exceed r / m.

    Reference: Mahloujifar, Melis and Chaudhuri 2024, "Auditing f-differential privacy in one run", algorithm 3.
    """
    hit, miss = level * right / canaries, level * (made - right) / canaries
    for i in range(right - 1, -1, -1):
        raised = max(miss, float(curve(np.asarray(1.0 - min(hit, 1.0)))))
        if i < made:
            hit += i / (made - i) * (raised - miss)
        miss = raised
        if hit + miss > made / canaries:
            return True
    return False


def epsilon_one_run_fdp(
    scores: ArrayLike, members: ArrayLike, *, delta: float, confidence: float = 0.95, fractions: Sequence[float] = FRACTIONS
) -> float:
    """A lower bound on epsilon from one run, if the mechanism's trade-off curve is Gaussian: the largest mu that is refuted.

    **Formal guarantee.** With probability ``confidence`` a mechanism that is mu-GDP has a mu of at least the one refuted here;
    what is returned is that mu's epsilon at ``delta``. The scores need not be independent.

    Args:
        scores: one for each canary; high means "was in".
        members: which canaries the coins put in.
        delta: at which the refuted mu's epsilon is returned.
        confidence: probability with which the bounds hold.
        fractions: shares of the canaries with the most extreme scores on which a guess is made.

    >>> import numpy as np
    >>> members = np.random.default_rng(0).integers(2, size=200)
    >>> print(f"{epsilon_one_run_fdp(members, members, delta=1e-5):.2f}")
    6.16

    Reference: Mahloujifar, Melis and Chaudhuri 2024, algorithm 3.
    """
    delta, level = _check.delta(delta=delta), _share(confidence, fractions)
    guesses = [correct_guesses(scores, members, fraction) for fraction in fractions]
    count = int(np.size(np.asarray(scores)))

    def rejected(right: int, made: int, mu: float) -> bool:
        return refutes_curve(right, made, count, lambda x: ndtr(ndtri(1.0 - x) - mu), level=level)

    best = _largest(rejected, guesses, _LARGEST_MU)
    return gaussian_epsilon(best, delta) if best > 0 else 0.0


def _share(confidence: float, fractions: Sequence[float]) -> float:
    if not fractions:
        _check.fail("fractions", fractions, "to hold at least one number")
    return (1.0 - _check.between(0, 1, confidence=confidence)) / len(fractions)


def _largest(rejected: Callable[[int, int, float], bool], guesses: list[tuple[int, int]], top: float) -> float:
    """The largest parameter that one of the (right, made) ``guesses`` still rejects, from below: 0 if none does."""
    best = 0.0
    for right, made in guesses:
        if not rejected(right, made, 0.0):
            continue
        low, high = 0.0, top
        while high - low > 1e-4 * (1.0 + low):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if rejected(right, made, middle) else (low, middle)
        best = max(best, low)
    return best
