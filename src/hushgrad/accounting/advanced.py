"""Advanced composition: epsilon grows with the square root of the number of steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hushgrad import _papers
from hushgrad.accounting._numeric import up
from hushgrad.accounting.base import Accountant, Loss
from hushgrad.accounting.basic import Terms, basic_epsilon, share_of_delta
from hushgrad.accounting.dp_statements import STATED, statement
from hushgrad.accounting.heuristics import HEURISTICS
from hushgrad.events import Event, Relation


def advanced_forms(epsilons: list[tuple[float, int]], slack: float) -> tuple[float, float]:
    r"""Both printed forms of advanced composition for (epsilon, times) pairs and the theorem's own ``slack``.

        sqrt(2 ln(1/slack) sum eps²) + sum eps (e^eps - 1)                (Dwork, Rothblum and Vadhan 2010, theorem III.3)
        sqrt(2 ln(1/slack) sum eps²) + sum eps (e^eps - 1)/(e^eps + 1)    (Kairouz, Oh and Viswanath 2015, theorem 3.5)

    >>> [round(form, 2) for form in advanced_forms([(0.1, 100)], 1e-6)]
    [6.31, 5.76]
    """
    spread = math.sqrt(2.0 * math.log(1.0 / slack) * sum(n * e * e for e, n in epsilons))
    first = sum(n * e * (math.expm1(e) if e < 700.0 else math.inf) for e, n in epsilons)
    second = sum(n * e * math.tanh(e / 2.0) for e, n in epsilons)
    return spread + first, spread + second


@dataclass(frozen=True)
class AdvancedLoss(Terms):
    """Statements composed by the advanced theorem, or by the basic one where that is smaller."""

    def epsilon(self, delta: float) -> float:
        """The smallest of both printed forms and of basic composition."""
        best = basic_epsilon(self.terms, delta)
        if delta <= 0.0:
            return best
        flexible = any(s.flexible for s, _ in self.terms)
        for slack_part in HEURISTICS.slacks if flexible else (1.0,):
            best = min(best, self._with_slack(delta, slack_part))
        return best

    def _with_slack(self, delta: float, part: float) -> float:
        flexible = sum(n for s, n in self.terms if s.flexible)
        slack = share_of_delta(self.terms, delta, 1.0 / part)
        share = share_of_delta(self.terms, delta, flexible / (1.0 - part)) if flexible else 0.0
        if slack is None or share is None or slack <= 0.0 or (flexible and share <= 0.0):
            return math.inf
        epsilons = [(s.epsilon(share if s.flexible else s.fixed), n) for s, n in self.terms]
        if any(math.isinf(e) for e, _ in epsilons):
            return math.inf
        return up(min(advanced_forms(epsilons, slack)))


class Advanced(Accountant):
    r"""Advanced composition, the minimum of both printed forms, and never above basic composition.

    **Formal guarantee.** Valid for adaptively chosen mechanisms, each (epsilon_i, delta_i)-DP under the same relation.

        >>> from hushgrad.events import PureDP
        >>> round(Advanced().loss(PureDP(0.1) * 100).epsilon(1e-6), 2)
        5.76

    Reference: Kairouz, Oh and Viswanath, "The composition theorem for differential privacy", ICML 2015, theorem 3.5.
    """

    papers = (_papers.KAIROUZ_2015_COMPOSITION,)

    name = "advanced"

    def total(self, parts: list[tuple[Loss, int]]) -> Loss:
        return AdvancedLoss.joined(parts)


@Advanced.analyses(*STATED)
def _leaf(event: Event, relation: Relation) -> Loss:
    return AdvancedLoss(((statement(event, relation), 1),))
