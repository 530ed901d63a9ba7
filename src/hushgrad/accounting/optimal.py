r"""Optimal composition of (epsilon, delta)-DP mechanisms (Kairouz, Oh and Viswanath).

Every (epsilon, delta)-DP pair of outputs is a post-processing of: with probability delta everything is revealed, else one
randomised response at epsilon. So the worst composition is that of randomised responses, and its delta is

    delta(e') = 1 - (1 - d(e')) prod (1 - delta_i),   d(e') = E[(1 - e^{e' - L})_+],   L the sum of the responses' losses.

For equal epsilons L = (n - 2k) epsilon with k binomial: a sum of positive terms, exact for any e', not only for the grid
(n - 2i) epsilon of the printed theorem. For unequal epsilons the exact value is #P-hard (Murtagh and Vadhan 2016); the
privacy-loss distribution of the responses bounds it as closely as wanted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hushgrad import _papers
from hushgrad.accounting._numeric import Shares, revealed, smallest_true, total_loss, up
from hushgrad.accounting.base import Accountant, Loss, Nothing
from hushgrad.accounting.dp_statements import STATED, statement
from hushgrad.accounting.renyi_conversion import delta_beside
from hushgrad.errors import NoTheorem
from hushgrad.events import Compose, Event, Gaussian, PureDP, Relation


def responses_delta(epsilon: float, times: int) -> Callable[[float], float]:
    r"""The function e' -> d(e') of ``times`` randomised responses at ``epsilon``: exact, rounded up.

        >>> d = responses_delta(1.0, 1)
        >>> round(d(0.0), 6), d(1.0)  # the total variation distance (e - 1)/(e + 1), and none beyond epsilon
        (0.462117, 0.0)

    Reference: Kairouz, Oh and Viswanath 2015, theorem 3.3.
    """
    lie = 1.0 / (1.0 + math.exp(epsilon)) if epsilon < 700.0 else math.exp(-epsilon)
    # All but e^-700 of the binomial mass lies within this window (Bernstein), and the rest is added back below.
    spread = math.sqrt(2.0 * 710.0 * times * lie * (1.0 - lie)) + 710.0
    low, high = max(0, math.floor(times * lie - spread)), min(times, math.ceil(times * lie + spread))
    k = np.arange(low, high + 1, dtype=np.float64)
    log_odds = -epsilon  # ln(lie / (1 - lie))
    steps = np.log((times - k[:-1]) / (k[:-1] + 1.0)) + log_odds
    log_mass = np.concatenate(([0.0], np.cumsum(steps)))
    log_mass -= log_mass.max()
    mass = np.exp(log_mass)
    mass /= mass.sum()
    loss = (times - 2.0 * k) * epsilon * (1.0 + 2.0**-51)  # rounded up: beside a target its last digit counts
    most = total_loss([(epsilon, times)])

    def delta(target: float) -> float:
        above = loss > target
        if target >= most or not above.any():
            return 0.0
        total = float(np.sum(mass[above] * -np.expm1(target - loss[above])))
        # 1e-9 covers the rounding of the running product over the window; 1e-300 the mass outside of it.
        return min(1.0, total * (1.0 + 1e-9) + (1e-300 if low > 0 else 0.0))

    return delta


@dataclass(frozen=True)
class OptimalLoss:
    """Counts of (epsilon, delta)-DP mechanisms, composed optimally."""

    counts: tuple[tuple[float, int], ...]  # (epsilon, times)
    revealed: Shares = ()  # the deltas
    _cache: dict[str, Loss] = field(default_factory=dict, compare=False, repr=False)

    def delta(self, epsilon: float) -> float:
        """1 - (1 - d) prod (1 - delta_i)."""
        return delta_beside(0.0 if epsilon >= total_loss(self.counts) else self._responses().delta(epsilon), self.revealed)

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon with delta(epsilon) <= ``delta``."""
        lost = revealed(self.revealed)
        if delta < lost or lost == 1.0:
            return math.inf
        wanted = (delta - lost) / (1.0 - lost) * (1.0 - 1e-12)
        return min(self._most, self._responses().epsilon(wanted)) if 0.0 < wanted < 1.0 else self._most

    @property
    def _most(self) -> float:
        return up(math.fsum(e * n for e, n in self.counts))  # basic composition

    def _responses(self) -> Loss:
        if "responses" not in self._cache:
            self._cache["responses"] = self._worst_case()
        return self._cache["responses"]

    def _worst_case(self) -> Loss:
        counts = [(e, n) for e, n in self.counts if e > 0.0]
        if not counts:
            return Nothing()
        if len(counts) == 1:
            return _EqualResponses(*counts[0])
        from hushgrad.accounting.pld import PLD  # which composes any responses, and itself never needs this file

        return PLD().loss(Compose(PureDP(e) * n for e, n in counts), Relation.REPLACE_ONE)


class _EqualResponses:
    """Equal randomised responses: the exact sum."""

    def __init__(self, epsilon: float, times: int) -> None:
        self._of, self._times = epsilon, times
        self.delta = responses_delta(epsilon, times)

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon with d(epsilon) <= ``delta``."""
        return smallest_true(lambda e: self.delta(e) <= delta, 0.0, up(self._of * self._times))


class Optimal(Accountant):
    r"""The optimal composition theorem for mechanisms known only by their (epsilon, delta).

    **Formal guarantee.** No smaller epsilon holds for all mechanisms with these parameters (equal epsilons: exact; unequal
    ones: up to the discretisation of the privacy-loss distribution). Adaptive choice is allowed.

        >>> from hushgrad.events import PureDP
        >>> round(Optimal().loss(PureDP(0.1) * 100).epsilon(1e-6), 2)
        4.77

    Reference: Kairouz, Oh and Viswanath 2015, theorem 3.3; Murtagh and Vadhan 2016.
    """

    papers = (
        _papers.KAIROUZ_2015_COMPOSITION,
        _papers.Paper(
            "murtagh2016complexity",
            "Murtagh, Jack and Vadhan, Salil",
            "The Complexity of Computing the Optimal Composition of Differential Privacy",
            "TCC",
            arxiv="1507.03113",
        ),
    )

    name = "optimal"

    def total(self, parts: list[tuple[Loss, int]]) -> Loss:
        losses = [(loss, times) for loss, times in parts if isinstance(loss, OptimalLoss)]
        counts = Counter[float]()
        for loss, times in losses:
            counts.update({epsilon: n * times for epsilon, n in loss.counts})
        return OptimalLoss(tuple(counts.items()), tuple((d, n * times) for loss, times in losses for d, n in loss.revealed))


@Optimal.analyses(*(kind for kind in STATED if kind is not Gaussian))
def _leaf(event: Event, relation: Relation) -> Loss:
    known = statement(event, relation)
    if known.flexible:
        raise NoTheorem(
            f"The optimal accountant composes mechanisms with one (epsilon, delta) each, and {event} has a curve of them. "
            "Ask pld, which composes the curve itself, or give an ApproxDP event."
        )
    epsilon = known.epsilon(known.fixed)
    if math.isinf(epsilon):
        raise NoTheorem(f"{event} has an infinite epsilon.")
    return OptimalLoss(((epsilon, 1),), ((known.fixed, 1),) if known.fixed > 0.0 else ())
