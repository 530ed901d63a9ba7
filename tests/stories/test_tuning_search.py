"""``hushgrad tune`` as a user meets it: a search that is paid for, resumable, and tells nothing but its winner."""

from __future__ import annotations

import json
import math
import re
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forger import renamed
from safetensors.torch import load_file

from hushgrad.budget import Ledger as BudgetLedger
from hushgrad.budget.pricing import price
from hushgrad.cli.main import main
from hushgrad.errors import ArgumentError
from hushgrad.events import Compose, Gaussian, OneOf, RepeatAndSelect
from hushgrad.guarantee import Guarantee, Ledger
from hushgrad.recipes import DATA, Recipe, load_predictor, load_recipe
from hushgrad.recipes.text_features import TextFeatures
from hushgrad.release import keys
from hushgrad.release.journal import Journal
from hushgrad.release.keys import RunKey
from hushgrad.report import privacy_card
from hushgrad.train import attached as running
from hushgrad.train.books import Books
from hushgrad.train.loss_tracking import PREPARED
from hushgrad.train.plan import Plan
from hushgrad.tuning import Draws, Stopping, priced, settings_of, tune, tuning_cost
from hushgrad.tuning import score as scoring
from hushgrad.tuning import search as room
from hushgrad.tuning.space import edges

TABLES = {
    "model": {"name": "logistic"},
    "data": {"name": "digits"},
    "plan": {"epsilon": 3.0, "delta": 1e-4, "batch_size": 128, "steps": 12},
    "run": {"checkpoint_every": 5, "evaluate_every": 6, "threads": 1},
    "tune": {"mean": 3.0, "over": {"optimizer.lr": [0.001, 2.0], "plan.max_grad_norm": [0.5, 1.0]}},
}


def recipe(**changes: dict) -> Recipe:
    return Recipe.from_tables({**TABLES, **{name: {**TABLES.get(name, {}), **table} for name, table in changes.items()}})


class Wandering(torch.utils.data.TensorDataset):
    """Reads with a generator of its own, which goes on from record to record."""

    def __getitem__(self, i):
        self.rng = getattr(self, "rng", None) or torch.Generator().manual_seed(0)
        x, y = super().__getitem__(i)
        return x + 0.01 * torch.randn(x.shape, generator=self.rng), y


def test_what_a_trial_could_not_show_the_search_says_too(tmp_path, monkeypatch):
    digits = DATA["digits"]()
    monkeypatch.setitem(DATA, "digits", lambda: replace(digits, train=Wandering(*digits.train.tensors)))
    short = recipe(plan={"steps": 2}, tune={"mean": 1.5, "over": {"optimizer.lr": [1.0, 2.0]}})
    tuned = tune(short, tmp_path / "out")
    assert PREPARED in tuned.guarantee.notes
    assert Guarantee.from_json(json.loads((tmp_path / "out" / "guarantee.json").read_text())) == tuned.guarantee


@pytest.mark.parametrize("trial", [0, 2])
def test_what_breaks_the_promise_of_a_trial_breaks_that_of_the_search(tmp_path, monkeypatch, fixed_key, trial):
    """Whether it wins or not."""
    broken, made = RunKey(Draws(fixed_key).key(trial)).run_name(), Books.ledger

    def ledger(self):
        self.broken = "it was broken on purpose" * (self.run == broken)
        return made(self)

    monkeypatch.setattr(Books, "ledger", ledger)
    tuned = tune(quick(0.001, 2.0), tmp_path / "out")
    assert math.isinf(tuned.guarantee.epsilon) and "broken on purpose" in str(tuned.guarantee)
    assert math.isinf(Guarantee.from_json((tmp_path / "out" / "guarantee.json").read_text()).epsilon)


def key_with(trials: int, stopping: Stopping) -> bytes:
    """A key whose search has this many trials."""
    return next(key for n in range(5000) if Draws(key := n.to_bytes(32, "big")).trials(stopping) == trials)


