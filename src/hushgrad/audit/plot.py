"""The plot of an audit report (needs matplotlib)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from hushgrad.audit.report import AuditReport

from hushgrad._printed import at_least, at_most
from hushgrad.release.atomic import written


def draw(report: AuditReport, path: str | Path) -> None:
    """Two panels and a caption; the format follows the name's ending."""
    figure = Figure(figsize=(10, 4.6), layout="constrained")
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
    written(path, lambda buffer: figure.savefig(buffer, format=Path(path).suffix[1:] or "png"))
