"""Audit reports: the claim, the lower bounds on epsilon, and a verdict, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hushgrad import _check
from hushgrad._printed import at_least, at_most
from hushgrad.audit.bounds import ErrorRates
from hushgrad.audit.checks import Check, _Finding
from hushgrad.errors import ArgumentError
from hushgrad.events import Event, Gaussian, Repeat
from hushgrad.guarantee import Guarantee
from hushgrad.release.atomic import written


def is_gaussian(event: Event) -> bool:
    """Whether an event is a Gaussian, or several equal ones: its trade-off curve is then a Gaussian one."""
    return isinstance(event.of if isinstance(event, Repeat) else event, Gaussian)


@dataclass(frozen=True, kw_only=True)
class LowerBound(_Finding):
    """With ``confidence``, epsilon at the claim's delta is at least this against ``threat``, if ``assumption`` holds."""

    method: str
    epsilon: float
    confidence: float
    assumption: str
    threat: str = "the attacker sees every released gradient and knows all records but one, whose gradient he has chosen"


class _Verdict(_Finding):
    """A report whose verdict is "refuted" or "not refuted"."""

    verdict: str
    expected = _check.each(verdict=partial(_check.one_of, ("refuted", "not refuted")))

    @property
    def refuted(self) -> bool:
        """Whether the claim is false: a check failed or, at the stated confidence, a bound exceeds it."""
        return self.verdict == "refuted"


@dataclass(frozen=True, kw_only=True)
class AuditReport(_Verdict):
    """What an audit found. ``str()`` is one honest sentence; an audit that finds nothing proves nothing.

    ``claimed`` is the guarantee of the audited steps. ``rates`` are the attack's errors at the ``threshold`` fixed beforehand, with
    upper bounds at the gate's confidence; ``gap`` is how far that point lies below the claimed trade-off curve (``curve``: pairs
    of false-alarm and miss rates), so a positive one refutes. ``checks`` are the white-box ones.
    """

    claimed: Guarantee
    lower_bounds: tuple[LowerBound, ...]
    confidence: float
    verdict: str
    refuted_by: tuple[str, ...]
    checks: tuple[Check, ...]
    steps: int
    canaries: int
    threshold: float
    false_alarms: float
    misses: float
    false_alarms_up: float
    misses_up: float
    gap: float
    scores_in: tuple[float, ...]
    scores_out: tuple[float, ...]
    curve: tuple[tuple[float, float], ...]
    seed: int
    notes: tuple[str, ...] = ()

    @property
    def lower_bound(self) -> float:
        """The lower bound on epsilon by the method that is fixed beforehand, so that ``confidence`` is its own.

        The Gaussian bound if the claimed curve is Gaussian, else the one composed of single steps if there is one, else the
        plain one. The largest of several would not hold with it.
        """
        if self.bound_is_exact:
            return self.bound("clopper-pearson gdp")
        composed = any(bound.method == "steps f-dp" for bound in self.lower_bounds)
        return self.bound("steps f-dp" if composed else "clopper-pearson")

    @property
    def rates(self) -> ErrorRates:
        """The attack's errors and their upper bounds."""
        return ErrorRates(**{field.name: getattr(self, field.name) for field in fields(ErrorRates)})

    @property
    def bound_is_exact(self) -> bool:
        """Whether the claimed curve is Gaussian, so that the Gaussian bounds assume nothing beyond the claim."""
        return is_gaussian(self.claimed.event)

    def bound(self, method: str) -> float:
        """The lower bound of one method by its name."""
        names = {bound.method: bound.epsilon for bound in self.lower_bounds}
        return names[_check.one_of(tuple(names), method=method)]

    def __str__(self) -> str:
        claim = f"({at_most(self.claimed.epsilon, 3)}, {at_most(self.claimed.delta, 6)})-DP of {self.steps} steps ({self.claimed.event})"
        found = (
            f"{self.canaries} canaries bound epsilon from below by {at_least(self.lower_bound)} at "
            f"{100 * self.confidence:g}% confidence"
        )
        notes = "".join(f" Note: {note}." for note in self.notes)
        if self.refuted:
            details = "".join(f" {check.name}: {check.seen}." for check in self.checks if not check.passed)
            return f"The claim {claim} is refuted by {', '.join(self.refuted_by)}; {found}.{details}{notes}"
        return f"The claim {claim} is not refuted: {found}, and every check passed; this is no proof of privacy.{notes}"

    def summary(self) -> dict[str, Any]:
        """The report without the single scores, as a JSON object."""
        content = self.to_json()
        return {key: value for key, value in content.items() if key not in ("scores_in", "scores_out", "curve")}

    def plot(self, path: str | Path) -> None:
        """Save a picture: the scores' histograms, and the attack's errors against the claimed trade-off curve."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ArgumentError("A picture needs matplotlib. Install it with pip install 'hushgrad[report]'.") from None
        figure = Figure(figsize=(10, 4.6), layout="constrained")
        _draw(figure, self)
        written(path, lambda buffer: figure.savefig(buffer, format=Path(path).suffix[1:] or "png"))


@dataclass(frozen=True, kw_only=True)
class DeepReport(_Verdict):
    """What a deep audit found: the claim for the whole plan, its certified lower end, every check and every bound.

    ``seconds`` of processor time by part. ``str()`` is a table and a sentence.
    """

    claimed: Guarantee
    certified_low: float
    lower_bounds: tuple[LowerBound, ...]
    checks: tuple[Check, ...]
    verdict: str
    refuted_by: tuple[str, ...]
    seconds: tuple[tuple[str, float], ...]
    notes: tuple[str, ...] = ()

    @property
    def lower_bound(self) -> float:
        """The bound from this run's own noise, contributions and batches."""
        return max((bound.epsilon for bound in self.lower_bounds), default=0.0)

    def __str__(self) -> str:
        lines = [f"{'ok    ' if check.passed else 'FAILED'} {check.name}: {check.seen}" for check in self.checks]
        lines += [
            f"epsilon >= {at_least(bound.epsilon)} ({bound.method}, {100 * bound.confidence:g}%): {bound.threat}; "
            f"assumes {bound.assumption}"
            for bound in self.lower_bounds
        ]
        claim = f"epsilon <= {at_most(self.claimed.epsilon)} at delta {at_most(self.claimed.delta, 6)} ({self.claimed.event})"
        verdict = f"refuted by {', '.join(self.refuted_by)}" if self.refuted else "not refuted; this is no proof of privacy"
        return "\n".join([*lines, *(f"Note: {note}." for note in self.notes), f"The claim {claim} is {verdict}."])


