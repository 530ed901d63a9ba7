r"""Lower bounds on epsilon composed from single steps, for an auditor who owns the run, where random batches hide the canaries.

A canary is in a batch of rate 1/250 too seldom for a whole run to tell. So the auditor puts canaries into batches of his choice, looks
at the released sum of *each* step along each canary (in clip norms: y = x + s Z), measures the rate on the dealt batches by itself, and
composes what he has bounded. Two bounds, from the same scores:

**Step f-DP.** At thresholds that were fixed beforehand the scores with and without the canary give error bounds (a_k, b_k), all of them
together at the stated confidence (Clopper-Pearson). The step's trade-off curve lies below the convex hull g of these points, which is
the curve of a pair (P, Q) of discrete distributions. At a rate of at least q the sampled step's curve lies below that of ((1-q)Q + qP, Q),
and compositions of lower curves are lower (Dong, Roth and Su 2022): the T-fold composition of the pair, by convolution with losses
rounded *down*, bounds epsilon from below. It assumes nothing about the noise but that steps and canaries are independent.

**Step GDP.** The same with the two numbers of a Gaussian step: the noise's standard deviation is at most s_up (chi-squared) and a
participation moves the sum by at least a_low (normal), so epsilon is at least the lower end of the certified interval at noise
multiplier s_up / a_low and rate q_low. It assumes that the noise is normal, which the checks test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from scipy.fft import next_fast_len
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp, ndtri
from scipy.stats import beta, chi2

from hushgrad.accounting import epsilon_interval
from hushgrad.audit.bounds import rate_upper_bound
from hushgrad.audit.gradient_canaries import Canaries, release
from hushgrad.audit.report import LowerBound
from hushgrad.errors import NoTheorem
from hushgrad.events import Event, Everyone, Gaussian, MinSep, Once, Poisson
from hushgrad.noise import Independent
from hushgrad.sampling import Draws, FullBatch
from hushgrad.train import Plan

_THREAT = (
    "the attacker sees every released gradient, knows all records but one, whose gradient he has chosen, and not the batches; "
    "the auditor owns the run and puts canaries into its batches"
)
_THRESHOLDS = 40
_RANGE = 1e-13  # mass that a composition may leave out on either side


@dataclass(frozen=True, kw_only=True, eq=False)
class StepScores:
    """Released sums along canaries, one number for each step and canary, in clip norms: with the canary, and without it."""

    inside: np.ndarray
    outside: np.ndarray


def at_every_step(plan: Plan, steps: int) -> Plan:
    """The same steps with full batches and independent noise: a single step's release, without amplification."""
    return replace(plan, sampler=FullBatch(steps=steps), steps=steps, noise=Independent())


def noise_upper(white: np.ndarray, *, confidence: float) -> float:
    """With ``confidence`` the standard deviation of these independent normals is at most this."""
    return float(np.sqrt(np.square(white).sum() / chi2.ppf(1.0 - confidence, white.size)))


def rate_lower(taken: int, possible: int, *, confidence: float) -> float:
    """With ``confidence`` a record takes part with at least this probability (Clopper-Pearson)."""
    return 0.0 if taken == 0 else float(beta.ppf(1.0 - confidence, taken, possible - taken + 1))


def contribution_lower(scores: StepScores, *, confidence: float) -> float:
    """With ``confidence`` a participation moves the sum by at least so many clip norms (normal, the noise's size estimated)."""
    error = math.sqrt(scores.outside.var() * (1 / scores.inside.size + 1 / scores.outside.size))
    return float(scores.inside.mean() - scores.outside.mean() + ndtri(1.0 - confidence) * error)


def step_scores(plan: Plan, *, canaries: int, steps: int, seed: int, kind: str = "dirac") -> StepScores | None:
    """The scores of ``steps`` steps of ``plan`` with the canaries in each; None where steps do not compose by themselves."""
    if not isinstance(plan.noise, Independent) or not isinstance(plan.participation, Poisson) or plan.denoise is not None:
        return None
    chosen = (Canaries.dirac if kind == "dirac" else Canaries.random)(canaries, seed=seed)
    seen = release(at_every_step(plan, steps), chosen, steps=steps, records=canaries, seed=seed)
    outside = np.concatenate([seen.signal[:, ~chosen.members].ravel(), seen.contrast.ravel()])
    return StepScores(inside=seen.signal[:, chosen.members].ravel(), outside=outside)


