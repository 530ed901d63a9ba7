r"""Statistical tests of a run's released noise over coordinates, tensors, steps and runs.

Whitened over time by the plan's own covariance, all numbers must be independent standard normals. Three samples are tested:

| sample | what | tested |
|---|---|---|
| wide | whole rows of two neighbouring steps | amplitude of every block of every tensor; distribution; every lag in position |
| long | chosen columns in many early and late steps | amplitude per step, tensor, and both; pairs of steps; pairs of columns |
| runs | a few steps of many runs with fresh keys | every pair of runs; the projection of every run on every other one |

**The projection test** sees every dependence of second order that is the same in all runs. Let v_r be all numbers of run r, N of
them, with covariance S (I, if the noise is right). Run s is a random direction for run r, drawn from the very covariance that is
to be found: E cos²(v_r, v_s) = tr S² / (tr S)², which is at least 1/N and exceeds it by the mean squared correlation of a number
with all others, divided by N. The sum over all M pairs of N cos² is chi-squared with M degrees of freedom for right noise (pairs of
independent directions are independent; relative error O(R/N)), and its mean is M (1 + c) with c = ‖S - I‖² / N. So it finds, at a
false-alarm rate of 1e-4, whatever has c > 6 / sqrt(M): for 32 runs, 0.27, where 1 means that every number has one copy somewhere.

Every check rejects right noise with probability at most ``FALSE_ALARM``; Bonferroni inside a check.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.fft import next_fast_len
from scipy.special import ndtr
from scipy.stats import binom, chi2, kstest
from scipy.stats import t as student

from hushgrad.audit.checks import FALSE_ALARM, Check

_BLOCK = 4096  # numbers of a tensor whose amplitude is looked at by itself
_TAILS = (2.0, 3.0, 4.0, 5.0)
_MOST = 4_000_000  # numbers of a row that are compared at all lags
_SAMPLE = 400_000  # numbers that a distribution is compared on


@dataclass(frozen=True, kw_only=True, eq=False)
class Wide:
    """Whole rows of two neighbouring steps (of one, if the run has no more), whitened: ``rows[name]`` is (2, numbers of the tensor)."""

    steps: tuple[int, ...]
    rows: dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True, eq=False)
class Long:
    """Chosen columns in many steps, whitened: ``white[t, i]`` is column i in ``steps[t]``; tensor ``of[i]`` holds it."""

    steps: tuple[int, ...]
    names: tuple[str, ...]
    of: np.ndarray
    white: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class Runs:
    """The same numbers of many runs with fresh keys: ``white[r]`` are those of run r."""

    white: np.ndarray


def field_checks(wides: list[Wide], long: Long, runs: Runs, *, on_grid: bool = False) -> list[Check]:
    """All checks of the three samples; ``on_grid``: the numbers are on a public grid, so that many are equal."""
    return [
        _check("noise amplitude", *_amplitude(wides, long)),
        _check("noise distribution", *_distribution(wides, long, on_grid)),
        _check("noise lags", *_lags(wides)),
        _check("noise pairs", *_pairs(long)),
        _check("noise projection", *_projection(runs)),
        _check("fresh noise", *_fresh(runs)),
    ]


def _check(name: str, seen: str, problems: list[str]) -> Check:
    return Check(name=name, passed=not problems, seen=", ".join([seen, *problems[:3]]))


# Amplitude -----------------------------------------------------------------------------------------------------------------


def _amplitude(wides: list[Wide], long: Long) -> tuple[str, list[str]]:
    """Sums of squares are chi-squared: of all numbers, each step, each tensor, each tensor in each step, each block of a whole row."""
    level, problems = FALSE_ALARM / 5, []
    squares = long.white**2
    total = float(np.sqrt(squares.mean()))
    seen = f"{long.white.size} numbers, standard deviation {total:.3f} of what the plan says"
    sizes = np.bincount(long.of, minlength=len(long.names))
    cells = np.add.reduceat(squares, np.concatenate([[0], np.cumsum(sizes)[:-1]]), axis=1)  # (steps, tensors)
    steps = len(long.steps)
    if outside(np.array([squares.sum()]), np.array([squares.size]), level)[0]:
        problems.append("which is not 1")
    for t in np.flatnonzero(outside(squares.sum(axis=1), np.full(steps, squares.shape[1]), level)):
        problems.append(f"step {long.steps[t]}: {np.sqrt(squares[t].mean()):.3f}")
    for i in np.flatnonzero(outside(cells.sum(axis=0), sizes * steps, level)):
        problems.append(f"{long.names[i]}: {np.sqrt(cells[:, i].sum() / (sizes[i] * steps)):.3f}")
    for t, i in np.argwhere(outside(cells, np.broadcast_to(sizes, cells.shape), level)):
        problems.append(f"{long.names[i]} in step {long.steps[t]}: {np.sqrt(cells[t, i] / sizes[i]):.3f}")
    for wide in wides:
        problems += _blocks(wide, level / len(wides))
    return seen, problems


def _blocks(wide: Wide, level: float) -> list[str]:
    """The amplitude of every block of every whole row, whatever its size."""
    where, sums, sizes = [], [], []
    for name, rows in wide.rows.items():
        starts = np.arange(0, rows.shape[1], _BLOCK)
        ends = np.minimum(starts + _BLOCK, rows.shape[1])
        for step, row in zip(wide.steps, rows, strict=True):
            where += [(name, step, int(start)) for start in starts]
            sums.append(np.add.reduceat(row**2, starts))
            sizes.append(ends - starts)
    total, count = np.concatenate(sums), np.concatenate(sizes)
    found = np.flatnonzero(outside(total, count, level))
    return [f"{where[k][0]}[{where[k][2]}:] in step {where[k][1]}: {np.sqrt(total[k] / count[k]):.3f}" for k in found]


def outside(sums: np.ndarray, freedom: np.ndarray, level: float) -> np.ndarray:
    """Which sums of squares are improbable, at a joint significance level of ``level``."""
    share = level / (2 * max(1, sums.size))
    return np.asarray((sums < chi2.ppf(share, freedom)) | (sums > chi2.isf(share, freedom)))


# Distribution --------------------------------------------------------------------------------------------------------------


def _distribution(wides: list[Wide], long: Long, on_grid: bool) -> tuple[str, list[str]]:
    """Kolmogorov-Smirnov, and how many numbers lie beyond 2, 3, 4 and 5: binomial."""
    numbers = np.concatenate([long.white.ravel(), *(rows.ravel() for wide in wides for rows in wide.rows.values())])
    step = max(1, numbers.size // _SAMPLE)
    distance, p = kstest(numbers[::step], "norm")
    problems = [f"not normally distributed (distance {distance:.4f})"] if p < FALSE_ALARM / 2 else []
    size, level = numbers.size, FALSE_ALARM / 2 / (2 * len(_TAILS))
    for bound in _TAILS:
        count, chance = int((np.abs(numbers) > bound).sum()), 2.0 * float(ndtr(-bound))
        if min(binom.cdf(count, size, chance), binom.sf(count - 1, size, chance)) < level:
            problems.append(f"{count} instead of {size * chance:.1f} beyond {bound:g}")
    distinct = _distinct(numbers)
    if distinct < 0.5 and not on_grid:
        problems.append(f"{100 * distinct:.1f}% of the numbers are different ones")
    return f"{size} numbers", problems


def _distinct(numbers: np.ndarray) -> float:
    """The fraction of distinct values: almost 1 for correct noise in single precision, small on a coarse grid."""
    some = numbers[:_SAMPLE]
    return len(np.unique(some)) / max(1, len(some))


# Lags ----------------------------------------------------------------------------------------------------------------------


def _lags(wides: list[Wide]) -> tuple[str, list[str]]:
    r"""Correlation at every lag in position, within a row (all tensors one behind the other) and between two.

    S_k = Σ_i v_i w_(i+k) has eigenvalues in [-1, 1] whose squares add up to at most the number n of products, so that
    P[|S_k| > sqrt(2 n u) + 2 u] <= 2 e^-u (Bernstein for quadratic forms of normals), whatever the lag.
    """
    problems, lags = [], 0
    for wide in wides:
        rows = np.concatenate(list(wide.rows.values()), axis=1)[:, :_MOST]
        n = rows.shape[1]
        size = next_fast_len(2 * n)
        spectra = np.fft.rfft(rows, size, axis=1)
        bound = np.log(2 * len(wides) * (2 * n + size) / FALSE_ALARM)
        limit = np.sqrt(2 * n * bound) + 2 * bound
        for a in range(len(rows)):
            for b in range(a, len(rows)):
                problems += _apart(wide.steps, a, b, np.fft.irfft(spectra[a].conj() * spectra[b], size), n, limit)
        lags += 2 * n + size
    where = ", ".join(str(step) for wide in wides for step in wide.steps)
    return f"{lags} lags of rows of {n} numbers in steps {where}", problems


def _apart(steps: tuple[int, ...], a: int, b: int, sums: np.ndarray, n: int, limit: float) -> list[str]:
    """The lags at which rows ``a`` and ``b`` are too correlated; lag 0 of a row with itself is its amplitude and is skipped."""
    if a == b:
        sums[0] = 0.0
    lag = int(np.abs(sums).argmax())
    if abs(sums[lag]) <= limit:
        return []
    places = lag if lag < n else lag - len(sums)
    return [f"numbers of steps {steps[a]} and {steps[b]} that are {abs(places)} places apart correlated by {sums[lag] / n:.3f}"]


# Pairs ---------------------------------------------------------------------------------------------------------------------


def _pairs(long: Long) -> tuple[str, list[str]]:
    """Every two steps over the columns, and every two columns over the steps: r has Student's distribution."""
    problems = []
    white = long.white
    some = white[:, _columns(long)]
    for what, rows, label in (("steps", white, long.steps), ("columns", some.T, None)):
        found = _correlated(rows, FALSE_ALARM / 2)
        if found is not None:
            a, b, r = found
            problems.append(f"{what} {label[a] if label else a} and {label[b] if label else b} correlated by {r:.3f}")
    return f"every pair of {white.shape[0]} steps and of {some.shape[1]} columns", problems


