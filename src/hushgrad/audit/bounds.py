r"""From the scores of canaries to lower bounds on epsilon, each at a stated confidence.

An attack scores every canary; a high score says "it was in the data". At a threshold tau it makes two errors:

    false alarms  a = P[score >= tau | out],      misses  b = P[score < tau | in].

A mechanism with trade-off curve f allows no point below it: b >= f(a). So confidence bounds a_up, b_up on the errors of *one*
attack give a lower bound on the epsilon of the *mechanism*, and a point below the claimed curve refutes the claim.

| bound | what it assumes beside independent scores |
|---|---|
| :func:`epsilon_clopper_pearson` | nothing; at n canaries it cannot exceed about ln(n / 4) |
| :func:`epsilon_gaussian` | that the mechanism's curve is a Gaussian one (true for Gaussian noise and a fixed participation) |
| :func:`curve_gap` | nothing: the point is compared with the claimed curve itself |

The threshold must not be chosen on the scores that are counted. It is fixed beforehand, or chosen on one part of the scores
and counted on the other (:func:`split_rates`), or there are a few of them and each gets a share of the error (:func:`grid_rates`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtri
from scipy.stats import beta

from hushgrad import _check
from hushgrad.accounting import delta_curve, epsilon, gaussian_epsilon
from hushgrad.events import Event, Relation

_SMALLEST_DELTA = 1e-7  # an audit of thousands of canaries cannot see error rates below this
_LARGEST_EPSILON = 40.0  # nor rates below e^-40


class ClaimedCurve:
    r"""The least miss rate at a false-alarm rate that ``event`` allows: a lower bound on its trade-off curve f.

        f(a) >= max over epsilon of max(0, 1 - delta(epsilon) - e^epsilon a, e^-epsilon (1 - delta(epsilon) - a))

    over a fixed set of epsilons. Fewer of them make the curve lower, never higher, so rounding cannot refute a true claim.

        >>> from hushgrad.events import Gaussian
        >>> curve = ClaimedCurve(Gaussian(1.0))
        >>> round(float(curve(0.05)), 2)  # Phi(Phi^-1(0.95) - 1) = 0.74
        0.74

    Reference: Dong, Roth and Su 2022, propositions 2.4 and 2.5.
    """

    def __init__(self, event: Event, *, relation: Relation | str = Relation.ADD_REMOVE, points: int = 80) -> None:
        top = min(epsilon(event, delta=_SMALLEST_DELTA, relation=relation), _LARGEST_EPSILON)
        self._epsilons = np.concatenate([[0.0], top * (np.arange(1, points + 1) / points) ** 1.5])
        self._deltas = np.asarray(delta_curve(event, self._epsilons.tolist(), relation=relation))

    def __call__(self, alphas: ArrayLike) -> np.ndarray:
        """The least miss rate at each false-alarm rate."""
        a = np.asarray(alphas, dtype=np.float64)[..., None]
        steep = 1.0 - self._deltas - np.exp(np.minimum(self._epsilons, 700.0)) * a
        flat = np.exp(-self._epsilons) * (1.0 - self._deltas - a)
        return np.asarray(np.maximum(0.0, np.maximum(steep, flat)).max(axis=-1))


@lru_cache(maxsize=32)
def claimed_curve(event: Event, relation: Relation) -> ClaimedCurve:
    """The curve of an event, cached: repeated audits of one plan analyse its claim once."""
    return ClaimedCurve(event, relation=relation)


Curve = Callable[[float], float | np.ndarray]
"""A trade-off curve: from a false-alarm rate to the least miss rate."""


@dataclass(frozen=True, kw_only=True)
class ErrorRates:
    """The two errors of one attack: as counted, and upper bounds that hold together with ``confidence``.

    >>> from hushgrad.audit import split_rates
    >>> rates = split_rates([0.9] * 100, [0.1] * 100)
    >>> 0.1 <= rates.threshold <= 0.9, rates.confidence
    (True, 0.95)
    """

    threshold: float
    false_alarms: float
    misses: float
    false_alarms_up: float
    misses_up: float
    confidence: float


def rate_upper_bound(successes: int, trials: int, *, confidence: float) -> float:
    """The Clopper-Pearson bound: with ``confidence`` a probability is at most this, after ``successes`` in ``trials``.

    **Formal guarantee.** P[p <= bound] >= ``confidence`` for every p and every number of trials: exact, no approximation.

        >>> round(rate_upper_bound(0, 100, confidence=0.95), 4)  # the rule of three
        0.0295

    Reference: Clopper and Pearson 1934.
    """
    trials = _check.positive_int(trials=trials)
    successes = _check.integer(0, successes=successes)
    if successes > trials:
        _check.fail("successes", successes, f"to be at most trials={trials}")
    level = _check.between(0, 1, confidence=confidence)
    return 1.0 if successes == trials else float(beta.ppf(level, successes + 1, trials - successes))


def error_rates(inside: ArrayLike, outside: ArrayLike, *, threshold: float, confidence: float = 0.95) -> ErrorRates:
    """Count the errors at a threshold that was fixed without looking at these scores.

    Args:
        inside: attack scores of runs (or records) with the canary.
        outside: attack scores without it.
        threshold: scores above it count as "inside"; fixed without looking at these scores.
        confidence: probability with which the bounds hold.

    >>> rates = error_rates([2.0, 3.0, 0.5], [-1.0, 0.0, 1.0], threshold=1.0)
    >>> rates.false_alarms, round(rates.misses, 2)
    (0.3333333333333333, 0.33)
    """
    ins, outs = _scores(inside=inside), _scores(outside=outside)
    if np.isnan(threshold):  # every comparison with NaN is false, which would look like an attack without errors
        _check.fail("threshold", threshold, "to be a number")
    alarms, misses = int((outs >= threshold).sum()), int((ins < threshold).sum())
    level = 1.0 - (1.0 - _check.between(0, 1, confidence=confidence)) / 2.0  # each of the two errors takes half
    return ErrorRates(
        threshold=float(threshold),
        false_alarms=alarms / len(outs),
        misses=misses / len(ins),
        false_alarms_up=rate_upper_bound(alarms, len(outs), confidence=level),
        misses_up=rate_upper_bound(misses, len(ins), confidence=level),
        confidence=confidence,
    )


def split_rates(inside: ArrayLike, outside: ArrayLike, *, confidence: float = 0.95, seed: int = 0) -> ErrorRates:
    """Choose the threshold on one half of the scores (by the Gaussian bound), count the errors on the other half.

    Args:
        inside: attack scores of runs (or records) with the canary.
        outside: attack scores without it.
        confidence: probability with which the bounds hold.
        seed: of the split into two halves.

    >>> rates = split_rates([0.9] * 100, [0.1] * 100)
    >>> rates.false_alarms, rates.misses, 0 < rates.misses_up < 0.1
    (0.0, 0.0, True)
    """
    rng = np.random.default_rng(seed)
    (ins, ins_rest), (outs, outs_rest) = (_halves(_scores(x=x), rng) for x in (inside, outside))
    with np.errstate(invalid="ignore"):
        candidates = np.quantile(np.concatenate([ins, outs]), np.linspace(0.02, 0.98, 49))
    # Infinite scores have no midpoint, so scores themselves are candidate thresholds, too.
    candidates = np.where(np.isnan(candidates), np.inf, candidates)
    rates = [error_rates(ins, outs, threshold=float(t), confidence=confidence) for t in candidates]
    best = max(rates, key=mu_lower_bound)
    return error_rates(ins_rest, outs_rest, threshold=best.threshold, confidence=confidence)


def grid_rates(
    inside: ArrayLike, outside: ArrayLike, *, thresholds: Sequence[float], confidence: float = 0.95
) -> list[ErrorRates]:
    """The errors at each of a few thresholds fixed beforehand; all bounds hold together with ``confidence`` (Bonferroni).

    Args:
        inside: attack scores of runs (or records) with the canary.
        outside: attack scores without it.
        thresholds: a few, fixed beforehand.
        confidence: probability with which all bounds hold together.

    >>> inside, outside = [0.9] * 100, [0.1] * 100
    >>> (rates,) = grid_rates(inside, outside, thresholds=[0.5])
    >>> rates.false_alarms, rates.misses, 0 < rates.misses_up < 0.05
    (0.0, 0.0, True)
    """
    if not thresholds:
        _check.fail("thresholds", thresholds, "to hold at least one number")
    shared = 1.0 - (1.0 - _check.between(0, 1, confidence=confidence)) / len(thresholds)
    return [error_rates(inside, outside, threshold=t, confidence=shared) for t in thresholds]


def epsilon_clopper_pearson(rates: ErrorRates, *, delta: float) -> float:
    r"""A lower bound on epsilon from (epsilon, delta)-DP alone, in both directions.

        epsilon >= max(ln((1 - delta - b_up) / a_up), ln((1 - delta - a_up) / b_up))

    **Formal guarantee.** If the scores are independent, a mechanism with a smaller epsilon at this delta produces such counts
    with probability at most 1 - ``rates.confidence``.

        >>> rates = error_rates(np.full(1000, 1.0), np.full(1000, 0.0), threshold=0.5)  # every canary is told apart
        >>> round(epsilon_clopper_pearson(rates, delta=1e-5), 2)
        5.6

    Reference: Kairouz, Oh and Viswanath 2015, theorem 2.1; Nasr et al. 2021, section IV.
    """
    delta = _check.delta(delta=delta)
    a, b = rates.false_alarms_up, rates.misses_up
    ratios = [(1.0 - delta - b) / a, (1.0 - delta - a) / b]
    return max(0.0, *(math.log(r) if r > 0 else 0.0 for r in ratios))


def mu_lower_bound(rates: ErrorRates) -> float:
    """The smallest mu of a Gaussian trade-off curve on or below the point: max(0, Phi^-1(1 - a_up) - Phi^-1(b_up))."""
    return max(0.0, float(ndtri(1.0 - rates.false_alarms_up) - ndtri(rates.misses_up)))


def epsilon_gaussian(rates: ErrorRates, *, delta: float) -> float:
    """A lower bound on epsilon, *if* the mechanism's trade-off curve is Gaussian: the epsilon of the bound on mu.

    The assumption carries the bound from the errors that were seen (a few per cent) to delta = 1e-5, where nothing was seen;
    hence its power. It is a theorem for Gaussian noise and a participation that is fixed; for random batches it is a fit.

        >>> rng = np.random.default_rng(0)
        >>> rates = error_rates(rng.normal(1, 1, 1000), rng.normal(0, 1, 1000), threshold=0.5)
        >>> 3.0 < epsilon_gaussian(rates, delta=1e-5) < 4.38  # mu = 1 has epsilon 4.38
        True

    Reference: Nasr et al. 2023, "Tight auditing of differentially private machine learning", section 4.
    """
    mu = mu_lower_bound(rates)
    return gaussian_epsilon(mu, delta) if mu > 0 else 0.0


def curve_gap(rates: ErrorRates, claimed: Event | Curve, *, relation: Relation | str = Relation.ADD_REMOVE) -> float:
    """How far the point (a_up, b_up) lies below the claimed trade-off curve: f(a_up) - b_up. Above 0 the claim is refuted.

    **Formal guarantee.** If the claim is true and the scores are independent, the gap exceeds 0 with probability at most
    1 - ``rates.confidence``. Nothing is assumed about the mechanism. ``claimed`` is an event, whose curve the accountant bounds
    from below (so that rounding never refutes), or the curve itself.

    Args:
        rates: counted errors with their upper bounds.
        claimed: the event that is claimed, or its trade-off curve.
        relation: which data sets are neighbours: "add_remove", "replace_one" or "zero_out".

        >>> from hushgrad.events import Gaussian
        >>> rates = error_rates(np.full(1000, 1.0), np.full(1000, 0.0), threshold=0.5)
        >>> curve_gap(rates, Gaussian(1.0)) > 0 > curve_gap(rates, Gaussian(0.1))
        True

    Reference: Dong, Roth and Su 2022, definition 2.3.
    """
    a = rates.false_alarms_up
    curve = ClaimedCurve(claimed, relation=relation) if isinstance(claimed, Event) else claimed
    return float(curve(a)) - rates.misses_up


def _scores(**argument: ArrayLike) -> np.ndarray:
    ((name, value),) = argument.items()
    scores = np.asarray(value, dtype=np.float64)
    if scores.ndim != 1 or not scores.size or np.isnan(scores).any():
        _check.fail(name, value, "to be a row of scores, at least one and no NaN")
    return scores


def _halves(scores: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    if len(scores) < 2:
        _check.fail("scores", scores, "to be at least two, one to choose by and one to count", "Fix the threshold instead.")
    mixed = rng.permutation(scores)
    return mixed[: len(mixed) // 2], mixed[len(mixed) // 2 :]
