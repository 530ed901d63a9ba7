"""``hushgrad train --ledger``: reserved before, committed after, settled when killed; and ``hushgrad ledger`` beside it."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_program import started
from forger import renamed

from hushgrad.budget import Ledger
from hushgrad.budget import folder as folders
from hushgrad.cli.main import main
from hushgrad.errors import ArgumentError, BudgetExceeded
from hushgrad.events import Event, Repeat
from hushgrad.recipes import Recipe, train
from hushgrad.report import privacy_card
from hushgrad.train import attached as running

TABLES = {
    "model": {"name": "logistic"},
    "data": {"name": "digits"},
    "plan": {"noise_multiplier": 2.0, "delta": 1e-4, "batch_size": 128, "steps": 30},
    "optimizer": {"lr": 2.0},
    "run": {"checkpoint_every": 10, "threads": 1},
}


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    ledger = Ledger.create(tmp_path / "budget.db")
    ledger.add("digits", epsilon=2.5, delta=1e-4)
    return ledger


def recipe(ledger: Ledger, **changes: dict) -> Recipe:
    tables = {name: {**table, **changes.get(name, {})} for name, table in TABLES.items()}
    return Recipe.from_tables(tables).paid_by(ledger.place, "digits")


class Killed(BaseException):
    """The process ends here, for all that the run can do about it."""


def killed_after(step: int, recipe: Recipe, out: Path, monkeypatch: pytest.MonkeyPatch, *, resume: bool = False) -> None:
    """Train until ``step`` steps were taken, then stop dead: no handler of the session runs that a kill would not run."""
    original = running.Books.charge

    def charge(books, *, issued: bool) -> None:
        if books.taken == step:
            raise Killed
        original(books, issued=issued)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(running.Books, "charge", charge)
        train(recipe, out, resume=resume, progress=False)


def test_reserved_before_committed_after_and_on_the_card(ledger: Ledger, tmp_path: Path) -> None:
    outcome = train(recipe(ledger), tmp_path / "run", progress=False)
    (booked,) = ledger.reservations()
    assert booked.state == "committed" and booked.charged == booked.reserved == outcome.guarantee.event
    kinds = [row.kind for row in ledger.entries()]
    assert kinds == ["ledger", "dataset", "hold", "begin", "commit"]
    card = privacy_card(tmp_path / "run")
    assert card.budget is not None and card.budget["head"] == ledger.head
    assert card.budget["spent_epsilon"] == pytest.approx(outcome.guarantee.epsilon)
    text = card.to_markdown()
    assert f"committed as {booked.id} on 'digits'" in text and ledger.head in text and str(tmp_path) not in text


def test_a_plan_that_does_not_fit_is_never_started(ledger: Ledger, tmp_path: Path, capsys) -> None:
    (tmp_path / "r.py").write_text(f"recipe = {TABLES!r}")
    words = ["train", str(tmp_path / "r.py"), "--out", str(tmp_path / "run"), "--ledger", ledger.place, "--dataset", "digits"]
    assert main([*words, "--quiet", "--set", "plan.noise_multiplier=0.5"]) == 3
    assert "would have spent epsilon" in capsys.readouterr().err
    assert not (tmp_path / "run").exists() and ledger.reservations() == ()
    assert main([*words, "--quiet"]) == 0  # the folder is still free
    capsys.readouterr()
    assert main(["train", "--out", str(tmp_path / "x"), "--ledger", ledger.place]) == 2
    assert main(["train", "--out", str(tmp_path / "x"), "--ledger", ledger.place, "--dataset", "nobody"]) == 2
    assert "to be in the ledger" in capsys.readouterr().err


def test_unit_and_relation_of_the_plan_must_be_the_data_sets(ledger: Ledger, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="relation='replace_one'"):
        train(recipe(ledger, plan={"relation": "replace_one"}), tmp_path / "run", progress=False)


def test_a_resumed_run_is_charged_once(ledger: Ledger, tmp_path: Path, monkeypatch) -> None:
    killed_after(17, recipe(ledger), tmp_path / "run", monkeypatch)
    (booked,) = ledger.reservations()
    assert booked.state == "begun" and booked.charged == booked.reserved
    train(None, tmp_path / "run", resume=True, progress=False)
    (booked,) = ledger.reservations()
    assert booked.state == "committed" and booked.charged == booked.reserved


@pytest.mark.parametrize(("taken", "charged"), [(0, 10), (5, 10), (10, 20), (17, 20), (25, 30), (30, 30)])
def test_a_killed_run_is_charged_for_all_that_it_may_have_released(ledger, tmp_path, monkeypatch, taken, charged) -> None:
    out = tmp_path / "run"
    if taken < 30:
        killed_after(taken, recipe(ledger), out, monkeypatch)
    else:  # all steps taken, then killed before anything else could be written
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr("hushgrad.recipes.session._finished", lambda *_: (_ for _ in ()).throw(Killed))
            train(recipe(ledger), out, progress=False)
    (booked,) = ledger.reservations()
    settled = ledger.settle(booked, out)
    assert isinstance(settled.charged, Repeat) and settled.charged.times == charged >= taken
    assert settled.state == "settled" and not settled.overrun
    assert not (out / "checkpoint" / "key.json").exists()  # it cannot go on
    with pytest.raises(ArgumentError, match="was settled"):
        train(None, out, resume=True, progress=False)


def test_charging_the_checkpoint_alone_would_be_too_little(ledger, tmp_path, monkeypatch) -> None:
    """The planted defect: 17 steps were taken and their metrics written, the checkpoint holds 10."""
    out = tmp_path / "run"
    killed_after(17, recipe(ledger), out, monkeypatch)
    released = len((out / "metrics.jsonl").read_text().splitlines())
    books = folders._saved_books(out / "checkpoint" / "state.safetensors")
    sound = folders.finding(out, ledger.reservations()[0].reserved).event.times
    assert books["issued"] == 10 < released == 17 <= sound == 20


def test_killed_resumed_and_killed_again(ledger, tmp_path, monkeypatch) -> None:
    out = tmp_path / "run"
    killed_after(19, recipe(ledger), out, monkeypatch)
    killed_after(12, None, out, monkeypatch, resume=True)  # it repeats 11 and 12, which were released before
    assert ledger.settle(ledger.reservations()[0], out).charged.times == 20 >= 19


@pytest.mark.parametrize("damage", ["count", "cut", "recipe", "plan"])
def test_in_doubt_the_whole_reservation_stays_charged(ledger, tmp_path, monkeypatch, damage) -> None:
    out = tmp_path / "run"
    killed_after(12, recipe(ledger), out, monkeypatch)
    state = out / "checkpoint" / "state.safetensors"
    if damage == "count":  # still a readable file, which now says that no step was taken
        assert b'issued\\",10' in state.read_bytes()
        state.write_bytes(state.read_bytes().replace(b'issued\\",10', b'issued\\", 0'))
    elif damage == "cut":
        state.write_bytes(state.read_bytes()[:-40])
    else:
        (out / f"{damage}.json").write_text("{}")
    (booked,) = ledger.reservations()
    assert ledger.settle(booked, out).charged == booked.reserved


@pytest.mark.parametrize("lost", ["everything", "journal", "journal and state", "journal's content", "another run's"])
def test_a_folder_without_its_run_s_journal_proves_nothing(ledger, tmp_path, monkeypatch, lost) -> None:
    """25 steps were taken; a folder that has lost what says so must not be settled for the few of a run that never saved."""
    out = tmp_path / "run"
    killed_after(25, recipe(ledger, plan={"noise_multiplier": 4.0}), out, monkeypatch)
    (booked,) = ledger.reservations()
    journal, state = out / "checkpoint" / "journal", out / "checkpoint" / "state.safetensors"
    if lost == "everything":  # as after `hushgrad key destroy`, or after a settlement that died before its row
        main(["key", "destroy", str(out)])
    elif lost == "another run's":
        killed_after(2, recipe(ledger, plan={"noise_multiplier": 4.0}), tmp_path / "other", monkeypatch)
        shutil.rmtree(out / "checkpoint")
        shutil.copytree(tmp_path / "other" / "checkpoint", out / "checkpoint")
    else:
        journal.write_bytes(b"") if "content" in lost else journal.unlink()
        if lost != "journal":
            state.unlink()
    assert ledger.settle(booked, out).charged == booked.reserved


def test_a_settlement_that_dies_before_its_row_is_made_again_for_no_less(ledger, tmp_path, monkeypatch) -> None:
    out = tmp_path / "run"
    killed_after(25, recipe(ledger, run={"checkpoint_every": 4}), out, monkeypatch)
    (booked,) = ledger.reservations()
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Ledger, "_write", lambda *_: (_ for _ in ()).throw(Killed))
        ledger.settle(booked, out)
    assert not (out / "checkpoint" / "key.json").exists()  # retired
    assert ledger.settle(booked, out).charged.times >= 25


def test_correlated_noise_is_charged_in_full(ledger, tmp_path, monkeypatch) -> None:
    changes = {"method": "dpftrl", "noise_multiplier": 8.0, "steps": 24, "relation": "add_remove", "noise": "Tree"}
    killed_after(3, recipe(ledger, plan=changes), tmp_path / "run", monkeypatch)
    (booked,) = ledger.reservations()
    assert not isinstance(booked.reserved, Repeat)
    assert ledger.settle(booked, tmp_path / "run").charged == booked.reserved


def _uncommitted(recipe: Recipe, out: Path, monkeypatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise ArgumentError("no server")

    with monkeypatch.context() as patch, pytest.raises(ArgumentError, match="no server"):
        patch.setattr(Ledger, "commit", unreachable)
        train(recipe, out, progress=False)


@pytest.mark.parametrize("whose", ["edited", "edited and named anew", "another run's", "another run's report"])
def test_a_finished_run_is_not_charged_for_a_ledger_that_is_not_its_own(ledger, tmp_path, monkeypatch, whose) -> None:
    out, other = tmp_path / "run", tmp_path / "other"
    _uncommitted(recipe(ledger), out, monkeypatch)
    (booked,) = ledger.reservations()
    mine = json.loads((out / "ledger.json").read_text())
    mine["entries"][0]["times"] = 1
    if whose.startswith("edited"):
        (out / "ledger.json").write_text(json.dumps(mine))
    else:
        train(Recipe.from_tables({**TABLES, "run": {**TABLES["run"], "max_epsilon": 0.8}}), other, progress=False)
        for name in ["ledger.json", *(["report.json"] if whose.endswith("report") else [])]:
            shutil.copyfile(other / name, out / name)
    if whose.endswith("anew"):  # by somebody who also lost the run's name: the ledger does not count for this run
        mine["entries"][0]["run"] = ""
        (out / "ledger.json").write_text(json.dumps(mine))
        renamed(out)
    assert ledger.settle(booked, out).charged == booked.reserved


def test_a_run_that_finished_but_could_not_commit_is_charged_for_its_ledger(ledger, tmp_path, monkeypatch) -> None:
    _uncommitted(recipe(ledger, run={"max_epsilon": 0.8}), tmp_path / "run", monkeypatch)
    (booked,) = ledger.reservations()
    settled = ledger.settle(booked, tmp_path / "run")
    done = json.loads((tmp_path / "run" / "ledger.json").read_text())["entries"][0]
    assert settled.charged == Event.from_json(done["event"]) * done["times"] and done["times"] < 30


def test_a_run_that_never_began_is_cancelled_and_a_foreign_folder_refused(ledger, tmp_path, monkeypatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("hushgrad.recipes.session.Checkpoint", lambda *_, **__: (_ for _ in ()).throw(Killed))
        train(recipe(ledger), tmp_path / "run", progress=False)
    (booked,) = ledger.reservations()
    other = ledger.reserve("digits", booked.reserved)
    with pytest.raises(ArgumentError, match="of the run that reserved"):
        ledger.settle(other, tmp_path / "run")
    assert ledger.settle(booked, tmp_path / "run").state == "cancelled"


def test_kill_minus_nine_then_settle_but_never_while_it_runs(ledger, tmp_path, capsys) -> None:
    (tmp_path / "r.py").write_text(f"recipe = {TABLES!r}")
    out = tmp_path / "run"
    words = ["train", str(tmp_path / "r.py"), "--out", str(out), "--ledger", ledger.place, "--dataset", "digits"]
    more = ["--quiet", "--set", "plan.steps=100000", "--set", "plan.noise_multiplier=500"]
    child = started([*words, *more], tmp_path)
    try:
        metrics = out / "metrics.jsonl"
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 12:  # past its first periodic checkpoint
            assert child.poll() is None
            time.sleep(0.05)
        assert main(["ledger", "settle", ledger.place, str(out)]) == 2
        assert "it is running" in capsys.readouterr().err
    finally:
        child.kill()
        child.communicate()
    released = len((out / "metrics.jsonl").read_text().splitlines())
    assert main(["ledger", "settle", ledger.place, str(out)]) == 0
    assert "steps in its checkpoint" in capsys.readouterr().out
    (booked,) = ledger.reservations()
    assert booked.state == "settled" and released <= booked.charged.times <= released + 11
    assert ledger.verify().ok


def test_a_password_does_not_get_into_a_recipe() -> None:
    with pytest.raises(ArgumentError, match="without a password") as refusal:
        Recipe.from_tables(TABLES).paid_by("postgresql://me:hunter2@host/db", "digits")
    assert "hunter2" not in str(refusal.value)
    Recipe.from_tables(TABLES).paid_by("postgresql://me@host:5432/db", "digits")


# The command --------------------------------------------------------------------------------------------------------------


def say(capsys, *words: str) -> tuple[int, str, str]:
    code = main(["ledger", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_from_init_to_export(tmp_path: Path, capsys) -> None:
    place = str(tmp_path / "b.db")
    assert say(capsys, "status", place)[0] == 2
    assert say(capsys, "init", place)[0] == 0
    assert say(capsys, "add", place, "d", "--epsilon", "1", "--delta", "1e-6")[0] == 0
    run = ("--noise-multiplier", "2", "--rate", "0.01", "--steps", "100")
    code, out, _ = say(capsys, "reserve", place, "d", *run, "--run", "first", "--json")
    first = json.loads(out)
    assert code == 0 and first["state"] == "begun"
    code, _, err = say(capsys, "reserve", place, "d", "--noise-multiplier", "0.5", "--steps", "9")
    assert code == 3 and "would fit with" in err and "Traceback" not in err
    assert say(capsys, "cancel", place, first["id"])[0] == 2
    assert say(capsys, "commit", place, first["id"])[0] == 0
    code, out, _ = say(
        capsys, "reserve", place, "d", "--event", json.dumps({"event": "PureDP", "epsilon": 0.1}), "--hold", "--json"
    )
    held = json.loads(out)["id"]
    assert say(capsys, "begin", place, held)[0] == 0
    assert say(capsys, "commit", place, held, "--event", '{"event": "PureDP", "epsilon": 0.2}')[0] == 3  # recorded, and said
    _, out, _ = say(capsys, "list", place)
    assert "first" in out and "committed, OVERRUN" in out
    _, out, _ = say(capsys, "status", place, "--json")
    status = json.loads(out)
    assert status["datasets"][0]["open"] == 0 and 0.2 < status["datasets"][0]["epsilon"] < 1
    assert say(capsys, "verify", place, "--head", status["head"])[0] == 0
    assert say(capsys, "verify", place, "--head", "f" * 64)[0] == 3
    code, out, _ = say(capsys, "export", place)
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and rows[-1]["hash"] == status["head"] and [row["number"] for row in rows] == list(range(1, 8))


def test_mistakes_are_one_sentence(tmp_path: Path, capsys) -> None:
    place = str(tmp_path / "b.db")
    say(capsys, "init", place)
    say(capsys, "add", place, "d", "--epsilon", "1", "--delta", "1e-6")
    for words in (
        ["reserv", place],
        ["reserve", place, "d"],
        ["reserve", place, "d", "--event", "no json"],
        ["reserve", place, "d", "--noise", "1"],
        ["add", place, "d", "--epsilon", "1", "--delta", "1e-6"],
        ["add", place, "e", "--epsilon", "-1", "--delta", "1e-6"],
        ["commit", place, "nobody"],
        ["settle", place, str(tmp_path)],
    ):
        code, out, err = say(capsys, *words)
        assert code == 2 and out == "" and err.startswith("hushgrad: ") and err.count("\n") == 1, words
    for action in ("init", "add", "reserve", "begin", "commit", "settle", "cancel", "status", "list", "verify", "export"):
        with pytest.raises(SystemExit) as left:
            main(["ledger", action, "--help"])
        assert left.value.code == 0 and "example:" in capsys.readouterr().out


def test_the_command_does_without_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from hushgrad.cli.main import main\n"
        f"place = {str(tmp_path / 'b.db')!r}\n"
        "main(['ledger', 'init', place]); main(['ledger', 'add', place, 'd', '--epsilon', '1', '--delta', '1e-6'])\n"
        "main(['ledger', 'reserve', place, 'd', '--noise-multiplier', '9']); main(['ledger', 'status', place])\n"
        "assert not {'torch', 'sqlalchemy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


# Copies and lost files ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("on_another_machine")
def test_of_two_copies_of_a_folder_one_goes_on(tmp_path, ledger, monkeypatch):
    """The other is refused before it releases anything, settled for nothing, and the budget pays one run."""
    killed_after(5, recipe(ledger), tmp_path / "run", monkeypatch)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    train(None, tmp_path / "copy", resume=True, progress=False)
    before = (tmp_path / "run" / "reservation.json").read_text()
    with pytest.raises(ArgumentError, match=r"to be open|gone on elsewhere"):
        train(None, tmp_path / "run", resume=True, progress=False)
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or len(_lines(tmp_path / "run")) <= 5
    assert (tmp_path / "run" / "reservation.json").read_text() == before
    (one,) = ledger.reservations("digits")
    assert one.state == "committed" and not one.overrun


@pytest.mark.usefixtures("on_another_machine")
def test_a_copy_that_starts_while_the_other_one_runs_makes_both_cost_infinity(tmp_path, ledger, monkeypatch):
    """Nobody can stop the first any more; its commit is recorded as what it is."""
    killed_after(5, recipe(ledger), tmp_path / "run", monkeypatch)
    original = running.Books.charge

    def charge(books, *, issued: bool) -> None:
        if books.taken == 20:  # the copy is made and goes on while this one is between two steps
            monkeypatch.setattr(running.Books, "charge", original)
            shutil.copytree(tmp_path / "run", tmp_path / "copy")
            (tmp_path / "copy" / ".lock").unlink(missing_ok=True)
            (tmp_path / "copy" / "checkpoint" / ".lock").unlink(missing_ok=True)
            killed_after(25, None, tmp_path / "copy", monkeypatch, resume=True)
        original(books, issued=issued)

    monkeypatch.setattr(running.Books, "charge", charge)
    with pytest.raises(BudgetExceeded, match="did more than it had reserved"):
        train(None, tmp_path / "run", resume=True, progress=False)
    status = ledger.status("digits")
    assert math.isinf(status.epsilon) and "went on beside it" in str(status.reservations[0].charged)


def test_an_older_copy_is_not_settled_for_the_run(tmp_path, ledger, monkeypatch):
    killed_after(5, recipe(ledger), tmp_path / "run", monkeypatch)
    shutil.copytree(tmp_path / "run", tmp_path / "old")
    killed_after(25, None, tmp_path / "run", monkeypatch, resume=True)
    (one,) = ledger.reservations("digits")
    with pytest.raises(ArgumentError, match="older copy"):
        ledger.settle(one, tmp_path / "old")
    assert (tmp_path / "old" / "checkpoint" / "key.json").exists()  # nothing was erased
    assert ledger.settle(one, tmp_path / "run").charged == one.reserved  # 25 of 30, saved every 10: all 30


def test_a_lost_reservation_is_not_made_twice_and_is_found_by_the_run_s_name(tmp_path, ledger, monkeypatch, capsys):
    killed_after(5, recipe(ledger), tmp_path / "run", monkeypatch)
    (tmp_path / "run" / "reservation.json").unlink()
    with pytest.raises(ArgumentError, match=r"it was lost.*hushgrad ledger settle"):
        train(None, tmp_path / "run", resume=True, progress=False)
    assert len(ledger.reservations("digits")) == 1
    assert main(["ledger", "settle", ledger.place, str(tmp_path / "run")]) == 0
    (one,) = ledger.reservations("digits")
    assert one.state == "settled" and one.charged == one.reserved and "old copy" in capsys.readouterr().out


@pytest.mark.parametrize("dies", ["before", "after"])
def test_a_death_between_the_ledger_and_the_folder_is_no_copy(tmp_path, ledger, monkeypatch, dies):
    """The secret of a life is in the folder before it is in the ledger."""
    killed_after(5, recipe(ledger), tmp_path / "run", monkeypatch)
    real = Ledger.begin

    def begin(self, *words, **options):
        if dies == "after":
            real(self, *words, **options)
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Ledger, "begin", begin)
        train(None, tmp_path / "run", resume=True, progress=False)
    assert train(None, tmp_path / "run", resume=True, progress=False).steps == 30
    (one,) = ledger.reservations("digits")
    assert one.state == "committed" and not one.overrun


def _lines(out: Path) -> list[str]:
    return (out / "metrics.jsonl").read_text().splitlines()
