"""Events: what a private computation did, as data.

An :class:`Event` is necessary and sufficient for privacy accounting: mechanisms produce events, accountants read them,
and the two meet nowhere else. The rules of this file are a constitution:

* an event is never removed and its meaning never changes; new parameters are optional and default to the old meaning;
* an accountant that has no theorem for an event says so (:class:`~hushgrad.errors.NoTheorem`), it never guesses;
* every parameter is public: an event may be printed, stored and sent.

Notation: a mechanism sees a data set through a query to which each record (each *unit*: an example, or all data of one
user) contributes a vector of norm at most 1. ``noise_multiplier`` and ``scale`` are in units of that bound.

    >>> run = Gaussian(1.1).sampled(rate=0.01) * 10_000
    >>> print(run)
    10000 x Poisson(0.01) Gaussian(1.1)
    >>> Event.from_json(run.to_json()) == run
    True
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from hushgrad import _check, _foreign
from hushgrad._value import LATER, Value, is_silent

__all__ = [
    "ZCDP",
    "Absent",
    "Answers",
    "ApproxDP",
    "BallsInBins",
    "Compose",
    "CyclicPoisson",
    "DiscreteGaussian",
    "DiscreteLaplace",
    "Event",
    "Everyone",
    "Exponential",
    "FixedSize",
    "Gaussian",
    "GaussianMixture",
    "Laplace",
    "MinSep",
    "NonPrivate",
    "Once",
    "Participation",
    "Poisson",
    "PureDP",
    "RandomizedResponse",
    "Relation",
    "Repeat",
    "RepeatAndSelect",
    "Sampled",
    "TruncatedPoisson",
    "Unanalysed",
    "to_dp_accounting",
]

_LEAST_NOISE = 1e-100  # less, or more than its inverse, and squares leave the range of floats


class Relation(enum.Enum):
    """When two data sets are neighbours. The guarantee compares the outputs on neighbours, so it has no meaning without.

    | relation | neighbours | distance of the two sums of a query (contributions of norm at most 1) |
    |---|---|---|
    | ``ADD_REMOVE`` | one record is added or removed | 1 |
    | ``REPLACE_ONE`` | one record is replaced by any other; the size is public | 2 |
    | ``ZERO_OUT`` | one record is replaced by a null record that contributes 0; the size is public | 1 |
    """

    ADD_REMOVE = "add_remove"
    REPLACE_ONE = "replace_one"
    ZERO_OUT = "zero_out"

    def __str__(self) -> str:
        return {"add_remove": "add/remove one", "replace_one": "replace one", "zero_out": "zero out one"}[self.value]

    @classmethod
    def of(cls, relation: Relation | str) -> Relation:
        """The relation itself, or the one that a word such as ``"replace_one"`` names."""
        if isinstance(relation, Relation):
            return relation
        return cls(_check.one_of([r.value for r in cls], relation=relation))

    @property
    def contributions(self) -> int:
        """How many bounded contributions the two neighbouring sums differ by: 2 for ``REPLACE_ONE``, else 1."""
        return 2 if self is Relation.REPLACE_ONE else 1


class Absent(enum.Enum):
    """What a mechanism sees of a record that is not there, or that is null: what amplification by sampling needs to know.

    | value | meaning |
    |---|---|
    | ``NOTHING`` | as if it contributed 0: the output's distribution is the same without it. Noise added to a sum is like that |
    | ``UNKNOWN`` | its place may be visible: a mechanism may print how many records it was given |
    """

    NOTHING = "nothing"
    UNKNOWN = "unknown"


class Answers(enum.Enum):
    """Whether what a mechanism releases says which records it comes from.

    | value | meaning |
    |---|---|
    | ``ANONYMOUS`` | a function of the records as a set: a name, where there is one, is part of the record |
    | ``NAMED`` | each answer stands beside its record's name, which is public |
    | ``UNKNOWN`` | nobody said; then the worse of the two is assumed |
    """

    ANONYMOUS = "anonymous"
    NAMED = "named"
    UNKNOWN = "unknown"


# Who takes part when ------------------------------------------------------------------------------------------------


class Participation(Value, family="participation"):
    """In which steps a record may take part. The sampler promises it, the mechanism's theorem needs it."""

    def __str__(self) -> str:
        return _show(self)


