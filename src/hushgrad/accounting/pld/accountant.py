"""``PLD``: the accountant by privacy-loss distributions."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from hushgrad import _papers
from hushgrad.accounting.base import Accountant, Loss
from hushgrad.accounting.pld.loss import PrivacyLoss, merged
from hushgrad.events import Event, Relation


class PLD(Accountant):
    r"""Privacy-loss distributions, composed numerically, with bounds from both sides.

    delta(eps) = E[(1 - e^{eps - S})_+], where S is the sum of the steps' privacy losses ln dP/dQ.

    **Formal guarantee.** ``epsilon`` and ``delta`` are upper bounds, and the ends of the intervals enclose the best epsilon (delta)
    of the worst mechanism that the event describes: discretisation, truncation, wrap-around and rounding are all paid for
    (docs/explanation/pld.md). Where the analysis of an event is not known to be tight, the lower end is attained by some data.

        >>> from hushgrad.events import Gaussian
        >>> loss = PLD().loss(Gaussian(1.1).sampled(rate=0.01) * 1000)
        >>> lower, upper = loss.epsilon_interval(delta=1e-5)
        >>> round(lower, 3), round(upper, 3)
        (1.515, 1.515)

    Reference: Sommer, Meiser and Mohammadi 2019; Doroshenko et al. 2022 for the upper discretisation.
    """

    papers = (
        _papers.Paper(
            "sommer2019privacy",
            "Sommer, David M. and Meiser, Sebastian and Mohammadi, Esfandiar",
            "Privacy Loss Classes: The Central Limit Theorem in Differential Privacy",
            "Proceedings on Privacy Enhancing Technologies",
            kind="article",
        ),
        _papers.Paper(
            "doroshenko2022connect",
            "Doroshenko, Vadym and Ghazi, Badih and Kamath, Pritish and Kumar, Ravi and Manurangsi, Pasin",
            "Connect the Dots: Tighter Discrete Approximations of Privacy Loss Distributions",
            "Proceedings on Privacy Enhancing Technologies",
            arxiv="2207.04380",
            kind="article",
        ),
    )

    name = "pld"

    def total(self, parts: list[tuple[Loss, int]]) -> PrivacyLoss:
        losses = [(cast(PrivacyLoss, loss), times) for loss, times in parts]
        return PrivacyLoss(
            merged((pair, n * times) for loss, times in losses for pair, n in loss.parts),
            tuple((event, relation, n * times) for loss, times in losses for event, relation, n in loss.sources),
        )

    def leaf(self, event: Event, relation: Relation) -> Loss:
        """The loss of one mechanism, for the analysis of another that contains it."""
        return super()._leaf(event, relation)

    def _leaf(self, event: Event, relation: Relation) -> Loss:
        loss = super()._leaf(event, relation)
        return replace(loss, sources=((event, relation, 1),)) if isinstance(loss, PrivacyLoss) else loss
