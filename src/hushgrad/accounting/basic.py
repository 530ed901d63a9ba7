"""Basic composition: epsilons add up."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hushgrad import _papers
from hushgrad.accounting._numeric import up
from hushgrad.accounting.base import Accountant, Loss
from hushgrad.accounting.composition import Terms, share_of_delta
from hushgrad.accounting.dp_statements import STATED, Statement, statement
from hushgrad.events import Event, Relation


@dataclass(frozen=True)
class BasicLoss(Terms):
    """Statements whose epsilons are added; Gaussians share the spare delta equally."""

    def epsilon(self, delta: float) -> float:
        """The sum of the epsilons, infinite where the deltas do not fit."""
        return basic_epsilon(self.terms, delta)


def basic_epsilon(terms: tuple[tuple[Statement, int], ...], delta: float) -> float:
    """The sum of the epsilons of ``terms`` when their deltas compose to ``delta``."""
    share = share_of_delta(terms, delta, sum(n for s, n in terms if s.flexible))
    if share is None or (share <= 0.0 and any(s.flexible for s, _ in terms)):
        return math.inf
    return up(sum(n * s.epsilon(share if s.flexible else s.fixed) for s, n in terms))


class Basic(Accountant):
    r"""Basic composition: (sum of epsilon_i, 1 - product of (1 - delta_i)).

    **Formal guarantee.** Valid for adaptively chosen mechanisms, each (epsilon_i, delta_i)-DP under the same relation.

        >>> from hushgrad.events import PureDP
        >>> round(Basic().loss(PureDP(0.5) * 4).epsilon(1e-6), 9)
        2.0

    Reference: Dwork and Roth 2014, theorem 3.16.
    """

    papers = (_papers.DWORK_2014_FOUNDATIONS,)

    name = "basic"

    def total(self, parts: list[tuple[Loss, int]]) -> Loss:
        return BasicLoss.joined(parts)


@Basic.analyses(*STATED)
def _leaf(event: Event, relation: Relation) -> Loss:
    return BasicLoss(((statement(event, relation), 1),))
