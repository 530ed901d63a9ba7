"""Laws of the budget ledger: what is admitted, what is charged, and that no row changes unnoticed."""

from __future__ import annotations

import json
import math
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hushgrad.accounting import calibrate, epsilon
from hushgrad.budget import BrokenChain, Dataset, Ledger, Reservation, Row, Status, Verification, pricing
from hushgrad.budget.rows import Stored
from hushgrad.errors import ArgumentError, BudgetExceeded, NoTheorem
from hushgrad.events import (
    ZCDP,
    ApproxDP,
    Compose,
    DiscreteGaussian,
    Event,
    Gaussian,
    Laplace,
    NonPrivate,
    OneOf,
    PureDP,
    Relation,
    RepeatAndSelect,
    Sampled,
    TruncatedPoisson,
    Unanalysed,
)

STEP = Gaussian(2.0).sampled(rate=0.05)
NOTHING = Compose(())


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    ledger = Ledger.create(tmp_path / "budget.db")
    ledger.add("patients", epsilon=2.5, delta=1e-6)
    return ledger


def tamper(path: Path, *statements: str) -> None:
    """What somebody with write access can do."""
    with closing(sqlite3.connect(path)) as connection:
        for trigger in ("keep", "same"):
            connection.execute(f"DROP TRIGGER IF EXISTS hushgrad_ledger_{trigger}")
        for statement in statements:
            connection.execute(statement)
        connection.commit()


# Admission --------------------------------------------------------------------------------------------------------------


def test_everything_charged_is_composed_and_open_runs_count_in_full(ledger: Ledger) -> None:
    first = ledger.reserve("patients", STEP * 150, run="first")
    second = ledger.reserve("patients", Gaussian(8.0))
    expected = epsilon(STEP * 150 + Gaussian(8.0), delta=1e-6)
    status = ledger.status("patients")
    assert status.epsilon == expected and status.committed_epsilon == 0.0
    assert status.left == 2.5 - expected and not status.exceeded and status.open == status.reservations
    ledger.commit(first, STEP * 100)
    assert ledger.status("patients").epsilon == epsilon(STEP * 100 + Gaussian(8.0), delta=1e-6)
    assert ledger.status("patients").committed_epsilon == epsilon(STEP * 100, delta=1e-6)
    ledger.commit(second, Gaussian(8.0))
    assert ledger.status("patients").open == ()


def test_a_run_that_does_not_fit_is_refused_with_what_would(ledger: Ledger) -> None:
    ledger.reserve("patients", STEP * 150)
    before = ledger.head
    with pytest.raises(BudgetExceeded, match=r"'patients' would have spent epsilon .* of 2.5 .*1 runs open.* left: ") as refusal:
        ledger.reserve("patients", STEP * 5000)
    assert ledger.head == before  # nothing was recorded
    words = str(refusal.value)
    steps = int(words.split(" of its 5000 steps")[0].rsplit(" ", 1)[1])
    factor = float(words.split("fit with ")[1].split(" times")[0])
    charges = (STEP * 150,)
    dataset = ledger.datasets()[0]
    assert pricing.fits(dataset, (*charges, STEP * steps)) and not pricing.fits(dataset, (*charges, STEP * (steps + 1)))
    assert pricing.fits(dataset, (*charges, pricing.scaled(STEP * 5000, factor)))
    assert not pricing.fits(dataset, (*charges, pricing.scaled(STEP * 5000, factor / 1.03)))
    ledger.reserve("patients", STEP * steps)  # the advice holds


def test_a_budget_admits_the_plan_that_was_calibrated_to_it(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "b.db")
    exact = epsilon(STEP * 500, delta=1e-6)
    ledger.add("exact", epsilon=exact, delta=1e-6)
    ledger.reserve("exact", STEP * 500)
    with pytest.raises(BudgetExceeded, match="'exact' has no room for it within epsilon") as refusal:
        ledger.reserve("exact", Gaussian(1000.0))
    assert "inf" not in str(refusal.value)


