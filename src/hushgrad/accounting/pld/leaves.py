"""The PLD accountant's analyses, one per event: which curves dominate it, and which it attains."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from scipy.special import bdtrc

from hushgrad.accounting.base import Loss, Nothing, Unbounded
from hushgrad.accounting.participation import Way, kind_of, sampling
from hushgrad.accounting.pld.accountant import PLD
from hushgrad.accounting.pld.bounds.allocation import AllocatedAbove, AllocatedBelow, reaches
from hushgrad.accounting.pld.bounds.exchange import AllocatedReplace
from hushgrad.accounting.pld.loss import Pair, PrivacyLoss
from hushgrad.accounting.pld.profiles.atoms import DEEPEST, DiscreteGaussianCurve, DiscreteLaplaceCurve, Response
from hushgrad.accounting.pld.profiles.continuous import BoundedRange, GaussianMixtureCurve, LaplaceCurve
from hushgrad.accounting.pld.profiles.curve import Curve, GaussianCurve, Mirror, Mixture
from hushgrad.accounting.pld.profiles.poisson import PoissonRemove, PoissonReplace, Shown, Symmetrised
from hushgrad.errors import NoTheorem
from hushgrad.events import (
    ApproxDP,
    BallsInBins,
    DiscreteGaussian,
    DiscreteLaplace,
    Event,
    Exponential,
    Gaussian,
    GaussianMixture,
    Laplace,
    Participation,
    Poisson,
    PureDP,
    RandomizedResponse,
    Relation,
    Sampled,
    TruncatedPoisson,
)

_NOISE = (Gaussian, Laplace, DiscreteGaussian, DiscreteLaplace)  # added to a sum: two sums are at most two contributions apart

_WIDEST = 1e5  # of a discrete Gaussian: 74 sigma atoms are 60 MB
_FARTHEST = 25.0  # of a mean of a mixture: losses are then hundreds in both directions, too large for ratios of densities
_MOST = 8_000_000  # atoms of a discrete Laplace distribution: the same


def _once(*above: Curve, below: tuple[Curve, ...] | None = None) -> PrivacyLoss:
    return PrivacyLoss(((Pair(above, above if below is None else below), 1),))


def _mirrored(curve: Curve) -> tuple[Curve, Curve]:
    return curve, Mirror(curve)


@PLD.analyses(Gaussian)
def _(event: Gaussian, relation: Relation) -> Loss:
    if event.noise_multiplier == 0:
        return Unbounded()
    return _once(GaussianCurve(relation.contributions / event.noise_multiplier))


@PLD.analyses(Laplace)
def _(event: Laplace, relation: Relation) -> Loss:
    return _once(LaplaceCurve(relation.contributions / event.scale))


@PLD.analyses(DiscreteGaussian)
def _(event: DiscreteGaussian, relation: Relation) -> Loss:
    if event.sigma > _WIDEST:
        raise NoTheorem(
            f"No table holds a discrete Gaussian of sigma={event.sigma:g}. Ask the zcdp or rdp accountant: it is tight there."
        )
    return _once(DiscreteGaussianCurve(event.sigma, relation.contributions * event.sensitivity))


@PLD.analyses(DiscreteLaplace)
def _(event: DiscreteLaplace, relation: Relation) -> Loss:
    distance = relation.contributions * event.sensitivity
    if min(distance, DEEPEST * event.scale) > _MOST:
        raise NoTheorem(
            f"No table holds a discrete Laplace distribution of scale={event.scale:g} at a distance of {distance:g}. "
            "Ask the rdp accountant, or describe the step by PureDP."
        )
    return _once(DiscreteLaplaceCurve(event.scale, distance))


@PLD.analyses(RandomizedResponse)
def _(event: RandomizedResponse, relation: Relation) -> Loss:
    if relation is Relation.ADD_REMOVE:
        raise NoTheorem(
            "Randomised response hides what a record answers, not that it answers, so it has no epsilon under add/remove. "
            "Ask with relation='replace_one', or with relation='zero_out'."
        )
    p, k = event.noise_probability, event.categories
    if p == 0:
        return Unbounded()
    return _once(Response(math.log1p((1 - p) * k / p), neutral=k - 2.0)) if p < 1 else Nothing()


@PLD.analyses(PureDP)
def _(event: PureDP, relation: Relation) -> Loss:
    return _once(Response(event.epsilon)) if event.epsilon > 0 else Nothing()


@PLD.analyses(ApproxDP)
def _(event: ApproxDP, relation: Relation) -> Loss:
    if event.epsilon == event.delta == 0:
        return Nothing()
    return _once(Response(max(event.epsilon, 1e-12), event.delta))


@PLD.analyses(Exponential)
def _(event: Exponential, relation: Relation) -> Loss:
    if event.epsilon == 0:
        return Nothing()
    # t = eta/2 is one mechanism of this kind: both answers equally far from a tie
    return _once(BoundedRange(event.epsilon), below=(Response(event.epsilon / 2),))


@PLD.analyses(GaussianMixture)
def _(event: GaussianMixture, relation: Relation) -> Loss:
    if event.noise_multiplier == 0:
        return Unbounded()
    if relation is Relation.REPLACE_ONE:
        raise NoTheorem(
            "A random contribution hidden by Gaussian noise is analysed for relation='add_remove' and 'zero_out' only. "
            "Ask for one of these."
        )
    means = tuple(s / event.noise_multiplier for s in event.sensitivities)
    present = [m for m, w in zip(means, event.probabilities, strict=True) if w > 0]
    if max(present) == 0:
        return Nothing()
    if min(present) > _FARTHEST:  # for tests of half lines, which are the best ones for a single Gaussian, the others are worse
        return _once(GaussianCurve(max(present)), below=(GaussianCurve(min(present)),))
    total = math.fsum(event.probabilities)
    return _once(*_mirrored(GaussianMixtureCurve(means, tuple(w / total for w in event.probabilities))))


@PLD.analyses(Sampled)
def _(event: Sampled, relation: Relation) -> Loss:
    analysis = _SAMPLES.get(kind_of(event.how))
    if analysis is None:
        raise NoTheorem(
            f"The pld accountant has no analysis of {type(event.how).__name__} sampling. "
            "Describe the run by Poisson, FixedSize or MinSep, or by Everyone, which is an upper bound."
        )
    return analysis(event.of, event.how, relation)


def _poisson(of: Event, rate: float, relation: Relation) -> Loss:
    if rate == 1:
        return PLD().loss(of, relation)
    if isinstance(of, GaussianMixture):
        still = replace(
            of,
            sensitivities=(0.0, *of.sensitivities),
            probabilities=(1 - rate, *(rate * w for w in of.probabilities)),
        )
        return PLD().loss(still, relation)
    if relation is Relation.REPLACE_ONE and isinstance(of, Gaussian) and of.noise_multiplier > 0:
        return _once(PoissonReplace(1 / of.noise_multiplier, rate))
    return _single(of, Poisson(rate), relation)


def _single(of: Event, how: Participation, relation: Relation) -> Loss:
    """One mechanism on a sample, by the theorem that covers it (``participation``)."""
    if not isinstance(of, (*_NOISE, PureDP, ApproxDP, Exponential, RandomizedResponse)):
        raise NoTheorem(
            f"Sampling of {type(of).__name__} has no analysis: only single mechanisms can be sampled. "
            "Sample each step, or leave the sampling out, which is an upper bound."
        )
    found = sampling(Sampled(how, of), relation)
    base = PLD().leaf(of, found.relation)
    if not isinstance(base, PrivacyLoss) or found.rate == 1:
        return base
    above, below = base.parts[0][0].above[0], base.parts[0][0].below[0]
    if found.way is Way.SHOWN:
        return _once(Shown(above, found.rate), below=(Shown(below, found.rate),) if found.attained else ())
    mirrored = _mirrored(PoissonRemove(below, found.rate)) if found.attained else ()
    if found.way is Way.EXCHANGED:  # Zhu, Dong and Wang 2022, theorem 11 (b); proved again in docs/explanation/pld.md
        return _once(Symmetrised(PoissonRemove(above, found.rate)), below=mirrored)
    return _once(*_mirrored(PoissonRemove(above, found.rate)), below=mirrored)


def _above(k: int, n: int, q: float) -> float:
    """P[Binomial(n, q) > k], rounded up by more than its error."""
    return float(bdtrc(k, n, q)) * (1 + 1e-9) if k < n else 0.0


def _truncated(of: Event, how: TruncatedPoisson, relation: Relation) -> Loss:
    """Condition on whether the other records alone fill the batch: if not, a Poisson sample; if so, a swap of two records."""
    if not isinstance(of, Gaussian) or of.noise_multiplier == 0:
        raise NoTheorem(f"Truncated Poisson samples of {of} have no analysis. Use Gaussian noise, or Poisson samples.")
    n, q, size, sigma = how.dataset_size, how.rate, how.size, of.noise_multiplier
    full = min(1.0, _above(size - 1, n - 1, q))
    if full == 0:
        return _poisson(of, q, relation)
    chosen = min(1.0, _above(size, n, q) * size / (full * n))
    swapped = PoissonRemove(GaussianCurve(2 / sigma), chosen)
    if relation is Relation.REPLACE_ONE:
        free: tuple[Curve, ...] = (PoissonReplace(1 / sigma, q) if q < 1 else GaussianCurve(2 / sigma),)
    else:
        free = _mirrored(PoissonRemove(GaussianCurve(1 / sigma), q))
    swaps = _mirrored(swapped) if relation is Relation.ADD_REMOVE else (Symmetrised(swapped),) * len(free)
    mixtures = (Mixture((f, s), (1 - full, full)) for f, s in zip(free, swaps, strict=True))
    return _once(*mixtures, below=_alone(1 / sigma, q * (1 - full), relation))


def _alone(mu: float, rate: float, relation: Relation) -> tuple[Curve, ...]:
    """What is attained where no other record contributes and this one does with a probability of at least ``rate``."""
    if rate <= 0:
        return ()
    if relation is Relation.REPLACE_ONE:
        return (PoissonReplace(mu, rate) if rate < 1 else GaussianCurve(2 * mu),)
    return _mirrored(PoissonRemove(GaussianCurve(mu), rate))


def _balls(of: Event, how: BallsInBins, relation: Relation) -> Loss:
    """Allocation for noise on sums; otherwise each record meets one step of each epoch, whichever it is.

    Gaussian noise of several epochs over the same bins is one epoch at the distance sqrt(epochs)/sigma. From below without more: an
    observer of a single bin sees the record with probability 1/bins, in all epochs.
    """
    if how.bins == 1:
        return PLD().loss(of * how.epochs, relation)
    if not isinstance(of, Gaussian) or of.noise_multiplier == 0:
        if not isinstance(of, _NOISE) or how.epochs > 1 or relation is Relation.REPLACE_ONE:
            return _unattained(PLD().loss(of * how.epochs, relation))
        base = PLD().leaf(of, relation)
        return _allocated(base.parts[0][0].above[0], how.bins) if isinstance(base, PrivacyLoss) else base
    mu = math.sqrt(how.epochs) / of.noise_multiplier
    if relation is not Relation.REPLACE_ONE:
        return _allocated(GaussianCurve(mu * (1 + 1e-15)), how.bins)
    far = reaches(GaussianCurve(2 * mu))
    return _once(
        AllocatedReplace(mu * (1 + 1e-15), how.bins) if far else GaussianCurve(2 * mu), below=_alone(mu, 1 / how.bins, relation)
    )


def _allocated(base: Curve, bins: int) -> Loss:
    """One pass over ``bins`` bins, each of which shows a record by ``base``."""
    alone = _mirrored(PoissonRemove(base, 1 / bins))
    if not reaches(base):
        return _once(base, below=alone)
    below = _mirrored(AllocatedBelow(base.mu * (1 - 1e-15), bins)) if isinstance(base, GaussianCurve) else alone
    return _once(*_mirrored(AllocatedAbove(base, bins)), below=below)


def _unattained(loss: Loss) -> Loss:
    """The same upper bound without a lower one, for a mechanism that may be more private than this analysis shows."""
    if not isinstance(loss, PrivacyLoss):
        return loss
    return replace(loss, parts=tuple((Pair(pair.above, ()), n) for pair, n in loss.parts))


# Samples of one kind each; ``participation`` tells them apart.
_SAMPLES: dict[str, Callable[[Event, Any, Relation], Loss]] = {
    "poisson": lambda of, how, relation: _poisson(of, how.rate, relation),
    "fixed size": _single,
    "truncated": _truncated,
    "balls": _balls,
}
