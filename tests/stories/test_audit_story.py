"""The audit as a user meets it: the command, the report, the picture, a running Private."""

from __future__ import annotations

import json
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch
from snippets import snippets_run

from hushgrad import Plan, make_private
from hushgrad.audit import Auditor, AuditReport
from hushgrad.audit.exact_check import compare, journal_check
from hushgrad.cli.main import main
from hushgrad.clipping import Adaptive, PerLayer
from hushgrad.errors import ArgumentError
from hushgrad.noise.streams import IndependentStream
from hushgrad.recipes import Recipe, train
from hushgrad.release.journal import Journal
from hushgrad.release.journal_history import shown
from hushgrad.release.owner import Owner
from hushgrad.sampling import RoundRobin
from hushgrad.testing.defects import DEFECTS, bench
from hushgrad.train.fitting import Passes

SMALL = Plan.dpgd(noise_multiplier=4.0, delta=1e-5, dataset_size=100, steps=10)


@pytest.fixture(scope="module")
def report() -> AuditReport:
    return Auditor(SMALL, canaries=200).run()


def test_the_report_says_what_was_found(report: AuditReport) -> None:
    assert report.verdict == "not refuted" and report.refuted_by == ()
    assert "no proof of privacy" in str(report) and "at 95% confidence" in str(report)
    assert report.claimed == SMALL.guarantee(steps=10)
    assert {check.name for check in report.checks} == {"batches", "noise", "contribution", "fresh noise"}
    assert len(report.scores_in) + len(report.scores_out) == report.canaries == 200
    with pytest.raises(ArgumentError, match="clopper"):
        report.bound("clopper pearson")


def test_the_report_is_a_value(report: AuditReport) -> None:
    assert AuditReport.from_json(json.dumps(report.to_json())) == report
    assert "scores_in" not in report.summary()


def test_the_same_seed_gives_the_same_scores(report: AuditReport) -> None:
    again, other = Auditor(SMALL, canaries=200).run(), Auditor(SMALL, canaries=200, seed=1).run()
    assert again.scores_in == report.scores_in != other.scores_in


def test_the_picture(report: AuditReport, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    report.plot(tmp_path / "audit.png")
    assert (tmp_path / "audit.png").read_bytes()[:4] == b"\x89PNG"


def test_a_running_private_is_audited_by_its_plan_and_left_alone() -> None:
    model = torch.nn.Linear(3, 1)
    private = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), SMALL, seed=0)
    before = model.weight.detach().clone()
    assert Auditor(private, canaries=50, steps=3).run().steps == 3
    assert private.steps == 0 and torch.equal(model.weight, before)


