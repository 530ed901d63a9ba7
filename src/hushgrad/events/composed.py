"""``Event``, and events composed of other events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hushgrad import _check, _other_libraries, _papers
from hushgrad._value import Value
from hushgrad.errors import NoTheorem
from hushgrad.events._fields import shown
from hushgrad.events.neighbours import Absent, Answers, Relation
from hushgrad.events.participation import Participation, Poisson


class Event(Value, family="event"):
    """One private computation, or several composed ones.

    ``event * n`` repeats it adaptively, ``a + b`` composes, ``event.sampled(rate=q)`` runs it on a Poisson sample. The event states what
    theorems about sampling need: ``absent``, ``answers``, ``single_answers`` (one answer for each record), and ``stated``: its guarantee
    is stated for the relation in question, and implies nothing about other relations.

        >>> from hushgrad.events import Gaussian
        >>> training = 1000 * Gaussian(1.1).sampled(rate=0.01)
        >>> print(training + Gaussian(20.0))
        1000 x Poisson(0.01) Gaussian(1.1) + Gaussian(20)
    """

    absent = Absent.UNKNOWN
    single_answers = False
    stated = False

    @property
    def answers(self) -> Answers:
        """Whether a release says which records it comes from; for several events, the worst case among them."""
        return Answers.ANONYMOUS

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
        """An event from its JSON, a dp-accounting event or an Opacus history; an event is returned as it is.

        >>> print(Event.read([(1.1, 0.01, 1000), (0.9, 0.01, 500)]))
        1000 x Poisson(0.01) Gaussian(1.1) + 500 x Poisson(0.01) Gaussian(0.9)
        """
        return description if isinstance(description, Event) else Event.from_json(_other_libraries.json_of(description))

    def __str__(self) -> str:
        return _show(self)


def to_dp_accounting(event: Event) -> Any:
    """``event`` as a dp-accounting ``DpEvent``.

    **Formal guarantee.** The two describe the same computation, so an accountant of dp-accounting bounds the same epsilon; what
    has no exact counterpart there raises an error. ``Event.read`` reads it back.

        >>> from hushgrad.events import Gaussian
        >>> to_dp_accounting(Gaussian(1.1).sampled(rate=0.01))
        PoissonSampledDpEvent(sampling_probability=0.01, event=GaussianDpEvent(noise_multiplier=1.1))

    Raises:
        ArgumentError: where there is no counterpart, or dp-accounting is not installed.
    """
    return _other_libraries.dp_accounting_of(_check.instance(Event, event=event).to_json())


@dataclass(frozen=True)
class Sampled(Event):
    """``of`` run on the records that ``how`` selects, the selection kept secret.

    One ``Sampled`` is one step for ``Poisson``, ``TruncatedPoisson`` and ``FixedSize``; one whole cycle of ``period`` steps
    for ``CyclicPoisson``; and the whole run for ``BallsInBins``, ``MinSep`` and ``Once``, whose steps are not independent.

        >>> from hushgrad.events import Gaussian, Poisson
        >>> Gaussian(1.0).sampled(rate=0.01) == Sampled(Poisson(0.01), Gaussian(1.0))
        True
    """

    how: Participation
    of: Event

    def __post_init__(self) -> None:
        _check.instance(Participation, how=self.how)
        _check.instance(Event, of=self.of)

    @property
    def answers(self) -> Answers:
        """Those of ``of``; and named if participation is not random, since the step then identifies the record."""
        return _worst([self.of.answers, Answers.ANONYMOUS if self.how.drawn else Answers.NAMED])


@dataclass(frozen=True)
class Repeat(Event):
    """``of`` run ``times`` times, each run free to depend on the outputs before it (adaptive composition).

    >>> from hushgrad.events import Gaussian
    >>> 10 * Gaussian(1.0) == Repeat(Gaussian(1.0), 10)
    True
    """

    of: Event
    times: int

    def __post_init__(self) -> None:
        of: Event = _check.instance(Event, of=self.of)
        times = _check.integer(0, times=self.times)
        if isinstance(of, Repeat):  # flattened, so that equal computations are equal events
            times, of = _check.integer(0, times=of.times * times), of.of
        self._keep(of=of, times=times)

    @property
    def answers(self) -> Answers:
        return self.of.answers


@dataclass(frozen=True)
class Compose(Event):
    """Several events on the same data, adaptively. ``Compose(())`` is doing nothing.

    >>> from hushgrad.events import Gaussian, Laplace
    >>> Gaussian(1.0) + Laplace(2.0) == Compose([Gaussian(1.0), Laplace(2.0)])
    True
    """

    events: tuple[Event, ...]

    def __init__(self, events: Iterable[Event] = ()) -> None:
        flat: list[Event] = []
        for event in _check.several(events=events):
            flat.extend(_parts(_check.instance(Event, events=event)))
        self._keep(events=tuple(flat))

    @property
    def answers(self) -> Answers:
        return _worst(event.answers for event in self.events)


@dataclass(frozen=True)
class OneOf(Event):
    """One of ``events``, chosen at random or by earlier releases, never by the data; whether the choice is published does not matter.

    Equal alternatives count once.

        >>> from hushgrad.events import Gaussian
        >>> print(OneOf([Gaussian(1.0), Gaussian(2.0)]))
        one of (Gaussian(1), Gaussian(2))
    """

    events: tuple[Event, ...]

    def __init__(self, events: Iterable[Event]) -> None:
        distinct = tuple(dict.fromkeys(_check.instance(Event, events=event) for event in _check.several(events=events)))
        if not distinct:
            _check.fail("events", (), "to be at least one event", "Doing nothing is Compose(()).")
        self._keep(events=distinct)

    @property
    def answers(self) -> Answers:
        return _worst(event.answers for event in self.events)

    @staticmethod
    def of(events: Iterable[Event]) -> Event:
        """``OneOf(events)``, or the event itself if all are equal.

        >>> from hushgrad.events import Gaussian
        >>> print(OneOf.of([Gaussian(1.0), Gaussian(1.0)]), "and", OneOf.of([Gaussian(1.0), Gaussian(2.0)]))
        Gaussian(1) and one of (Gaussian(1), Gaussian(2))
        """
        found = OneOf(events)
        return found.events[0] if len(found.events) == 1 else found


@dataclass(frozen=True, kw_only=True)
class RepeatAndSelect(Event):
    """``of`` run a random number K of times; only the best result is released (private tuning).

    K has mean ``mean`` and is Poisson for ``shape`` = inf, else truncated negative binomial with that shape (1: geometric,
    0: logarithmic). Papernot and Steinke 2022, theorems 2 and 6.

        >>> from hushgrad import epsilon
        >>> from hushgrad.events import Gaussian
        >>> print(f"{epsilon(RepeatAndSelect(of=Gaussian(10.0), mean=5.0), delta=1e-5, accountant='rdp'):.3f}")
        0.763
    """

    papers = (
        _papers.Paper(
            "papernot2022tuning",
            "Papernot, Nicolas and Steinke, Thomas",
            "Hyperparameter Tuning with {R\\'enyi} Differential Privacy",
            "ICLR",
            arxiv="2110.03620",
        ),
    )

    of: Event
    mean: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        _check.instance(Event, of=self.of)
        endless = isinstance(self.shape, float) and self.shape == float("inf")
        shape = self.shape if endless else _check.between(-1, 1e300, shape=self.shape)
        self._keep(mean=_check.positive(mean=self.mean), shape=shape)

    @property
    def answers(self) -> Answers:
        return self.of.answers


@dataclass(frozen=True)
class NonPrivate(Event):
    """Something without any privacy: epsilon is infinite.

    >>> from hushgrad import epsilon
    >>> epsilon(NonPrivate(), delta=1e-5)
    inf
    """


@dataclass(frozen=True)
class Unanalysed(Event):
    """Something for which no analysis is known, and ``why``: epsilon is infinite until somebody proves better.

    >>> from hushgrad import epsilon
    >>> epsilon(Unanalysed("the largest loss of each step was printed"), delta=1e-5)
    inf
    """

    why: str

    def __post_init__(self) -> None:
        _check.instance(str, why=self.why)


def counted_samples(event: Event) -> Iterator[Participation]:
    """The participations in ``event`` whose theorem relies on a public number of records."""
    pending = [event]
    while pending:
        of = pending.pop()
        if isinstance(of, Sampled) and of.how.counted is not None:
            yield of.how
        if isinstance(of, (Compose, OneOf)):
            pending.extend(of.events)
        elif isinstance(of, (Repeat, RepeatAndSelect)) or (isinstance(of, Sampled) and of.how.drawn_number is None):
            pending.append(of.of)


def require_one_size(event: Event, relation: Relation, size: int) -> None:
    """Refuse groups of several records where the number of records is public: the guarantee compares sizes that differ by one only.

    Raises:
        NoTheorem: under add/remove, if a participation in ``event`` relies on that number.
    """
    if size > 1 and relation is Relation.ADD_REMOVE and next(counted_samples(event), None) is not None:
        raise NoTheorem(
            f"{event} counts on a public number of records, and a group of {size} changes it by more than one. "
            "Ask with relation='zero_out' or 'replace_one', which keep it."
        )


def _worst(answers: Iterable[Answers]) -> Answers:
    """The worst case: unknown if any is unknown, else named if any is named, else anonymous."""
    said = set(answers)
    return next((word for word in (Answers.UNKNOWN, Answers.NAMED) if word in said), Answers.ANONYMOUS)


def _parts(event: Event) -> tuple[Event, ...]:
    return event.events if isinstance(event, Compose) else (event,)


def _show(value: Value) -> str:
    if isinstance(value, Repeat):
        inner = str(value.of)
        return f"{value.times} x {'(' + inner + ')' if isinstance(value.of, Compose) else inner}"
    if isinstance(value, Compose):
        return " + ".join(map(str, value.events)) or "nothing"
    if isinstance(value, OneOf):
        return f"one of ({', '.join(map(str, value.events))})"
    if isinstance(value, Sampled):
        inner = str(value.of)
        return f"{value.how} {'(' + inner + ')' if isinstance(value.of, (Compose, Repeat)) else inner}"
    return shown(value)
