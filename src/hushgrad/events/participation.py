"""Participation: in which steps of a run a record may take part."""

from __future__ import annotations

from dataclasses import dataclass, field

from hushgrad import _check
from hushgrad._value import LATER, Value
from hushgrad.events._fields import shown


class Participation(Value, family="participation"):
    """In which steps a record may take part. The sampler promises it; the mechanism's theorem relies on it.

    ``drawn``: participation is random and identically distributed for all records, or all take part; else it depends on the record.

        >>> from hushgrad.events import FixedSize, MinSep, Poisson
        >>> [how.drawn for how in (Poisson(0.01), FixedSize(dataset_size=100, size=1), MinSep(gap=10, times=3))]
        [True, True, False]
    """

    drawn = True

    @property
    def counted(self) -> int | None:
        """The public number of records, if the theorem relies on it; else None."""
        return None

    @property
    def drawn_number(self) -> int | None:
        """How many records take part in a step, if that is public; else None."""
        return None

    def __str__(self) -> str:
        return shown(self)


@dataclass(frozen=True)
class Poisson(Participation):
    """In each step every record takes part independently with probability ``rate``.

    >>> from hushgrad import epsilon
    >>> from hushgrad.events import Gaussian, Sampled
    >>> [f"{epsilon(event, delta=1e-6):.3f}" for event in (Sampled(Poisson(0.01), Gaussian(1.0)), Gaussian(1.0))]
    ['0.364', '4.887']
    """

    rate: float
    expected = _check.each(rate=_check.rate)


@dataclass(frozen=True, kw_only=True)
class TruncatedPoisson(Participation):
    """As Poisson, but a batch of more than ``size`` records is cut, uniformly at random, to ``size`` of them.

    The batch then has a fixed physical size at most; records compete, which the accounting has to pay for.
    ``dataset_size`` is public under this participation; under add/remove a neighbour has one record more or less.

        >>> from hushgrad.events import Gaussian, Sampled
        >>> print(Sampled(TruncatedPoisson(rate=0.01, dataset_size=1000, size=30), Gaussian(1.0)))
        TruncatedPoisson(0.01, 1000, 30) Gaussian(1)
    """

    rate: float
    dataset_size: int
    size: int
    expected = _check.each(rate=_check.rate, dataset_size=_check.positive_int, size=_check.positive_int)

    @property
    def counted(self) -> int:
        return self.dataset_size


@dataclass(frozen=True, kw_only=True)
class FixedSize(Participation):
    """In each step a uniformly random subset of exactly ``size`` of the ``dataset_size`` records (no replacement).

    >>> half = FixedSize(dataset_size=100, size=50)
    >>> half.rate, half.counted, half.drawn_number
    (0.5, 100, 50)
    """

    dataset_size: int
    size: int

    def __post_init__(self) -> None:
        n = _check.positive_int(dataset_size=self.dataset_size)
        size = _check.positive_int(size=self.size)
        if size > n:
            _check.fail("size", size, f"to be at most dataset_size={n}")
        self._keep(dataset_size=n, size=size)

    @property
    def rate(self) -> float:
        """The fraction of the records that take part in one step."""
        return self.size / self.dataset_size

    @property
    def counted(self) -> int:
        return self.dataset_size

    @property
    def drawn_number(self) -> int:
        return self.size


@dataclass(frozen=True, kw_only=True)
class CyclicPoisson(Participation):
    """Records are split once into ``period`` groups; step t takes a Poisson sample at ``rate`` of group t mod period.

    A record's possible steps are thus ``period`` apart, which is what amplifies banded mechanisms.

        >>> from hushgrad.events import Gaussian, Sampled
        >>> print(Sampled(CyclicPoisson(period=4, rate=0.1), Gaussian(1.0)))
        CyclicPoisson(4, 0.1) Gaussian(1)
    """

    drawn = False

    period: int
    rate: float
    expected = _check.each(period=_check.positive_int, rate=_check.rate)


@dataclass(frozen=True, kw_only=True)
class MinSep(Participation):
    """At most ``times`` participations of one record, any two of them at least ``gap`` steps apart; no randomness.

    >>> MinSep(gap=100, times=10).drawn
    False
    """

    drawn = False

    gap: int
    times: int
    expected = _check.each(gap=_check.positive_int, times=_check.positive_int)


@dataclass(frozen=True, kw_only=True)
class BallsInBins(Participation):
    """Each record is thrown into one of ``bins`` batches, uniformly: once for all ``epochs`` passes, or anew (``fresh``) for each.

    >>> from hushgrad.events import Gaussian, Sampled
    >>> print(Sampled(BallsInBins(bins=100, epochs=3), Gaussian(1.0)))
    BallsInBins(100, 3) Gaussian(1)
    """

    bins: int
    epochs: int = 1
    fresh: bool = field(default=False, metadata=LATER)
    expected = _check.each(bins=_check.positive_int, epochs=_check.positive_int, fresh=_check.flag)


@dataclass(frozen=True)
class Once(Participation):
    """Each record takes part in at most one step; no randomness.

    >>> Once().drawn
    False
    """

    drawn = False


@dataclass(frozen=True)
class Everyone(Participation):
    """Every record takes part in every step (full batch).

    >>> from hushgrad.events import Gaussian, Sampled
    >>> print(Sampled(Everyone(), Gaussian(1.0)))
    Everyone() Gaussian(1)
    """
