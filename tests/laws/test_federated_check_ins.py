"""The book of check-ins against a dictionary that does the same one user at a time."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import calls_in

from hushgrad import testing
from hushgrad.errors import ArgumentError
from hushgrad.events import MinSep
from hushgrad.federated import CheckIns, MinSeparation
from hushgrad.federated.check_ins import as_ids, unpack_ids
from hushgrad.federated.cohorts import Separated
from hushgrad.sampling import Draws

BIG = 2**64 - 1


@settings(max_examples=60, deadline=None)
@given(
    gap=st.integers(1, 5),
    times=st.integers(1, 4),
    reachable=st.lists(st.sets(st.sampled_from([0, 1, 2, 3, 5, 2**63, BIG]), max_size=7), min_size=1, max_size=12),
    cohort=st.integers(1, 3),
)
def test_the_book_is_a_dictionary_of_rounds(gap, times, reachable, cohort):
    book, rounds = CheckIns(gap=gap, times=times), {}
    for t, connected in enumerate(reachable):
        may = sorted(u for u in connected if len(rounds.get(u, [])) < times and (u not in rounds or t - rounds[u][-1] >= gap))
        assert book.eligible(connected, round=t).tolist() == may
        book.enter(may[:cohort], round=t)
        for user in may[:cohort]:
            rounds.setdefault(user, []).append(t)
        again = CheckIns(gap=gap, times=times)
        again.load_state_dict(book.state_dict())
        book = again
    assert {user: book.participations(user) for user in rounds} == {user: len(r) for user, r in rounds.items()}
    assert len(book) == len(rounds)


def test_entering_somebody_whose_turn_it_is_not_is_refused_and_changes_nothing():
    book = CheckIns(gap=3, times=2)
    book.enter([7], round=0)
    with pytest.raises(ArgumentError, match="at least 3 rounds apart and at most 2 times"):
        book.enter([6, 7], round=2)
    assert len(book) == 1 and book.participations(6) == 0
    book.enter([6, 7], round=3)
    with pytest.raises(ArgumentError, match="Choose from eligible"):
        book.enter([7], round=100)


@pytest.mark.parametrize("state", [{"users": [2, 1]}, {"users": [1, 1]}])
def test_a_broken_book_is_refused(state):
    import torch

    book = CheckIns(gap=1, times=1)
    two = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ArgumentError, match="sorted"):
        book.load_state_dict({"users": torch.tensor(state["users"]), "last": two, "count": two})


def test_a_million_users_cost_few_calls_and_no_object_each():
    """Neither a table of one Python object per user, nor a loop over them."""
    rng = np.random.default_rng(0)
    everyone = np.unique(rng.integers(0, BIG, size=1_000_000, dtype=np.uint64))
    book = CheckIns(gap=100, times=10)

    def round_(t: int) -> None:
        free = book.eligible(everyone, round=t)
        book.enter(free[rng.choice(len(free), 10_000, replace=False)], round=t)

    assert all(calls_in(lambda t=t: round_(t)) < 1000 for t in range(3))
    before = sys.getallocatedblocks()
    free = book.eligible(everyone, round=3)
    assert sys.getallocatedblocks() - before < 1000 and len(free) == len(everyone) - 30_000
    assert len(book) == 30_000 and len(book.eligible(everyone, round=3)) == len(everyone) - 30_000


def test_the_sampler_keeps_its_promise_and_a_careless_one_is_caught(monkeypatch):
    sampler = MinSeparation(cohort=3, gap=4, times=3, steps=12)
    assert sampler.participation() == MinSep(gap=4, times=3)
    testing.check_sampler(sampler, n=15)
    monkeypatch.setattr(CheckIns, "eligible", lambda self, users, *, round: as_ids(users))
    with pytest.raises(AssertionError):
        testing.check_sampler(sampler, n=15)


@pytest.mark.parametrize("forged", [torch.tensor(3), torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2)])
def test_ids_that_are_no_list_are_refused_when_they_are_read(forged):
    with pytest.raises(ArgumentError, match="list of whole numbers"):
        unpack_ids(forged)


@pytest.mark.parametrize("forged", [float("inf"), float("nan"), 2.5, -1, "1"])
def test_a_round_that_is_no_whole_number_is_refused_when_it_is_read(forged):
    cohorts = Separated(MinSep(gap=2, times=3), 2, Draws(bytes(32)))
    cohorts.choose(0, np.arange(5, dtype=np.uint64))
    state = cohorts.state_dict()
    with pytest.raises(ArgumentError):
        cohorts.load_state_dict({**state, "latest": (forged, state["latest"][1])})
    cohorts.load_state_dict(state)
