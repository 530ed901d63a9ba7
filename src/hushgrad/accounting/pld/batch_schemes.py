"""Sampling schemes with analyses of their own (fixed size, truncated Poisson, balls in bins): dominating pairs from above and below."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import cast

from scipy.special import bdtr, bdtrc, betaln

from hushgrad.accounting.base import Loss
from hushgrad.accounting.heuristics import HEURISTICS
from hushgrad.accounting.participation import require_known_size
from hushgrad.accounting.pld.accountant import PLD
from hushgrad.accounting.pld.bounds.allocation import AllocatedAbove, AllocatedBelow, reaches
from hushgrad.accounting.pld.bounds.replace_one_allocation import AllocatedReplace
from hushgrad.accounting.pld.bounds.replace_one_allocation_below import AllocatedReplaceBelow
from hushgrad.accounting.pld.loss import Pair, PrivacyLoss
from hushgrad.accounting.pld.profiles.continuous import LaplaceCurve
from hushgrad.accounting.pld.profiles.curve import Curve, GaussianCurve, Mirror, Mixture
from hushgrad.accounting.pld.profiles.discrete import DiscreteGaussianCurve, DiscreteLaplaceCurve
from hushgrad.accounting.pld.profiles.poisson import PoissonRemove, PoissonReplace, Symmetrised
from hushgrad.accounting.pld.profiles.replace_one import DiscreteReplace, LaplaceReplace, TwoDistances
from hushgrad.accounting.pld.profiles.sized_batches import Joined, TruncatedRemove, ZeroedBeside
from hushgrad.errors import NoTheorem
from hushgrad.events import (
    BallsInBins,
    DiscreteGaussian,
    DiscreteLaplace,
    Event,
    Gaussian,
    Laplace,
    Relation,
    Sampled,
    TruncatedPoisson,
)

_TAILS = 1e-9  # the relative error of binomial tails, generously
_U = 2.0**-53


@dataclass(frozen=True)
class Cuts:
    """The masses of ``profiles/sized_batches`` for one record among n, each with a relative error of at most ``error``."""

    rate: float
    free: float  # P[N < B-1]
    last: float  # P[N = B-1]
    full: float  # P[N >= B]
    survives: float  # P[N >= B, the record is sampled and stays]
    error: float

    @classmethod
    def of(cls, n: int, q: float, size: int) -> Cuts:
        """For N ~ Bin(n-1, q) others. P[N = k] q/(k+1) = P[Bin(n, q) = k+1]/n makes the survivors a tail."""
        full = float(bdtrc(size - 1, n - 1, q)) if size - 1 < n - 1 else 0.0
        survives = size / n * float(bdtrc(size, n, q)) if size < n else 0.0
        free = float(bdtr(size - 2, n - 1, q)) if size > 1 else 0.0
        last, error = _point(size - 1, n - 1, q)
        return cls(q, free, last, full, min(survives, full), max(_TAILS, error))

    @property
    def stays(self) -> float:
        """How much of ``survives`` to leave at a distance of two contributions; any part gives a valid bound."""
        first, all_of_it = HEURISTICS.frequent_cuts
        ratio = self.survives / (self.last * self.rate) if self.last > 1e-250 else math.inf
        return self.survives * min(1.0, max(0.0, (ratio - first) / (all_of_it - first)))

    @property
    def rate_of_last(self) -> float:
        """The probability that the record is in a batch of the second row, if another record takes its place."""
        moved = self.survives - self.stays
        return (self.last * self.rate + moved) / (self.last + moved) if self.last + moved > 0 else self.rate

    @property
    def rate_of_full(self) -> float:
        """The probability that the record is in a batch of the third row, if another record takes its place."""
        return self.stays / (self.full - self.survives + self.stays)


def _point(k: int, n: int, q: float) -> tuple[float, float]:
    """P[Bin(n, q) = k] and a bound on its relative error: so many roundings of its largest terms."""
    if k > n:
        return 0.0, 0.0
    if q == 1:
        return float(k == n), 0.0
    terms = (-math.log(n + 1), -float(betaln(k + 1, n - k + 1)), k * math.log(q), (n - k) * math.log1p(-q))
    return math.exp(math.fsum(terms)), 32 * _U * sum(abs(term) for term in terms)


NOISE = (Gaussian, Laplace, DiscreteGaussian, DiscreteLaplace)  # noise on a sum: two sums are at most two contributions apart
# distances of Gaussians: below, differences of tails lose digits; above, ratios overflow
_NEAREST, _FARTHEST = (1e-3, 25.0)
_NOTHING = 1e-100  # a negligible mass
_FAR = 300.0  # scales of Laplace noise: beyond, e^{2r} overflows


def once(*above: Curve, below: tuple[Curve, ...] | None = None) -> PrivacyLoss:
    """One step with a curve for each direction, attained unless ``below`` says otherwise."""
    return PrivacyLoss(((Pair(above, above if below is None else below), 1),))


def mirrored(curve: Curve) -> tuple[Curve, Curve]:
    """The curves of both directions."""
    return curve, Mirror(curve)


def zeroed(of: Gaussian, rate: float) -> Loss | None:
    """Gaussian noise on samples of a fixed size under zero-out (``profiles/sized_batches``); None outside the range of doubles."""
    if not _NEAREST * of.noise_multiplier < 1 < _FARTHEST * of.noise_multiplier:
        return None
    mu = 1 / of.noise_multiplier
    beside = ZeroedBeside(mu, rate)
    return once(*mirrored(Joined(beside, Mirror(PoissonRemove(GaussianCurve(mu), rate)))), below=mirrored(beside))


def replaced(of: Event, rate: float) -> Loss:
    """Non-Gaussian noise on Poisson samples under replace-one (``profiles/replace_one``): exact for scalars."""
    one, two = (
        cast(PrivacyLoss, PLD().leaf(of, way)).parts[0][0].above[0] for way in (Relation.ADD_REMOVE, Relation.REPLACE_ONE)
    )
    anything = Symmetrised(TwoDistances(one, two, rate))
    exact: Curve
    if isinstance(one, DiscreteGaussianCurve) or (isinstance(one, DiscreteLaplaceCurve) and one.distance <= _FAR * one.scale):
        exact = DiscreteReplace(one, rate)
        if exact.infinite > 0:  # so far apart that a table of the noise does not hold all of it
            return once(exact if exact.infinite < _NOTHING else anything, below=(DiscreteReplace(one, rate, cut=True),))
    elif isinstance(one, LaplaceCurve) and one.distance <= _FAR:
        exact = LaplaceReplace(one.distance, rate)
    else:
        return once(anything, below=())
    several = (isinstance(of, Laplace) and not of.scalar) or (isinstance(of, DiscreteLaplace) and of.vector)
    return once(anything if several else exact, below=(exact,))  # attained by a number, which is a vector too


def truncated(of: Event, how: TruncatedPoisson, relation: Relation) -> Loss:
    """The three rows of ``profiles/sized_batches``; if no batch can be cut, a Poisson sample."""
    if not isinstance(of, Gaussian) or of.noise_multiplier == 0:
        raise NoTheorem(f"Truncated Poisson samples of {of} have no analysis. Use Gaussian noise, or Poisson samples.")
    mu, q, cut = 1 / of.noise_multiplier, how.rate, Cuts.of(how.dataset_size, how.rate, how.size)
    if relation is Relation.ADD_REMOVE:  # one record fewer than the public number, or one more: two pairs, and the worse counts
        larger = Cuts.of(how.dataset_size + 1, how.rate, how.size)
        if larger.full == 0:
            return PLD().loss(of.sampled(rate=q), relation)
        return once(*_competing(mu, q, cut), *_competing(mu, q, larger), below=_beside_silent(mu, q, cut, relation))
    if cut.full == 0:
        return PLD().loss(of.sampled(rate=q), relation)
    more = 1 + 2 * cut.error
    free, last = (_alone(mu, min(1.0, rate * more), relation) for rate in (q, cut.rate_of_last))
    swapped = Symmetrised(PoissonRemove(GaussianCurve(2 * mu), min(1.0, cut.rate_of_full * more))) if cut.stays else None
    weights = (cut.free * more, (cut.last + cut.survives - cut.stays) * more, (cut.full - cut.survives + cut.stays) * more)
    mixtures = (
        Mixture((f, t) if swapped is None else (f, t, swapped), weights[: 2 if swapped is None else 3])
        for f, t in zip(free, last, strict=True)
    )
    return once(*mixtures, below=_beside_silent(mu, q, cut, relation))


def _competing(mu: float, q: float, cut: Cuts) -> tuple[Curve, Curve]:
    """A record against its absence, if other records may take its place."""
    if cut.full == 0:
        return mirrored(PoissonRemove(GaussianCurve(mu), q))
    return mirrored(TruncatedRemove(mu, q, cut.free, cut.last, cut.full, cut.survives, cut.stays, cut.error))


def _beside_silent(mu: float, q: float, cut: Cuts, relation: Relation) -> tuple[Curve, ...]:
    """The pair attained if all other records contribute nothing, and no batch is cut."""
    return _alone(mu, q * (1 - min(1.0, cut.full * (1 + cut.error))), relation)


def _alone(mu: float, rate: float, relation: Relation) -> tuple[Curve, ...]:
    """The pair attained if only this record contributes, with a probability of at least ``rate``."""
    if rate <= 0:
        return ()
    if relation is Relation.REPLACE_ONE:
        return (PoissonReplace(mu, rate) if rate < 1 else GaussianCurve(2 * mu),)
    return mirrored(PoissonRemove(GaussianCurve(mu), rate))


def balls(of: Event, how: BallsInBins, relation: Relation) -> Loss:
    """Balls in bins: random allocation for noise on sums; for other mechanisms, one unamplified step in each epoch.

    Gaussian noise of several epochs over the same bins is one epoch at the distance sqrt(epochs)/sigma. From below without more: an
    observer of a single bin sees the record with probability 1/bins, in all epochs.
    """
    if how.bins == 1:  # all records, as they are
        return PLD().loss(of * how.epochs, relation)
    if not isinstance(of, Gaussian) or of.noise_multiplier == 0:
        require_known_size(Sampled(how, of))
        if not isinstance(of, NOISE) or how.epochs > 1 or relation is Relation.REPLACE_ONE:
            return _unattained(PLD().loss(of * how.epochs, relation))
        base = PLD().leaf(of, relation)
        return _allocated(base.parts[0][0].above[0], how.bins) if isinstance(base, PrivacyLoss) else base
    mu = math.sqrt(how.epochs) / of.noise_multiplier
    if relation is not Relation.REPLACE_ONE:
        return _allocated(GaussianCurve(mu * (1 + 1e-15)), how.bins)
    if not reaches(GaussianCurve(2 * mu)):
        return once(GaussianCurve(2 * mu), below=_alone(mu, 1 / how.bins, relation))
    above = AllocatedReplace(mu * (1 + 1e-15), how.bins)
    return once(above, below=(AllocatedReplaceBelow(mu * (1 - 1e-15), above),))


def _allocated(base: Curve, bins: int) -> Loss:
    """One pass over ``bins`` bins, each of which reveals a record as ``base`` does."""
    alone = mirrored(PoissonRemove(base, 1 / bins))
    if not reaches(base):
        return once(base, below=alone)
    below = mirrored(AllocatedBelow(base.mu * (1 - 1e-15), bins)) if isinstance(base, GaussianCurve) else alone
    return once(*mirrored(AllocatedAbove(base, bins)), below=below)


def _unattained(loss: Loss) -> Loss:
    """The same upper bound without a lower one, for a mechanism that may be more private than this analysis shows."""
    if not isinstance(loss, PrivacyLoss):
        return loss
    return replace(loss, parts=tuple((Pair(pair.above, ()), n) for pair, n in loss.parts))