@pytest.fixture
def fixed_key(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Three trials, among them one of each learning rate."""
    rates = [candidate["optimizer.lr"] for candidate in settings_of(recipe()).candidates]

    def suits(key: bytes) -> bool:
        draws = Draws(key)
        return draws.trials(Stopping(mean=3.0)) == 3 and len({rates[draws.candidate(t, 4)] for t in range(3)}) == 2

    key = next(key for n in range(5000) if suits(key := n.to_bytes(32, "big")))
    monkeypatch.setattr(keys.secrets, "token_bytes", lambda size: key)
    return key


QUICK = {"noise_multiplier": 4.0, "delta": 1e-4, "batch_size": 64, "steps": 2}  # no calibration


def quick(*rates: float) -> Recipe:
    over = {"optimizer.lr": list(rates), "plan.max_grad_norm": [0.5, 1.0]}
    return Recipe.from_tables({**TABLES, "plan": QUICK, "tune": {"mean": 3.0, "over": over}})


def test_a_candidate_that_cannot_be_trained_is_a_lost_trial(tmp_path, fixed_key):
    tuned = tune(quick(-1.0, 2.0), tmp_path / "out")
    assert tuned.candidate is not None and tuned.candidate["optimizer.lr"] == 2.0
    with pytest.raises(
        ArgumentError, match=r"\[optimizer\]"
    ):  # nothing is begun, and nothing paid, for a search without a chance
        tune(quick(-1.0, -2.0), tmp_path / "none")
    assert not (tmp_path / "none" / "search").exists()


def test_a_search_with_a_cut_file_is_one_sentence(tmp_path, monkeypatch, capsys, fixed_key):
    out = tmp_path / "out"

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(room, "released", killed)
        tune(quick(0.001, 2.0), out)
    trials = sorted(folder for folder in (out / "search").iterdir() if folder.is_dir())
    assert len(trials) == 3
    names = ("recipe.json", "plan.json", "report.json", "metrics.jsonl", "score.json")
    for files in ([out / "search" / "recipe.json"], *([folder / name for folder in trials] for name in names)):
        whole = {file: file.read_bytes() for file in files}
        for file, content in whole.items():
            file.write_bytes(content[:-5])
        assert main(["tune", "--out", str(out), "--resume"]) == 2, files
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "damaged" in error, error
        for file, content in whole.items():
            file.write_bytes(content)
    assert main(["tune", "--out", str(out), "--resume"]) == 0


def test_nothing_is_printed_about_single_trials_unasked(monkeypatch, tmp_path, capsys) -> None:
    """A log of the command would tell K: two searches with one trial and with four print the same."""
    printed = []
    for trials in (1, 4):
        monkeypatch.setattr(keys.secrets, "token_bytes", lambda size, trials=trials: key_with(trials, Stopping(mean=3.0)))
        monkeypatch.setattr(room, "released", lambda search, best, folder, out, run, notes: best is not None)
        assert tune(recipe(), tmp_path / str(trials)) is True
        assert len(list((tmp_path / str(trials) / "search").glob("0*"))) == trials
        printed.append(capsys.readouterr())
    assert printed[0] == printed[1] == ("", "")


class Killed(BaseException):
    """The process ends here."""


def test_the_winner_is_released_with_the_price_of_the_search(fixed_key: bytes, tmp_path: Path) -> None:
    torch.manual_seed(0)
    out = tmp_path / "out"
    tuned = tune(recipe(), out, progress=False)
    names = {"model.safetensors", "plan.json", "ledger.json", "metrics.jsonl", "guarantee.json", "recipe.json", "tuning.json"}
    assert {path.name for path in out.iterdir()} == names | {"report.md", "report.json"}  # no key, no loser, no K
    guarantee = Guarantee.from_json((out / "guarantee.json").read_text())
    assert guarantee == tuned.guarantee and 2.9 < guarantee.epsilon <= 3.0 and guarantee.accountant == "rdp"
    assert (
        isinstance(guarantee.event, RepeatAndSelect)
        and guarantee.event == Ledger.from_json((out / "ledger.json").read_text()).event()
    )
    assert tuned.naive_epsilon < 0.7 * guarantee.epsilon
    draws, candidates = Draws(fixed_key), settings_of(recipe()).candidates
    assert tuned.candidate in [candidates[draws.candidate(trial, 4)] for trial in range(3)]
    assert tuned.candidate["optimizer.lr"] == 2.0 and tuned.test["test_accuracy"] > 0.5  # the other one hardly learns
    everything = "".join(path.read_text() for path in out.iterdir() if path.suffix in (".json", ".jsonl", ".md"))
    assert fixed_key.hex() not in everything and "epsilon" not in json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    chosen = json.loads((out / "recipe.json").read_text())
    assert chosen["optimizer"]["lr"] == tuned.candidate["optimizer.lr"] and "tune" not in chosen

    card = privacy_card(out)
    text = card.to_markdown()
    assert "naive epsilon" in text and "(the winner alone, not a claim); true epsilon 3 at delta" in text
    assert "papernot2022tuning" in text and "that is not counted here" not in text and "as in every trial" in text
    assert "trials" not in json.loads((out / "tuning.json").read_text())
    assert card.to_html()

    with pytest.raises(ArgumentError, match="search in it is complete"):
        tune(None, out, resume=True, progress=False)
    # The planted defect: claiming the winner's own epsilon. A card refuses to repeat it.
    naive = {**guarantee.to_json(), "epsilon": tuned.naive_epsilon}
    (out / "guarantee.json").write_text(json.dumps(naive))
    with pytest.raises(ArgumentError, match="to be at least"):
        privacy_card(renamed(out))
    (out / "tuning.json").unlink()
    with pytest.raises(ArgumentError, match=r"tuning\.json in the run's folder"):
        privacy_card(out)


def test_a_killed_search_goes_on_as_the_same_search(fixed_key: bytes, tmp_path: Path, monkeypatch) -> None:
    torch.manual_seed(7)
    whole = tune(recipe(), tmp_path / "whole", progress=False)
    original, taken = running.Books.charge, []

    def charge(books, *, issued: bool) -> None:
        taken.append(books.taken)
        if len(taken) in (20, 34):  # in the middle of the second trial, and again later
            raise Killed
        original(books, issued=issued)

    torch.manual_seed(7)
    monkeypatch.setattr(running.Books, "charge", charge)
    broken = tmp_path / "broken"
    with pytest.raises(Killed):
        tune(recipe(), broken, progress=False)
    assert stat.S_IMODE((broken / "search" / "key.json").stat().st_mode) == 0o600
    assert stat.S_IMODE((broken / "search").stat().st_mode) == 0o700
    assert not (broken / "model.safetensors").exists()  # nothing is released before the end
    with pytest.raises(Killed):
        tune(None, broken, resume=True, progress=False)
    again = tune(None, broken, resume=True, progress=False)
    assert (again.candidate, again.score) == (whole.candidate, whole.score)
    for name, tensor in load_file(tmp_path / "whole" / "model.safetensors").items():
        assert torch.equal(tensor, load_file(broken / "model.safetensors")[name])


@pytest.mark.parametrize("order", [(float("nan"), -0.7, -0.3), (-0.3, float("nan"), -0.7), (-0.7, -0.3, float("nan"))])
def test_a_trial_that_diverged_never_wins_whatever_the_order(tmp_path: Path, monkeypatch, order) -> None:
    stopping = Stopping(mean=3.0)
    monkeypatch.setattr(room, "_scored", lambda search, draws, data, folder, trial, progress: order[trial])
    search = SimpleNamespace(settings=SimpleNamespace(stopping=stopping))
    assert room._best(search, Draws(key_with(3, stopping)), None, tmp_path, False, Journal(RunKey.make(seed=0))).score == -0.3


def test_a_private_score_is_noisy_covered_and_never_written_raw(fixed_key: bytes, tmp_path: Path, monkeypatch) -> None:
    seen: list[float] = []
    original = scoring.evaluate

    def evaluate(model, dataset):
        found = original(model, dataset)
        seen.append(found["test_accuracy"] * len(dataset))
        return found

    monkeypatch.setattr(scoring, "evaluate", evaluate)
    out = tmp_path / "out"
    tuned = tune(recipe(tune={"score": "private", "score_noise": 12.0, "holdout": 0.2}), out, progress=False)
    assert isinstance(tuned.guarantee.event, RepeatAndSelect)
    trial = tuned.guarantee.event.of
    assert isinstance(trial, Compose) and trial.events[1] == Gaussian(12.0)  # the score is paid for
    assert len(seen) == 3 and all(abs(tuned.score - hits) > 1e-6 for hits in seen)
    assert all(100 < hits < 350 or hits < 100 for hits in seen)
    assert "covered by the guarantee" in json.loads((out / "tuning.json").read_text())["score"]


LENGTHS = {"over": {"plan.batch_size": [32, 256], "plan.steps": [4, 16]}}


def test_batch_size_and_steps_are_tuned_each_with_its_own_noise(tmp_path: Path) -> None:
    ledger = BudgetLedger.create(tmp_path / "b.db")
    ledger.add("digits", epsilon=3.1, delta=1e-4)
    searched = recipe(tune={**LENGTHS, "score": "private"}, run={"seed": 3})
    search = priced(searched)
    stopping = search.settings.stopping
    assert 2.9 < search.cost.epsilon <= 3.0 and len({plan.noise_multiplier for plan in search.plans}) == 4
    trial = search.cost.event.of.events[0]
    assert isinstance(trial, OneOf) and trial.events == tuple(plan.event() for plan in search.plans)
    for plan in search.plans:  # none is much noisier than if it were searched alone
        alone = tuning_cost(plan.event() + Gaussian(10.0), delta=1e-4, stopping=stopping).epsilon
        assert 2.4 < alone <= search.cost.epsilon
    tuned = tune(searched.paid_by(ledger.place, "digits"), tmp_path / "out")
    assert tuned.guarantee.epsilon == search.cost.epsilon and tuned.guarantee.event == search.cost.event
    (booked,) = ledger.reservations()
    assert booked.charged == search.cost.event
    winner = Plan.from_json(json.loads((tmp_path / "out" / "plan.json").read_text()))
    chosen = search.settings.candidates.index(tuned.candidate)
    assert winner.event() == search.plans[chosen].event() and winner.batch_size == tuned.candidate["plan.batch_size"]
    assert tuned.naive_epsilon == winner.guarantee().epsilon < search.cost.epsilon
    assert len(tuned.edges) == 2  # of two values each is an end
    assert "true epsilon" in privacy_card(tmp_path / "out").to_markdown()


def test_the_noise_of_a_recipe_is_taken_as_it_is_for_every_length(capsys, tmp_path: Path) -> None:
    search = priced(Recipe.from_tables({**TABLES, "plan": QUICK, "tune": {"mean": 3.0, **LENGTHS}}))
    assert {plan.noise_multiplier for plan in search.plans} == {4.0} and search.noise_without_tuning == ()
    tables = {**TABLES, "tune": {"mean": 3.0, **LENGTHS}}
    (tmp_path / "r.py").write_text(f"recipe = {tables!r}")
    assert main(["tune", str(tmp_path / "r.py"), "--dry"]) == 0
    assert re.search(r"Noise multiplier [\d.]+ to [\d.]+ in each trial \([\d.]+ to [\d.]+ would do", capsys.readouterr().out)


def test_private_scores_hold_each_record_out_by_its_own_coin() -> None:
    settings = settings_of(recipe(tune={"score": "private", "holdout": 0.25}))
    data = recipe().make_data()
    train, records = scoring.held_out(data, settings, bytes(32))
    assert len(train.train) + len(records) == len(data.train)
    assert abs(len(records) - 0.25 * len(data.train)) < 5 * (len(data.train) * 0.1875) ** 0.5
    other, _ = scoring.held_out(data, settings, b"x" * 32)
    assert len(other.train) != len(train.train) or not torch.equal(other.train.tensors[0], train.train.tensors[0])
    plans = {priced(recipe(tune={"score": "private", "holdout": 0.25})).plan.event()}
    assert len(plans) == 1  # the public rate does not follow the private split


def test_the_score_has_the_noise_that_it_is_charged_for() -> None:
    """300 scores of one model: their standard deviation is score_noise within 5 standard errors (false alarms below 1e-6)."""
    data = recipe().make_data()
    settings = settings_of(recipe(tune={"score": "private", "score_noise": 4.0}))
    model = recipe().make_model(data)
    scores = torch.tensor([scoring.private_score(model, data.test, settings, n.to_bytes(32, "big")) for n in range(300)])
    assert abs(scores.std().item() - 4.0) < 5 * 4.0 / (2 * 300) ** 0.5


def test_the_ledger_pays_for_the_search(fixed_key: bytes, tmp_path: Path) -> None:
    ledger = BudgetLedger.create(tmp_path / "b.db")
    ledger.add("digits", epsilon=3.0, delta=1e-4)
    tuned = tune(recipe().paid_by(ledger.place, "digits"), tmp_path / "out", progress=False)
    (booked,) = ledger.reservations()
    assert booked.state == "committed" and booked.charged == tuned.guarantee.event
    status = ledger.status("digits")  # a filter at one order, fixed in advance; the guarantee is at the best of all orders
    assert tuned.guarantee.epsilon <= status.epsilon <= 3.0 and status.epsilon == pytest.approx(tuned.guarantee.epsilon, rel=1e-3)
    composed = price(replace(status.dataset, composition="pld"), (booked.charged,))
    assert composed == pytest.approx(tuned.guarantee.epsilon, rel=1e-9) and privacy_card(tmp_path / "out").budget
    words = ["tune", "--over", "optimizer.lr=1", "--ledger", ledger.place, "--dataset", "digits", "--out", str(tmp_path / "more")]
    assert main([*words, "--quiet"]) == 3  # the demo, and nothing is left


def test_a_killed_search_is_charged_in_full_and_cannot_go_on(fixed_key: bytes, tmp_path: Path, monkeypatch) -> None:
    ledger = BudgetLedger.create(tmp_path / "b.db")
    ledger.add("digits", epsilon=3.0, delta=1e-4)

    def dies(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(room, "train", dies)
        tune(recipe().paid_by(ledger.place, "digits"), tmp_path / "out", progress=False)
    (booked,) = ledger.reservations()
    settled = ledger.settle(booked, tmp_path / "out")
    assert settled.state == "settled" and settled.charged == booked.reserved  # no theorem for half a search
    assert not (tmp_path / "out" / "search" / "key.json").exists()
    with pytest.raises(ArgumentError, match="was settled"):
        tune(None, tmp_path / "out", resume=True, progress=False)


def test_a_poisson_number_of_trials_may_be_none(tmp_path: Path, monkeypatch) -> None:
    key = key_with(0, Stopping(mean=0.5, shape=float("inf")))
    monkeypatch.setattr(keys.secrets, "token_bytes", lambda size: key)
    tuned = tune(recipe(tune={"mean": 0.5, "shape": "poisson"}), tmp_path / "out", progress=False)
    assert tuned.candidate is None and {path.name for path in (tmp_path / "out").iterdir()} == {"tuning.json"}


def test_what_makes_no_sense_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    for changes, message in (
        ({"over": {"plan.method": ["dpsgd", "dpftrl"]}}, "all candidates to promise the same"),
        ({"over": {"plan.method": ["dpftrl"]}}, "all candidates to promise the same"),  # the data were split for add/remove
        ({"over": {"plan.batch_size": [64, "many"]}}, "finite number"),
        ({"over": {"plan.epsilon": [1.0, 2.0]}}, "does not change what is promised"),
        ({"over": {"run.seed": [1, 2]}}, "to name a value"),
        ({"over": {}}, "something to tune"),
        ({"over": {"optimizer.lr": 0.5}}, "list of values"),
        ({"means": 3}, "Did you mean 'mean'"),
        ({"score": "training"}, "score='training'"),
        ({"score": "private", "metric": "loss"}, "without bound"),
    ):
        with pytest.raises(ArgumentError, match=message):
            tune(recipe(tune=changes), tmp_path / "out", progress=False)
        assert not (tmp_path / "out").exists()
    with pytest.raises(ArgumentError, match="interrupted search"):
        tune(None, tmp_path / "out", resume=True)


def test_a_seeded_search_says_so(tmp_path: Path) -> None:
    tuned = tune(recipe(run={"seed": 11}, tune={"mean": 1.0}), tmp_path / "out", progress=False)
    assert "not private against whoever knows the seed" in str(tuned.guarantee)
    assert privacy_card(tmp_path / "out").noise_source.startswith("A seed")


# The command --------------------------------------------------------------------------------------------------------------


def test_dry(tmp_path: Path, capsys) -> None:
    (tmp_path / "r.py").write_text(f"recipe = {TABLES!r}")
    assert main(["tune", str(tmp_path / "r.py"), "--dry", "--mean", "10", "--shape", "1"]) == 0
    out = capsys.readouterr().out
    assert "4 candidates over optimizer.lr, plan.max_grad_norm" in out and "geometric with mean 10" in out
    assert "true epsilon 3 at delta" in out and "would do for one run that is not chosen" in out
    assert main(["tune", str(tmp_path / "r.py"), "--dry", "--json", "--over", "optimizer.lr=0.1,0.2,0.4"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["candidates"] == 6 and facts["naive_epsilon"] < facts["epsilon"] <= 3.0
    assert facts["noise_multiplier"] > 1.2 * facts["noise_multiplier_without_tuning"]
    assert not list(tmp_path.glob("out*"))


def test_what_would_tuning_cost_without_a_recipe_and_without_torch() -> None:
    program = (
        "import sys; from hushgrad.cli.main import main\n"
        "assert main(['tune', '--dry', '--epsilon', '1', '--delta', '1e-5', '--json']) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    facts = json.loads(done.stdout)
    assert 1.5 < facts["epsilon"] < 3.0 and facts["noise_factor"] > 1.5


def test_mistakes_are_one_sentence(tmp_path: Path, capsys) -> None:
    for words in (
        ["--out", "x"],
        ["--dry", "--epsilon", "1"],
        ["--over", "optimizer.lr=1"],
        ["--out", "x", "--over", "lr=1"],
        ["--out", "x", "--over", "optimizer.lr"],
        ["--out", str(tmp_path / "x"), "--resume"],
        ["--out", "x", "--resume", "--mean", "3"],
        ["--out", "x", "--shape", "round", "--over", "optimizer.lr=1"],
        ["--out", "x", "--ledger", "b.db", "--over", "optimizer.lr=1"],
    ):
        assert main(["tune", *words]) == 2, words
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith("hushgrad: ") and captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "word", ["optimizer.lr=0.1,fast", "optimizer.lr=nan", "optimizer.lr=0.1,inf", "plan.max_grad_norm=1,true"]
)
def test_a_candidate_that_is_no_number_is_refused_before_anything_is_paid(word):
    with pytest.raises(ArgumentError, match="finite number"):
        settings_of(load_recipe(None), over=[word])


def test_a_winner_at_the_end_of_its_grid_is_told():
    over = {"optimizer.lr": (0.3, 0.1, 1.0), "model.name": ("mlp", "cnn"), "plan.max_grad_norm": (1.0, 2.0, 4.0)}
    said = edges(over, {"optimizer.lr": 0.1, "model.name": "mlp", "plan.max_grad_norm": 2.0})
    assert said == ["optimizer.lr = 0.1 is the smallest value that was tried; a better one may lie beyond it."]


# Encoders that learn ------------------------------------------------------------------------------------------------------------


def learning(folder: Path, **tune_table: object) -> Recipe:
    """A search whose encoder learns a mean from the records first."""
    texts = folder / "texts.tsv"
    texts.write_text("".join(f"{('no', 'yes')[i % 2]}\t{('hi', 'WIN 1!')[i % 2]} {i}\n" for i in range(300)))
    encoder = TextFeatures(buckets=8, noise_multiplier=30.0).to_json()
    data = {"name": "encoded", "path": str(texts), "encoder": encoder, "classes": ["no", "yes"]}
    plan = {"epsilon": 2.0, "delta": 1e-5, "batch_size": 50, "dataset_size": 240, "steps": 4}
    tables = {"model": {"name": "linear"}, "data": data, "plan": plan, "run": {"threads": 1}}
    over = {"optimizer.lr": [0.1, 1.0], "plan.steps": [2, 4]}
    return Recipe.from_tables({**tables, "tune": {"mean": 3.0, "over": over, **tune_table}})


@pytest.mark.parametrize("score", ["public", "private"])
def test_what_an_encoder_learns_is_charged_once_beside_the_trials(tmp_path, score, fixed_key):
    wanted = learning(tmp_path, score=score)
    search = priced(wanted)
    first, trials = search.cost.event.events
    assert first == Gaussian(30.0) and isinstance(trials, RepeatAndSelect)
    assert Gaussian(30.0) not in getattr(trials.of, "events", (trials.of,))
    assert all(plan.before == Gaussian(30.0) for plan in search.plans)
    assert 1.99 < search.cost.epsilon <= 2.0
    tuned = tune(wanted, tmp_path / "out")
    assert tuned.guarantee.event == search.cost.event
    assert Ledger.from_json(json.loads((tmp_path / "out" / "ledger.json").read_text())).event() == search.cost.event
    shared = json.loads((tmp_path / "out" / "encoder.json").read_text())
    assert load_predictor(tmp_path / "out" / "model.safetensors").encoder.to_json() == shared


def test_all_trials_of_a_search_share_one_encoder_also_when_it_goes_on(tmp_path, monkeypatch, fixed_key):
    seen, real = [], room.train

    def spied(recipe, folder, **options):
        seen.append(options["data"].encoder.mean)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return real(recipe, folder, **options)

    monkeypatch.setattr(room, "train", spied)
    with pytest.raises(KeyboardInterrupt):
        tune(learning(tmp_path), tmp_path / "out")
    (tmp_path / "out" / "encoder.json").unlink()  # the journal knows it, too
    tune(None, tmp_path / "out", resume=True)
    assert len(seen) == 4 and len(set(seen)) == 1


def test_a_search_whose_budget_the_encoder_uses_up_is_refused_by_its_name(tmp_path):
    wanted = learning(tmp_path)
    poor = replace(wanted, plan={**wanted.plan, "epsilon": 0.1})
    with pytest.raises(ArgumentError, match=r"which Gaussian\(30\) before the run costs alone"):
        tune(poor, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("learns", [False, True], ids=["declared", "learned"])
def test_a_search_that_costs_more_than_its_own_limit_releases_nothing(tmp_path, learns):
    wanted = learning(tmp_path) if learns else recipe(plan={**TABLES["plan"], "epsilon": 2.0})
    with pytest.raises(ArgumentError, match=r"Expected max_epsilon=1\.5 to be at least 2, which the whole search costs"):
        tune(replace(wanted, run=replace(wanted.run, max_epsilon=1.5)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("values", [{"secure": [False, True]}, {"certified": [True]}, {"dataset_size": [240, 300]}], ids=str)
def test_what_an_encoder_learns_by_is_the_same_in_all_trials(tmp_path, values):
    over = {f"plan.{key}": tried for key, tried in values.items()}
    with pytest.raises(ArgumentError, match="to be the same in all trials: the encoder, which they share, learns by it"):
        priced(learning(tmp_path, over=over))


@pytest.mark.parametrize("lost", [["encoder.json"], []], ids=["encoder too", "key and journal"])
def test_a_search_that_has_begun_never_gets_a_second_key(tmp_path, monkeypatch, fixed_key, lost):
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(room.Journal, "released", killed)  # one trial is trained
        tune(learning(tmp_path), tmp_path / "out")
    for name in ("search/key.json", "search/journal", *lost):
        (tmp_path / "out" / name).unlink()
    with pytest.raises(ArgumentError, match=r"Expected key\.json: this search has begun, and without its key it cannot go on"):
        tune(None, tmp_path / "out", resume=True)
    assert (tmp_path / "out" / "encoder.json").exists() is not bool(lost)