def test_data_sets_do_not_share_budgets_and_names_are_checked(ledger: Ledger) -> None:
    ledger.add("other", epsilon=1.0, delta=1e-6)
    ledger.reserve("patients", PureDP(2.5))
    ledger.reserve("other", PureDP(1.0))
    with pytest.raises(BudgetExceeded):
        ledger.reserve("patients", PureDP(0.01))
    with pytest.raises(ArgumentError, match="to be in the ledger"):
        ledger.reserve("patient", PureDP(0.01))
    with pytest.raises(ArgumentError, match="to be new"):
        ledger.add("patients", epsilon=100.0, delta=1e-6)
    with pytest.raises(ArgumentError, match="short name"):
        ledger.add("two\nlines", epsilon=1.0, delta=1e-6)


def test_unit_and_relation_must_be_the_data_sets(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "b.db")
    ledger.add("users", epsilon=1.0, delta=1e-6, unit="user", relation="zero_out")
    with pytest.raises(ArgumentError, match="unit='example'"):
        ledger.reserve("users", PureDP(0.1), unit="example")
    with pytest.raises(ArgumentError, match="relation='add_remove'"):
        ledger.reserve("users", PureDP(0.1), unit="user", relation=Relation.ADD_REMOVE)
    ledger.reserve("users", PureDP(0.1), unit="user", relation="zero_out")


def test_what_nobody_can_analyse_is_never_admitted(ledger: Ledger) -> None:
    for event in (Unanalysed("who knows"), Gaussian(0.0)):
        with pytest.raises(BudgetExceeded):
            ledger.reserve("patients", event)


def test_replace_one_costs_more(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "b.db")
    for relation in ("add_remove", "replace_one"):
        ledger.add(relation, epsilon=5.0, delta=1e-6, relation=relation)
        ledger.reserve(relation, Gaussian(4.0))
    assert ledger.status("replace_one").epsilon > 1.8 * ledger.status("add_remove").epsilon


def test_selections_have_a_price_although_the_pld_accountant_has_none(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "budget.db")
    ledger.add("patients", epsilon=2.5, delta=1e-6, composition="pld")
    tuned = RepeatAndSelect(of=Gaussian(30.0), mean=5.0, shape=0.0)
    ledger.reserve("patients", tuned)
    ledger.reserve("patients", STEP * 100)
    everything = tuned + STEP * 100
    renyi = epsilon(everything, delta=1e-6, accountant="rdp")
    spent = ledger.status("patients").epsilon
    parts = epsilon(ApproxDP(epsilon(tuned, delta=5e-7, accountant="rdp"), 5e-7) + STEP * 100, delta=1e-6)
    assert spent == min(renyi, parts) and spent > epsilon(STEP * 100, delta=1e-6)


STRANGE = (
    ZCDP(0.01),
    ZCDP(0.001) * 5,
    OneOf((Gaussian(8.0), Gaussian(4.0).sampled(rate=0.1) * 3)),
    DiscreteGaussian(1e7, 10**6),
    RepeatAndSelect(of=Gaussian(40.0), mean=2.0) * 2,
)


@pytest.mark.parametrize("composition", ["adaptive", "pld"])
@pytest.mark.parametrize("event", STRANGE, ids=str)
def test_what_has_no_distribution_is_priced_by_another_theorem(tmp_path: Path, event: Event, composition: str) -> None:
    """They had no price at all, so that an open budget refused a rho that it has room for fifty times."""
    with pytest.raises(NoTheorem):
        epsilon(event, delta=1e-6)
    ledger = Ledger.create(tmp_path / "budget.db")
    ledger.add("patients", epsilon=2.5, delta=1e-6, composition=composition)
    alone = epsilon(event, delta=1e-6, accountant="rdp")
    ledger.reserve("patients", event)
    assert alone * 0.99 <= ledger.status("patients").epsilon <= 2.5
    ledger.reserve("patients", Gaussian(8.0))
    together = ledger.status("patients").epsilon
    assert max(alone, epsilon(Gaussian(8.0), delta=1e-6)) < together <= 2.5
    with pytest.raises(BudgetExceeded):
        ledger.reserve("patients", event * 1000)


