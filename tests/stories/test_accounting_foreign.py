"""Runs described by other libraries: read, written, asked about, and compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hushgrad
from hushgrad.cli import crosscheck
from hushgrad.cli.main import main
from hushgrad.errors import ArgumentError
from hushgrad.events import (
    ZCDP,
    BallsInBins,
    Compose,
    CyclicPoisson,
    DiscreteLaplace,
    Event,
    Everyone,
    Exponential,
    FixedSize,
    Gaussian,
    GaussianMixture,
    Laplace,
    NonPrivate,
    Poisson,
    RandomizedResponse,
    RepeatAndSelect,
    Sampled,
    TruncatedPoisson,
    to_dp_accounting,
)

dp = pytest.importorskip("dp_accounting")

THERE_AND_BACK = [
    Gaussian(1.1),
    Laplace(2.0),
    DiscreteLaplace(0.5, 3, vector=True),
    RandomizedResponse(0.3, 4),
    ZCDP(0.2),
    NonPrivate(),
    Compose(()),
    GaussianMixture(noise_multiplier=2.0, sensitivities=(0.0, 1.0), probabilities=(0.9, 0.1)),
    Gaussian(1.1).sampled(rate=0.01) * 100,
    Sampled(FixedSize(dataset_size=100, size=7), Gaussian(1.0)) * 3,
    Sampled(TruncatedPoisson(rate=0.01, dataset_size=1000, size=20), Gaussian(1.0)) * 3,
    RepeatAndSelect(of=Gaussian(5.0), mean=10.0, shape=float("inf")),
    Gaussian(1.0) * 3 + Laplace(2.0) + Gaussian(2.0).sampled(rate=0.5) * 2,
]


@pytest.mark.parametrize("event", THERE_AND_BACK, ids=str)
def test_there_and_back(event: Event) -> None:
    assert Event.read(to_dp_accounting(event)) == event
    assert Event.read(event) is event
    assert Event.read(event.to_json()) == event == Event.read(json.dumps(event.to_json()))


def test_the_same_epsilon_whoever_describes_the_run() -> None:
    run = Gaussian(1.1).sampled(rate=0.01) * 1000
    asked = {"delta": 1e-5, "accountant": "rdp"}
    ours = hushgrad.epsilon(run, **asked)
    theirs = dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.01, dp.GaussianDpEvent(1.1)), 1000)
    history = [(1.1, 0.01, 1000)]
    opacus = type("Accountant", (), {"history": history})()
    for described in (theirs, history, [list(history[0])], opacus, json.dumps(run.to_json()), run.to_json()):
        assert hushgrad.epsilon(described, **asked) == ours
    assert hushgrad.delta(history, epsilon=1.0) > 0 and hushgrad.accounting.epsilon_interval(theirs, delta=1e-5)[0] > 0


def test_what_has_no_counterpart_is_refused() -> None:
    for event in (Exponential(1.0), Sampled(BallsInBins(bins=3), Gaussian(1.0)), Exponential(1.0) * 3 + Gaussian(1.0)):
        with pytest.raises(ArgumentError, match="no counterpart"):
            to_dp_accounting(event)
    with pytest.raises(ArgumentError, match="no counterpart"):
        Event.read(dp.SampledWithReplacementDpEvent(10, 3, dp.GaussianDpEvent(1.0)))
    with pytest.raises(ArgumentError, match="xi"):
        Event.read(dp.ZCDpEvent(0.1, xi=0.2))
    for nonsense in (3.0, object(), [(1.0, 0.1)], [3], "{", b"[1"):
        with pytest.raises(ArgumentError):
            Event.read(nonsense)
    assert Event.read(to_dp_accounting(Sampled(CyclicPoisson(period=3, rate=0.1), Gaussian(1.0)))) == Sampled(
        Poisson(0.1), Gaussian(1.0)
    )


def test_a_vector_of_integers_is_not_taken_for_a_number() -> None:
    number, vector = (DiscreteLaplace(1.0, vector=flag).sampled(rate=0.1) * 5 for flag in (False, True))
    asked = {"delta": 1e-6, "relation": "replace_one"}
    assert hushgrad.epsilon(number, **asked) < hushgrad.epsilon(vector, **asked)


def test_from_a_file_and_crosscheck(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history, tree = tmp_path / "history.json", tmp_path / "event.json"
    history.write_text("[[2.0, 0.1, 10], [1.5, 0.1, 5]]")
    tree.write_text(json.dumps((Gaussian(2.0).sampled(rate=0.1) * 10).to_json()))
    assert main(["epsilon", "--from", str(history), "--delta", "1e-5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["answers"][0]["epsilon"]
    assert found == hushgrad.epsilon([(2.0, 0.1, 10), (1.5, 0.1, 5)], delta=1e-5)
    assert main(["epsilon", "--from", str(history), "--event", "{}", "--delta", "1e-5"]) == 2
    (tmp_path / "weights").write_bytes(b"\xff\xfe\x00")
    for no_text in ("none", "weights"):
        assert main(["epsilon", "--from", str(tmp_path / no_text), "--delta", "1e-5"]) == 2
    capsys.readouterr()
    peers = crosscheck._PEERS
    assert main(["crosscheck", "--from", str(tree), "--delta", "1e-5", "--json"]) == 0
    answers = {row["accountant"]: row for row in json.loads(capsys.readouterr().out)["answers"]}
    assert set(answers) == {"hushgrad pld", *peers}
    assert answers["dp-accounting PLD"]["verdict"] == "inside the interval" and "above" in answers["dp-accounting RDP"]["verdict"]
    assert main(["crosscheck", "--noise-multiplier", "1", "--delta", "1e-5", "--relation", "replace_one", "--json"]) == 0
    answers = {row["accountant"]: row for row in json.loads(capsys.readouterr().out)["answers"]}
    assert answers["dp-accounting PLD"]["verdict"] == "inside the interval" and "refused" in answers["dp-accounting RDP"]
    lying = {"a liar": lambda *question: 0.1, "a ruin": lambda *question: 1 / 0, "absent": _absent}
    monkeypatch.setattr(crosscheck, "_PEERS", lying)
    assert main(["crosscheck", "--from", str(tree), "--delta", "1e-5"]) == 1
    shown = capsys.readouterr().out
    assert "below the truth" in shown and "division by zero" in shown and "not installed" in shown


def test_crosscheck_where_nothing_is_needed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An epsilon of 0 suffices: below it is no false claim, above it no division."""
    said = {"below": -0.1, "same": 0.0, "above": 0.2}
    monkeypatch.setattr(crosscheck, "_PEERS", {name: (lambda *question, x=x: x) for name, x in said.items()})
    assert main(["crosscheck", "--noise-multiplier", "1", "--steps", "0", "--delta", "1e-5", "--json"]) == 0
    verdicts = [row["verdict"] for row in json.loads(capsys.readouterr().out)["answers"][1:]]
    assert verdicts == ["inside the interval", "inside the interval", "above: 0 suffices"]
    assert (
        main(["crosscheck", "--noise-multiplier", "1", "--delta", "1e-5", "--accountant", "rdp"]) == 2
    )  # not offered, so refused
    assert crosscheck._history(Sampled(Everyone(), Gaussian(1.0)) * 3 + Gaussian(2.0), "add_remove") == [
        (1.0, 1.0, 3),
        (2.0, 1.0, 1),
    ]


def _absent(*question: object) -> float:
    import no_such_library  # noqa: F401

    return 0.0
