r"""The exponential mechanism where it can be sampled exactly: finitely many candidates, or one dimension.

Scores have sensitivity Δ (how far one record can move any candidate's score).

* :func:`select`: Gumbel noise, P(i) ∝ exp(ε u_i / 2Δ), or permute-and-flip (McKenna and Sheldon 2020), which is never worse.
* :func:`quantile`: P(t) ∝ exp(-ε |#{x < t} - q n| / 2Δ) on an interval, by the inverse of its piecewise constant density.

Both are ε-DP (McSherry and Talwar 2007, theorem 6). Continuous mechanisms in more dimensions are refused: they need Markov chains, and a
chain that has not converged has no guarantee.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import logsumexp

from hushgrad import _check
from hushgrad.errors import NoTheorem
from hushgrad.estimators.bounded import bounded_values
from hushgrad.estimators.randomness import Randomness, randomness
from hushgrad.events import Relation

__all__ = ["quantile", "select"]


def select(
    scores: ArrayLike, *, epsilon: float, sensitivity: float, method: str = "permute_and_flip", random_state: int | None = None
) -> int:
    """The number of a candidate with a nearly best score, ``epsilon``-DP.

    **Formal guarantee.** epsilon-DP if one record changes every score by at most ``sensitivity``.

        >>> select([0.0, 1.0, 50.0], epsilon=1.0, sensitivity=1.0, random_state=0)
        2
    """
    u = np.asarray(scores, dtype=float)
    if u.ndim != 1 or not u.size:
        raise NoTheorem(
            "The exponential mechanism is sampled exactly from a finite list of scores only. "
            "Give one score per candidate, or use quantile() for one dimension."
        )
    if not np.isfinite(u).all():
        _check.fail("scores", scores, "to be finite")
    scale = _check.positive(epsilon=epsilon) / (2 * _check.positive(sensitivity=sensitivity))
    random = randomness(random_state)
    if _check.one_of(("permute_and_flip", "gumbel"), method=method) == "gumbel":
        return int(np.argmax(scale * u + random.gumbel(u.size)))
    # Permute-and-flip in its equivalent form: exponential noise instead of Gumbel (Ding et al. 2021).
    return int(np.argmax(scale * u + random.exponential(u.size)))


def quantile(
    values: ArrayLike,
    *,
    q: float = 0.5,
    epsilon: float,
    bounds: tuple[float, float] | None,
    relation: Relation | str = Relation.ADD_REMOVE,
    random_state: int | None = None,
) -> float:
    """A private quantile of ``values``, which are clipped to ``bounds`` (low, high): Smith 2011, algorithm 2.

    **Formal guarantee.** epsilon-DP. The score -|rank(t) - q n| moves by at most max(q, 1 - q) when a record joins or leaves, and by at
    most 1 when one is replaced, be it by a null record: then n stays and only the rank moves.

        >>> round(quantile(np.linspace(0, 1, 10_001), epsilon=1.0, bounds=(0, 10), random_state=0), 2)
        0.5
    """
    q = _check.probability(q=q)
    x = np.sort(bounded_values(np.asarray(values, dtype=float).ravel(), bounds))
    if not np.isfinite(x).all():
        _check.fail("values", values, "to be numbers")
    sensitivity = max(q, 1 - q) if Relation.of(relation) is Relation.ADD_REMOVE else 1.0
    return _piecewise(x, q, _check.positive(epsilon=epsilon) / (2 * sensitivity), bounds, randomness(random_state))


def _piecewise(x: np.ndarray, q: float, scale: float, bounds, random: Randomness) -> float:
    edges = np.concatenate([[bounds[0]], x, [bounds[1]]])
    ranks = np.arange(x.size + 1)  # how many values lie below any point of each interval
    with np.errstate(divide="ignore"):
        log_mass = np.log(np.diff(edges)) - scale * np.abs(ranks - q * x.size)
    probabilities = np.exp(log_mass - logsumexp(log_mass))
    place, inside = random.uniform(2)
    interval = int(np.searchsorted(np.cumsum(probabilities), place).clip(max=x.size))
    return float(edges[interval] + inside * (edges[interval + 1] - edges[interval]))