def _columns(long: Long, most: int = 1200) -> np.ndarray:
    """Columns to compare pair by pair: small tensors whole, then equally many of each larger one."""
    counts = np.bincount(long.of, minlength=len(long.names))
    order, left, chosen = np.argsort(counts), most, []
    for place, i in enumerate(order):
        share = max(1, left // (len(order) - place))
        own = np.flatnonzero(long.of == i)
        chosen.append(own[np.linspace(0, len(own) - 1, min(share, len(own))).astype(int)] if len(own) else own)
        left = max(0, left - len(chosen[-1]))
    return np.sort(np.concatenate(chosen))


def _correlated(rows: np.ndarray, level: float) -> tuple[int, int, float] | None:
    """The most correlated pair of rows, if it is improbable; r sqrt(n-1) / sqrt(1-r²) is Student's with n - 1 degrees of freedom."""
    count, n = rows.shape
    if count < 2 or n < 3:
        return None
    unit = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-300)
    cosines = np.triu(unit @ unit.T, 1)
    a, b = np.unravel_index(int(np.abs(cosines).argmax()), cosines.shape)
    limit = float(student.isf(level / (count * (count - 1)), n - 1))
    r = float(cosines[a, b])
    return (int(a), int(b), r) if abs(r) > limit / np.sqrt(n - 1 + limit**2) else None


