"""The privacy card of a real run, as its readers meet it: complete, honest, without secrets and without network."""

from __future__ import annotations

import base64
import json
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from forger import renamed

from hushgrad.cli.main import main
from hushgrad.errors import ArgumentError
from hushgrad.recipes import Recipe, train
from hushgrad.recipes.saved import load_model
from hushgrad.report import Card, privacy_card
from hushgrad.report.page import interval_words
from hushgrad.train import private as running

TABLES = {
    "model": {"name": "logistic"},
    "data": {"name": "digits"},
    "plan": {"noise_multiplier": 2.0, "delta": 1e-4, "batch_size": 128, "steps": 12},
    "optimizer": {"lr": 2.0},
    "run": {"evaluate_every": 4, "raw_metrics": True, "threads": 1},
}
AUDIT = {
    "verdict": "not refuted",
    "confidence": 0.95,
    "canaries": 50,
    "steps": 12,
    "scores_in": [0.123456789],
    "lower_bounds": [{"method": "one run", "epsilon": 0.31, "confidence": 0.95, "assumption": "nothing"}],
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A finished run and the key that it had."""
    keys = []
    out = tmp_path_factory.mktemp("runs") / "digits <b>&"  # a hostile name
    original = running.RunKey.make
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running.RunKey, "make", staticmethod(lambda key, seed: keys.append(original(key, seed)) or keys[-1]))
        train(Recipe.from_tables(TABLES), out, progress=False)
    assert len(keys) == 1
    return out, keys[0].secret


@pytest.fixture(scope="module")
def card(finished: tuple[Path, bytes]) -> Card:
    return privacy_card(finished[0])


@pytest.fixture
def copy(finished: tuple[Path, bytes], tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished[0], tmp_path / "run"))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    renamed(path.parent)


def outputs(card: Card) -> list[str]:
    return [json.dumps(card.to_json()), card.to_markdown(), card.to_html()]


class Page(HTMLParser):
    """Collects tags, and everything that a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data", "action", "srcset") and not (value or "").startswith("#"):
                self.fetched.append(f"{tag} {name}={value}")


def test_the_claim_in_words_and_in_full(card: Card) -> None:
    lower, upper = card.interval
    assert lower <= card.guarantee.epsilon * (1 + 1e-9) and upper <= card.guarantee.epsilon * (1 + 1e-3)
    for text in outputs(card):
        assert card.plan.digest in text and "abadi2016deep" in text and "pld" in text
    markdown = card.to_markdown()
    for word in (
        "add/remove one",
        "Poisson",
        "as assumed",
        "not audited",
        "unknown: nothing is recorded",
        "256-bit key",
        "torch",
    ):
        assert word in markdown
    assert "at most" in card.plain[0] and "right at most" in card.plain[1]


def test_curves_are_bounds(card: Card) -> None:
    deltas = [d for _, d in card.curve]
    assert deltas == sorted(deltas, reverse=True) and card.curve[0][0] == 0
    at_claim = next(d for e, d in card.curve if e >= card.guarantee.epsilon)
    assert at_claim <= card.guarantee.delta * (1 + 1e-6)
    assert all(0 <= beta <= 1 - alpha + 1e-9 for alpha, beta in card.trade_off)


def test_no_secret_in_any_output(finished: tuple[Path, bytes], card: Card) -> None:
    secret = finished[1]
    forms = [secret.hex(), base64.b64encode(secret).decode().rstrip("="), base64.urlsafe_b64encode(secret).decode().rstrip("=")]
    forms += [str(int.from_bytes(secret, "big")), str(list(secret))]
    assert len(secret) == 32
    for text in [*outputs(card), *outputs(privacy_card(finished[0], raw=True))]:
        assert not any(form in text or form.upper() in text for form in forms)


def test_a_key_that_lies_around_is_not_read(copy: Path) -> None:
    (copy / "checkpoint").mkdir()
    (copy / "checkpoint" / "key").write_text("5ec2e7" * 10)
    assert not any("5ec2e7" in text for text in outputs(privacy_card(copy)))


def test_the_page_is_self_contained_and_escaped(card: Card) -> None:
    text = card.to_html()
    page = Page(text)
    assert page.fetched == [] and "script" not in page.tags and "link" not in page.tags
    assert not re.search(r"url\((?!#)|@import", text)
    assert "digits &lt;b&gt;&amp;" in text and "<b>" not in text
    assert page.tags.count("svg") >= 4 and text.count('class="line"') >= 4
    assert "prefers-color-scheme: dark" in text and "@media print" in text
    # the parser above can find what it looks for
    assert Page('<img src="http://x.y/z.png">').fetched == ["img src=http://x.y/z.png"]


def test_raw_metrics_only_when_asked_for(finished: tuple[Path, bytes], card: Card) -> None:
    assert "raw_loss" in (finished[0] / "metrics.jsonl").read_text()
    assert {"epsilon", "signal_to_noise", "test_accuracy"} <= set(card.series)
    assert not any(name.startswith("raw_") for name in card.series)
    raw = privacy_card(finished[0], raw=True)
    assert "raw_clipped_fraction" in raw.series and any("as sensitive as the data" in caveat for caveat in raw.caveats)


def test_audit_and_tuning_beside_the_claim(copy: Path) -> None:
    (copy / "audit.json").write_text(json.dumps(AUDIT))
    (copy / "tuning.json").write_text(json.dumps({"trials": 12, "naive_epsilon": 1.0, "epsilon": 2.5}))
    card = privacy_card(copy)
    assert card.audit["lower_bound"] == 0.31 and card.tuning["trials"] == 12
    for text in outputs(card):
        assert "0.31" in text and "0.123456789" not in text
    assert "epsilon is at least 0.31 over 12 steps with 50 canaries" in card.to_markdown()
    assert "trials 12, naive epsilon 1.0, epsilon 2.5" in card.to_html()
    assert not any("its cost is unknown" in caveat for caveat in card.caveats)
    assert [caveat.partition(":")[0] for caveat in card.caveats if "Somebody" in caveat] == [
        "Somebody added tuning.json",
        "Somebody added audit.json",
    ]
    (copy / "audit.json").write_text(json.dumps({**AUDIT, "plan_digest": card.plan.digest}))
    assert not any("audit.json" in caveat for caveat in privacy_card(copy).caveats)
    (copy / "audit.json").write_text(json.dumps({**AUDIT, "plan_digest": "0" * 64}))
    with pytest.raises(ArgumentError, match=r"audit\.json to be an audit of plan\.json"):
        privacy_card(copy)


def test_a_seeded_run_says_so(copy: Path) -> None:
    recipe = json.loads((copy / "recipe.json").read_text())
    edit(copy / "recipe.json", run={**recipe["run"], "seed": 7})
    edit(copy / "report.json", recipe=json.loads((copy / "recipe.json").read_text()))
    assert "not private against whoever knows" in privacy_card(copy).to_markdown()


def test_changed_files_are_refused(copy: Path) -> None:
    claim = json.loads((copy / "guarantee.json").read_text())
    edit(copy / "guarantee.json", epsilon=claim["epsilon"] * 0.9)
    with pytest.raises(ArgumentError, match="to be at least"):
        privacy_card(copy)
    edit(copy / "guarantee.json", epsilon=claim["epsilon"], delta=1e-3)
    with pytest.raises(ArgumentError, match="delta, relation and unit"):
        privacy_card(copy)
    edit(copy / "guarantee.json", delta=claim["delta"])
    privacy_card(copy)
    plan = json.loads((copy / "plan.json").read_text())
    edit(copy / "plan.json", batch_size=64)
    with pytest.raises(ArgumentError, match="hash differs"):
        privacy_card(copy)
    edit(copy / "plan.json", **plan)
    edit(copy / "ledger.json", entries=[])
    with pytest.raises(ArgumentError, match=r"steps in ledger\.json"):
        privacy_card(copy)


_NAMED = ("plan.json", "recipe.json", "ledger.json", "metrics.jsonl", "guarantee.json", "report.json")


@pytest.mark.parametrize("name", _NAMED)
def test_a_file_that_is_gone_cut_or_changed_is_refused_by_its_name(copy: Path, name: str) -> None:
    whole = (copy / name).read_bytes()
    for spoilt in (None, b"", whole[: len(whole) // 2], whole.replace(b"0", b"1"), whole.replace(b"1", b"2", 1), whole + b"[1"):
        (copy / name).unlink() if spoilt is None else (copy / name).write_bytes(spoilt)
        with pytest.raises(ArgumentError, match=re.escape(name)):
            privacy_card(copy)
    (copy / name).write_bytes(whole)
    privacy_card(copy)


def test_files_of_another_run_of_the_same_plan_are_refused(copy: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    train(Recipe.from_tables(TABLES), other, progress=False)
    told = 0
    for name in (*_NAMED, "model.safetensors"):
        mine, others = (copy / name).read_bytes(), (other / name).read_bytes()
        (copy / name).write_bytes(others)
        if mine == others:  # the same plan, the same promise: nothing was changed
            privacy_card(copy)
        else:
            told += 1
            with pytest.raises(ArgumentError, match="SHA-256 is another one"):
                privacy_card(copy)
        (copy / name).write_bytes(mine)
    assert told == 4  # ledger, metrics, report, model


def test_a_folder_gives_its_own_model_only(copy: Path, tmp_path: Path) -> None:
    load_model(copy)
    train(Recipe.from_tables(TABLES), tmp_path / "other", progress=False)
    shutil.copyfile(tmp_path / "other" / "model.safetensors", copy / "model.safetensors")
    load_model(copy / "model.safetensors")  # a file that is asked for by itself is what it is
    with pytest.raises(ArgumentError, match=r"model\.safetensors to be the file that report\.json names"):
        load_model(copy)
    (copy / "report.json").write_text("{")
    with pytest.raises(ArgumentError, match=r"readable report\.json.*Give the model file itself"):
        load_model(copy)


def test_the_report_of_an_earlier_version_is_read_and_the_card_says_so(copy: Path) -> None:
    report = json.loads((copy / "report.json").read_text())
    old = {name: value for name, value in report.items() if name not in ("files", "sha256", "reservation")}
    (copy / "report.json").write_text(json.dumps(old))
    assert any("earlier version" in caveat for caveat in privacy_card(copy).caveats)
    (copy / "report.json").write_text(json.dumps({**old, "sha256": report["sha256"]}))
    with pytest.raises(ArgumentError, match=r"report\.json to be as the run wrote it"):
        privacy_card(copy)


def test_an_unfinished_run_has_no_card(copy: Path) -> None:
    (copy / "guarantee.json").unlink()
    (copy / "checkpoint").mkdir()
    with pytest.raises(ArgumentError, match="finished run"):
        privacy_card(copy)


def test_the_command(finished: tuple[Path, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html, markdown = tmp_path / "card.html", tmp_path / "card.md"
    assert main(["report", str(finished[0]), "--html", str(html), "--markdown", str(markdown), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["privacy_card"] == 1 and content["plan_digest"]
    assert html.read_text().startswith("<!doctype html>") and markdown.read_text().startswith("## Privacy")
    assert main(["report", str(finished[0])]) == 0
    assert "## Privacy" in capsys.readouterr().out
    assert main(["report", str(tmp_path)]) == 2
    assert "to be the folder of a run" in capsys.readouterr().err


def test_a_missing_extra_is_one_sentence_and_curves_need_no_matplotlib(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "delta over epsilon" in card.to_html()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ArgumentError, match=r"jinja2.*hushgrad\[report\]"):
        card.to_html()
    card.to_markdown()  # does without


@pytest.mark.parametrize(
    "lower, upper, words", [(2.9999949, 2.9999951, "2.99999 and 3"), (0.01234561, 0.01234564, "0.0123456 and 0.0123457")]
)
def test_an_interval_is_rounded_outwards(lower, upper, words):
    assert interval_words(SimpleNamespace(interval=(lower, upper))).endswith(f"between {words}")
