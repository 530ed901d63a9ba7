"""Tail bounds for statistics of random batches, valid for every rate and every number of records, steps and canaries.

Normal and chi-squared laws fit the counts of random batches only where there are many of each; at a rate of 1e-4, or for one step, they
call right batches wrong far more often than they say. Each function here bounds the probability, under the stated law, of something at
least as far out as what was seen, on either side: an exact tail, or a Chernoff bound with the exact generating function.
"""

from __future__ import annotations

import numpy as np
from scipy.special import logsumexp
from scipy.stats import binom

_TILTS = np.geomspace(1e-4, 20.0, 80)
_DISTANCES = (2.0, 4.0, 8.0, 16.0)  # standard deviations for which the tilts of ``meeting_tail`` are optimal


def binomial_tail(successes: int, trials: int, probability: float) -> float:
    """Twice the smaller tail of Binomial(``trials``, ``probability``) from ``successes`` on.

    >>> round(binomial_tail(0, 10, 0.5) * 2**10)
    2
    """
    law = binom(trials, probability)
    return min(1.0, 2.0 * float(min(law.cdf(successes), law.sf(successes - 1))))


def sum_tail(total: float, count: int, values: np.ndarray, mass: np.ndarray) -> float:
    """Bounds the two tails at ``total`` of a sum of ``count`` independent numbers, each of ``values`` with probability ``mass``.

    P[sum >= x] <= E e^(θ sum) / e^(θ x) for every θ > 0 (Chernoff), and the same below with θ < 0.
    """
    tilts = np.concatenate([_TILTS, -_TILTS])
    with np.errstate(divide="ignore"):
        log_moments = logsumexp(tilts[:, None] * values + np.log(mass), axis=1)
    return min(1.0, 2.0 * float(np.exp(min(0.0, (count * log_moments - tilts * total).min()))))


def meeting_tail(batches: np.ndarray) -> float:
    r"""A bound on the probability that independent uniform batches of these sizes overlap so much, or so little.

    ``batches[t, i]`` says whether batch t holds record i. With c_i the number of batches before t that hold i, U = Σ_t Σ_{i in batch t} c_i
    counts the pairs of batches that share a record. A batch of b records is a uniform subset whatever came before, so that
    E e^(θ Σ_{i in batch} c_i) <= (mean of e^(θ c_i))^b (Hoeffding 1963, theorem 4), and e^(θ U) over the product of these bounds is a
    supermartingale: it ever exceeds 1/p with probability at most p (Ville). The tilts θ are fixed by the sizes, and share p.
    """
    sizes, records = batches.sum(axis=1), batches.shape[1]
    expected = (sizes.sum() ** 2 - np.square(sizes).sum()) / (2.0 * records)  # of U
    if expected == 0:
        return 1.0
    tilts = np.log1p(np.array(_DISTANCES) / np.sqrt(expected))
    tilts = np.concatenate([tilts, -tilts])
    before, evidence, most = np.zeros(records, dtype=np.int64), np.zeros(len(tilts)), 0.0
    for batch, size in zip(batches, sizes, strict=True):
        if size == 0:
            continue
        often = np.bincount(before)
        times = np.arange(len(often))
        peak = np.maximum(tilts * times[-1], tilts * before.min())
        log_mean = peak + np.log(np.exp(tilts[:, None] * times - peak[:, None]) @ often / records)
        evidence += tilts * before[batch].sum() - size * log_mean
        before += batch
        most = max(most, float(evidence.max()))
    return min(1.0, len(tilts) * float(np.exp(-most)))
