"""White-box checks of a canary run: does the code do what the theorem assumes? Sharper than any attack, and no bound on epsilon.

The auditor knows which record took part when, so the noise, the contributions and the batches can be looked at one by one.
Each check rejects correct code with probability of at most ``FALSE_ALARM``, by exact tails (chi-squared, Student, Kolmogorov-Smirnov)
or, for the counts of random batches, by a gamma law with the right moments; Bonferroni inside a check.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch

import numpy as np
from scipy.special import ndtri
from scipy.stats import chi2, kstest
from scipy.stats import t as student

from hushgrad._value import Value
from hushgrad.audit.canaries import Canaries, Released
from hushgrad.audit.scores import Scorer
from hushgrad.events import (
    BallsInBins,
    CyclicPoisson,
    Everyone,
    FixedSize,
    MinSep,
    Once,
    Participation,
    Poisson,
    TruncatedPoisson,
)

__all__ = ["FALSE_ALARM", "Check", "batches_check", "contribution_check", "fresh_noise_check", "noise_check"]

FALSE_ALARM = 1e-4


class _Finding(Value, family="finding"):
    """Family of what an audit finds."""


@dataclass(frozen=True, kw_only=True)
class Check(_Finding):
    """One check: its name, whether it passed, and in one sentence what was seen."""

    name: str
    passed: bool
    seen: str


def noise_check(scorer: Scorer, released: Released, canaries: Canaries) -> Check:
    """Whitened over time, what no canary moves must be independent standard normal numbers.

    Four questions share the false-alarm rate: the variance of all, of each step, the correlation of each pair of steps, the
    distribution of all (Kolmogorov-Smirnov). Together they know every row of the noise: its size, its order, its repetition.
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
    return Check(
        name="contribution",
        passed=bool(passed),
        seen=f"a participation moves the sum by {estimate:.3f} ± {error:.3f} clip norms (at most 1 is claimed)",
    )


def fresh_noise_check(runs: list[np.ndarray]) -> Check:
    """The first noise rows of runs with different keys must have nothing to do with each other."""
    count = runs[0].size
    limit = min(0.9, 6.0 / np.sqrt(count))  # six standard deviations: 2e-9 per pair
    pairs = [abs(float(np.corrcoef(a, b)[0, 1])) for i, a in enumerate(runs) for b in runs[:i]]
    worst = max(pairs)
    seen = f"first noise rows of {len(runs)} runs correlated by {worst:.3f} at most"
    return Check(name="fresh noise", passed=bool(worst <= limit), seen=seen)


def batches_check(how: Participation, present: np.ndarray) -> Check:
    """Are the dealt batches those of the participation that the claim is made for?"""
    problem = _problem(how, present)
    seen = f"{present.shape[0]} batches of {present.sum(axis=1).mean():.1f} of {present.shape[1]} records on average"
    return Check(name="batches", passed=problem is None, seen=seen if problem is None else f"{seen}, {problem}")


# The law of each participation ---------------------------------------------------------------------------------------


@singledispatch
def _problem(how: Participation, present: np.ndarray) -> str | None:
    return f"and there is no check for {type(how).__name__}"


@_problem.register
def _(how: Everyone, present: np.ndarray) -> str | None:
    return None if present.all() else "although everybody takes part in every step"


@_problem.register
def _(how: Once, present: np.ndarray) -> str | None:
    return None if present.sum(axis=0).max() <= 1 else "although a record may take part once"


@_problem.register
def _(how: MinSep, present: np.ndarray) -> str | None:
    if present.sum(axis=0).max() > how.times:
        return f"although a record may take part {how.times} times"
    for record in present.T:
        if (np.diff(np.flatnonzero(record)) < how.gap).any():
            return f"although a record's participations must be {how.gap} steps apart"
    return None


