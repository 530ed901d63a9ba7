r"""Model size, batch size and steps for private pre-training under a compute budget, by a published scaling law.

McKenna et al. (2025) trained BERT models of 4.5 to 778 million parameters with DP-Adam on texts of 512 tokens, and describe the training
loss of M parameters after T steps by the noise-batch ratio r = (noise multiplier) / (batch size) (their equations 2 and 3):

    L(M, T, r) = E + A / M^a + B / T^b + C s(r)^g / M^c,        s(r) = sigmoid((log r - m) / w).

Compute is 6 M B S T for batches of B texts of S tokens; epsilon, delta and the number N of records enter by r alone, which an accountant
gives for Poisson samples of rate B / N. The exponents of the paper belong to runs of more than 100,000 steps, and its other constants were
not published. So all ten constants here are **fitted to the paper's Table 2**: twenty budgets, the loss that was reached at each and the
(M, T, B) that was best there (``benchmarks/scaling.py``; docs/scale.md has the errors on rows that were left out of the fit). What is
returned stays within what the paper trained, and other questions are refused. The law ranks; it does not promise a loss on other text.

Reference: McKenna et al., "Scaling laws for differentially private language models" (ICML 2025), equation 3 and Table 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from hushgrad import _check
from hushgrad.accounting.calibration import calibrate_noise
from hushgrad.accounting.calibration_target import likely_noise
from hushgrad.events import Relation

LENGTH = 512  # tokens of a text, in all runs of the paper
# What the paper trained (parameters, steps, noise-batch ratios) or has a row of its table for (batch sizes, compute).
PARAMETERS, STEPS, RATIOS = (4.5e6, 3.35e8), (1e3, 1.28e5), (2.0**-23, 2.0**-6)
BATCHES, COMPUTE = (512, 2**20), (1.25e16, 1.25e23)
_SIZES = 14  # of models, between the smallest and the largest


@dataclass(frozen=True, kw_only=True)
class Law:
    """The constants of equation 3, by M / 3e7 and T / 1e4 (numbers near one); see the table of this module."""

    floor: float  # E
    size: tuple[float, float]  # A, a
    steps: tuple[float, float]  # B, b
    noise: tuple[float, float, float]  # C, g, c
    middle: float  # m
    width: float  # w

    def loss(self, parameters: float, steps: float, ratio: float) -> float:
        """The predicted loss at the end of training, in nats per token.

        Args:
            parameters: M.
            steps: T.
            ratio: r, the noise multiplier divided by the batch size.

        >>> round(LAW.loss(4.9e7, 1.1e4, 1.508e-5), 1)  # the paper has 2.81
        2.8
        """
        size, (factor, power, more) = parameters / 3e7, self.noise
        noisy = 1.0 / (1.0 + math.exp(-(math.log(ratio) - self.middle) / self.width))
        learned = self.floor + self.size[0] * size ** -self.size[1] + self.steps[0] * (steps / 1e4) ** -self.steps[1]
        return learned + factor * noisy**power * size**-more


# Fitted by benchmarks/scaling.py.
LAW = Law(floor=0.4644, size=(0.2422, 0.6103), steps=(1.215, 0.2729), noise=(6.404, 3.291, -0.08769), middle=-11.59, width=2.234)


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """A way to spend the compute: model size, batch size and steps, the noise that the privacy budget needs, and the predicted loss.

    >>> from hushgrad.planner import allocations
    >>> best = allocations(compute=3.8e20, epsilon=4, delta=1e-8, dataset_size=10**7, exact=1)[0]
    >>> best.batch_size * best.steps > 10**7
    True
    """

    parameters: float
    batch_size: int
    steps: int
    noise_multiplier: float
    loss: float

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def allocations(
    *, compute: float, epsilon: float, delta: float, dataset_size: int, law: Law = LAW, exact: int = 5
) -> list[Allocation]:
    """The best batch size and number of steps for models of each size, by predicted loss; see the formula of this module.

    Noise is that of Poisson samples under adding or removing one record: by the accountant for the first ``exact`` answers,
    and by the central limit theorem (within about 5 %) for the others, which are only ranked by it.

    Args:
        compute: operations of the whole run, 6 times parameters, steps, batch size and 512 tokens.
        epsilon: of the whole run.
        delta: of the whole run.
        dataset_size: records, a public number.
        law: the constants.
        exact: for how many answers noise is calibrated, not estimated.

    >>> best = allocations(compute=3.8e20, epsilon=4, delta=1e-8, dataset_size=10**7, exact=1)[0]
    >>> 2e7 < best.parameters < 1.2e8 and 5e4 < best.batch_size < 5e5  # the paper: 4.9e7 and 2.2e5
    True

    Raises:
        ArgumentError: for budgets beyond the paper's, where the law says nothing.
    """
    _check.between(*COMPUTE, compute=compute, remedy="The published law has no runs of less or more.")
    epsilon, delta = _check.positive(epsilon=epsilon), _check.delta(delta=delta)
    records = _check.positive_int(dataset_size=dataset_size)
    found: dict[float, Allocation] = {}
    for one in _possible(compute, epsilon, delta, records, law):
        if one.parameters not in found or one.loss < found[one.parameters].loss:
            found[one.parameters] = one
    ranked = sorted(found.values(), key=lambda one: one.loss)
    if not ranked:
        sizes = f"{PARAMETERS[0]:.2g} to {PARAMETERS[1]:.3g} parameters, {STEPS[0]:g} to {STEPS[1]:g} steps"
        known = f"{sizes}, batches of {BATCHES[0]} to {BATCHES[1]}, noise-batch ratios of 2^-23 to 2^-6"
        _check.fail(
            "compute", compute, f"to allow a run that the published law covers ({known})", "Change compute, data or epsilon."
        )
    best = [_calibrated(one, epsilon, delta, records, law) for one in ranked[:exact]]
    return sorted(best, key=lambda one: one.loss) + ranked[exact:]


def saturating(*, epsilon: float, delta: float, dataset_size: int, law: Law = LAW) -> float:
    """The least compute whose best loss is within 1 % of the best of all: more of it buys nothing (the paper's Table 2 asks the same)."""
    steps = [COMPUTE[0] * 2.0 ** (k / 2) for k in range(int(2 * math.log2(COMPUTE[1] / COMPUTE[0])) + 1)]
    least = [
        (compute, min((one.loss for one in _possible(compute, epsilon, delta, dataset_size, law)), default=math.inf))
        for compute in steps
    ]
    best = min(loss for _, loss in least)
    return next(compute for compute, loss in least if loss <= 1.01 * best)


def _possible(compute: float, epsilon: float, delta: float, records: int, law: Law) -> Iterator[Allocation]:
    """All allocations of this compute within the paper's range: model sizes in equal ratios, batch sizes in ratios of sqrt 2."""
    growth = (PARAMETERS[1] / PARAMETERS[0]) ** (1 / (_SIZES - 1))
    for parameters in (PARAMETERS[0] * growth**k for k in range(_SIZES)):
        for batch in (round(BATCHES[0] * 2.0 ** (half / 2)) for half in range(2 * (BATCHES[1] // BATCHES[0]).bit_length() - 1)):
            steps = int(compute / (6 * LENGTH * parameters * batch))
            if not STEPS[0] <= steps <= STEPS[1] or batch > records:
                continue
            noise = likely_noise(epsilon, delta, steps, batch / records, Relation.ADD_REMOVE)
            if RATIOS[0] <= noise / batch <= RATIOS[1]:
                loss = law.loss(parameters, steps, noise / batch)
                yield Allocation(parameters=parameters, batch_size=batch, steps=steps, noise_multiplier=noise, loss=loss)


def _calibrated(one: Allocation, epsilon: float, delta: float, records: int, law: Law) -> Allocation:
    noise = calibrate_noise(epsilon=epsilon, delta=delta, steps=one.steps, rate=one.batch_size / records)
    return replace(one, noise_multiplier=noise, loss=law.loss(one.parameters, one.steps, noise / one.batch_size))
