"""White-box checks of a canary run: whether the code does what the theorem assumes. Sharper than an attack, but no bound on epsilon.

The auditor knows which record took part when, so the noise, the contributions and the batches can be looked at one by one.
Each check rejects correct code with probability of at most ``FALSE_ALARM``, by exact tails (chi-squared, Student, Kolmogorov-Smirnov)
or bounds of these (for random batches, whatever their rate and number); Bonferroni inside a check.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch

import numpy as np
from scipy.special import logsumexp, ndtri
from scipy.stats import binom, chi2, kstest
from scipy.stats import t as student

from hushgrad import events
from hushgrad._value import Value
from hushgrad.audit.gradient_canaries import Canaries, Released
from hushgrad.audit.scores import Scorer

FALSE_ALARM = 1e-4


class _Finding(Value, family="finding"):
    """The family of audit results."""


@dataclass(frozen=True, kw_only=True)
class Check(_Finding):
    """One check: its name, whether it passed, and in one sentence what was seen.

    >>> Check(name="empty batches", passed=True, seen="Noise alone was released.").passed
    True
    """

    name: str
    passed: bool
    seen: str


def noise_check(scorer: Scorer, released: Released, canaries: Canaries) -> Check:
    """Test that the noise, whitened over time and in directions that no canary moves, is independent standard normal.

    Four questions share the false-alarm rate: the variance of all, of each step, the correlation of each pair of steps, the
    distribution of all (Kolmogorov-Smirnov). Together they detect rows of the wrong size, in the wrong order, or repeated.
    """
    quiet = released.contrast if scorer.opposite else np.hstack([released.contrast, released.signal[:, ~canaries.members]])
    white = scorer.whitened(quiet)
    steps, count = white.shape
    gram = white @ white.T
    level = FALSE_ALARM / 4
    seen = [f"{steps} x {count} numbers, standard deviation {np.sqrt((white**2).mean()):.3f} of what the plan says"]
    if not _inside(float(np.trace(gram)), steps * count, level):
        seen.append("which is not 1")
    rows = [t for t in range(steps) if not _inside(float(gram[t, t]), count, level / steps)]
    if rows:
        seen.append(f"noise of step {rows[0]} off by a factor {np.sqrt(gram[rows[0], rows[0]] / count):.3f}")
    if steps > 1:
        sizes = np.sqrt(np.diag(gram))
        correlation = np.triu(gram / np.maximum(np.outer(sizes, sizes), 1e-300), 1)
        a, b = np.unravel_index(int(np.abs(correlation).argmax()), correlation.shape)
        if abs(correlation[a, b]) > _correlation_limit(count, level / (steps * (steps - 1) / 2)):
            seen.append(f"steps {a} and {b} correlated by {correlation[a, b]:.3f}")
    if kstest(white.ravel(), "norm").pvalue < level:
        seen.append("not normally distributed")
    return Check(name="noise", passed=len(seen) == 1, seen=", ".join(seen))


def contribution_check(scorer: Scorer, released: Released, canaries: Canaries) -> Check:
    """The generalised least-squares estimate of how far one participation moves the sum: at most the clip norm."""
    sides = np.where(canaries.members, 1.0, -1.0 if scorer.opposite else 0.0)
    pattern = released.present[:, : len(canaries)] * sides
    filters = scorer.whitened(pattern)
    energy = float((filters**2).sum())
    if energy == 0.0:
        return Check(name="contribution", passed=True, seen="no canary took part in the audited steps")
    estimate = float((filters * scorer.whitened(released.signal)).sum()) / energy
    error = 1.0 / np.sqrt(energy)
    passed = estimate - float(-ndtri(FALSE_ALARM)) * error <= 1.0 + 1e-4
    seen = f"a participation moves the sum by {estimate:.3f} ± {error:.3f} clip norms (at most 1 is claimed)"
    return Check(name="contribution", passed=bool(passed), seen=seen)


def fresh_noise_check(runs: list[np.ndarray]) -> Check:
    """Test that the first noise rows of runs with different keys are uncorrelated."""
    count = runs[0].size
    limit = min(0.9, 6.0 / np.sqrt(count))  # six standard deviations: 2e-9 per pair
    pairs = [abs(float(np.corrcoef(a, b)[0, 1])) for i, a in enumerate(runs) for b in runs[:i]]
    worst = max(pairs)
    seen = f"first noise rows of {len(runs)} runs correlated by {worst:.3f} at most"
    return Check(name="fresh noise", passed=bool(worst <= limit), seen=seen)


def batches_check(how: events.Participation, present: np.ndarray) -> Check:
    """Test that the batches follow the participation for which the claim is made."""
    problem = _problem(how, present)
    seen = f"{present.shape[0]} batches of {present.sum(axis=1).mean():.1f} of {present.shape[1]} records on average"
    return Check(name="batches", passed=problem is None, seen=seen if problem is None else f"{seen}, {problem}")


# The law of each participation ---------------------------------------------------------------------------------------


@singledispatch
def _problem(how: events.Participation, present: np.ndarray) -> str | None:
    return f"and there is no check for {type(how).__name__}"


@_problem.register
def _(how: events.Everyone, present: np.ndarray) -> str | None:
    return None if present.all() else "although everybody takes part in every step"


@_problem.register
def _(how: events.Once, present: np.ndarray) -> str | None:
    return None if present.sum(axis=0).max() <= 1 else "although a record may take part once"


@_problem.register
def _(how: events.MinSep, present: np.ndarray) -> str | None:
    if present.sum(axis=0).max() > how.times:
        return f"although a record may take part {how.times} times"
    for record in present.T:
        if (np.diff(np.flatnonzero(record)) < how.gap).any():
            return f"although a record's participations must be {how.gap} steps apart"
    return None


@_problem.register
def _(how: events.BallsInBins, present: np.ndarray) -> str | None:
    if how.fresh:
        epochs = [present[start : start + how.bins] for start in range(0, len(present), how.bins)]
        if max(int(epoch.sum(axis=0).max()) for epoch in epochs) > 1:
            return "although a record has one bin in each epoch"
    else:
        bins = [np.unique(np.flatnonzero(record) % how.bins) for record in present.T]
        if max(map(len, bins)) > 1:
            return "although a record has one bin"
        epochs = [present[: how.bins]]
    level = FALSE_ALARM / (2 * len(epochs))
    return None if all(_even(epoch.T, how.bins, level) for epoch in epochs) else "although the bins are uniform"


def _even(first: np.ndarray, bins: int, level: float) -> bool:
    """Whether the records' bins in one epoch are consistent with uniform, independent bins."""
    chance = min(bins, first.shape[1]) / bins
    return binomial_tail(int(first.sum()), len(first), chance) > level and meeting_tail(first) > level


