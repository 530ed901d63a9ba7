r"""Membership inference from losses, as a black-box report. An attack that finds nothing proves nothing.

The attacker has the target model's loss on each example and the losses of reference models, trained on other random subsets, of
which it is known who was in. With p = e^-loss the scores are

| method | score of example x |
|---|---|
| "loss" | log p(x): no references |
| "lira" | log-likelihood ratio of the logit of p(x) under two normals fitted to the reference models with and without x |
| "rmia" | the fraction of the population z with [p(x) / mean p_ref(x)] / [p(z) / mean p_ref(z)] >= gamma |
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import beta, norm

from hushgrad import _check
from hushgrad.audit.checks import _Finding
from hushgrad.recipes.metrics import area

_FEW = 16  # reference models on each side below which all examples share one variance (Carlini et al. 2022, section VI.C)


@dataclass(frozen=True, kw_only=True)
class MembershipReport(_Finding):
    """How well one attack tells members from others: area under the curve, and true positives at few false ones."""

    method: str
    auc: float
    false_positive_rate: float
    true_positive_rate: float
    true_positive_low: float
    true_positive_high: float
    confidence: float
    members: int
    others: int

    def __str__(self) -> str:
        return (
            f"The {self.method} attack has an AUC of {self.auc:.3f} (0.5 is guessing) and finds {self.true_positive_rate:.2%} of "
            f"{self.members} members at {self.false_positive_rate:.2%} false alarms ({self.true_positive_low:.2%} to "
            f"{self.true_positive_high:.2%} at {100 * self.confidence:g}% confidence); a stronger attack may find more."
        )


def membership_inference(
    losses: ArrayLike,
    members: ArrayLike,
    *,
    reference_losses: ArrayLike | None = None,
    reference_members: ArrayLike | None = None,
    method: str = "lira",
    false_positive_rate: float = 0.001,
    gamma: float = 2.0,
    confidence: float = 0.95,
) -> MembershipReport:
    """Attack n examples by their losses (n,) under the target, and (k, n) under k reference models with (k, n) memberships.

    The confidence interval is Clopper-Pearson's on the true positives at the threshold. The threshold is the lowest score with at
    most ``false_positive_rate`` false alarms among the others, so fewer than 1 / rate of them make the report coarse.

    Args:
        losses: of n examples under the attacked model.
        members: which of them it was trained on.
        reference_losses: of the same examples under k reference models, (k, n).
        reference_members: which examples each reference model was trained on, (k, n).
        method: "lira", "rmia" or, without reference models, "loss".
        false_positive_rate: at which true positives are reported.
        gamma: how much likelier a member must be than others, for "rmia".
        confidence: probability with which the bounds hold.

        >>> rng = np.random.default_rng(0)
        >>> members = rng.random(2000) < 0.5
        >>> losses = rng.exponential(1.0, 2000) * np.where(members, 0.5, 1.0)
        >>> print(round(membership_inference(losses, members, method="loss").auc, 1))
        0.7

    References: Carlini et al. 2022, "Membership inference attacks from first principles" (LiRA); Zarifzadeh, Liu and Shokri 2024,
    "Low-cost high-power membership inference attacks" (RMIA).
    """
    truth = np.asarray(members, dtype=bool)
    target = _losses(losses, truth.shape, "losses")
    if truth.ndim != 1 or truth.all() or not truth.any():
        _check.fail("members", members, "to hold members and others")
    _check.one_of(("loss", "lira", "rmia"), method=method)
    if method == "loss":
        scores = -target
    else:
        inside = np.asarray(reference_members, dtype=bool)
        if reference_losses is None or inside.ndim != 2 or not len(inside) or inside.shape[1:] != truth.shape:
            constraint = "to be (k, n) losses of k >= 1 models with (k, n) memberships"
            _check.fail("reference_losses", reference_losses, constraint, 'Or use method="loss".')
        references = _losses(reference_losses, inside.shape, "reference_losses")
        scores = _lira(target, references, inside) if method == "lira" else _rmia(target, references, inside, gamma)
    return _report(scores, truth, method, _check.between(0, 1, false_positive_rate=false_positive_rate), confidence)


def _losses(values: ArrayLike, shape: tuple[int, ...], name: str) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if array.shape != shape or not np.isfinite(array).all() or (array < 0).any():
        _check.fail(name, values, f"to be losses of at least 0, of shape {shape}")
    return array


def _lira(target: np.ndarray, references: np.ndarray, inside: np.ndarray) -> np.ndarray:
    signal, seen = _logit(target), _logit(references)
    (mean_in, spread_in), (mean_out, spread_out) = _fit(seen, inside), _fit(seen, ~inside)
    known_in, known_out = np.isfinite(mean_in), np.isfinite(mean_out)
    if not (known_in.any() and known_out.any()):  # offline: all reference models are on one side, so only that is known
        mean, spread, sign = (mean_out, spread_out, 1.0) if known_out.any() else (mean_in, spread_in, -1.0)
        return np.asarray(sign * (signal - mean) / spread)
    both = known_in & known_out
    known_in, known_out = (both, both) if both.any() else (known_in, known_out)  # one model: no example is on both sides
    shift = float(mean_in[known_in].mean() - mean_out[known_out].mean())  # of membership on average, for a side that is missing
    mean_in, mean_out = (
        np.where(np.isnan(mean_in), mean_out + shift, mean_in),
        np.where(np.isnan(mean_out), mean_in - shift, mean_out),
    )
    return np.asarray(norm.logpdf(signal, mean_in, spread_in) - norm.logpdf(signal, mean_out, spread_out))


def _fit(seen: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation for each example over the models in ``mask``; NaN where there is none."""
    count = mask.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(mask, seen, 0.0).sum(axis=0) / count
        squares = np.where(mask, (seen - mean) ** 2, 0.0)
        if count.min() < _FEW:
            spread = np.full_like(mean, np.sqrt(squares.sum() / max(1, np.maximum(count - 1, 0).sum())))
        else:
            spread = np.sqrt(squares.sum(axis=0) / (count - 1))
    return mean, np.maximum(spread, 1e-6)


