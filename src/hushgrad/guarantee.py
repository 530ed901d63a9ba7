"""The guarantee that a person can sign, and the ledger that it is computed from."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hushgrad import _check
from hushgrad._printed import at_most, times
from hushgrad._value import Value
from hushgrad.events import Compose, Event, Relation, Unanalysed
from hushgrad.events.composed import require_one_size

__all__ = ["Entry", "Guarantee", "Ledger", "questions"]

_LARGE_EPSILON, _LARGE_DELTA = 20.0, 1e-3


class _Statement(Value, family="statement"):
    """The family of the values in this module."""


@dataclass(frozen=True, kw_only=True)
class Guarantee(_Statement):
    r"""An (epsilon, delta) differential-privacy guarantee with everything that it depends on.

    **Formal guarantee.** For every pair of data sets that are neighbours under ``relation`` with respect to one ``unit``, and
    every set S of outputs, P[M(D) in S] <= e^epsilon P[M(D') in S] + delta, where M is the computation described by ``event``.

        >>> from hushgrad.events import Gaussian
        >>> print(Guarantee(epsilon=4.3772, delta=1e-5, accountant="pld", event=Gaussian(1.0)))
        (4.378, 1e-05)-DP per example (add/remove one; pld accountant) for Gaussian(1).
    """

    epsilon: float
    delta: float
    event: Event
    accountant: str
    relation: Relation = Relation.ADD_REMOVE
    unit: str = "example"
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", _check.between(0, math.inf, closed="both", epsilon=self.epsilon))
        object.__setattr__(self, "delta", _check.probability(delta=self.delta))
        object.__setattr__(self, "relation", Relation.of(self.relation))
        if isinstance(self.notes, str) or not all(isinstance(note, str) for note in self.notes):
            _check.fail("notes", self.notes, "to be sentences, each a string", "Write (note,) for a single one.")
        object.__setattr__(self, "notes", tuple(self.notes))
        _check.instance(Event, event=self.event)
        _check.instance(str, accountant=self.accountant)
        _check.instance(str, unit=self.unit)

    def __str__(self) -> str:
        if math.isinf(self.epsilon):
            claim = f"No privacy guarantee (epsilon is infinite) per {self.unit}"
        else:
            claim = f"({at_most(self.epsilon)}, {at_most(self.delta, 6)})-DP per {self.unit}"
        notes = "".join(f" {note.rstrip('.')}." for note in self.notes)
        return f"{claim} ({self.relation}; {self.accountant} accountant) for {self.event}.{notes}"

    def for_group(self, size: int) -> Guarantee:
        r"""The guarantee for a group of ``size`` units that act together (a family, all records of one person).

        (k epsilon, delta (e^{k epsilon} - 1)/(e^epsilon - 1)): apply the definition k times along a chain of neighbours
        (Vadhan 2017, lemma 2.2). It holds for every mechanism; for Gaussians, calibrating with sensitivity k is tighter.

            >>> from hushgrad.events import PureDP
            >>> Guarantee(epsilon=0.5, delta=0.0, accountant="basic", event=PureDP(0.5)).for_group(3).epsilon
            1.5

        Raises:
            NoTheorem: under add/remove, where samples count on a public number of records that a group would change.
        """
        k = _check.positive_int(size=size)
        if k == 1:
            return self
        require_one_size(self.event, self.relation, k)
        return replace(
            self,
            epsilon=times(k, self.epsilon),
            delta=_group_delta(self.epsilon, self.delta, k),
            unit=f"group of {k} {self.unit}s",
        )


def questions(epsilon: float | None, delta: float | None, *, records: float | None = None) -> tuple[str, ...]:
    r"""Warnings about an unusual (epsilon, delta), as sentences; none for a usual one. Nothing is refused.

    A mechanism that publishes a record outright with probability delta is (0, delta)-DP: n records are safe only if delta is well
    below 1/n. And e^epsilon bounds how much more likely an outcome becomes by one record's presence.

    Args:
        epsilon: of the claim or of the budget; None where it is not known yet.
        delta: of the claim; None where it is not known yet.
        records: how many records there are, a public number, if it is known.

        >>> questions(3.0, 1e-6, records=60_000)
        ()
        >>> len(questions(1e6, 0.5))
        2
    """
    found = []
    if epsilon is not None and epsilon > _LARGE_EPSILON:
        size = "An infinite epsilon" if math.isinf(epsilon) else f"An epsilon of {at_most(epsilon, 6)}"
        found.append(f"{size} promises next to nothing: one record may change a probability by the factor e^epsilon.")
    limit = _LARGE_DELTA if records is None else min(_LARGE_DELTA, 1.0 / _check.positive(records=records))
    if delta is not None and limit <= delta < 1:
        known = "the number of records" if records is None else f"{records:.6g} records"
        found.append(
            f"A delta of {at_most(delta, 6)} allows to publish that share of the records as they are: "
            f"choose one well below 1 / {known}."
        )
    return tuple(found)


def _group_delta(epsilon: float, delta: float, k: int) -> float:
    if delta == 0 or math.isinf(epsilon):
        return delta
    if epsilon == 0:
        return min(1.0, times(k, delta))
    # expm1(k e)/expm1(e) = e^{(k-1) e} (1 - e^{-k e})/(1 - e^{-e}), which does not overflow before the minimum is taken
    log_ratio = (k - 1) * epsilon + math.log(-math.expm1(-k * epsilon)) - math.log(-math.expm1(-epsilon))
    # all numbers above are below 1500 where it matters, so their roundings are below 1e-12 together
    return max(math.exp(min(0.0, math.log(delta) + log_ratio + 1e-12)), sys.float_info.min)


@dataclass(frozen=True)
class Entry(_Statement):
    """One line of a ledger: ``event`` happened ``times`` times.

    ``stream`` is empty for independent steps: they compose. The steps of one correlated-noise run are not independent; they
    carry the run's name as ``stream``, ``event`` is then the cost of the *whole* run, charged once, and ``times`` counts the
    steps taken, which can only make the charge an upper bound (a prefix of a run is post-processing of the run).

    ``run`` names the run whose noise this is, and ``content`` is a keyed digest of what it released: two entries of one run with
    different contents are two releases under the same noise, which no theorem covers. Without the run's key neither tells anything.
    """

    event: Event
    times: int = 1
    stream: str = ""
    run: str = ""
    content: str = ""
    part: int = 0  # which ledger of a sum it comes from: equal stream names in different parts are different streams

    def __post_init__(self) -> None:
        _check.instance(Event, event=self.event)
        object.__setattr__(self, "times", _check.positive_int(times=self.times))
        _check.instance(str, stream=self.stream)
        _check.instance(str, run=self.run)
        _check.instance(str, content=self.content)
        _check.integer(0, part=self.part)

    def is_same(self, other: Entry) -> bool:
        """Whether the two differ only in ``times``, so that their steps can be added."""
        mine, others = ((e.stream, e.run, e.content, e.part) for e in (self, other))
        return mine == others and self.event == other.event


_FORKED = Unanalysed("one run was continued in two ways: both released under the same noise")


class Ledger:
    """What really happened, in order: append-only, and the only source of ``spent()``.

    Runs of equal steps are stored as one entry with a count, so that a million steps take one line; a stream that is recorded
    again is the same stream, charged once. Two ledgers on the same data add up, ``pretraining + finetuning``, and every charge of
    both counts: streams of the two are different, even if their names are equal. Two ledgers of *one* run with different contents
    (a folder was copied and both copies went on) add up to infinity.

        >>> from hushgrad.events import Gaussian
        >>> ledger = Ledger()
        >>> for _ in range(1000):
        ...     ledger.record(Gaussian(5.0))
        >>> len(ledger), str(ledger.event())
        (1, '1000 x Gaussian(5)')
    """

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def record(self, event: Event, *, times: int = 1, stream: str = "", run: str = "", content: str = "") -> None:
        """Append: ``event`` happened ``times`` more times. A known stream continues, in the latest part that has it.

        Args:
            event: what happened.
            times: how often.
            stream: the name of a correlated run, which is charged once; empty for independent steps.
            run: the name of the run whose noise it is.
            content: a keyed digest of what was released.
        """
        parts = [entry.part for entry in self._entries if entry.stream == stream] if stream else []
        self._append(Entry(event, times, stream, run, content, max(parts, default=0)))

    def _append(self, entry: Entry) -> None:
        last = self._entries[-1] if self._entries else None
        if last is not None and last.is_same(entry):
            self._entries[-1] = replace(last, times=last.times + entry.times)
        else:
            self._entries.append(entry)

    @property
    def _parts(self) -> int:
        return max((entry.part + 1 for entry in self._entries if entry.stream), default=0)

    def event(self) -> Event:
        """Everything in this ledger as one event; each stream is charged once."""
        charged: set[tuple[int, str, Event]] = set()
        contents: dict[str, str] = {}
        costs: list[tuple[Event, int]] = []
        for entry in self._entries:
            if entry.run and contents.setdefault(entry.run, entry.content) != entry.content:
                costs.append((_FORKED, 1))
            if entry.stream:
                if (entry.part, entry.stream, entry.event) in charged:
                    continue
                charged.add((entry.part, entry.stream, entry.event))
                costs.append((entry.event, 1))
            elif costs and costs[-1][0] == entry.event:  # equal steps in consecutive entries
                costs[-1] = (entry.event, costs[-1][1] + entry.times)
            else:
                costs.append((entry.event, entry.times))
        events = [event if times == 1 else event * times for event, times in costs]
        return events[0] if len(events) == 1 else Compose(events)

    @property
    def steps(self) -> int:
        """How many steps were recorded."""
        return sum(entry.times for entry in self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(tuple(self._entries))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self._entries == other._entries

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __add__(self, other: Ledger) -> Ledger:
        if not isinstance(other, Ledger):
            return NotImplemented
        total = Ledger()
        for entry in self:
            total._append(entry)
        first = self._parts
        for entry in other:
            total._append(replace(entry, part=entry.part + first) if entry.stream else entry)
        return total

    def __str__(self) -> str:
        return f"Ledger of {self.steps} steps: {self.event()}"

    def to_json(self) -> dict[str, Any]:
        """This ledger as a JSON object."""
        return {"ledger": 1, "entries": [entry.to_json() for entry in self]}

    @classmethod
    def from_json(cls, data: object) -> Ledger:
        """The ledger described by a JSON object or text; anything that is not understood is refused."""
        if isinstance(data, (str, bytes)):
            data = _check.parsed(data)
        if not isinstance(data, dict) or data.get("ledger") != 1 or not isinstance(data.get("entries"), list):
            _check.fail("data", data, 'to be a ledger: {"ledger": 1, "entries": [...]}')
        ledger = cls()
        ledger._entries = [Entry.from_json(item) for item in data["entries"]]
        return ledger