@dataclass(frozen=True)
class Poisson(Participation):
    """In each step every record takes part independently with probability ``rate``."""

    rate: float

    def __post_init__(self) -> None:
        _set(self, rate=_check.rate(rate=self.rate))


@dataclass(frozen=True, kw_only=True)
class TruncatedPoisson(Participation):
    """As Poisson, but a batch of more than ``size`` records is cut, uniformly at random, to ``size`` of them.

    The batch then has a fixed physical size at most; records compete, which the accounting has to pay for.
    ``dataset_size`` is public under this participation.
    """

    rate: float
    dataset_size: int
    size: int

    def __post_init__(self) -> None:
        _set(
            self,
            rate=_check.rate(rate=self.rate),
            dataset_size=_check.positive_int(dataset_size=self.dataset_size),
            size=_check.positive_int(size=self.size),
        )


@dataclass(frozen=True, kw_only=True)
class FixedSize(Participation):
    """In each step a uniformly random subset of exactly ``size`` of the ``dataset_size`` records (no replacement)."""

    dataset_size: int
    size: int

    def __post_init__(self) -> None:
        n = _check.positive_int(dataset_size=self.dataset_size)
        size = _check.positive_int(size=self.size)
        if size > n:
            _check.fail("size", size, f"to be at most dataset_size={n}")
        _set(self, dataset_size=n, size=size)

    @property
    def rate(self) -> float:
        """The fraction of the records that take part in one step."""
        return self.size / self.dataset_size


@dataclass(frozen=True, kw_only=True)
class CyclicPoisson(Participation):
    """Records are split once into ``period`` groups; step t takes a Poisson sample at ``rate`` of group t mod period.

    A record's possible steps are thus ``period`` apart, which is what amplifies banded mechanisms.
    """

    period: int
    rate: float

    def __post_init__(self) -> None:
        _set(self, period=_check.positive_int(period=self.period), rate=_check.rate(rate=self.rate))


@dataclass(frozen=True, kw_only=True)
class MinSep(Participation):
    """At most ``times`` participations of one record, any two of them at least ``gap`` steps apart; no randomness."""

    gap: int
    times: int

    def __post_init__(self) -> None:
        _set(self, gap=_check.positive_int(gap=self.gap), times=_check.positive_int(times=self.times))


@dataclass(frozen=True, kw_only=True)
class BallsInBins(Participation):
    """Each record is thrown into one of ``bins`` batches, uniformly: once for all ``epochs`` passes, or anew (``fresh``) for each."""

    bins: int
    epochs: int = 1
    fresh: bool = field(default=False, metadata=LATER)

    def __post_init__(self) -> None:
        _set(
            self,
            bins=_check.positive_int(bins=self.bins),
            epochs=_check.positive_int(epochs=self.epochs),
            fresh=_check.instance(bool, fresh=self.fresh),
        )


@dataclass(frozen=True)
class Once(Participation):
    """Each record takes part in at most one step; no randomness."""


@dataclass(frozen=True)
class Everyone(Participation):
    """Every record takes part in every step (full batch)."""


# What happened ------------------------------------------------------------------------------------------------------


class Event(Value, family="event"):
    """One private computation, or several composed ones.

    ``event * n`` repeats it adaptively, ``a + b`` composes, ``event.sampled(rate=q)`` runs it on a Poisson sample. What theorems
    about samples need to know is part of the event: ``absent``, ``answers``, and ``single_answers`` (one for each record).
    """

    absent = Absent.UNKNOWN
    answers = Answers.ANONYMOUS
    single_answers = False

    def __mul__(self, times: int) -> Event:
        times = _check.integer(0, times=times)
        return self if times == 1 else Repeat(self, times)

    __rmul__ = __mul__

    def __add__(self, other: Event) -> Event:
        if not isinstance(other, Event):
            return NotImplemented
        return Compose((*_parts(self), *_parts(other)))

    def sampled(self, *, rate: float) -> Event:
        """This event on a Poisson sample: each record takes part with probability ``rate``, secretly."""
        return Sampled(Poisson(rate), self)

    @classmethod
    def read(cls, description: object) -> Event:
        """An event itself, or one that is described by its JSON, by a dp-accounting event or by an Opacus history.

        >>> print(Event.read([(1.1, 0.01, 1000), (0.9, 0.01, 500)]))
        1000 x Poisson(0.01) Gaussian(1.1) + 500 x Poisson(0.01) Gaussian(0.9)
        """
        return description if isinstance(description, Event) else Event.from_json(_foreign.json_of(description))

    def __str__(self) -> str:
        return _show(self)