def step_bounds(
    plan: Plan, *, canaries: int = 1000, steps: int = 50, confidence: float = 0.95, seed: int = 0, kind: str = "dirac"
) -> tuple[LowerBound, ...]:
    """Bounds on the whole plan's epsilon from ``steps`` of its steps with ``canaries`` in each of them; see the module.

    **Formal guarantee.** Each bound exceeds the true epsilon with probability at most 1 - ``confidence``, under its assumption.
    Empty where steps do not compose by themselves (correlated noise, batches that are not Poisson, denoisers).

    Args:
        plan: a calibrated plan.
        canaries: how many, each in every looked-at batch by a fair coin.
        steps: how many steps are looked at; the bounds are for all of the plan's.
        confidence: of each bound by itself.
        seed: of coins, noise and batches of the audit.
        kind: "dirac" or "random" directions.

        >>> plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=10, dataset_size=1000, steps=400)
        >>> bounds = step_bounds(plan, canaries=200, steps=20)
        >>> [bound.method for bound in bounds], all(0 < bound.epsilon < plan.guarantee().epsilon for bound in bounds)
        (['steps f-dp', 'steps gdp'], True)
    """
    scores = step_scores(plan, canaries=canaries, steps=steps, seed=seed, kind=kind)
    return () if scores is None else composed_bounds(plan, scores, confidence=confidence, seed=seed)


def composed_bounds(plan: Plan, scores: StepScores, *, confidence: float, seed: int = 0) -> tuple[LowerBound, ...]:
    """The two bounds from a step's scores, at the rate of as many dealt batches as tell it to a thousandth."""
    level, how, noise = 1.0 - (1.0 - confidence) / 3, plan.participation, float(plan.noise_multiplier or 0.0)
    assert isinstance(how, Poisson)
    rate = rate_lower(*_dealt(plan, seed), confidence=level)
    ratio = noise_upper(scores.outside, confidence=level) / max(contribution_lower(scores, confidence=level), 1e-9) / noise
    fdp = step_fdp(scores, noise=noise, rate=rate, steps=plan.steps, delta=plan.delta, confidence=1.0 - 2 * (1.0 - level))
    independent = "canaries and steps are independent; the other steps are like these"
    return (
        LowerBound(method="steps f-dp", epsilon=fdp, confidence=confidence, assumption=independent, threat=_THREAT),
        LowerBound(
            method="steps gdp",
            epsilon=step_gdp(plan, ratio=ratio, rate=rate),
            confidence=confidence,
            assumption=f"{independent}; normal noise",
            threat=_THREAT,
        ),
    )


def _dealt(plan: Plan, seed: int) -> tuple[int, int]:
    """(participations, possible participations) of drawn batches: about 1.5 million participations, or all of the plan's."""
    how = plan.participation
    assert isinstance(how, Poisson)
    records = max(1, round(float(plan.batch_size) / how.rate))
    deal = plan.sampler.dealer(records, Draws(np.random.default_rng([seed, 6]).bytes(32)))
    steps = min(plan.steps, max(1, int(1.5e6 / max(1.0, float(plan.batch_size)))))
    return sum(len(deal(step)) for step in range(steps)), steps * records


# Step GDP ------------------------------------------------------------------------------------------------------------------


def step_gdp(plan: Plan, *, ratio: float, rate: float | None = None, reach: float = 1.0) -> float:
    """The lower end of epsilon at ``ratio`` times the plan's noise multiplier, ``rate`` for that of the plan.

    ``reach`` is |L⁻¹p| of a record's observed steps p, for a participation that is no secret; see :mod:`hushgrad.audit.scores`.
    """
    how, sigma = plan.participation, ratio * float(plan.noise_multiplier or 0.0)
    if isinstance(how, (Everyone, MinSep, Once)):
        event: Event = Gaussian(sigma / reach)
    else:
        observed = replace(how, rate=rate) if isinstance(how, Poisson) and rate is not None else how
        try:
            event = plan.event_with(sigma, participation=observed)
        except NoTheorem:
            return 0.0
    return float(epsilon_interval(event, delta=plan.delta, relation=plan.relation)[0])


# Step f-DP -----------------------------------------------------------------------------------------------------------------