@_problem.register
def _(how: BallsInBins, present: np.ndarray) -> str | None:
    bins = [np.unique(np.flatnonzero(record) % how.bins) for record in present.T]
    if max(map(len, bins)) > 1:
        return "although a record has one bin"
    seen = np.array([b[0] for b in bins if len(b)])
    possible = min(how.bins, len(present))
    expected = present.shape[1] / how.bins
    statistic = float(((np.bincount(seen, minlength=how.bins)[:possible] - expected) ** 2 / expected).sum())
    if possible > 1 and statistic > _gamma_limits(possible, 2.0 * possible, FALSE_ALARM)[1]:
        return "although the bins are uniform"
    return None


@_problem.register
def _(how: Poisson, present: np.ndarray) -> str | None:
    return _independent_coins(present, how.rate, sizes_vary=True)


@_problem.register
def _(how: FixedSize, present: np.ndarray) -> str | None:
    if (present.sum(axis=1) != how.size).any():
        return f"although batches have {how.size} records"
    return _independent_coins(present, how.rate, sizes_vary=False)


@_problem.register
def _(how: TruncatedPoisson, present: np.ndarray) -> str | None:
    if present.sum(axis=1).max() > how.size:
        return f"although batches have at most {how.size} records"
    limit = float(-ndtri(FALSE_ALARM)) * np.sqrt(present.size * how.rate)
    return None if present.sum() <= present.size * how.rate + limit else f"although the rate is {how.rate:g}"


@_problem.register
def _(how: CyclicPoisson, present: np.ndarray) -> str | None:
    groups = [np.unique(np.flatnonzero(record) % how.period) for record in present.T]
    if max(map(len, groups)) > 1:
        return "although a record's steps are one period apart"
    chances = present.size * how.rate / how.period
    if abs(present.sum() - chances) > _two_sided(FALSE_ALARM, 1) * np.sqrt(chances * (1 + len(present) / how.period)):
        return f"although the rate is {how.rate:g}"
    return None


def _independent_coins(present: np.ndarray, rate: float, *, sizes_vary: bool) -> str | None:
    """Records' counts and batches' sizes must vary as those of independent coins do: no more, and no less."""
    steps, records = present.shape
    if rate == 1.0:
        return None if present.all() else "although everybody takes part in every step"
    variance, level = rate * (1.0 - rate), FALSE_ALARM / 3
    excess = (1.0 / variance - 6.0) / steps  # kurtosis of a binomial count: the spread of counts is not quite chi-squared
    counts = float(((present.sum(axis=0) - steps * rate) ** 2).sum() / (steps * variance))
    low, high = _gamma_limits(records, records * (2.0 + excess), level)
    if not low <= counts <= high:
        return f"whose records' counts vary {counts / records:.3f} times as much as independent draws at rate {rate:g}"
    if sizes_vary:
        sizes = float(((present.sum(axis=1) - records * rate) ** 2).sum() / (records * variance))
        low, high = _gamma_limits(steps, steps * (2.0 + (1.0 / variance - 6.0) / records), level)
        if not low <= sizes <= high:
            return f"whose sizes vary {sizes / steps:.3f} times as much as independent draws at rate {rate:g}"
    if abs(present.sum() - present.size * rate) > _two_sided(level, 1) * np.sqrt(present.size * variance) + 1e-9:
        return f"although the rate is {rate:g}"
    return None


def _gamma_limits(mean: float, variance: float, level: float) -> tuple[float, float]:
    """Two-sided limits of a gamma law with these moments, which is what a sum of squared near-normal numbers nearly has."""
    scale = variance / (2.0 * mean)
    freedom = mean / scale
    return float(scale * chi2.ppf(level / 2, freedom)), float(scale * chi2.isf(level / 2, freedom))


def _inside(statistic: float, freedom: int, level: float) -> bool:
    return bool(chi2.ppf(level / 2, freedom) <= statistic <= chi2.isf(level / 2, freedom))


def _two_sided(level: float, tests: int) -> float:
    return float(-ndtri(level / 2 / tests))


def _correlation_limit(count: int, level: float) -> float:
    """|r| of two independent rows of ``count`` normals exceeds this with probability ``level``: r sqrt(n-1) / sqrt(1-r²) is Student's."""
    limit = float(student.isf(level / 2, count - 1))
    return limit / np.sqrt(count - 1 + limit**2)