def to_dp_accounting(event: Event) -> Any:
    """``event`` as a dp-accounting ``DpEvent``.

    **Formal guarantee.** The two describe the same computation, so an accountant of dp-accounting bounds the same epsilon; what
    has no exact counterpart there raises an error. ``Event.read`` reads it back.

        >>> to_dp_accounting(Gaussian(1.1).sampled(rate=0.01))
        PoissonSampledDpEvent(sampling_probability=0.01, event=GaussianDpEvent(noise_multiplier=1.1))

    Raises:
        ArgumentError: where there is no counterpart, or dp-accounting is not installed.
    """
    return _foreign.dp_accounting_of(_check.instance(Event, event=event).to_json())


@dataclass(frozen=True)
class Gaussian(Event):
    """N(0, ``noise_multiplier``² I) added to a sum of contributions of L2 norm at most 1. Multiplier 0 is no privacy."""

    noise_multiplier: float
    absent = Absent.NOTHING

    def __post_init__(self) -> None:
        _set(self, noise_multiplier=_noise(noise_multiplier=self.noise_multiplier))


@dataclass(frozen=True)
class Laplace(Event):
    """Laplace noise of ``scale`` b (density exp(-|x|/b)/2b) added to a number to which each record contributes at most 1.

    Under add/remove it is (1/b)-DP. For a vector with a total L1 contribution of 1 this event is an upper bound, unless it says
    that the answer is a single number (``scalar``), which costs less on Poisson samples under replace-one.
    """

    scale: float
    scalar: bool = field(default=False, metadata=LATER)
    absent = Absent.NOTHING

    def __post_init__(self) -> None:
        _set(self, scale=_noise(scale=_check.positive(scale=self.scale)), scalar=_check.instance(bool, scalar=self.scalar))


@dataclass(frozen=True)
class DiscreteGaussian(Event):
    """Integer noise with P(k) proportional to exp(-k²/2 ``sigma``²) on an integer sum, contributions at most ``sensitivity``."""

    sigma: float
    sensitivity: int = 1
    absent = Absent.NOTHING

    def __post_init__(self) -> None:
        _set(
            self,
            sigma=_noise(sigma=_check.positive(sigma=self.sigma)),
            sensitivity=_check.positive_int(sensitivity=self.sensitivity),
        )


@dataclass(frozen=True)
class DiscreteLaplace(Event):
    """Integer noise with P(k) proportional to exp(-|k|/``scale``) on an integer sum, contributions at most ``sensitivity``.

    Or on each place of a ``vector`` of sums, to which a record contributes at most ``sensitivity`` in total.
    """

    scale: float
    sensitivity: int = 1
    vector: bool = field(default=False, metadata=LATER)
    absent = Absent.NOTHING

    def __post_init__(self) -> None:
        _set(
            self,
            scale=_noise(scale=_check.positive(scale=self.scale)),
            sensitivity=_check.positive_int(sensitivity=self.sensitivity),
            vector=_check.instance(bool, vector=self.vector),
        )


@dataclass(frozen=True)
class RandomizedResponse(Event):
    """Each record answers truthfully, except that with ``noise_probability`` the answer is uniform over ``categories``.

    ``answers`` says whether the answers stand beside names or are only counted; a null record gives some answer too.
    """

    noise_probability: float
    categories: int = 2
    answers: Answers = field(default=Answers.UNKNOWN, metadata=LATER)
    single_answers = True

    def __post_init__(self) -> None:
        _set(
            self,
            noise_probability=_check.probability(noise_probability=self.noise_probability),
            categories=_check.integer(2, categories=self.categories),
            answers=_word(Answers, answers=self.answers),
        )


