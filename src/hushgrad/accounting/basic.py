"""Basic composition: epsilons add up; and what it shares with advanced composition, a list of (epsilon, delta) statements."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hushgrad import _papers
from hushgrad.accounting._numeric import revealed, smallest_true, up
from hushgrad.accounting.base import Accountant, Loss
from hushgrad.accounting.dp_statements import STATED, Statement, statement
from hushgrad.events import Event, Relation

T = TypeVar("T", bound="Terms")


def least_delta(epsilon_at: Callable[[float], float], epsilon: float) -> float:
    """The smallest delta with ``epsilon_at(delta) <= epsilon``, rounded up; 1 where there is none."""
    if epsilon_at(0.0) <= epsilon:
        return 0.0
    if epsilon_at(1.0 - 1e-9) > epsilon:
        return 1.0
    # log10(delta) is searched, to an absolute accuracy: delta may be 1e-300, and log10(delta) may be 0
    exponent = smallest_true(lambda x: epsilon_at(min(10.0**x, 1.0 - 1e-9)) <= epsilon, -300.0, 0.0, absolute=1e-12)
    return float(min(1.0, 10.0**exponent))


@dataclass(frozen=True)
class Terms(ABC):
    """Statements with their counts; composition concatenates the lists."""

    terms: tuple[tuple[Statement, int], ...]

    @abstractmethod
    def epsilon(self, delta: float) -> float:
        """The smallest epsilon that this composition theorem gives at ``delta``."""

    def delta(self, epsilon: float) -> float:
        """The smallest delta that this composition theorem gives at ``epsilon``."""
        return least_delta(self.epsilon, epsilon)

    @classmethod
    def joined(cls: type[T], parts: list[tuple[Loss, int]]) -> T:
        """All terms of ``(loss, times)`` parts of this kind."""
        return cls(tuple((s, n * times) for loss, times in parts if isinstance(loss, cls) for s, n in loss.terms))


def share_of_delta(terms: tuple[tuple[Statement, int], ...], delta: float, shares: float) -> float | None:
    """The delta that each of ``shares`` flexible terms may take so that the total is ``delta``; None if fixed ones need more.

    Deltas compose as 1 - (1 - d_1)(1 - d_2)..., slightly less than their sum (Kairouz, Oh and Viswanath 2015).
    """
    lost = revealed((s.fixed, n) for s, n in terms)
    if delta < lost or lost == 1.0:
        return None
    room = math.log1p(-(delta - lost) / (1.0 - lost) * (1.0 - 2.0**-48)) if delta < 1.0 else -math.inf
    return -math.expm1(room / shares) if shares else 0.0


@dataclass(frozen=True)
class BasicLoss(Terms):
    """Statements whose epsilons are added; Gaussians share the spare delta equally."""

    def epsilon(self, delta: float) -> float:
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