def test_parts_that_no_single_accountant_knows_are_priced_together(tmp_path: Path) -> None:
    """A truncated batch has no Rényi divergence here, a rho no distribution; the rho is a step of its own then."""
    ledger = Ledger.create(tmp_path / "budget.db")
    ledger.add("patients", epsilon=3.0, delta=1e-6, composition="pld")
    cut = Sampled(TruncatedPoisson(rate=0.01, dataset_size=10_000, size=130), Gaussian(2.0)) * 10
    ledger.reserve("patients", cut)
    ledger.reserve("patients", ZCDP(0.01))
    step = ApproxDP(epsilon(ZCDP(0.01), delta=5e-7, accountant="rdp"), 5e-7)
    assert ledger.status("patients").epsilon == epsilon(cut + step, delta=1e-6)


def _admitted(ledger: Ledger, name: str) -> int:
    for count in range(50):
        try:
            ledger.reserve(name, Gaussian(10.0))
        except BudgetExceeded:
            return count
    return 50


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> int:
    ledger = Ledger.create(tmp_path_factory.mktemp("tight") / "b.db")
    ledger.add("tight", epsilon=2.5, delta=1e-6)
    return _admitted(ledger, "tight")


@pytest.mark.parametrize("composition", ["rdp", "zcdp", "gdp"])
def test_filters_admit_less_than_pld_and_share_their_budget(tmp_path: Path, composition: str, tight: int) -> None:
    ledger = Ledger.create(tmp_path / "b.db")
    ledger.add("adaptive", epsilon=2.0, delta=1e-6, composition=composition)
    assert 2 <= _admitted(ledger, "adaptive") <= tight < 50
    assert 0 < ledger.status("adaptive").used <= 1


# What is charged afterwards -----------------------------------------------------------------------------------------------


def test_more_than_reserved_is_recorded_and_never_silent(ledger: Ledger) -> None:
    first = ledger.reserve("patients", STEP * 100)
    with pytest.raises(BudgetExceeded, match="recorded as an overrun"):
        ledger.commit(first, STEP * 101)
    known = ledger.reservation(first.id)
    assert known.overrun and known.charged == STEP * 101 and known.state == "committed"
    assert ledger.status("patients").overruns == (known,)
    second = ledger.reserve("patients", Gaussian(20.0))
    done = ledger.commit(second, Gaussian(1.0), overrun=True, note="the wrong noise was used")
    assert done.overrun and ledger.status("patients").exceeded
    with pytest.raises(BudgetExceeded):
        ledger.reserve("patients", PureDP(1e-6))
    assert ledger.entries()[-1].note == "the wrong noise was used"


def test_another_event_of_the_same_epsilon_is_an_overrun_where_it_composes_worse(tmp_path):
    ledger = Ledger.create(tmp_path / "budget.db")
    ledger.add("patients", epsilon=2.5, delta=1e-6, composition="pld")
    noise = calibrate(Gaussian, epsilon=0.99, delta=1e-6)
    reserved = [ledger.reserve("patients", Gaussian(noise)) for _ in range(3)]
    assert ledger.status("patients").epsilon < 1.8
    pure = PureDP(0.98)  # alone it costs less than the Gaussian that it takes the place of
    assert not ledger.commit(reserved[0], pure).overrun  # and together they still fit
    with pytest.raises(BudgetExceeded, match="recorded as an overrun"):
        for reservation in reserved[1:]:
            ledger.commit(reservation, pure)
    assert any(r.overrun for r in ledger.reservations()) == ledger.status("patients").exceeded


