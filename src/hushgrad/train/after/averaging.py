"""Averages of the iterates: post-processing, so they cost no privacy."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from hushgrad import _check, _papers
from hushgrad._value import Value


class Average(Value, family="average"):
    """A frozen, public rule for averaging the parameters of successive steps.

    >>> Average.of("ema")
    EMA(decay=0.999)
    """

    @abstractmethod
    def weight(self, step: int, steps: int) -> float:
        """How much of the average becomes the parameters after step ``step`` (0-based) of ``steps``: in [0, 1]; 1 restarts."""

    @classmethod
    def of(cls, average: Average | str | None) -> Average | None:
        """The rule itself, or the one that ``"tail"``, ``"ema"`` or ``"polyak"`` names."""
        if average is None or isinstance(average, Average):
            return average
        named: dict[str, type[Average]] = {"tail": Tail, "ema": EMA, "polyak": Polyak}
        return named[_check.one_of(named, average=average)]()


@dataclass(frozen=True)
class Polyak(Average):
    r"""The mean of all iterates, (1/t) sum_{s <= t} w_s.

        >>> [round(Polyak().weight(t, 4), 3) for t in range(4)]
        [1.0, 0.5, 0.333, 0.25]

    Reference: Polyak and Juditsky 1992; Bassily, Smith and Thakurta 2014, theorem 2.4, analyse private SGD at this point.
    """

    papers = (
        _papers.Paper(
            "polyak1992acceleration",
            "Polyak, Boris T. and Juditsky, Anatoli B.",
            "Acceleration of Stochastic Approximation by Averaging",
            "SIAM Journal on Control and Optimization",
            kind="article",
        ),
    )

    def weight(self, step: int, steps: int) -> float:
        """1/(t+1): the running mean."""
        return 1.0 / (step + 1)


@dataclass(frozen=True)
class Tail(Average):
    r"""The mean of the last ``fraction`` of the iterates; before they begin, the current one.

        >>> [round(Tail(0.5).weight(t, 4), 3) for t in range(4)]
        [1.0, 1.0, 1.0, 0.5]

    Reference: Rakhlin, Shamir and Sridharan 2012, section 3 (suffix averaging).
    """

    papers = (
        _papers.Paper(
            "rakhlin2012making",
            "Rakhlin, Alexander and Shamir, Ohad and Sridharan, Karthik",
            "Making Gradient Descent Optimal for Strongly Convex Stochastic Optimization",
            "ICML",
            arxiv="1109.5647",
        ),
    )

    fraction: float = 0.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "fraction", _check.rate(fraction=self.fraction))

    def weight(self, step: int, steps: int) -> float:
        """1/(number of tail iterates so far), 1 before the tail."""
        first = steps - max(1, round(self.fraction * steps))
        return 1.0 / max(1, step - first + 1)


@dataclass(frozen=True)
class EMA(Average):
    r"""m_t = decay_t m_{t-1} + (1 - decay_t) w_t with decay_t = min(``decay``, (1+t)/(10+t)): short memory at first.

        >>> [round(EMA(0.999).weight(t, 4), 3) for t in range(4)]
        [1.0, 0.818, 0.75, 0.692]

    Reference: De et al. 2022, "Unlocking high-accuracy differentially private image classification through scale", section 3.
    """

    papers = (
        _papers.Paper(
            "de2022unlocking",
            "De, Soham and Berrada, Leonard and Hayes, Jamie and Smith, Samuel L. and Balle, Borja",
            "Unlocking High-Accuracy Differentially Private Image Classification through Scale",
            arxiv="2204.13650",
            kind="misc",
        ),
    )

    decay: float = 0.999

    def __post_init__(self) -> None:
        object.__setattr__(self, "decay", _check.between(0, 1, closed="left", decay=self.decay))

    def weight(self, step: int, steps: int) -> float:
        """1 - decay_t; the first iterate starts the average."""
        return 1.0 if step == 0 else 1.0 - min(self.decay, (1 + step) / (10 + step))