@_problem.register
def _(how: events.Poisson, present: np.ndarray) -> str | None:
    steps, records = present.shape
    level = FALSE_ALARM / 3
    if binomial_tail(int(present.sum()), present.size, how.rate) < level:
        return f"although the rate is {how.rate:g}"
    if how.rate == 1.0:
        return None  # rate 1: everybody took part, or the count would have failed
    possible = np.arange(records + 1)
    spread = (possible - records * how.rate) ** 2 / (records * how.rate * (1.0 - how.rate))
    seen = float(spread[present.sum(axis=1)].sum())
    if sum_tail(seen, steps, spread, binom.pmf(possible, records, how.rate)) < level:
        return f"whose sizes vary {seen / steps:.3f} times as much as independent draws at rate {how.rate:g}"
    return _not_fresh(present, level)


@_problem.register
def _(how: events.FixedSize, present: np.ndarray) -> str | None:
    if (present.sum(axis=1) != how.size).any():
        return f"although batches have {how.size} records"
    return _not_fresh(present, FALSE_ALARM)


@_problem.register
def _(how: events.TruncatedPoisson, present: np.ndarray) -> str | None:
    if present.sum(axis=1).max() > how.size:
        return f"although batches have at most {how.size} records"
    improbable = binom.sf(present.sum() - 1, present.size, how.rate) < FALSE_ALARM  # truncation makes them fewer, if anything
    return f"although the rate is {how.rate:g}" if improbable else None


@_problem.register
def _(how: events.CyclicPoisson, present: np.ndarray) -> str | None:
    groups = [np.unique(np.flatnonzero(record) % how.period) for record in present.T]
    if max(map(len, groups)) > 1:
        return "although a record's steps are one period apart"
    cycles, more = divmod(len(present), how.period)  # the first ``more`` groups have one step more than the others
    counts = np.arange(cycles + 2)
    mass = (
        more * binom.pmf(counts, cycles + 1, how.rate) + (how.period - more) * binom.pmf(counts, cycles, how.rate)
    ) / how.period
    if sum_tail(float(present.sum()), present.shape[1], counts, mass) < FALSE_ALARM:
        return f"although the rate is {how.rate:g}"
    return None


def _not_fresh(present: np.ndarray, level: float) -> str | None:
    """Test that batches are independent uniform subsets: they share records neither more nor less often."""
    return "whose batches are not drawn afresh" if meeting_tail(present) < level else None


def _inside(statistic: float, freedom: int, level: float) -> bool:
    return bool(chi2.ppf(level / 2, freedom) <= statistic <= chi2.isf(level / 2, freedom))


def _correlation_limit(count: int, level: float) -> float:
    """|r| of two independent rows of ``count`` normals exceeds this with probability ``level``: r sqrt(n-1) / sqrt(1-r²) is Student's."""
    limit = float(student.isf(level / 2, count - 1))
    return limit / np.sqrt(count - 1 + limit**2)


# Tail bounds ---------------------------------------------------------------------------------------------------------
#
# Normal and chi-squared laws fit the counts of random batches only where there are many of each; at a rate of 1e-4, or for one step, they
# call right batches wrong far more often than they say. Each function here bounds the probability, under the stated law, of something at
# least as far out as what was seen, on either side: an exact tail, or a Chernoff bound with the exact generating function.

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