def test_the_command_prints_bounds_and_says_no_by_its_exit_code(tmp_path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(SMALL.to_json()))
    assert main(["audit", str(tmp_path), "--canaries", "200", "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert "clopper-pearson gdp" in printed and "claimed (upper bound)" in printed and "not refuted" in printed
    honest = IndependentStream.rows

    def faint(self, *args, scale, **options):  # too little noise in every step
        return honest(self, *args, scale=0.3 * scale, **options)

    monkeypatch.setattr(IndependentStream, "rows", faint)
    assert main(["audit", str(tmp_path / "plan.json"), "--canaries", "200", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "refuted" and "noise" in found["refuted_by"]


def test_the_command_shows_progress_on_stderr(tmp_path, capsys) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(SMALL.to_json()))
    assert main(["audit", str(tmp_path), "--canaries", "50"]) == 0
    assert "claimed" in capsys.readouterr().out


def test_the_command_refuses_nonsense_in_one_sentence(tmp_path, capsys) -> None:
    assert main(["audit", str(tmp_path)]) == 2
    assert "holds no plan that can be read" in capsys.readouterr().err
    (tmp_path / "plan.json").write_text("{}")
    assert main(["audit", str(tmp_path)]) == 2
    (tmp_path / "plan.json").write_text(json.dumps(SMALL.to_json()))
    assert main(["audit", str(tmp_path), "--canaries", "3"]) == 2
    assert "canaries=3" in capsys.readouterr().err


def test_what_cannot_be_audited_is_refused_or_noted() -> None:
    common = {"delta": 1e-5, "batch_size": 20, "dataset_size": 100}
    with pytest.raises(ArgumentError, match="with noise"):
        Auditor(Plan.dpgd(noise_multiplier=0.0, delta=1e-5, dataset_size=100, steps=2))
    with pytest.raises(ArgumentError, match="seed"):
        Auditor(SMALL, seed=-1)
    adaptive = Plan.dpsgd(noise_multiplier=2.0, steps=5, clip=Adaptive(1.0, batch_size=20, count_noise=5.0), **common)
    layers = Plan.dpsgd(
        noise_multiplier=2.0, steps=5, clip=PerLayer.with_norms({"body": 1.0, "head": 2.0}), average="tail", **common
    )
    for plan, notes in ((adaptive, 1), (layers, 2)):
        found = Auditor(plan, canaries=60).run()
        assert not found.refuted and len(found.notes) == notes, str(found)


def test_a_long_plan_is_audited_in_its_first_steps() -> None:
    """Canaries that take part in none of them are not scored; the claim is that of the first steps."""
    sampler = RoundRobin(batch_size=10, dataset_size=1000, epochs=2)
    plan = Plan.dpftrl(noise_multiplier=3.0, delta=1e-5, batch_size=10, dataset_size=1000, sampling=sampler)
    found = Auditor(plan, canaries=500, steps=20).run()
    assert not found.refuted, str(found)
    assert 50 < found.canaries < 160 and found.claimed.event == plan.event(20)


def test_user_level_plans_are_audited_too() -> None:
    plan = Plan.dpsgd(noise_multiplier=2.0, delta=1e-5, batch_size=20, dataset_size=100, steps=5, unit="user")
    found = Auditor(plan, canaries=60).run()
    assert not found.refuted and found.claimed.unit == "user"


def test_the_snippets_of_the_page_run(capsys) -> None:
    snippets_run("audit.md", 7)
    printed = capsys.readouterr().out
    assert "not refuted" in printed and "is refuted at 95% confidence" in printed


# The run itself -----------------------------------------------------------------------------------------------------------


def test_the_owner_holds_computed_steps_against_the_journal(tmp_path: Path) -> None:
    own, key = bench("layers"), bytes(range(32))
    model, optimizer = own.build()
    private = make_private(model, optimizer, own.plan, key=key)
    private.keep_journal(Journal.create(tmp_path / "journal", private.key, Owner(tmp_path), {}))
    passes = Passes(private, own.loss_fn, None)
    for batch in islice(private.loader(own.dataset), 3):
        private.optimizer.step(partial(passes.run, batch))
    private.detach()
    digests = shown(tmp_path / "journal").digests
    assert len(digests) == 3
    found = list(compare(own, key, first=0, count=2))
    assert journal_check(found, digests).passed
    assert not journal_check(found, [digests[0], bytes(5), digests[2]]).passed
    other = list(compare(own, bytes(32), first=0, count=1))
    assert not journal_check(other, digests).passed


RECIPE = {
    "data": {"name": "digits"},
    "model": {"name": "logistic"},
    "optimizer": {"name": "sgd", "lr": 0.5},
    "plan": {"method": "dpsgd", "noise_multiplier": 2.0, "delta": 1e-4, "batch_size": 24, "steps": 6},
    "run": {"seed": 3},
}


def test_the_command_audits_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    train(Recipe.from_tables(RECIPE), out, progress=False)
    assert main(["audit", str(out), "--deep"]) == 0
    text = capsys.readouterr().out
    assert "exact release" in text and "noise projection" in text and "epsilon >=" in text and "not refuted" in text
    with DEFECTS["noise halved"].plant():
        assert main(["audit", str(out), "--deep", "--json"]) == 1
    assert "noise amplitude" in json.loads(capsys.readouterr().out)["refuted_by"]
    assert main(["audit", str(tmp_path), "--deep"]) == 2
    assert "recipe.json" in capsys.readouterr().err
