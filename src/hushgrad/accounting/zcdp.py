"""Zero-concentrated differential privacy: rhos add up."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hushgrad import _papers, events
from hushgrad.accounting._numeric import Shares
from hushgrad.accounting.base import Accountant, Loss, Unbounded
from hushgrad.accounting.dp_statements import pure_epsilon
from hushgrad.accounting.renyi_conversion import RenyiLoss
from hushgrad.events import Relation


def rho_of_pure(epsilon: float) -> float:
    """The rho of an epsilon-DP mechanism: epsilon²/2, or epsilon where that is less (D_alpha <= epsilon <= alpha epsilon).

    >>> rho_of_pure(0.1)
    0.005000000000000001

    Reference: Bun and Steinke 2016, proposition 3.3.
    """
    return min(epsilon * epsilon / 2.0, epsilon)


@dataclass(frozen=True)
class ZCDPLoss(RenyiLoss):
    """delta-approximate rho-zCDP: rho-zCDP except for what is ``revealed`` outright (Bun and Steinke 2016, section 8)."""

    rho: float
    revealed: Shares = ()

    def renyi(self, alpha: float) -> float:
        return alpha * self.rho if self.rho > 0.0 else 0.0


class ZCDP(Accountant):
    r"""zCDP: rho = sum of rho_i, converted with the best Rényi order instead of rho + 2 sqrt(rho ln 1/delta).

    **Formal guarantee.** Valid for adaptively chosen mechanisms under one relation. It knows no amplification by sampling.

        >>> from hushgrad.events import Gaussian
        >>> round(ZCDP().loss(Gaussian(10.0) * 100).epsilon(1e-5), 3)  # the truth is 4.377; rho + 2 sqrt(...) gives 5.299
        4.728

    Reference: Bun and Steinke 2016, lemma 1.7; Canonne, Kamath and Steinke 2020, proposition 12 (conversion).
    """

    papers = (
        _papers.Paper(
            "bun2016concentrated",
            "Bun, Mark and Steinke, Thomas",
            "Concentrated Differential Privacy: Simplifications, Extensions, and Lower Bounds",
            "TCC",
            arxiv="1605.02065",
        ),
        _papers.CANONNE_2020_DISCRETE,
    )

    name = "zcdp"

    def total(self, parts: list[tuple[Loss, int]]) -> Loss:
        losses = [(loss, times) for loss, times in parts if isinstance(loss, ZCDPLoss)]
        shares = tuple((d, n * times) for loss, times in losses for d, n in loss.revealed)
        return ZCDPLoss(math.fsum(loss.rho * times for loss, times in losses), shares)


@ZCDP.analyses(events.Gaussian)
def _gaussian(event: events.Gaussian, relation: Relation) -> Loss:
    if event.noise_multiplier == 0.0:
        return Unbounded()
    return ZCDPLoss((relation.contributions / event.noise_multiplier) ** 2 / 2.0)


@ZCDP.analyses(events.DiscreteGaussian)
def _discrete_gaussian(event: events.DiscreteGaussian, relation: Relation) -> Loss:
    # Canonne, Kamath and Steinke 2020, theorem 4: the same rho as the continuous one, for an integer distance.
    return ZCDPLoss((relation.contributions * event.sensitivity / event.sigma) ** 2 / 2.0)


@ZCDP.analyses(events.Exponential)
def _exponential(event: events.Exponential, relation: Relation) -> Loss:
    # Bounded range: epsilon²/8 (Cesar and Rogers 2021), a quarter of what epsilon-DP alone gives.
    return ZCDPLoss(event.epsilon**2 / 8.0)


@ZCDP.analyses(events.Laplace, events.DiscreteLaplace, events.PureDP, events.RandomizedResponse)
def _pure(event: events.Event, relation: Relation) -> Loss:
    epsilon = pure_epsilon(event, relation)
    assert epsilon is not None  # all four are purely differentially private
    return ZCDPLoss(rho_of_pure(epsilon)) if math.isfinite(epsilon) else Unbounded()


@ZCDP.analyses(events.ApproxDP)
def _approximate(event: events.ApproxDP, relation: Relation) -> Loss:
    return ZCDPLoss(rho_of_pure(event.epsilon), ((event.delta, 1),) if event.delta > 0.0 else ())


@ZCDP.analyses(events.ZCDP)
def _zcdp(event: events.ZCDP, relation: Relation) -> Loss:
    return ZCDPLoss(event.rho)
