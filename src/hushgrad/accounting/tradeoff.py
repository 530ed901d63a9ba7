r"""What a guarantee means for an attacker: trade-off curves (f-DP), advantage and attack accuracy.

An attacker who must tell two neighbouring data sets apart makes false alarms (alpha) and misses (beta). Every test obeys
beta >= f(alpha) with

    f(alpha) = max over epsilon >= 0 of  max(0, 1 - delta(epsilon) - e^epsilon alpha, e^-epsilon (1 - delta(epsilon) - alpha))

(Dong, Roth and Su 2022, propositions 2.4 and 2.5). Upper bounds on delta give lower bounds on f, so what is returned is safe.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal

from hushgrad import _check
from hushgrad.accounting.api import deltas_of, loss_of, sane_delta
from hushgrad.accounting.base import Accountant, Loss
from hushgrad.events import Event, Relation


def trade_off(
    event: Event,
    alphas: Iterable[float],
    *,
    accountant: str | Accountant = "pld",
    relation: Relation | str = Relation.ADD_REMOVE,
    points: int = 200,
) -> list[float]:
    """The least miss rate of any attacker with false-alarm rate alpha, for each of ``alphas``: a lower bound on f(alpha).

    Args:
        event: what is released.
        alphas: false-alarm rates at which the curve is asked.
        accountant: who computes it: "pld" (tight, certified), "rdp", "zcdp", "gdp", "optimal", "advanced", "basic", or an accountant.
        relation: which data sets are neighbours: "add_remove", "replace_one" or "zero_out".
        points: tangents from which the curve is built; more are tighter and slower.

    >>> from hushgrad.events import Gaussian
    >>> [round(f, 3) for f in trade_off(Gaussian(1.0), [0.05, 0.5], accountant="gdp")]  # Phi(Phi^-1(1 - alpha) - 1)
    [0.74, 0.159]
    """
    loss = loss_of(event, accountant, relation)
    wanted = [_check.probability(alphas=a) for a in alphas]
    profile = _profile(loss, _check.positive_int(points=points), min([a for a in wanted if a > 0.0], default=1e-6))
    return [max([_miss_rate(e, d, a) for e, d in profile]) for a in wanted]


def _profile(loss: Loss, points: int, smallest: float) -> list[tuple[float, float]]:
    """(epsilon, delta) pairs dense enough for false-alarm rates down to ``smallest``."""
    top = loss.epsilon(max(1e-12, min(1e-3, smallest / 100.0)))
    if not math.isfinite(top):
        return [(0.0, 1.0)]
    epsilons = [0.0] + [top * (k / points) ** 1.5 for k in range(1, points + 1)]
    return [(e, sane_delta(d)) for e, d in zip(epsilons, deltas_of(loss, epsilons), strict=True)]


def _miss_rate(epsilon: float, delta: float, alpha: float) -> float:
    steep = 1.0 - delta - math.exp(epsilon) * alpha if epsilon < 700.0 else (1.0 - delta if alpha == 0.0 else 0.0)
    return max(0.0, steep, math.exp(-epsilon) * (1.0 - delta - alpha))


def advantage(event: Event, *, accountant: str | Accountant = "pld", relation: Relation | str = Relation.ADD_REMOVE) -> float:
    """The largest difference of true and false alarm rates that any attacker reaches: the total variation, delta at epsilon 0.

    Args:
        event: what is released.
        accountant: who computes it: "pld" (tight, certified), "rdp", "zcdp", "gdp", "optimal", "advanced", "basic", or an accountant.
        relation: which data sets are neighbours: "add_remove", "replace_one" or "zero_out".

    >>> from hushgrad.events import Gaussian
    >>> round(advantage(Gaussian(1.0), accountant="gdp"), 4)
    0.3829
    """
    return sane_delta(loss_of(event, accountant, relation).delta(0.0))


@dataclass(frozen=True, kw_only=True)
class Attack:
    """What the best attacker can do against ``event``. ``str()`` is one plain sentence.

    >>> from hushgrad.accounting import attack
    >>> from hushgrad.events import Gaussian
    >>> str(attack(Gaussian(4.0))).partition(" (")[0][-35:]
    'is right at most 54.98% of the time'
    """

    advantage: float
    accuracy: float
    false_alarms: float
    detections: float

    def __str__(self) -> str:
        return (
            f"Whoever sees the output and guesses whether one given record was used is right at most {_percent(self.accuracy)} "
            f"of the time (50% is a coin flip); with {self.false_alarms:.2%} false alarms at most "
            f"{_percent(self.detections)} of the records used are detected."
        )


def attack(
    event: Event,
    *,
    false_alarms: float = 0.01,
    accountant: str | Accountant = "pld",
    relation: Relation | str = Relation.ADD_REMOVE,
) -> Attack:
    """Advantage and attack accuracy in plain words: bounds on every attacker, whatever they know beside the output.

    Args:
        event: what is released.
        false_alarms: the share of records not used that the attacker may wrongly accuse.
        accountant: who computes it: "pld" (tight, certified), "rdp", "zcdp", "gdp", "optimal", "advanced", "basic", or an accountant.
        relation: which data sets are neighbours: "add_remove", "replace_one" or "zero_out".

    >>> from hushgrad.events import Gaussian
    >>> print(attack(Gaussian(2.0), accountant="gdp"))  # doctest: +NORMALIZE_WHITESPACE
    Whoever sees the output and guesses whether one given record was used is right at most 59.88% of the time (50% is a
    coin flip); with 1.00% false alarms at most 3.39% of the records used are detected.
    """
    gap = advantage(event, accountant=accountant, relation=relation)
    (miss,) = trade_off(event, [false_alarms], accountant=accountant, relation=relation)
    return Attack(advantage=gap, accuracy=(1.0 + gap) / 2.0, false_alarms=false_alarms, detections=1.0 - miss)


def _percent(x: float) -> str:
    """Rounded up: the sentence must not promise more than holds."""
    return f"{Decimal(repr(x)).quantize(Decimal('0.0001'), ROUND_CEILING) * 100:.2f}%"
