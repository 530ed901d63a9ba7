"""Rényi differential privacy: divergences add up at every order, and the best order is found by search."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hushgrad import _check, _papers, events
from hushgrad.accounting import renyi, renyi_sampled
from hushgrad.accounting._numeric import Shares, least_over_orders, product_up, ratio_up, revealed, smallest_true, total_loss, up
from hushgrad.accounting.base import Accountant, Loss, Nothing, Unbounded
from hushgrad.accounting.dp_statements import amplified, pure_epsilon
from hushgrad.accounting.participation import Sampling, Way, poisson_rate, sampling
from hushgrad.accounting.renyi import Curve
from hushgrad.accounting.renyi_conversion import RenyiLoss
from hushgrad.errors import NoTheorem
from hushgrad.events import Relation


@dataclass(frozen=True)
class RDPLoss(RenyiLoss):
    """Rényi divergences with counts, and the probabilities with which (epsilon, delta)-DP parts reveal everything (``revealed``)."""

    curves: tuple[tuple[Curve, int], ...]
    revealed: Shares = ()

    def renyi(self, alpha: float) -> float:
        if math.isinf(alpha):
            return total_loss((curve(alpha), n) for curve, n in self.curves)
        return math.fsum(n * curve(alpha) for curve, n in self.curves)


class RDP(Accountant):
    r"""Rényi DP: D_alpha of a composition is the sum of the D_alpha; converted at the order that gives the least epsilon.

    **Formal guarantee.** Valid for adaptively chosen mechanisms under one relation. Orders are real numbers found by search,
    so there is no list of orders to be too short for an unusually small or large epsilon.

        >>> from hushgrad.events import Gaussian
        >>> round(RDP().loss(Gaussian(1.1).sampled(rate=256 / 60_000) * 14_040).epsilon(1e-5), 3)  # the truth is 2.380
        2.594

    Reference: Mironov 2017, propositions 1 and 3; Canonne, Kamath and Steinke 2020, proposition 12 (conversion).
    """

    papers = (
        _papers.Paper("mironov2017renyi", "Mironov, Ilya", "{R{\\'e}nyi} Differential Privacy", "IEEE CSF", arxiv="1702.07476"),
        _papers.Paper(
            "mironov2019sampled",
            "Mironov, Ilya and Talwar, Kunal and Zhang, Li",
            "{R{\\'e}nyi} Differential Privacy of the Sampled {Gaussian} Mechanism",
            arxiv="1908.10530",
            kind="misc",
        ),
        _papers.CANONNE_2020_DISCRETE,
    )

    name = "rdp"

    def total(self, parts: list[tuple[Loss, int]]) -> Loss:
        losses = [(loss, times) for loss, times in parts if isinstance(loss, RDPLoss)]
        curves = tuple((curve, n * times) for loss, times in losses for curve, n in loss.curves)
        return RDPLoss(curves, tuple((d, n * times) for loss, times in losses for d, n in loss.revealed))


def _of(curve: Curve, revealed: float = 0.0) -> RDPLoss:
    return RDPLoss(((curve, 1),), ((revealed, 1),) if revealed > 0.0 else ())


@RDP.analyses(events.Gaussian)
def _gaussian(event: events.Gaussian, relation: Relation) -> Loss:
    if event.noise_multiplier == 0.0:
        return Unbounded()
    return _of(renyi.concentrated((relation.contributions / event.noise_multiplier) ** 2 / 2.0))


@RDP.analyses(events.DiscreteGaussian)
def _discrete_gaussian(event: events.DiscreteGaussian, relation: Relation) -> Loss:
    # Canonne, Kamath and Steinke 2020, theorem 4: at every order at most the continuous Gaussian's divergence.
    return _of(renyi.concentrated((relation.contributions * event.sensitivity / event.sigma) ** 2 / 2.0))


@RDP.analyses(events.ZCDP)
def _zcdp(event: events.ZCDP, relation: Relation) -> Loss:
    return _of(renyi.concentrated(event.rho))


@RDP.analyses(events.Laplace)
def _laplace(event: events.Laplace, relation: Relation) -> Loss:
    return _of(renyi.laplace(ratio_up(relation.contributions, event.scale)))


@RDP.analyses(events.DiscreteLaplace)
def _discrete_laplace(event: events.DiscreteLaplace, relation: Relation) -> Loss:
    return _of(renyi.discrete_laplace(event.scale, relation.contributions * event.sensitivity))


@RDP.analyses(events.PureDP)
def _pure(event: events.PureDP, relation: Relation) -> Loss:
    return _of(renyi.pure(event.epsilon)) if event.epsilon > 0.0 else Nothing()


@RDP.analyses(events.ApproxDP)
def _approximate(event: events.ApproxDP, relation: Relation) -> Loss:
    # Revealed with probability delta, else randomised response at epsilon (Kairouz, Oh and Viswanath 2015, theorem 2).
    return _of(renyi.pure(event.epsilon), event.delta)


@RDP.analyses(events.Exponential)
def _exponential(event: events.Exponential, relation: Relation) -> Loss:
    pure, ranged = renyi.pure(event.epsilon), renyi.concentrated(event.epsilon**2 / 8.0)
    return _of(lambda alpha: min(pure(alpha), ranged(alpha)))  # bounded range: Cesar and Rogers 2021


@RDP.analyses(events.RandomizedResponse)
def _response(event: events.RandomizedResponse, relation: Relation) -> Loss:
    epsilon = pure_epsilon(event, relation)
    assert epsilon is not None
    if math.isinf(epsilon):
        return Unbounded()
    lie = math.log(event.noise_probability) - math.log(event.categories)
    return _of(renyi.response(lie + epsilon, lie, event.categories - 2, largest=epsilon))


@RDP.analyses(events.GaussianMixture)
def _mixture(event: events.GaussianMixture, relation: Relation) -> Loss:
    if event.noise_multiplier == 0.0:
        return Unbounded()
    if relation is Relation.REPLACE_ONE:
        raise NoTheorem("The rdp accountant has no analysis of a GaussianMixture under replace-one. Ask under add/remove.")
    return _of(renyi_sampled.gaussian_mixture(event.noise_multiplier, event.sensitivities, event.probabilities))


@RDP.analyses(events.Sampled)
def _sampled(event: events.Sampled, relation: Relation) -> Loss:
    of, rate = event.of, poisson_rate(event)
    if rate is not None and isinstance(of, events.Gaussian) and relation is not Relation.REPLACE_ONE:
        if of.noise_multiplier == 0.0:
            return Unbounded()
        return _of(renyi_sampled.poisson_gaussian(of.noise_multiplier, rate))
    how = sampling(event, relation)
    base = RDP().loss(of, how.relation)
    if not isinstance(base, RDPLoss):
        return base
    # A part that reveals everything with probability delta does so with probability rate delta on a sample, and the rest
    # is amplified; only a single (epsilon, delta)-DP mechanism is split like that (the subsampling lemma).
    if base.revealed:
        return _sampled_approximate(of, how)
    if how.way is Way.SHOWN:
        return _of(renyi_sampled.shown(base.renyi, how.rate))
    if how.way is Way.EXCHANGED:
        curve = renyi_sampled.without_replacement(base.renyi, how.rate)
    else:
        curve = renyi_sampled.poisson(base.renyi, how.rate, tight=isinstance(of, (events.Laplace, events.Gaussian)))
    largest = base.renyi(math.inf)
    if math.isinf(largest):
        return _of(curve)
    pure = renyi.pure(up(amplified(largest, how.rate)))
    return _of(lambda alpha: min(curve(alpha), pure(alpha)) if math.isfinite(alpha) else pure(alpha))


def _sampled_approximate(of: events.Event, how: Sampling) -> Loss:
    if not isinstance(of, events.ApproxDP):
        raise NoTheorem("The rdp accountant samples single (epsilon, delta)-DP mechanisms, not compositions of them. Ask pld.")
    share = product_up(how.rate, of.delta)
    if how.way is Way.SHOWN:
        return _of(renyi_sampled.shown(renyi.pure(of.epsilon), how.rate), share)
    return _of(renyi.pure(up(amplified(of.epsilon, how.rate))), share)


@RDP.analyses(events.OneOf)
def _one_of(event: events.OneOf, relation: Relation) -> Loss:
    # The divergence of a mixture is at most the largest of its parts', at every order (van Erven and Harremoës 2014, theorem 13),
    # also if the choice depends on earlier outputs.
    losses = [RDP().loss(part, relation) for part in event.events]
    known = [loss for loss in losses if isinstance(loss, RDPLoss)]
    if any(isinstance(loss, Unbounded) for loss in losses) or not known:
        return next((loss for loss in losses if isinstance(loss, Unbounded)), Nothing())
    return _of(lambda alpha: max(loss.renyi(alpha) for loss in known), max(revealed(loss.revealed) for loss in known))


@RDP.analyses(events.RepeatAndSelect)
def _repeat_and_select(event: events.RepeatAndSelect, relation: Relation) -> Loss:
    base = RDP().loss(event.of, relation)
    if not isinstance(base, RDPLoss):
        return base
    if base.revealed:
        raise NoTheorem("Repeat-and-select is analysed for mechanisms with finite Rényi divergences, not for ApproxDP parts.")
    if math.isinf(event.shape):
        return _of(_poisson_repeats(base, event.mean))
    return _of(_negative_binomial_repeats(base, event.mean, event.shape))


def _negative_binomial_repeats(base: RDPLoss, mean: float, shape: float) -> Curve:
    """Papernot and Steinke 2022, theorem 2: K truncated negative binomial, with a second order that is free to choose."""
    log_inverse_gamma = _success_exponent(mean, shape)

    def penalty_at(order: float) -> float:
        return (1.0 + shape) * ((1.0 - 1.0 / order) * base.renyi(order) + log_inverse_gamma / order)

    def hopeless(order: float, best: float) -> bool:
        return (1.0 + shape) * (1.0 - 1.0 / order) * base.renyi(order) >= best

    penalty = min(least_over_orders(penalty_at, hopeless=hopeless), (1.0 + shape) * base.renyi(math.inf))

    def curve(alpha: float) -> float:
        if math.isinf(alpha):
            return base.renyi(alpha) * (2.0 + shape)  # pure DP: corollary 4 of the same paper
        return base.renyi(alpha) + penalty + math.log(mean) / (alpha - 1.0)

    return curve


def _poisson_repeats(base: RDPLoss, mean: float) -> Curve:
    """Papernot and Steinke 2022, theorem 6: K Poisson; needs (eps, delta)-DP with e^eps <= 1 + 1/(alpha - 1)."""

    def curve(alpha: float) -> float:
        if math.isinf(alpha):
            return math.inf
        failure = base.delta(math.log1p(1.0 / (alpha - 1.0)))
        return base.renyi(alpha) + mean * failure + math.log(max(mean, 1.0)) / (alpha - 1.0)

    return curve


def success_probability(mean: float, shape: float) -> float:
    """The parameter gamma of the truncated negative binomial distribution of this ``shape`` whose mean is ``mean``.

    >>> round(success_probability(10.0, 1.0), 9)  # geometric: the mean is 1/gamma
    0.1
    """
    exponent = _success_exponent(mean, shape)
    if exponent > 700.0:
        _check.fail("shape", shape, f"to leave a success probability that is a number, for mean={mean:g}", "Use a larger shape.")
    return math.exp(-exponent)


def _success_exponent(mean: float, shape: float) -> float:
    """-ln gamma, rounded up; for shapes near -1 gamma itself is below all doubles."""
    if mean < 1.0:
        raise NoTheorem(f"A truncated negative binomial number of repetitions is at least 1, so its mean cannot be {mean}.")

    def log_mean_of(
        x: float,
    ) -> float:  # of (1/gamma - 1) shape / (1 - gamma^shape) at gamma = e^-x, which may be below all doubles
        failures = x + math.log(-math.expm1(-x))
        if abs(shape * x) < 1e-9:
            return failures - math.log(x) + shape * x / 2.0
        if shape > 0.0:
            return failures + math.log(shape) - math.log(-math.expm1(-shape * x))
        return failures + math.log(-shape) + shape * x - math.log(-math.expm1(shape * x))

    high = 1.0
    while log_mean_of(high) < math.log(mean):
        high *= 2.0
    return smallest_true(lambda x: log_mean_of(x) >= math.log(mean), 1e-12, high) if mean > 1.0 else 0.0