def _draw(figure: Any, report: AuditReport) -> None:
    """Two panels and a caption."""
    left, right = figure.subplots(1, 2)
    bins = np.histogram_bin_edges(np.concatenate([report.scores_in, report.scores_out]), bins=40)
    left.hist(report.scores_out, bins=list(bins), alpha=0.6, label=f"canary out ({len(report.scores_out)})", color="tab:blue")
    left.hist(report.scores_in, bins=list(bins), alpha=0.6, label=f"canary in ({len(report.scores_in)})", color="tab:orange")
    left.axvline(report.threshold, color="black", linewidth=1, label="threshold, fixed beforehand")
    left.set(xlabel="score of a canary (noise standard deviations, or log-likelihood ratio)", ylabel="canaries")
    left.legend(fontsize=8)
    alphas, betas = zip(*report.curve, strict=True)
    right.plot(alphas, betas, color="black", label="claimed trade-off curve")
    right.fill_between(alphas, 0, betas, color="tab:red", alpha=0.12, label="impossible if the claim holds")
    right.plot([0, 1], [1, 0], color="grey", linestyle=":", linewidth=0.8, label="guessing")
    spread = [[0.0], [report.false_alarms_up - report.false_alarms]], [[0.0], [report.misses_up - report.misses]]
    right.errorbar(
        [report.false_alarms], [report.misses], xerr=spread[0], yerr=spread[1], fmt="o", capsize=3, label="attack, upper bounds"
    )
    right.set(xlabel="false-alarm rate", ylabel="miss rate", xlim=(0, 1), ylim=(0, 1))
    right.legend(fontsize=8)
    figure.suptitle(
        f"Audit of {report.claimed.event}: claimed epsilon {at_most(report.claimed.epsilon, 3)} at delta "
        f"{at_most(report.claimed.delta, 6)}, "
        f"at least {at_least(report.lower_bound, 3)} at {100 * report.confidence:g}% confidence; {report.verdict}",
        fontsize=9,
    )