def test_something_unanalysed_exhausts_the_data_set(ledger: Ledger) -> None:
    run = ledger.reserve("patients", STEP * 100)
    with pytest.raises(BudgetExceeded):
        ledger.commit(run, STEP * 10 + Unanalysed("a foreign batch"))
    assert math.isinf(ledger.status("patients").epsilon)


def test_a_closed_charge_never_goes_down_and_the_same_words_twice_are_one_commit(ledger: Ledger) -> None:
    run = ledger.reserve("patients", STEP * 100)
    ledger.commit(run, STEP * 60)
    rows = len(ledger.entries())
    ledger.commit(run, STEP * 60)
    assert len(ledger.entries()) == rows
    with pytest.raises(ArgumentError, match="never goes down"):
        ledger.commit(run, STEP * 10)
    with pytest.raises(BudgetExceeded):
        ledger.commit(run, STEP * 80)  # more than it was closed with, although less than reserved: said aloud
    assert ledger.reservation(run.id).charged == STEP * 80


def test_cancel_only_what_has_demonstrably_not_begun(ledger: Ledger) -> None:
    held = ledger.reserve("patients", STEP * 100, hold=True)
    assert held.state == "held" and ledger.cancel(held).charged == NOTHING
    assert ledger.status("patients").epsilon == 0.0
    with pytest.raises(ArgumentError, match="it is cancelled"):
        ledger.begin(held)  # so a run that was cancelled meanwhile does not start
    begun = ledger.begin(ledger.reserve("patients", STEP * 100, hold=True))
    plain = ledger.reserve("patients", STEP * 10)
    for reservation in (begun, plain):
        with pytest.raises(ArgumentError, match="not to have begun"):
            ledger.cancel(reservation)
    assert ledger.begin(begun).state == "begun"  # a resumed run begins again
    with pytest.raises(BudgetExceeded):
        ledger.commit(held, STEP * 3)  # it ran nevertheless: recorded, and said
    assert ledger.reservation(held.id).charged == STEP * 3


def test_the_two_lines_commit_what_was_reserved_or_less_and_an_exception_commits_nothing(ledger: Ledger) -> None:
    with ledger.run("patients", STEP * 100, run="two lines"):
        pass
    with ledger.run("patients", STEP * 100) as reservation:
        ledger.commit(reservation, STEP * 7)
    with pytest.raises(ZeroDivisionError), ledger.run("patients", STEP * 50):
        1 / 0  # noqa: B018
    first, second, third = ledger.reservations("patients")
    assert (first.run, first.charged, first.state) == ("two lines", STEP * 100, "committed")
    assert (second.charged, third.charged, third.state) == (STEP * 7, STEP * 50, "begun")


LIGHT = Gaussian(80.0)  # 400 steps cost about half of a budget, and what they cost is a formula


