"""The auditor: attacks a plan's own code with canaries and says whether its claim survives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from scipy.special import ndtri

from hushgrad import _check
from hushgrad.audit import bounds, checks, one_run
from hushgrad.audit.bounds import ClaimedCurve, ErrorRates, claimed_curve
from hushgrad.audit.composed_bounds import composed_bounds, step_scores
from hushgrad.audit.gradient_canaries import Canaries, Released, Undo, bare, release
from hushgrad.audit.report import AuditReport, LowerBound, is_gaussian
from hushgrad.audit.scores import Scorer
from hushgrad.errors import ArgumentError
from hushgrad.events import Relation
from hushgrad.sampling import Draws, FixedSize, Poisson, RoundRobin, TruncatedPoisson
from hushgrad.train import Plan, Private

_CURVE = tuple(np.concatenate([[0.0, 1e-4, 1e-3], np.linspace(0.005, 0.995, 199), [1.0]]).tolist())
_SIMULATIONS = 8
_FAR_TOO_SMALL = 0.2


class Auditor:
    r"""Canaries through the real path of a plan: lower bounds on epsilon beside the claimed one, and a verdict.

    The first ``steps`` steps of the plan are run once, with the real capture, clipper, noise, denoiser, sampler and optimizer, on
    ``canaries`` records of known gradient, each in the data by a fair coin (see :mod:`hushgrad.audit.gradient_canaries`). The claim is
    ``plan.event(steps)`` under the plan's relation; where the steps of a canary are not claimed to be secret the attack knows them.

    **What refutes.** (1) *The gate*: the attack's errors lie below the claimed trade-off curve, at ``confidence``, by exact
    (Clopper-Pearson) bounds at two thresholds that were chosen on simulations, so no score is looked at twice. (2) The
    white-box checks of noise, contributions, batches and fresh keys, each with a false-alarm rate of at most 1e-4. (3) *The bound*:
    for Poisson batches and independent noise, a bound composed of single steps (:mod:`hushgrad.audit.composed_bounds`) exceeds the claim
    at a confidence of 0.9999. Correct code is refuted with probability at most 1 - ``confidence`` + 6e-4.

    **What it assumes.** Canaries have orthogonal directions and the noise is isotropic, so their scores are independent.

    Args:
        plan: a calibrated plan, or a running ``Private``, whose plan is then audited (the run itself is not touched).
        canaries: how many; 1000 take seconds.
        steps: how many steps at most.
        confidence: of the verdict's gate, and of each lower bound by itself.
        seed: for coins, noise and batches of the audit: the same seed, the same report.
        kind: "dirac" or "random" directions.
        undo: an inverse of a linear denoiser, applied to the released rows; without it a denoised plan is attacked as it is, and
            the noise and contribution checks, which need the rows before denoising, are left out.
        progress: show a progress bar.

    >>> plan = Plan.dpgd(noise_multiplier=20.0, delta=1e-5, dataset_size=100, steps=8)
    >>> report = Auditor(plan, canaries=100).run()
    >>> report.verdict, report.lower_bound < report.claimed.epsilon
    ('not refuted', True)

    Reference: Nasr et al. 2023, "Tight auditing of differentially private machine learning" (gradient canaries, Gaussian fit).
    """

    def __init__(
        self,
        plan: Plan | Private,
        *,
        canaries: int = 1000,
        steps: int = 50,
        confidence: float = 0.95,
        seed: int = 0,
        kind: str = "dirac",
        undo: Undo | None = None,
        progress: bool = False,
    ) -> None:
        _check.instance((Plan, Private), plan=plan)
        self.plan, self.notes = bare(plan.plan if isinstance(plan, Private) else plan)
        if self.plan.denoise is not None and undo is None:
            self.notes += ("noise and contributions, which the denoiser changes, were not checked one by one",)
        if not self.plan.noise_multiplier:
            raise ArgumentError("Expected a plan with noise: without any it claims nothing that an audit could refute.")
        self.steps = min(_check.positive_int(steps=steps), self.plan.steps)
        self.confidence = _check.between(0, 1, confidence=confidence)
        self.seed = _check.integer(0, seed=seed)
        self.undo, self.progress = undo, _check.instance(bool, progress=progress)
        count, self.records = _sizes(self.plan, _check.integer(20, canaries=canaries))
        make = {"dirac": Canaries.dirac, "random": Canaries.random}[_check.one_of(("dirac", "random"), kind=kind)]
        self.canaries = make(count, seed=self.seed)
        self.scorer = Scorer(self.plan, self.steps)

    def run(self) -> AuditReport:
        """Attack once and report."""
        claimed = self.plan.guarantee(steps=self.steps)
        curve = claimed_curve(claimed.event, self.plan.relation)
        gates, plain = self._thresholds(curve)
        with _bar(self.steps, self.progress) as on_step:
            released = self._release(self.seed, on_step)
        scores, members = self._scored(released)
        points = bounds.grid_rates(scores[members], scores[~members], thresholds=gates, confidence=self.confidence)
        rates = max(points, key=lambda point: bounds.curve_gap(point, curve))
        gap, made = bounds.curve_gap(rates, curve), self._checks(released)
        composed, sure = self._composed()
        refuted_by = (
            *(["trade-off"] if gap > 0 else []),
            *(["bound"] if sure > claimed.epsilon else []),
            *(check.name for check in made if not check.passed),
        )
        return AuditReport(
            claimed=claimed,
            lower_bounds=(*self._bounds(scores, members, points, plain), *composed),
            confidence=self.confidence,
            verdict="refuted" if refuted_by else "not refuted",
            refuted_by=refuted_by,
            checks=tuple(made),
            steps=self.steps,
            canaries=len(scores),
            threshold=rates.threshold,
            false_alarms=rates.false_alarms,
            misses=rates.misses,
            false_alarms_up=rates.false_alarms_up,
            misses_up=rates.misses_up,
            gap=gap,
            scores_in=tuple(scores[members].tolist()),
            scores_out=tuple(scores[~members].tolist()),
            curve=tuple(zip(_CURVE, curve(_CURVE).tolist(), strict=True)),
            seed=self.seed,
            notes=self.notes,
        )

    def _scored(self, released: Released) -> tuple[np.ndarray, np.ndarray]:
        """Scores and memberships of the canaries about which the audited steps say something."""
        scores = self.scorer(released.signal, released.present[:, : len(self.canaries)])
        usable = np.isfinite(scores)
        members = self.canaries.members[usable]
        if members.all() or not members.any():
            raise ArgumentError(
                "No canary took part in the audited steps on one of the sides. Audit more steps or more canaries."
            )
        return scores[usable], members

    def _release(self, seed: int | None, on_step: Callable[[int], None] = lambda step: None, steps: int = 0) -> Released:
        return release(
            self.plan, self.canaries, steps=steps or self.steps, records=self.records, seed=seed, undo=self.undo, on_step=on_step
        )

    # Thresholds, without looking at the run ----------------------------------------------------------------------------

    def _thresholds(self, curve: ClaimedCurve) -> tuple[tuple[float, ...], float]:
        """The best thresholds for the gate and for the plain bound, on *simulated* scores.

        The gate has two, and pays for both: the best one if the claim is true, and the best one if the noise is far too small.
        """
        gates = []
        for noise in (1.0, _FAR_TOO_SMALL):
            rates = self._simulated_rates(noise)
            allowed = np.clip(curve([r.false_alarms_up for r in rates]), 1e-9, 1 - 1e-9)
            # In standard deviations, so that the middle of the curve has no advantage over its ends.
            depth = ndtri(allowed) - ndtri(np.clip([r.misses_up for r in rates], 1e-9, 1 - 1e-9))
            gates.append(rates[int(np.argmax(depth))].threshold)
            if noise == 1.0:
                plain = max(rates, key=lambda r: bounds.epsilon_clopper_pearson(r, delta=self.plan.delta)).threshold
        return tuple(gates), plain

    def _simulated_rates(self, noise: float) -> list[ErrorRates]:
        ins, outs = self._simulated(noise)
        tried = np.unique(np.quantile(np.concatenate([ins, outs]), np.linspace(0.01, 0.99, 99)))
        return [self._expected(ins, outs, float(t)) for t in tried]

    def _expected(self, ins: np.ndarray, outs: np.ndarray, threshold: float) -> ErrorRates:
        """The bounds to expect at a threshold for this number of canaries."""
        each = max(1, len(self.canaries) // 2)
        level = 1.0 - (1.0 - self.confidence) / 2.0
        alarms, misses = float((outs >= threshold).mean()), float((ins < threshold).mean())
        up = [bounds.rate_upper_bound(round(rate * each), each, confidence=level) for rate in (alarms, misses)]
        return ErrorRates(
            threshold=threshold,
            false_alarms=alarms,
            misses=misses,
            false_alarms_up=up[0],
            misses_up=up[1],
            confidence=self.confidence,
        )

    def _simulated(self, noise: float) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng([self.seed, 2])
        draws = [self._simulate(rng, noise) for _ in range(_SIMULATIONS)]
        ins, outs = (np.concatenate(scores) for scores in zip(*draws, strict=True))
        usable = np.isfinite(ins) & np.isfinite(outs)
        if not usable.any():
            raise ArgumentError("No canary takes part in the audited steps. Audit more steps or more canaries.")
        return ins[usable], outs[usable]

    def _simulate(self, rng: np.random.Generator, factor: float) -> tuple[np.ndarray, np.ndarray]:
        """Scores of canaries in and out, with ``factor`` times the plan's noise; other batches and other noise than the run's."""
        count = len(self.canaries)
        deal, present = self.plan.sampler.dealer(self.records, Draws(rng.bytes(32))), np.zeros((self.steps, self.records))
        for step in range(self.steps):
            present[step, deal(step)] = 1.0
        present = present[:, :count]
        noise = [factor * self.scorer.noise * self.scorer.factor @ rng.standard_normal((self.steps, count)) for _ in range(2)]
        other = -present if self.plan.relation is Relation.REPLACE_ONE else 0.0
        return self.scorer(noise[0] + present, present > 0), self.scorer(noise[1] + other, present > 0)

    # What is found -----------------------------------------------------------------------------------------------------

    def _bounds(self, scores: np.ndarray, members: np.ndarray, points: list[ErrorRates], plain: float) -> tuple[LowerBound, ...]:
        delta, level = self.plan.delta, self.confidence
        tried = (*(point.threshold for point in points), plain)
        simple = bounds.grid_rates(scores[members], scores[~members], thresholds=tried, confidence=level)
        fit = "the trade-off curve is Gaussian" + ("" if is_gaussian(self.plan.event(self.steps)) else " (here only a fit)")
        found = [
            ("clopper-pearson", max(bounds.epsilon_clopper_pearson(r, delta=delta) for r in simple), "scores are independent"),
            (
                "clopper-pearson gdp",
                max(bounds.epsilon_gaussian(r, delta=delta) for r in points),
                f"scores are independent; {fit}",
            ),
            ("one run", one_run.epsilon_one_run(scores, members, delta=delta, confidence=level), "none beside fair coins"),
            ("one run f-dp", one_run.epsilon_one_run_fdp(scores, members, delta=delta, confidence=level), f"fair coins; {fit}"),
        ]
        return tuple(LowerBound(method=m, epsilon=e, confidence=level, assumption=a) for m, e, a in found)

    def _composed(self) -> tuple[tuple[LowerBound, ...], float]:
        """The bounds composed of single steps, and the largest of them that the verdict may rely on."""
        plan = self.plan if self.steps == self.plan.steps else _first(self.plan, self.steps)
        scores = step_scores(plan, canaries=len(self.canaries), steps=self.steps, seed=self.seed)
        if scores is None:
            return (), 0.0
        sure = composed_bounds(plan, scores, confidence=1.0 - checks.FALSE_ALARM, seed=self.seed)
        found = composed_bounds(plan, scores, confidence=self.confidence, seed=self.seed)
        return found, max(bound.epsilon for bound in sure)

    def _checks(self, released: Released) -> list[checks.Check]:
        made = [checks.batches_check(self.plan.participation, released.present)]
        if self.plan.denoise is None or self.undo is not None:
            made.append(checks.noise_check(self.scorer, released, self.canaries))
            made.append(checks.contribution_check(self.scorer, released, self.canaries))
        others = [self._release(None, steps=1).contrast[0] for _ in range(2)]
        made.append(checks.fresh_noise_check([released.contrast[0], *others]))
        return made


def _first(plan: Plan, steps: int) -> Plan:
    """The first ``steps`` steps of a plan with Poisson batches; any other plan unchanged."""
    sampler = plan.sampler
    return replace(plan, sampler=replace(sampler, steps=steps), steps=steps) if isinstance(sampler, Poisson) else plan


def _sizes(plan: Plan, wanted: int) -> tuple[int, int]:
    """(canaries, records): some samplers deal a fixed number of records; those that are no canaries are null records."""
    sampler = plan.sampler
    if isinstance(sampler, (FixedSize, TruncatedPoisson)):
        return min(wanted, sampler.dataset_size), sampler.dataset_size
    if isinstance(sampler, RoundRobin):
        return min(wanted, sampler.dataset_size), min(wanted, sampler.dataset_size)
    return wanted, wanted


@contextmanager
def _bar(steps: int, shown: bool) -> Iterator[Callable[[int], None]]:
    if not shown:
        yield lambda step: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Auditing", total=steps)
        yield lambda step: progress.update(task, completed=step + 1)
