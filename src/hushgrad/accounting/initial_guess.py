"""Initial guesses for calibrations: they save evaluations, and no result depends on them."""

from __future__ import annotations

import math

from hushgrad import _check
from hushgrad.accounting.gaussian import gaussian_mu
from hushgrad.events import Event, Gaussian, Poisson, Relation, Repeat, Sampled


def likely_noise(epsilon: float, delta: float, steps: int, rate: float, relation: Relation | str) -> float:
    """The noise by the central limit theorem: rate sqrt(steps (e^{1/sigma^2} - 1)) is the distance of one Gaussian (a guess)."""
    mu = gaussian_mu(_check.positive(epsilon=epsilon), _check.delta(delta=delta))
    ratio = mu / rate
    spread = math.log1p(ratio * ratio / steps)  # a power would raise where a product is infinite
    alone = min(max(1.0 / math.sqrt(spread), 1e-3), 1e8) if spread > 0.0 else 1e8
    return alone * Relation.of(relation).contributions


def likely_factor(event: Event, epsilon: float, delta: float, relation: Relation | str) -> float | None:
    """A guess of the factor on ``event``'s noise that meets the target; None unless it is one noise multiplier on Poisson samples."""
    step, steps = (event.of, event.times) if isinstance(event, Repeat) else (event, 1)
    rate, base = 1.0, step
    if isinstance(step, Sampled) and isinstance(step.how, Poisson):
        rate, base = step.how.rate, step.of
    if not isinstance(base, Gaussian) or base.noise_multiplier == 0.0:
        return None
    return likely_noise(epsilon, delta, steps, rate, relation) / base.noise_multiplier
