"""``hushgrad reproduce`` as a user meets it: every light experiment in its quick form, and what a wrong claim does."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hushgrad.cli.main import main
from hushgrad.experiments import EXPERIMENTS, Context, Experiment

DOCS = Path(__file__).resolve().parents[2] / "docs"
LIGHT = [experiment for experiment in EXPERIMENTS if not experiment.heavy]


def test_every_light_experiment_is_reproduced(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for experiment in LIGHT:
        assert main(["reproduce", experiment.name, "--quick", "--out", str(tmp_path)]) == 0, capsys.readouterr().out
        results = json.loads((tmp_path / experiment.name / "results.json").read_text())
        assert results["reproduced"] and results["quick"]
        assert len(results["claims"]) >= 3
        picture = (tmp_path / experiment.name / f"{experiment.name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) < 100_000
        assert len(results["caption"]) > 60


@pytest.mark.slow
@pytest.mark.timeout(1800)  # of wall time, for machines that are busy with other things
def test_all_experiments_in_their_quick_form(tmp_path, capsys):
    """The trainings too, in less than ten minutes of one core."""
    assert main(["reproduce", "--all", "--quick", "--json", "--out", str(tmp_path)]) == 0
    reports = json.loads(capsys.readouterr().out)["experiments"]
    assert len(reports) == len(EXPERIMENTS)
    assert sum(report["cpu_seconds"] for report in reports) < 600


def test_the_errors_of_the_sources_are_found():
    """Each slip that the sources are known to have is in the committed results as such, and no claim is left unproduced."""
    claims = [
        claim
        for experiment in LIGHT
        for claim in json.loads((DOCS / "results" / f"{experiment.name}.json").read_text())["claims"]
    ]
    slips = " ".join(claim["says"] for claim in claims if claim["verdict"] == "does not hold as printed")
    for slip in ("-t^(-3/2)", "gamma converges to 0", "exponent 2", "'variance sigma'", "P(L > eps) <= delta", "eps = 10"):
        assert slip in slips
    assert all(claim["verdict"] != "not reproduced" for claim in claims)
    page = (DOCS / "results.md").read_text()
    assert all(claim["says"].replace("|", "\\|") in page for claim in claims)


@pytest.mark.parametrize("experiment", [e for e in EXPERIMENTS if e.heavy], ids=lambda e: e.name)
def test_the_trainings_were_run_in_full(experiment):
    """Their committed results are of real data, and what was not reproduced is on the overview as such."""
    results = json.loads((DOCS / "results" / f"{experiment.name}.json").read_text())
    assert not results["quick"] and "--data" in results["command"] and results["cpu_seconds"] > 30
    assert len(results["claims"]) >= (1 if experiment.again else 4)
    page = (DOCS / "results.md").read_text()
    for verdict, title, later in (
        ("not reproduced", "## Not reproduced", set()),
        ("undecided", "## Undecided", _again(experiment)),
    ):
        section = page.partition(title)[2].partition("\n## ")[0]
        assert {c["says"] for c in results["claims"] if c["verdict"] == verdict} - later == {
            c["says"] for c in results["claims"] if f"{experiment.name}.md), {c['source']}: {c['says']}: " in section
        }


def _again(experiment: Experiment) -> set[str]:
    """What the second look at an experiment speaks of."""
    files = [DOCS / "results" / f"{e.name}.json" for e in EXPERIMENTS if e.again == experiment.name]
    return {claim["says"] for file in files for claim in json.loads(file.read_text())["claims"]}


def test_a_defect_in_the_library_is_not_reproduced(monkeypatch):
    """Planted: noise without its sensitivity, as if nothing had been paid for the correlation."""
    from hushgrad.experiments import mean_estimation

    honest = mean_estimation._simulated

    def cheap(method, eta, **options):
        value, error = honest(method, eta, **options)
        mechanism = mean_estimation._mechanism(method, eta)
        sens = 1.0 if method == "Noisy-SGD" else float(np.linalg.norm(mechanism.strategy_coefficients(1000)))
        return value / sens**2, error / sens**2

    monkeypatch.setattr(mean_estimation, "_simulated", cheap)
    findings = mean_estimation.run(Context(quick=True))
    wrong = [claim.says for claim in findings.claims if claim.verdict == "not reproduced"]
    assert any("nu-FTRL" in says for says in wrong) and any("anti-PGD" in says for says in wrong)
    assert not any("Noisy-SGD" in says for says in wrong)


def test_a_claim_that_is_not_reproduced_is_exit_code_1(monkeypatch, capsys):
    honest = Experiment.run

    def twisted(self, context):
        findings = honest(self, context)
        return replace(findings, claims=(replace(findings.claims[0], found=9.0, tolerance=0.0), *findings.claims[1:]))

    monkeypatch.setattr(Experiment, "run", twisted)
    assert main(["reproduce", "laplacian-tables", "--quick", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert not answer["reproduced"] and answer["claims"][0]["verdict"] == "not reproduced"


def test_mistakes_are_one_sentence(capsys):
    assert main(["reproduce"]) == 2
    assert "--all" in capsys.readouterr().err
    assert main(["reproduce", "tre"]) == 2
    assert "tree" in capsys.readouterr().err
    assert main(["reproduce", "tree", "--all"]) == 2


def test_without_matplotlib_the_message_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert main(["reproduce", "laplacian-tables", "--quick", "--out", str(tmp_path)]) == 2
    assert "hushgrad[report]" in capsys.readouterr().err
    assert main(["reproduce", "laplacian-tables", "--quick", "--out", str(tmp_path), "--no-picture"]) == 0