@dataclass(frozen=True)
class Exponential(Event):
    """The exponential mechanism with P(y) proportional to exp(``epsilon`` u(y) / 2), u of sensitivity 1: epsilon-DP.

    Its log-odds have a range of at most epsilon between neighbours, so it composes better than epsilon-DP alone tells.
    ``absent="nothing"`` says that a null record's utility is 0 everywhere.
    """

    epsilon: float
    absent: Absent = field(default=Absent.UNKNOWN, metadata=LATER)

    def __post_init__(self) -> None:
        _set(self, epsilon=_check.non_negative(epsilon=self.epsilon), absent=_word(Absent, absent=self.absent))


@dataclass(frozen=True)
class PureDP(Event):
    """Any mechanism that is ``epsilon``-DP under the relation that the question is asked for.

    ``absent="nothing"`` says that a null record is to the mechanism as if it were not there; see :class:`Absent`.
    """

    epsilon: float
    absent: Absent = field(default=Absent.UNKNOWN, metadata=LATER)

    def __post_init__(self) -> None:
        _set(self, epsilon=_check.non_negative(epsilon=self.epsilon), absent=_word(Absent, absent=self.absent))


@dataclass(frozen=True)
class ApproxDP(Event):
    """Any mechanism that is (``epsilon``, ``delta``)-DP under the relation that the question is asked for.

    ``absent="nothing"`` says that a null record is to the mechanism as if it were not there; see :class:`Absent`.
    """

    epsilon: float
    delta: float
    absent: Absent = field(default=Absent.UNKNOWN, metadata=LATER)

    def __post_init__(self) -> None:
        _set(
            self,
            epsilon=_check.non_negative(epsilon=self.epsilon),
            delta=_check.between(0, 1, closed="left", delta=self.delta),
            absent=_word(Absent, absent=self.absent),
        )


@dataclass(frozen=True)
class ZCDP(Event):
    """Any mechanism that is ``rho``-zCDP (Bun and Steinke 2016) under the relation that the question is asked for.

    ``absent="nothing"`` says that a null record is to the mechanism as if it were not there; see :class:`Absent`.
    """

    rho: float
    absent: Absent = field(default=Absent.UNKNOWN, metadata=LATER)

    def __post_init__(self) -> None:
        _set(self, rho=_check.non_negative(rho=self.rho), absent=_word(Absent, absent=self.absent))


@dataclass(frozen=True, kw_only=True)
class GaussianMixture(Event):
    """N(0, ``noise_multiplier``²) added to a sum to which the record contributes a random amount, hidden from the observer.

    The contribution has norm ``sensitivities[i]`` with probability ``probabilities[i]``. Poisson sampling of a Gaussian is
    the case (0, 1) with (1 - q, q); a banded matrix mechanism under cyclic Poisson sampling is another.
    """

    noise_multiplier: float
    sensitivities: tuple[float, ...]
    probabilities: tuple[float, ...]
    absent = Absent.NOTHING

    def __post_init__(self) -> None:
        sensitivities = tuple(_check.non_negative(sensitivities=s) for s in self.sensitivities)
        probabilities = tuple(_check.probability(probabilities=p) for p in self.probabilities)
        if not sensitivities or len(sensitivities) != len(probabilities):
            _check.fail("probabilities", self.probabilities, "to be as many as the sensitivities, at least one")
        if abs(sum(probabilities) - 1) > 1e-9:
            _check.fail("probabilities", self.probabilities, "to sum to 1")
        _set(
            self,
            noise_multiplier=_noise(noise_multiplier=self.noise_multiplier),
            sensitivities=sensitivities,
            probabilities=probabilities,
        )


@dataclass(frozen=True)
class Sampled(Event):
    """``of`` run on the records that ``how`` selects, the selection kept secret.

    One ``Sampled`` is one step for ``Poisson``, ``TruncatedPoisson`` and ``FixedSize``; one whole cycle of ``period`` steps
    for ``CyclicPoisson``; and the whole run for ``BallsInBins``, ``MinSep`` and ``Once``, whose steps are not independent.
    """

    how: Participation
    of: Event

    def __post_init__(self) -> None:
        _check.instance(Participation, how=self.how)
        _check.instance(Event, of=self.of)