# Runs ----------------------------------------------------------------------------------------------------------------------


def _cosines(runs: Runs) -> np.ndarray:
    unit = runs.white / np.maximum(np.linalg.norm(runs.white, axis=1, keepdims=True), 1e-300)
    return np.asarray((unit @ unit.T)[np.triu_indices(len(unit), 1)])


def _projection(runs: Runs) -> tuple[str, list[str]]:
    """The sum over all pairs of runs of N cos²; see the module."""
    cosines, size = _cosines(runs), runs.white.shape[1]
    pairs = len(cosines)
    excess = float(size * (cosines**2).sum()) / pairs - 1.0
    limit = float(chi2.isf(FALSE_ALARM / 2, pairs)) / pairs * (1.0 + 2.0 * len(runs.white) / size) - 1.0
    seen = f"{len(runs.white)} runs of {size} numbers projected on each other: c = {excess:.3f} (at most {limit:.3f})"
    return seen, ["the numbers of a run depend on each other"] if excess > limit else []


def _fresh(runs: Runs) -> tuple[str, list[str]]:
    """Test that runs with fresh keys are uncorrelated."""
    found = _correlated(runs.white, FALSE_ALARM)
    problems = [] if found is None else [f"runs {found[0]} and {found[1]} correlated by {found[2]:.3f}"]
    return f"{len(runs.white)} runs with fresh keys", problems
