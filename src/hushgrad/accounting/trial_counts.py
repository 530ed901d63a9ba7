r"""The random number of trials of a private selection: quantiles of the truncated negative binomial distribution.

P(K = k) ∝ (1 - γ)^k Π_{l<k} (l + η)/(l + 1) for k >= 1, with γ such that the mean is the one asked for. The theorem is about all of
the distribution, and for shapes η below 0 its tail is long, so it is followed as far as a draw requires, never cut off.

Reference: Papernot and Steinke (2022), "Hyperparameter tuning with Rényi differential privacy", definition 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hushgrad.accounting.heuristics import HEURISTICS
from hushgrad.accounting.rdp import success_probability


def number_at(place: float, *, mean: float, shape: float) -> int:
    """The quantile of K at ``place`` in [0, 1); a uniform random ``place`` gives a draw.

    >>> [number_at(u, mean=2.0, shape=1.0) for u in (0.0, 0.49, 0.51, 0.76)]  # geometric: halves
    [1, 1, 2, 3]
    """
    k, below = 1, 0.0
    for mass in probabilities(mean, shape):
        cumulative = below + np.cumsum(mass)
        if cumulative[-1] > place:
            return k + int(np.searchsorted(cumulative, place, side="right"))
        k, below = k + len(mass), float(cumulative[-1])
    return k - 1  # only rounding keeps the sum below the draw


def probabilities(mean: float, shape: float) -> Iterator[NDArray[np.float64]]:
    """P(K = 1), P(K = 2), ..., in blocks, until less than 2^-64 is left."""
    gamma, block = success_probability(mean, shape), HEURISTICS.trials_block
    if gamma == 1.0:
        yield np.ones(1)
        return
    k, log_first, below = 1, _log_of_one(gamma, shape), 0.0
    while below < 0.5 or log_first > math.log(gamma) - 45:  # the rest is at most P(K = k) / γ, once the probabilities fall
        ratios = math.log1p(-gamma) + np.log((np.arange(k, k + block) + shape) / np.arange(k + 1, k + 1 + block))
        logs = log_first + np.concatenate([[0.0], np.cumsum(ratios)])
        mass = np.exp(logs[:-1])
        yield mass
        k, log_first, below = k + block, float(logs[-1]), below + float(mass.sum())


def _log_of_one(gamma: float, shape: float) -> float:
    """The logarithm of P(K = 1) = (1 - γ) η / (γ^-η - 1), whose limit for η = 0 is (1 - γ) / log(1/γ)."""
    rate = -math.log(gamma)
    if shape == 0:
        return math.log1p(-gamma) - math.log(rate)
    # For η > 0 the power may be beyond every float: it is taken out of the logarithm.
    power = shape * rate + math.log(-math.expm1(-shape * rate)) if shape > 0 else math.log(-math.expm1(shape * rate))
    return math.log1p(-gamma) + math.log(abs(shape)) - power