@dataclass(frozen=True)
class Repeat(Event):
    """``of`` run ``times`` times, each run free to depend on the outputs before it (adaptive composition)."""

    of: Event
    times: int

    def __post_init__(self) -> None:
        of: Event = _check.instance(Event, of=self.of)
        times = _check.integer(0, times=self.times)
        if isinstance(of, Repeat):  # never nested: equality is by what happened
            times, of = _check.integer(0, times=of.times * times), of.of
        _set(self, of=of, times=times)


@dataclass(frozen=True)
class Compose(Event):
    """Several events on the same data, adaptively. ``Compose(())`` is doing nothing."""

    events: tuple[Event, ...]

    def __init__(self, events: Iterable[Event] = ()) -> None:
        flat: list[Event] = []
        for event in events:
            flat.extend(_parts(_check.instance(Event, events=event)))
        _set(self, events=tuple(flat))


@dataclass(frozen=True, kw_only=True)
class RepeatAndSelect(Event):
    """``of`` run a random number K of times; only the best result is released (private tuning).

    K has mean ``mean`` and is Poisson for ``shape`` = inf, else truncated negative binomial with that shape (1: geometric,
    0: logarithmic). Papernot and Steinke 2022, theorems 2 and 6.
    """

    of: Event
    mean: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        _check.instance(Event, of=self.of)
        shape = float(self.shape) if self.shape == float("inf") else _check.between(-1, 1e300, shape=self.shape)
        _set(self, mean=_check.positive(mean=self.mean), shape=shape)


@dataclass(frozen=True)
class NonPrivate(Event):
    """Something without any privacy: epsilon is infinite."""


@dataclass(frozen=True)
class Unanalysed(Event):
    """Something for which no analysis is known, and ``why``: epsilon is infinite until somebody proves better."""

    why: str

    def __post_init__(self) -> None:
        _check.instance(str, why=self.why)


# ---------------------------------------------------------------------------------------------------------------------


def _noise(**argument: Any) -> float:
    """A scale of noise: 0, or a number whose square and its inverse are still numbers."""
    ((name, value),) = argument.items()
    scale = _check.non_negative(**argument)
    if scale and not _LEAST_NOISE <= scale <= 1 / _LEAST_NOISE:
        _check.fail(name, value, f"to be 0 or to lie in [{_LEAST_NOISE:g}, {1 / _LEAST_NOISE:g}]")
    return scale


def _word(kind: Any, **argument: Any) -> Any:
    """The member of an enumeration, given itself or its word."""
    ((_, value),) = argument.items()
    return value if isinstance(value, kind) else kind(_check.one_of([member.value for member in kind], **argument))


def _set(value: Value, **fields: object) -> None:
    """Store checked fields of a frozen value during its construction."""
    for name, content in fields.items():
        object.__setattr__(value, name, content)


def _parts(event: Event) -> tuple[Event, ...]:
    return event.events if isinstance(event, Compose) else (event,)


def _show(value: Value) -> str:
    if isinstance(value, Repeat):
        inner = str(value.of)
        return f"{value.times} x {'(' + inner + ')' if isinstance(value.of, Compose) else inner}"
    if isinstance(value, Compose):
        return " + ".join(map(str, value.events)) or "nothing"
    if isinstance(value, Sampled):
        inner = str(value.of)
        return f"{value.how} {'(' + inner + ')' if isinstance(value.of, (Compose, Repeat)) else inner}"
    shown = [_show_field(f.name, getattr(value, f.name)) for f in fields(value) if not is_silent(value, f)]  # type: ignore[arg-type]
    return f"{type(value).__name__}({', '.join(text for text in shown if text)})"


def _show_field(name: str, x: object) -> str:
    if isinstance(x, enum.Enum):
        return f"{name}={x.value}"
    if isinstance(x, bool):
        return name if x else ""  # a flag shows its name or nothing
    if isinstance(x, float):
        return f"{x:.6g}"
    if isinstance(x, tuple):
        shown = [_show_field(name, item) for item in x[:4]]
        return f"[{', '.join(shown)}{', ...' if len(x) > 4 else ''}]"
    return str(x)
