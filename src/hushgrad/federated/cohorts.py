"""Cohorts: whom the server asks in a round, by a rule that the plan's theorem relies on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hushgrad import _check, events
from hushgrad.errors import ArgumentError
from hushgrad.federated.check_ins import CheckIns, as_ids, pack_ids, unpack_ids
from hushgrad.sampling.base import Deal, Sampler
from hushgrad.sampling.draws import Draws
from hushgrad.train.plan import Plan


@dataclass(frozen=True, kw_only=True)
class MinSeparation(Sampler):
    """A random cohort of ``cohort`` users among those who last took part ``gap`` rounds ago, and fewer than ``times`` times.

    For servers whose devices come and go: it needs no order, no epochs and no known population.

    **Formal guarantee.** At most ``times`` participations of one user, any two at least ``gap`` rounds apart. Users compete
    for places, so it works for neighbours of the same size only: zero-out and replace-one. The guarantee does not rely on randomness.

    | case | what happens |
    |---|---|
    | fewer than ``cohort`` users may take part | a smaller cohort; the divisor stays |
    | nobody may | an empty cohort; the round is noise only |

        >>> sampler = MinSeparation(cohort=2, gap=2, times=3, steps=4)
        >>> [len(batch) for batch in sampler.batches(3, np.random.default_rng(0))]
        [2, 1, 2, 1]
        >>> print(sampler.participation())
        MinSep(2, 3)

    Reference: Choquette-Choo et al. 2023 (arXiv:2306.08153), section 3.
    """

    cohort: int
    gap: int
    times: int
    steps: int
    expected = _check.each(**dict.fromkeys(("cohort", "gap", "times", "steps"), _check.positive_int))

    def participation(self) -> events.MinSep:
        """MinSep(gap, times)."""
        return events.MinSep(gap=self.gap, times=self.times)

    def dealer(self, n: int, draws: Draws) -> Deal:
        """The cohorts of a run in which all ``n`` users are always available. Later rounds depend on earlier ones, which are kept."""
        everyone, book, dealt = np.arange(n), CheckIns(gap=self.gap, times=self.times), list[np.ndarray]()

        def deal(step: int) -> np.ndarray:
            for t in range(len(dealt), step + 1):
                chosen = pick(book.eligible(everyone, round=t), self.cohort, draws.at(t))
                book.enter(chosen, round=t)
                dealt.append(chosen.astype(np.int64))
            return dealt[step]

        return deal


def pick(users: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """A uniformly random subset of ``size`` users, or all of them if there are fewer; sorted."""
    if len(users) <= size:
        return users
    return np.asarray(users[np.sort(rng.choice(len(users), size=size, replace=False, shuffle=False))])


class Cohorts(ABC):
    """Chooses each round's users. The choice of a round is final: asked again, it returns the same."""

    users: int | None = None  # how many there are, where that is known

    @abstractmethod
    def choose(self, round: int, connected: np.ndarray) -> np.ndarray:
        """The users of ``round`` (counted from 0), whether or not they can be reached; sorted."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What a resumed server needs."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue."""


class Separated(Cohorts):
    """A random cohort of the connected users who are eligible by the check-in book."""

    def __init__(self, participation: events.MinSep, size: int, draws: Draws) -> None:
        self.book = CheckIns(gap=participation.gap, times=participation.times)
        self._size, self._draws = size, draws
        self._latest: tuple[int, np.ndarray] | None = None
        self._resumed = False

    def choose(self, round: int, connected: np.ndarray) -> np.ndarray:
        """Choose and record the cohort at once; a round that is configured twice keeps its cohort."""
        self._require_known_faces(connected)
        if self._latest is None or self._latest[0] != round:
            chosen = pick(self.book.eligible(connected, round=round), self._size, self._draws.at(round))
            self.book.enter(chosen, round=round)
            self._latest = round, chosen
        return self._latest[1]

    def _require_known_faces(self, connected: np.ndarray) -> None:
        """Refuse a restart in which no connected user is known: ids were assigned again, and the book would bound nobody."""
        if self._resumed and len(self.book) and len(connected) and not len(self.book.knows(connected)):
            raise ArgumentError(
                f"Expected some of the {len(connected)} connected users to be among the {len(self.book)} in the check-in book. "
                "Node ids changed with the restart, so the book protects nobody; give users=, which tells whose a node is."
            )
        self._resumed = False

    def state_dict(self) -> dict[str, Any]:
        """The book and the latest cohort."""
        latest = None if self._latest is None else (self._latest[0], pack_ids(self._latest[1]))
        return {"book": self.book.state_dict(), "latest": latest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the interrupted server's book."""
        self.book.load_state_dict(state["book"])
        latest = state["latest"]
        self._latest = None if latest is None else (_check.integer(0, latest=latest[0]), unpack_ids(latest[1]))
        self._resumed = True


class Dealt(Cohorts):
    """The plan's own sampler draws from the whole known population; users who cannot be reached drop out.

    A cohort is a pure function of key and round and does not depend on who is connected, as amplification requires.
    """

    def __init__(self, sampler: Sampler, population: np.ndarray, draws: Draws) -> None:
        self._population, self.users = population, len(population)
        self._deal = sampler.dealer(len(population), draws)

    def choose(self, round: int, connected: np.ndarray) -> np.ndarray:
        """As the sampler says."""
        return np.asarray(self._population[self._deal(round)])

    def state_dict(self) -> dict[str, Any]:
        """The population, to be recognised again."""
        return {"population": pack_ids(self._population)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to continue; the population must be the same."""
        if not np.array_equal(unpack_ids(state["population"]), self._population):
            _check.fail("population", len(self._population), "users to be those of the interrupted run", "Node ids may change.")


def cohorts_of(plan: Plan, population: Iterable[int] | None, key: bytes) -> Cohorts:
    """How the plan's participation is enforced: by check-ins for a separation, otherwise by sampling the known population.

    Raises:
        ArgumentError: if the plan samples a population that was not given, or gives one that it does not sample.
    """
    participation, draws = plan.participation, Draws(key)
    if isinstance(participation, events.Once):
        participation = events.MinSep(gap=plan.steps, times=1)
    if isinstance(participation, events.MinSep):
        if population is not None:
            _check.fail("population", "...", f"to be left out: {participation} is kept by check-ins, over whoever connects")
        size = plan.sampler.cohort if isinstance(plan.sampler, MinSeparation) else max(1, round(plan.batch_size))
        return Separated(participation, size, draws)
    if population is None:
        raise ArgumentError(
            f"Expected population=None to be the ids of all users: {participation} is a promise about every one of them, and "
            "amplification needs a server that samples from all, not from those who happen to be connected. Give population=, "
            "or plan without amplification: sampling=federated.MinSeparation(...)."
        )
    return Dealt(plan.sampler, as_ids(population), draws)