def _rmia(target: np.ndarray, references: np.ndarray, inside: np.ndarray, gamma: float) -> np.ndarray:
    # The marginal p(x) is the mean over models with and without x; where one side is missing, over all there are.
    out = np.where(inside, np.nan, np.exp(-references))
    have = np.where(inside, np.exp(-references), np.nan)
    with np.errstate(invalid="ignore"):
        sides = [np.nansum(side, axis=0) / np.maximum(1, np.isfinite(side).sum(axis=0)) for side in (out, have)]
    present = [np.isfinite(side).any(axis=0) for side in (out, have)]
    marginal = (sides[0] * present[0] + sides[1] * present[1]) / (present[0].astype(float) + present[1])
    ratio = np.exp(-target) / np.maximum(marginal, 1e-300)
    ordered = np.sort(ratio)
    return np.asarray(np.searchsorted(ordered, ratio / _check.positive(gamma=gamma), "right") / len(ordered)) + 1e-9 * ratio


def _logit(losses: np.ndarray) -> np.ndarray:
    """log(p / (1 - p)) with p = e^-loss, without cancellation near p = 1."""
    safe = np.maximum(losses, 1e-12)
    return -safe - np.log(-np.expm1(-safe))


def _report(scores: np.ndarray, members: np.ndarray, method: str, rate: float, confidence: float) -> MembershipReport:
    ins, outs = scores[members], scores[~members]
    allowed = int(rate * len(outs))
    threshold = np.sort(outs)[::-1][allowed]  # strictly above it lie at most ``allowed`` of the others
    hits = int((ins > threshold).sum())
    tail = (1.0 - _check.between(0, 1, confidence=confidence)) / 2.0
    return MembershipReport(
        method=method,
        auc=area(scores, members),
        false_positive_rate=float((outs > threshold).mean()),
        true_positive_rate=hits / len(ins),
        true_positive_low=float(beta.ppf(tail, hits, len(ins) - hits + 1)) if hits else 0.0,
        true_positive_high=float(beta.isf(tail, hits + 1, len(ins) - hits)) if hits < len(ins) else 1.0,
        confidence=confidence,
        members=len(ins),
        others=len(outs),
    )