@pytest.mark.parametrize("composition", ["pld", "adaptive"])
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(1, 400), st.sampled_from(["commit", "less", "cancel", "leave"])), min_size=3, max_size=6))
def test_whatever_is_asked_the_budget_holds_and_the_rows_say_so(
    composition: str, tmp_path_factory: pytest.TempPathFactory, runs
) -> None:
    """Nothing beyond the budget is admitted; composed numerically, nothing within it is refused."""
    ledger = Ledger.create(tmp_path_factory.mktemp("law") / "b.db")
    ledger.add("d", epsilon=1.0, delta=1e-6, composition=composition)
    charged = []
    for steps, end in runs:
        try:
            run = ledger.reserve("d", LIGHT * steps, hold=end == "cancel")
        except BudgetExceeded:
            assert composition != "pld" or epsilon(Compose((*charged, LIGHT * steps)), delta=1e-6) > 1.0
            continue
        if end == "commit":
            ledger.commit(run, LIGHT * steps)
        elif end == "less":
            ledger.commit(run, LIGHT * (steps // 2))
            steps //= 2
        elif end == "cancel":
            ledger.cancel(run)
            steps = 0
        charged += [LIGHT * steps] if steps else []
        assert epsilon(Compose(charged), delta=1e-6) <= 1.0
    told, spent = ledger.status("d").epsilon, epsilon(Compose(charged), delta=1e-6) if charged else 0.0
    assert told == spent if composition == "pld" else spent <= told <= 1.0
    assert ledger.verify().ok


# The chain --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def filled(ledger: Ledger) -> Ledger:
    for steps in (10, 20, 30, 40):
        ledger.commit(ledger.reserve("patients", STEP * steps), STEP * (steps // 2))
    return ledger  # 1 genesis, 1 data set, 8 rows of runs


@pytest.mark.parametrize(
    ("statements", "problem"),
    [
        (
            ["UPDATE hushgrad_ledger SET text = replace(text, '\"times\":20', '\"times\":10') WHERE number = 5"],
            "Row 5 was changed",
        ),
        (["UPDATE hushgrad_ledger SET hash = substr(hash, 2) || 'g' WHERE number = 7"], "Row 7"),  # no digit: never the same
        (["DELETE FROM hushgrad_ledger WHERE number = 4"], "Row 4 is missing"),
        (["DELETE FROM hushgrad_ledger WHERE number = 1"], "Row 1 is missing"),
        (["DELETE FROM hushgrad_ledger"], "Row 1 is missing"),
        (
            [
                "UPDATE hushgrad_ledger SET number = 100 WHERE number = 5",
                "UPDATE hushgrad_ledger SET number = 5 WHERE number = 6",
                "UPDATE hushgrad_ledger SET number = 6 WHERE number = 100",
            ],
            "Row 5 does not follow row 4",
        ),
        (
            [
                "DELETE FROM hushgrad_ledger WHERE number = 4",
                *(f"UPDATE hushgrad_ledger SET number = {n - 1} WHERE number = {n}" for n in range(5, 11)),
            ],
            "Row 4 does not follow row 3",
        ),
        (["INSERT INTO hushgrad_ledger SELECT 11, text, hash FROM hushgrad_ledger WHERE number = 10"], "Row 11 does not follow"),
    ],
)
def test_a_changed_removed_moved_or_repeated_row_is_found_and_named(filled: Ledger, statements, problem) -> None:
    assert filled.verify().ok
    tamper(Path(filled.place), *statements)
    verdict = Ledger(filled.place).verify()
    assert not verdict.ok and problem in verdict.problem
    for use in (lambda: filled.reserve("patients", PureDP(0.01)), lambda: filled.status("patients"), filled.entries):
        with pytest.raises(BrokenChain):
            use()  # nothing is spent from a damaged ledger


def test_a_row_that_is_rewritten_with_its_hash_breaks_the_next_one(filled: Ledger) -> None:
    from dataclasses import replace

    row = replace(filled.entries()[4], event=STEP * 1)
    quoted = row.text.replace("'", "''")
    tamper(Path(filled.place), f"UPDATE hushgrad_ledger SET text = '{quoted}', hash = '{row.hash}' WHERE number = 5")
    assert "Row 6 does not follow row 5" in filled.verify().problem


def test_a_cut_tail_and_a_rewritten_chain_are_found_by_a_noted_head_only(filled: Ledger, tmp_path: Path) -> None:
    noted = filled.head
    filled.commit(filled.reserve("patients", STEP * 10), STEP * 10)
    assert filled.verify(head=noted).ok  # the chain has grown since
    tamper(Path(filled.place), "DELETE FROM hushgrad_ledger WHERE number > 8")
    assert filled.verify().ok  # said plainly in the documentation: a chain alone cannot tell
    assert "cut off at the end" in filled.verify(head=noted).problem
    other = Ledger.create(tmp_path / "other.db")
    assert other.verify().ok and not other.verify(head=noted).ok


def test_rows_that_cannot_follow_are_damage_even_with_good_hashes(ledger: Ledger) -> None:
    run = ledger.reserve("patients", STEP * 10, hold=True)
    books = ledger.entries()[-1]
    for content in (
        {"kind": "commit", "reservation": "nobody", "event": STEP},
        {"kind": "commit", "reservation": run.id},
        {"kind": "ledger"},
        {"kind": "reserve", "dataset": "unknown", "reservation": "x", "event": STEP},
        {"kind": "dataset", "budget": ledger.datasets()[0]},
    ):
        row = Row(number=books.number + 1, previous=books.hash, time="", **content)
        with ledger._store.writing() as writer:
            writer.append(Stored(row.number, row.text, row.hash))
        assert f"Row {row.number}" in ledger.verify().problem
        tamper(Path(ledger.place), f"DELETE FROM hushgrad_ledger WHERE number = {row.number}")
    assert ledger.verify().ok


def test_triggers_stop_accidents(filled: Ledger) -> None:
    with closing(sqlite3.connect(filled.place)) as connection:
        for statement in ("DELETE FROM hushgrad_ledger", "UPDATE hushgrad_ledger SET text = ''"):
            with pytest.raises(sqlite3.IntegrityError, match="only grows"):
                connection.execute(statement)


# Places -----------------------------------------------------------------------------------------------------------------


def test_a_misspelt_path_is_no_fresh_budget(ledger: Ledger, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="hushgrad ledger init"):
        Ledger(tmp_path / "buget.db")
    assert not (tmp_path / "buget.db").exists()
    again = Ledger.create(ledger.place)  # opens what is there
    assert again.datasets() == ledger.datasets() and Ledger(f"sqlite:///{ledger.place}").head == ledger.head
    (tmp_path / "text").write_text("no ledger at all, but long enough to be taken for one" * 30)
    with pytest.raises(ArgumentError, match="readable and writable ledger"):
        Ledger(tmp_path / "text")
    for place in (":memory:", "", "mysql://secret:password@host/x"):
        with pytest.raises(ArgumentError) as refusal:
            Ledger(place)
        assert "password" not in str(refusal.value)


def test_everything_public_has_one_json_form(filled: Ledger) -> None:
    kinds = {Dataset: filled.datasets(), Reservation: filled.reservations(), Row: filled.entries()}
    kinds |= {Status: (filled.status("patients"),), Verification: (filled.verify(),)}
    for kind, values in kinds.items():
        for value in values:
            assert kind.from_json(json.loads(json.dumps(value.to_json()))) == value


def test_scaling_reaches_every_noise_and_nothing_else() -> None:
    event = Gaussian(1.0).sampled(rate=0.5) * 3 + Laplace(2.0) + RepeatAndSelect(of=Gaussian(4.0), mean=2.0) + PureDP(0.5)
    doubled = Gaussian(2.0).sampled(rate=0.5) * 3 + Laplace(4.0) + RepeatAndSelect(of=Gaussian(8.0), mean=2.0) + PureDP(0.5)
    assert pricing.scaled(event, 2.0) == doubled


# Planted defects ----------------------------------------------------------------------------------------------------------


def test_a_ledger_that_forgets_open_reservations_would_be_noticed(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    from hushgrad.budget.books import Books

    sound = Books.charges
    monkeypatch.setattr(Books, "charges", lambda self, dataset, open_too=True: sound(self, dataset, open_too=False))
    ledger.reserve("patients", PureDP(1.5))
    ledger.reserve("patients", PureDP(1.5))  # admitted by the defective copy ...
    monkeypatch.undo()
    assert ledger.status("patients").exceeded  # ... and seen at once by the sound one


@pytest.mark.parametrize("composition", ["adaptive", "pld", "rdp"])
@pytest.mark.parametrize("of", [NonPrivate(), Gaussian(0.0), Gaussian(5.0) + NonPrivate()])
def test_a_selection_of_something_without_privacy_costs_everything(composition: str, of: Event) -> None:
    dataset = Dataset(name="patients", epsilon=3.0, delta=1e-5, composition=composition)
    assert math.isinf(pricing.price(dataset, (RepeatAndSelect(of=of, mean=3.0), Gaussian(5.0))))


# Rows that nobody here writes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overrun", [False, True])
@pytest.mark.parametrize("kind", ["commit", "settle"])
@pytest.mark.parametrize("event", [NOTHING, STEP, STEP * 50], ids=str)
def test_a_row_that_lowers_a_closed_charge_is_damage_though_every_noted_head_is_there(ledger, kind, event, overrun) -> None:
    """Whoever can only append keeps the chain, and the heads that others have noted; what was charged stays charged."""
    run = ledger.reserve("patients", STEP * 50)
    ledger.commit(run, STEP * 50)
    noted, books = ledger.head, ledger._books()
    forged = Row(number=books.rows + 1, previous=books.head, time="", kind=kind, reservation=run.id, event=event, overrun=overrun)
    with ledger._store.writing() as writer:
        writer.append(Stored(forged.number, forged.text, forged.hash))
    verdict = ledger.verify(head=noted)
    assert not verdict.ok and "no charge goes down" in verdict.problem
    with pytest.raises(BrokenChain):
        ledger.status("patients")


@pytest.mark.parametrize("composition", ["adaptive", "pld", "rdp", "zcdp"])
@pytest.mark.parametrize("kind", ["commit", "settle"])
def test_an_overrun_that_nobody_priced_lowers_no_closed_charge(tmp_path, kind, composition) -> None:
    """It names another event, so that no word of it is a part of what was charged: the costlier of the two counts."""
    ledger = Ledger.create(tmp_path / "budget.db")
    ledger.add("patients", epsilon=3.0, delta=1e-6, composition=composition)
    ledger.commit(ledger.reserve("patients", Gaussian(20.0)), Gaussian(20.0))
    run = ledger.reserve("patients", Gaussian(5.0))
    ledger.commit(run, Gaussian(5.0))
    spent = ledger.status("patients").epsilon
    for event, costs_more in ((Gaussian(900.0), False), (Laplace(1e6), False), (Gaussian(4.0), True)):
        books = ledger._books()
        forged = Row(
            number=books.rows + 1, previous=books.head, time="", kind=kind, reservation=run.id, event=event, overrun=True
        )
        with ledger._store.writing() as writer:
            writer.append(Stored(forged.number, forged.text, forged.hash))
        status = ledger.status("patients")
        assert (status.epsilon > spent) == costs_more and status.epsilon >= spent and status.overruns


ALIKE = [
    ("trial I", "trial l"),
    ("modern", "modem"),
    ("wave", "vvave"),
    ("trial 1", "TRIAL I"),
    ("data-1", "data\u20131"),
    ("data-1", "data\u22121"),
    ("data-1", "data-l"),
    ("cohort 0", "cohort O"),
    ("a|b", "alb"),
    ("it's", "it\u2019s"),
    ("a/b", "a\u2215b"),
    ("10:30", "10\u223630"),
    ("scans", "sc\u0251ns"),
    ("imaging", "ima\u0261in\u0261"),
    ("ab", "a\u3164b"),
    ("a b", "a\u2800b"),
    ("long", "\u04cf\u0585\u0578g"),
]


@pytest.mark.parametrize(("one", "other"), ALIKE, ids=ascii)
def test_a_name_that_looks_like_another_is_no_second_budget(ledger: Ledger, one: str, other: str) -> None:
    ledger.add(one, epsilon=1.0, delta=1e-6)
    with pytest.raises(ArgumentError, match="to look unlike"):
        ledger.add(other, epsilon=1.0, delta=1e-6)
