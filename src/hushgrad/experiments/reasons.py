"""Why a claim was not reproduced, or stays undecided, in words: shown in the overview where the experiment itself notes nothing."""

from __future__ import annotations

import math
from typing import Any

from hushgrad.experiments.base import NOISE, REFUTED, UNDECIDED

_SMOOTHING = (
    "Decided against the claim: smoothing trades noise for bias. With a step size of its own for each method there is little noise left to "
    "take, and the bias remains; at a step too long for the plain method it gains, as the claim on large step sizes says, which holds."
)
# (experiment, how the claim begins, reason): the first that fits counts.
_REASONS = (
    ("mnist-cnn", "figure 7: DP-LSSGD improves", _SMOOTHING),
    ("mnist-cnn", "figures 5 and 7: DP-LSSGD improves", _SMOOTHING),
    ("mnist-cnn", "figure 5: DP-LSAdam improves", _SMOOTHING),
    ("mnist-cnn-again", "figures 5 and 7: DP-LSSGD improves", _SMOOTHING),
    (
        "mnist-cnn",
        "DP-FTRL without amplification",
        "Most likely the comparison is at fault, not the claim: each method has one step size, chosen at epsilon 0.4. With DP-SGD's (3) "
        "DP-FTRL has 91.7 ± 1.1 % on the test data at epsilon 2 (three seeds; 88.4 with 1.5), DP-SGD 92.6 ± 0.4: the step size was 3.3 of "
        "the 4.2 points; see 'a step size for each epsilon' on the page on noise.",
    ),
    (
        "cifar10",
        "denoising improves on DP-SGD: Laplacian",
        "Decided against the claim where noise is small: smoothing gains at epsilon 1, where the claim holds, and at larger ones its bias "
        "costs more than the noise that it takes.",
    ),
)
_PAPER = "137 fresh pairs of runs at eps = 0.3 would, 1.7 hours of one core; there is no command for them."
# What decides what is undecided, in the same form: seeds for a chance of 95 per cent, and the time of one core.
_DECIDED_BY = (
    ("mnist-logistic", "sigma = 3 improves", _PAPER),
    ("mnist-logistic", "figure 4: sigma = 3 improves", _PAPER),
    (
        "cifar10-again",
        "correlated noise",
        "850 fresh pairs of runs would, half an hour of one core; there is no command for them.",
    ),
)


def reason(experiment: str, claim: dict[str, Any]) -> str:
    """A sentence for a claim that does not hold, from the table above; of an undecided one also what would decide it."""
    if claim["verdict"] not in (REFUTED, UNDECIDED):
        return ""
    known = _REASONS if claim["verdict"] == REFUTED else _DECIDED_BY
    why = next((why for name, begins, why in known if name == experiment and claim["says"].startswith(begins)), "")
    if claim["verdict"] == REFUTED:
        return why
    gap = abs(claim["found"] - claim["expected"])
    times = math.inf if gap == 0 else (NOISE * claim["stderr"] / gap) ** 2
    if times > 50:
        return "The two are alike: no number of seeds that anybody would run tells them apart."
    many = "twice" if times <= 2 else f"{math.ceil(times)} times"
    return f"If the difference is what it seems, {many} as many seeds would decide it. {why}".rstrip()
