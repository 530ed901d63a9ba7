"""A run's books: which step may be taken, what is written down for it, and what is refused, to the last step."""

from __future__ import annotations

from functools import cache

import pytest

from hushgrad.accounting import epsilon
from hushgrad.errors import ArgumentError, BudgetExceeded, NoTheorem
from hushgrad.events import Compose, Gaussian, MinSep, Poisson, Unanalysed
from hushgrad.guarantee import Ledger
from hushgrad.noise import BLT
from hushgrad.train import Plan
from hushgrad.train.books import Books
from hushgrad.train.spending import guarantee_of

HOW = {"noise_multiplier": 1.0, "delta": 1e-5, "dataset_size": 100, "batch_size": 10}
PLAN = Plan.dpsgd(**HOW, steps=9)
STREAM = Plan.dpftrl(**{**HOW, "dataset_size": 30}, epochs=3, noise=BLT(buffers=1))


def _prior() -> Ledger:
    prior = Ledger()
    prior.record(Gaussian(3.0), run="another")
    return prior


@cache
def _costs(plan: Plan) -> list[float]:
    """Of one step, of two, ..., after the prior phase."""
    events = [_prior().event() + plan.event(steps) for steps in range(1, 10)]
    return [epsilon(event, delta=plan.delta, relation=plan.relation) for event in events]


@pytest.mark.parametrize("plan", [PLAN, STREAM], ids=["composes", "a stream"])
@pytest.mark.parametrize("steps", range(1, 10))
def test_exactly_as_many_steps_as_the_budget_allows(plan, steps):
    prior, costs = _prior(), _costs(plan)
    within = Books(plan, "run", prior=prior, max_epsilon=costs[steps - 1])
    assert within.limit == sum(cost <= costs[steps - 1] for cost in costs) >= steps
    assert Books(plan, "run", prior=prior, max_epsilon=costs[steps - 1] * (1 - 1e-9)).limit < steps


def test_after_the_last_step_none_is_taken():
    books = Books(PLAN, "run")
    for _ in range(9):
        books.require_room(issued=True)
        books.charge(issued=True)
    with pytest.raises(BudgetExceeded, match="All 9 steps"):
        books.require_room(issued=True)


def test_a_step_beyond_the_budget_is_not_taken():
    books = Books(PLAN, "run", max_epsilon=epsilon(PLAN.event(4), delta=1e-5))
    for _ in range(4):
        books.require_room(issued=True)
        books.charge(issued=True)
    with pytest.raises(BudgetExceeded, match="Step 5 would exceed"):
        books.require_room(issued=True)


def test_under_a_budget_a_foreign_step_needs_a_declaration():
    books = Books(PLAN, "run", max_epsilon=50.0)
    books.require_room(issued=True)
    with pytest.raises(BudgetExceeded, match="unknown epsilon"):
        books.require_room(issued=False)
    Books(PLAN, "run").require_room(issued=False)
    books.declare(Poisson(rate=0.1))
    books.require_room(issued=False)


def test_a_declaration_is_checked_and_counts_in_the_budget():
    with pytest.raises(ArgumentError):
        Books(PLAN, "run").declare("everybody")
    with pytest.raises(NoTheorem):
        Books(STREAM, "run").declare(Poisson(rate=0.1))
    books = Books(PLAN, "run")
    books.charge(issued=True)
    with pytest.raises(ArgumentError, match=r"before any batch"):
        books.declare(Poisson(rate=0.1))
    limited = Books(PLAN, "run", max_epsilon=epsilon(PLAN.event(4), delta=1e-5))
    limited.declare(Poisson(rate=0.9))
    assert limited.limit < 4
    unlimited = Books(PLAN, "run")
    unlimited.declare(Poisson(rate=0.9))
    assert unlimited.limit == 9


def test_everything_that_happened_is_written_down():
    books = Books(PLAN, "run", prior=_prior())
    assert books.ledger() == _prior()
    for issued in (True, False, True, False):
        books.charge(issued=issued)
    books.broken = "a batch came twice"
    entries = list(books.ledger())
    assert [(e.event, e.times, e.run, e.stream) for e in entries[1:2]] == [(PLAN.event(1), 2, "run", "")]
    assert isinstance(entries[2].event, Unanalysed) and "did not issue" in str(entries[2].event) and entries[2].times == 2
    assert entries[3].event == Unanalysed("a batch came twice") and len(entries) == 4


def test_declared_steps_are_one_stream_of_the_declared_cost():
    who = MinSep(gap=3, times=3)
    books = Books(STREAM, "run")
    books.declare(who)
    for _ in range(4):
        books.charge(issued=False)
    (entry,) = books.ledger()
    assert entry.event == STREAM.event_with(1.0, participation=who, steps=4) and entry.stream == "run"
    silent = Books(Plan.dpsgd(**{**HOW, "noise_multiplier": 0.0}, steps=9), "run")
    silent.declare(Poisson(rate=0.1))
    silent.charge(issued=False)
    assert guarantee_of(silent.ledger(), silent.plan).epsilon == float("inf")


def test_a_key_serves_one_run():
    with pytest.raises(ArgumentError, match="key to be a fresh one"):
        Books(PLAN, "another", prior=_prior())


def test_books_go_on_where_they_were():
    books = Books(PLAN, "run", prior=_prior(), max_epsilon=50.0)
    state = books.state_dict()
    Books(PLAN, "run").load_state_dict(state)  # before any step
    books.charge(issued=True)
    books.charge(issued=False)
    other = Books(PLAN, "run", prior=_prior(), max_epsilon=50.0)
    other.load_state_dict(books.state_dict())
    assert (other.taken, other.issued, other.foreign) == (2, 1, 1) and other.ledger() == books.ledger()
    left_out = Books(PLAN, "run")
    left_out.load_state_dict(books.state_dict())
    assert left_out.ledger() == books.ledger()
    longer = _prior()
    longer.record(Gaussian(5.0), run="a third")
    with pytest.raises(ArgumentError, match="prior= to be the interrupted run's own"):
        Books(PLAN, "run", prior=longer).load_state_dict(books.state_dict())


def test_a_ledger_without_a_step_costs_nothing_and_notes_follow_the_run():
    empty = guarantee_of(Ledger(), PLAN)
    assert empty.epsilon == 0.0 and empty.event == Compose(()) and empty.notes == ()
    assert "seed" in guarantee_of(Ledger(), PLAN, reproducible=True).notes[0]
    certified = Plan.dpsgd(**HOW, steps=9, certified=True)
    assert "double precision" in guarantee_of(Ledger(), certified).notes[0]
