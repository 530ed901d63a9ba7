"""The policy in the page: what is allowed is shown, warned of and obeyed, as its file says at that moment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the web page needs hushgrad[serve]")
from fastapi.testclient import TestClient

from hushgrad.budget import Ledger, Policy
from hushgrad.cli.main import main
from hushgrad.recipes import Recipe, train
from hushgrad.serve import Settings, create_app

HOME = "http://localhost:8642"
TABLES = {
    "model": {"name": "logistic"},
    "data": {"name": "digits"},
    "plan": {"noise_multiplier": 2.0, "delta": 1e-5, "batch_size": 64, "steps": 3},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger that has paid for one of two runs."""
    place = tmp_path_factory.mktemp("policy")
    Ledger.create(place / "budget.db").add("digits", epsilon=5.0, delta=1e-5)
    train(Recipe.from_tables(TABLES).paid_by(str(place / "budget.db"), "digits"), place / "runs" / "paid", progress=False)
    train(Recipe.from_tables(TABLES), place / "runs" / "free", progress=False)
    return place


@pytest.fixture(scope="module")
def policy(place: Path) -> Path:
    return place / "policy.toml"


@pytest.fixture(scope="module")
def client(place: Path, policy: Path) -> Iterator[TestClient]:
    """One page for all tests, each of which writes the policy anew."""
    settings = Settings(runs=place / "runs", ledger=str(place / "budget.db"), policy=str(policy))
    with TestClient(create_app(settings), base_url=HOME) as client:
        yield client


def check(client: TestClient, name: str) -> str:
    return next(run["check"] for run in client.get("/api/runs").json()["runs"] if run["name"] == name)


def test_the_rules_are_shown_with_the_digest_that_cards_name(client, policy):
    policy.write_text('max_epsilon = 3.0\nmax_delta = 1e-5\nunits = ["example"]\nsecure = true\napprovals = 2\n')
    shown, told = client.get("/policy").text, client.get("/api/policy").json()
    assert "at most 3<" in shown and "at most 1e-05, below 1 / (public number of records)" in shown and ">2<" in shown
    assert "correctly rounded noise" in shown and told["sha256"] in shown
    assert Policy.from_json(told["policy"]).digest == told["sha256"]
    assert "2 wanted" in client.get("/ledger").text  # nobody has approved the run yet
    assert client.get("/api/ledger").json()["datasets"][0]["runs"][0]["approved"] == []


def test_a_changed_policy_counts_at_once(client, policy):
    policy.write_text("max_epsilon = 9.0")
    assert client.get("/cards/free").status_code == 200 and check(client, "free") == "verified"
    assert "<td>allowed</td>" in client.get("/policy").text
    policy.write_text("max_epsilon = 0.01")
    assert check(client, "free") == "not verified" and "not asked yet" in client.get("/policy").text
    answer = client.get("/cards/free")
    assert answer.status_code == 422 and "epsilon of at most 0.01" in answer.text and check(client, "free") == "not allowed"
    assert "<td>not allowed</td>" in client.get("/policy").text
    policy.write_text("max_epsilon = 9.0")
    assert client.get("/cards/free").status_code == 200


def test_a_policy_that_cannot_be_read_allows_nothing_and_is_named_as_the_cause(client, policy, place, capsys):
    for content in (None, "max_epsilom = 3"):
        policy.unlink(missing_ok=True) if content is None else policy.write_text(content)
        for path in ("/cards/free", "/policy", "/api/policy", "/ledger", "/?epsilon=1"):
            answer = client.get(path)
            assert answer.status_code == 422 and "The policy cannot be read" in answer.text, path
            assert "contradict" not in answer.text and policy.name not in answer.text
        assert check(client, "free") == "not verified"  # it is the policy's fault
        assert client.get("/runs").status_code == 200
        assert main(["serve", str(place / "runs"), "--policy", str(policy)]) == 2
        assert "olicy" in capsys.readouterr().err


def test_the_planner_warns_of_a_budget_that_is_not_allowed(client, policy):
    policy.write_text('max_epsilon = 1.0\nrelations = ["add_remove"]')
    assert "Not allowed here." not in client.get("/?epsilon=1").text
    for question, words in (("epsilon=2", "at most 1; this is 2"), ("epsilon=1&relation=zero_out", "zero_out")):
        page = client.get(f"/?{question}").text
        assert "Not allowed here." in page and words in page
        assert words in client.get(f"/part/plan?{question}").text


def test_a_run_that_must_be_paid_is_looked_up_in_the_ledger_each_time(client, policy, place):
    policy.write_text("ledger = true")
    assert client.get("/cards/free").status_code == 422 and check(client, "free") in ("contradicted", "not allowed")
    before = client.get("/api/cards/paid").json()["budget"]
    assert before["looked_up"] and before["dataset"] == "digits"


def test_without_a_policy_the_page_says_how_to_give_one(place, monkeypatch, tmp_path):
    monkeypatch.delenv("HUSHGRAD_POLICY", raising=False)
    with TestClient(create_app(Settings(runs=place / "runs")), base_url=HOME) as client:
        assert "No policy was given" in client.get("/policy").text
        assert client.get("/api/policy").json() == {"policy": None, "sha256": None}
        (tmp_path / "rules.toml").write_text("max_epsilon = 4.5")
        monkeypatch.setenv("HUSHGRAD_POLICY", str(tmp_path / "rules.toml"))
        assert "at most 4.5" in client.get("/policy").text