def step_fdp(scores: StepScores, *, noise: float, rate: float, steps: int, delta: float, confidence: float) -> float:
    """The lower bound on epsilon by composition of one step's error bounds; ``noise`` only places the thresholds."""
    points = _points(scores, noise, confidence)
    p, q = _pair(points)
    p = (1.0 - rate) * q + rate * p
    losses = np.log(p / q)
    best = 0.0
    for mass, loss in ((p, losses), (q, -losses)):  # either may be the one with the canary
        tail = Composition(mass, loss, steps)
        low, high = 0.0, max(1e-3, float(steps * loss.max()))
        if tail.delta(low) <= delta:
            continue
        while high - low > 1e-4 * max(1.0, low):
            middle = (low + high) / 2
            low, high = (middle, high) if tail.delta(middle) > delta else (low, middle)
        best = max(best, low)
    return best


def _points(scores: StepScores, noise: float, confidence: float) -> list[tuple[float, float]]:
    """(false alarms, misses) at fixed thresholds: upper bounds that hold together with ``confidence``, the two ends included."""
    level = 1.0 - (1.0 - confidence) / (2 * _THRESHOLDS)
    outside, inside = np.sort(scores.outside), np.sort(scores.inside)
    points = [(0.0, 1.0), (1.0, 0.0)]
    for threshold in np.linspace(-3.0 * noise, 1.0 + 4.5 * noise, _THRESHOLDS):
        alarms = len(outside) - int(np.searchsorted(outside, threshold))
        misses = int(np.searchsorted(inside, threshold))
        points.append(
            (rate_upper_bound(alarms, len(outside), confidence=level), rate_upper_bound(misses, len(inside), confidence=level))
        )
    return points


def _pair(points: list[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    """The discrete (P, Q) whose trade-off curve is the lower convex hull of these points."""
    hull: list[tuple[float, float]] = []
    for a, b in sorted(set(points)):
        while len(hull) > 1 and _above(hull[-2], hull[-1], (a, b)):
            hull.pop()
        if not hull or b < hull[-1][1]:
            hull.append((a, b))
    alphas, betas = np.array(hull).T
    return -np.diff(betas), np.diff(alphas)


def _above(first: tuple[float, float], middle: tuple[float, float], last: tuple[float, float]) -> bool:
    """Whether ``middle`` lies on or above the line from ``first`` to ``last``."""
    (a, b), (c, d), (e, f) = first, middle, last
    return (d - b) * (e - a) >= (f - b) * (c - a)


class Composition:
    """The sum of ``steps`` independent losses, each ``loss[k]`` with probability ``mass[k]``.

    On a grid, every loss rounded down, nothing wrapped around but ``_RANGE``.

    >>> mass, loss = np.array([0.75, 0.25]), np.log([3.0, 1 / 3])  # randomised response, epsilon ln 3
    >>> 0.499 < Composition(mass, loss, 1).delta(0.0) <= 0.5
    True
    """

    def __init__(self, mass: np.ndarray, loss: np.ndarray, steps: int) -> None:
        bottom, top = _end(mass, -loss, steps), _end(mass, loss, steps)
        width = max(top + bottom, 1e-6)
        self._spacing = max(width / (1 << 20), 4e-3 * max(top, 1e-9) / steps)
        places = np.floor(loss / self._spacing).astype(np.int64)
        size = next_fast_len(int(width / self._spacing) + steps + 8)
        cells = np.zeros(size)
        np.add.at(cells, (places - places.min()) % size, mass)
        total = np.maximum(np.fft.irfft(np.fft.rfft(cells) ** steps, size), 0.0)
        first = int(np.floor(-bottom / self._spacing)) - steps  # of the window that the circle is cut to
        order = np.arange(first, first + size)
        self._mass = total[(order - steps * int(places.min())) % size]
        self._loss = order * self._spacing
        self._left_out = 2 * _RANGE + 1e-14 * math.sqrt(size)  # wrapped around, and rounded by the transform

    def delta(self, epsilon: float) -> float:
        """A lower bound on delta: E[(1 - e^(epsilon - loss))+], less what may be wrong with it."""
        over = self._loss > epsilon
        return float((self._mass[over] * -np.expm1(epsilon - self._loss[over])).sum()) - self._left_out


def _end(mass: np.ndarray, loss: np.ndarray, steps: int) -> float:
    """A number that the sum of the losses exceeds with probability ``_RANGE`` at most (Chernoff)."""

    def bound(log_tilt: float) -> float:
        tilt = math.exp(log_tilt)
        return float(steps * logsumexp(tilt * loss, b=mass) - math.log(_RANGE)) / tilt

    return float(minimize_scalar(bound, bounds=(-8.0, 8.0), method="bounded").fun)
