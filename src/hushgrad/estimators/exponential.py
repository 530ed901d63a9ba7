r"""The exponential mechanism where it can be sampled exactly: finitely many candidates, or one dimension.

Scores have sensitivity Δ (how far one record can move any candidate's score).

* :func:`select`: Gumbel noise, P(i) ∝ exp(ε u_i / 2Δ), or permute-and-flip (McKenna and Sheldon 2020), which is never worse.
* :func:`quantile`: P(t) ∝ exp(ε u_w(t) / 2Δ) on an interval, by the inverse of its piecewise constant density.

Both are ε-DP (McSherry and Talwar 2007, theorem 6).

**Theorem (widened score).** Put L(s) = #{x < s}, R(s) = #{x <= s}, and let u(s) = -max(0, L(s) - qn, qn - R(s)): 0 where s is a q-quantile,
else minus the number of records that would have to move. For a public width w >= 0 the score u_w(t) = max over |s - t| <= w of u(s) is

    u_w(t) = -max(0, #{x < t - w} - qn, qn - #{x <= t + w}),

and one record moves it by at most max(q, 1 - q) if it joins or leaves and by at most 1 if it is replaced, like u itself.

*Proof.* Two functions that differ by at most Δ everywhere have maxima over one window that differ by at most Δ; and u is a maximum of
terms each of which moves by q or 1 - q (by at most 1) in size. For the formula: no s in the window is better than either bound, as L and R
do not fall. If L(t - w) > qn, s = t - w attains it, as R >= L; likewise s = t + w if R(t + w) < qn. Otherwise the closed, non-empty
interval of q-quantiles begins at or before t + w and ends at or after t - w, so it meets the window, and u_w(t) = 0. ∎

Why: n equal values leave no interval at their position, and for w = 0 the mechanism, a density, would give that position no weight: the
median of n fives between 0 and 10 would be uniform. With w it lies within w of five but for a share e^{-εn/4Δ} (high - low)/2w.

Continuous mechanisms in more dimensions are refused: they need Markov chains, and a chain that has not converged has no guarantee.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import logsumexp

from hushgrad import _check
from hushgrad.errors import ArgumentError, NoTheorem
from hushgrad.estimators.bounded import bounded_values, representable
from hushgrad.estimators.methods import Budget
from hushgrad.estimators.randomness import Randomness, randomness
from hushgrad.events import Relation


def select(
    scores: ArrayLike, *, epsilon: float, sensitivity: float, method: str = "permute_and_flip", random_state: int | None = None
) -> int:
    """The index of a candidate with a nearly best score, ``epsilon``-DP.

    **Formal guarantee.** epsilon-DP if one record changes every score by at most ``sensitivity``.

    Args:
        scores: one for each candidate; higher is better.
        epsilon: what the choice costs.
        sensitivity: how much one record changes a score, at most.
        method: "permute_and_flip" (never worse) or "gumbel".
        random_state: a seed, for experiments; secret randomness without it.

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
    return selected(u, epsilon=epsilon, sensitivity=sensitivity, method=method, random=randomness(random_state))


def selected(u: np.ndarray, *, epsilon: float, sensitivity: float, method: str, random: Randomness) -> int:
    """:func:`select` with random numbers from an existing stream."""
    scale = _check.positive(epsilon=epsilon) / (2 * _check.positive(sensitivity=sensitivity))
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
    resolution: float | None = None,
    relation: Relation | str = Relation.ADD_REMOVE,
    random_state: int | None = None,
) -> float:
    """A private quantile of ``values``, which are clipped to ``bounds`` (low, high): Smith 2011, algorithm 2, with a widened score.

    **Formal guarantee.** epsilon-DP, by the theorem above with w = ``resolution``. The answer is rounded to a public grid of
    ``resolution``/16, so that its last bits are not those of the data.

    Args:
        values: The private numbers; what lies outside the bounds is clipped to them.
        q: Which quantile; 0.5 is the median.
        epsilon: The privacy budget.
        bounds: (low, high), known without looking at the data.
        resolution: The accuracy that you need; (high - low)/2²⁰ if None. Values closer than this count as one.
        relation: "add_remove", "replace_one" or "zero_out".
        random_state: None draws from the operating system.

        >>> round(quantile(np.linspace(0, 1, 10_001), epsilon=1.0, bounds=(0, 10), random_state=0), 2)
        0.5
    """
    q = _check.probability(q=q)
    x = np.sort(bounded_values(np.asarray(values, dtype=float).ravel(), bounds))
    if not np.isfinite(x).all():
        raise ArgumentError("Expected values to be numbers; one is none.")
    sensitivity = max(q, 1 - q) if Relation.of(relation) is Relation.ADD_REMOVE else 1.0
    low, high = (float(end) for end in bounds)  # type: ignore[union-attr]
    share = 2.0**-20 if resolution is None else _check.positive(resolution=resolution) / (high - low)
    if not 2.0**-30 <= share <= 1:
        _check.fail("resolution", resolution, f"to lie between 2⁻³⁰ and 1 times {high - low:g}, the distance of the bounds")
    scale = Budget(epsilon, 0.0, Relation.of(relation)).epsilon / (2 * sensitivity)
    with representable():
        return _piecewise(x, q, scale, (low, high), share * (high - low), randomness(random_state))


def _piecewise(x: np.ndarray, q: float, scale: float, bounds: tuple[float, float], width: float, random: Randomness) -> float:
    low, high = bounds
    begins, ends = np.clip(x - width, low, high), np.clip(x + width, low, high)  # where a value comes into reach, and leaves it
    edges = np.sort(np.concatenate([[low], begins, ends, [high]]))
    below = np.searchsorted(ends, edges[:-1], "right")  # for any point between two edges: #{x < t - w} and #{x <= t + w}
    reached = np.searchsorted(begins, edges[:-1], "right")
    score = -np.maximum(0.0, np.maximum(below - q * x.size, q * x.size - reached))
    with np.errstate(divide="ignore"):
        log_mass = np.log(np.diff(edges)) + scale * score
    probabilities = np.exp(log_mass - logsumexp(log_mass))
    place, inside = random.uniform(2)
    interval = int(np.searchsorted(np.cumsum(probabilities), place).clip(max=len(probabilities) - 1))
    point = float(edges[interval] + inside * (edges[interval + 1] - edges[interval]))
    return float(np.clip(low + np.rint((point - low) / (width / 16)) * (width / 16), low, high))
