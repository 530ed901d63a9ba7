"""Values behind the experiments, checked from outside of them, and the frame's verdicts."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from patience import HANGS

from hushgrad.errors import ArgumentError
from hushgrad.experiments import EXPERIMENTS, Claim, Context, Experiment, Findings, Table, find, reproduce
from hushgrad.experiments.base import HOLDS, MISPRINT, REFUTED, UNDECIDED
from hushgrad.experiments.runner import reason, summary
from hushgrad.experiments.stationary import Problem, W, best_damping, filter_anti, filter_independent, filter_nu, filtered, mean


def claim(**changes: object) -> Claim:
    return Claim(**({"source": "s", "says": "x", "expected": 1.0, "found": 1.0} | changes))


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, HOLDS),
        ({"found": 1.05, "tolerance": 0.1}, HOLDS),
        ({"found": 1.2, "tolerance": 0.1}, REFUTED),
        ({"found": 1.2, "tolerance": 0.1, "corrected": 1.25}, MISPRINT),
        ({"found": 1.2, "corrected": 1.5}, REFUTED),
        ({"found": 0.3, "relation": "at most"}, HOLDS),
        ({"found": 1.3, "relation": "at most"}, REFUTED),
        ({"found": 5.0, "relation": "at most", "corrected": 3.0}, REFUTED),  # an inequality's correction is a value, not a bound
        ({"found": 1.3, "relation": "at least"}, HOLDS),
        ({"found": 0.3, "relation": "at least"}, REFUTED),
        ({"found": math.nan}, REFUTED),
        ({"found": math.nan, "relation": "at most"}, REFUTED),
        ({"found": math.nan, "relation": "at least", "corrected": 2.0}, REFUTED),
        ({"found": math.inf, "expected": math.inf}, HOLDS),
        ({"found": 1.3, "relation": "at least", "stderr": 0.1}, HOLDS),
        ({"found": 1.3, "relation": "at least", "stderr": 0.2}, UNDECIDED),  # on the claimed side, but within the noise
        ({"found": 0.9, "relation": "at least", "stderr": 0.1}, UNDECIDED),
        ({"found": 0.7, "relation": "at least", "stderr": 0.1}, REFUTED),
        ({"found": 0.7, "relation": "at most", "stderr": 0.1}, HOLDS),
        ({"found": 0.9, "relation": "at most", "stderr": 0.1}, UNDECIDED),
        ({"found": 1.3, "relation": "at most", "stderr": 0.1}, REFUTED),
        ({"found": 0.9, "relation": "at least", "stderr": 0.1, "corrected": 0.9}, MISPRINT),
        ({"found": 1.2, "stderr": 0.2, "tolerance": 0.1}, REFUTED),  # an equation has its tolerance, and no doubt besides
        ({"found": math.nan, "relation": "at least", "stderr": 0.1}, REFUTED),
        ({"found": 1.3, "relation": "at least", "stderr": math.nan}, REFUTED),
    ],
)
def test_a_verdict_follows_from_the_numbers(changes, verdict):
    assert claim(**changes).verdict == verdict


def test_what_is_undecided_is_said_and_is_no_failure(tmp_path, monkeypatch):
    doubtful = claim(says="smoothing helps", expected=0.0, found=0.1, stderr=0.3, relation="at least")
    findings = Findings(claims=(doubtful,), tables=(), draw=lambda figure: figure.add_subplot(), caption="nothing")
    monkeypatch.setattr(Experiment, "run", lambda self, context: findings)
    outcome = reproduce(find("tree"), Context(quick=True), tmp_path, picture=False)
    assert outcome.reproduced
    assert json.loads((tmp_path / "tree" / "results.json").read_text())["claims"][0]["verdict"] == UNDECIDED
    (tmp_path / "tree.json").write_text((tmp_path / "tree" / "results.json").read_text())
    section = summary(tmp_path).partition("## Undecided")[2].partition("\n## [")[0]
    assert "smoothing helps: printed 0, found 0.1 ± 0.3. If the difference is what it seems, 36 times as many seeds" in section


@pytest.mark.parametrize(("found", "counts"), [(-1.0, "1 not reproduced"), (1.0, "1 holds"), (0.1, "1 undecided")])
def test_an_undecided_claim_counts_as_its_second_look_says(tmp_path, found, counts):
    second = next(experiment for experiment in EXPERIMENTS if experiment.again)
    for name, value in ((second.again, 0.1), (second.name, found)):
        told = claim(says="it helps", expected=0.0, found=value, stderr=0.3, relation="at least").to_json()
        content = {
            "experiment": name,
            "claim": "c",
            "command": "x",
            "seed": 0,
            "wall_seconds": 1,
            "cpu_seconds": 1,
            "claims": [told],
        }
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    head = summary(tmp_path).partition("\n* 000")[0]
    assert head.rstrip().endswith(f"95 %. {counts}.")


def test_every_claim_that_was_not_reproduced_or_decided_has_a_reason_in_words():
    files = sorted((Path(__file__).parents[2] / "docs" / "results").glob("*.json"))
    found = [(result["experiment"], c) for result in (json.loads(f.read_text()) for f in files) for c in result["claims"]]
    doubtful = [(name, c) for name, c in found if c["verdict"] in (REFUTED, UNDECIDED)]
    assert doubtful and all(c["note"] or reason(name, c) for name, c in doubtful)
    assert not any(reason(name, c) for name, c in found if c["verdict"] not in (REFUTED, UNDECIDED))


def test_claims_and_tables_refuse_nonsense():
    with pytest.raises(ArgumentError, match="relation"):
        claim(relation="roughly")
    with pytest.raises(ArgumentError, match="2 entries"):
        Table(title="t", columns=("a", "b"), rows=((1,),))
    with pytest.raises(ArgumentError, match="mean-estimation"):
        find("mean-estimaton")


def test_the_list_is_complete_and_needs_no_torch():
    names = [experiment.name for experiment in EXPERIMENTS]
    assert len(set(names)) == len(names)
    light = {"composition", "tree", "mean-estimation", "linear-regression", "laplacian-signals", "laplacian-tables"}
    assert light | {"lecture-dpgd", "dp-rates"} <= set(names)
    code = "import sys; from hushgrad.cli.main import main; main(['reproduce', '--list']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0
    assert all(name in done.stdout for name in names)


def test_an_experiment_is_written_down(tmp_path, monkeypatch):
    findings = Findings(
        claims=(claim(says="a | b", found=np.float64(3.0), expected=2.0, corrected=3.0, note="why"),),
        tables=(Table(title="numbers", columns=("x",), rows=((np.float64(0.25),), ("",))),),
        draw=lambda figure: figure.add_subplot().plot([1, 2]),
        caption="a line, in metres",
        data={"curve": np.arange(2.0), "none": math.inf, 3: (1,)},
    )
    monkeypatch.setattr(Experiment, "run", lambda self, context: findings)
    experiment = Experiment("toy", "000", "toys work", "toy:run")
    outcome = reproduce(experiment, Context(seed=5, quick=True), tmp_path)
    written = json.loads((tmp_path / "toy" / "results.json").read_text())
    assert written["claims"][0]["verdict"] == MISPRINT
    assert written["data"] == {"curve": [0.0, 1.0], "none": "inf", "3": [1]}
    assert written["command"] == "hushgrad reproduce toy --quick --seed 5"
    page = (tmp_path / "toy" / "toy.md").read_text()
    assert "a \\| b" in page and "a line, in metres" in page and "seed 5" in page and "**does not hold as printed**" in page
    assert (tmp_path / "toy" / "toy.png").read_bytes().startswith(b"\x89PNG")
    assert outcome.reproduced


# The formulas ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eta", [0.3, 0.01, 1e-4])
def test_stationary_variance_has_its_closed_forms(eta):
    one, a = Problem(curvatures=((1.0, 1),), eta=eta), 1 - eta
    assert one.variance(1.0, filter_independent()) == pytest.approx(eta / (2 - eta), rel=1e-10)
    assert one.variance(1.0, filter_anti(best_damping(eta))) == pytest.approx(eta**2 / math.sqrt(1 - a * a), rel=1e-10)
    assert one.variance(1.0, filter_nu(eta)) == pytest.approx(eta**2 * mean(1 / np.abs(a - np.exp(1j * W))) ** 2, rel=1e-9)
    np.testing.assert_allclose(one.optimal_power(), filter_nu(eta), rtol=1e-9)  # one curvature: Spectral is Nu


def test_exact_risk_solves_the_recursion_of_second_moments():
    """Independent noise: S <- (I - 2 eta H) S + eta² (2 H S H + H tr(H S)) + eta² sigma² I, Isserlis, solved directly."""
    lam, eta = np.array([1.0, 0.3, 0.3, 0.1]), 0.2
    problem = Problem(curvatures=((1.0, 1), (0.3, 2), (0.1, 1)), eta=eta, label_noise=0.7)
    step = np.diag(1 - 2 * eta * lam + 2 * eta**2 * lam**2) + eta**2 * np.outer(lam, lam)
    source = eta**2 * (np.ones(4) + 0.7**2 * lam)
    moments = np.linalg.solve(np.eye(4) - step, source)
    assert problem.risk(filter_independent()) == pytest.approx(float(lam @ moments), rel=1e-9)
    assert problem.first_order_risk(filter_independent()) < 0.95 * float(lam @ moments)  # the zeroth order alone is not the risk


def test_risk_is_infinite_beyond_the_boundary():
    assert math.isinf(Problem(curvatures=((1.0, 8),), eta=0.21).risk(filter_independent()))
    assert math.isfinite(Problem(curvatures=((1.0, 8),), eta=0.19).risk(filter_independent()))


def test_filtered_is_the_causal_convolution():
    z, beta = np.random.default_rng(0).standard_normal((13, 2)), np.array([1.0, -0.5, 0.25] + [0.0] * 10)
    wanted = np.stack([np.convolve(z[:, i], beta)[:13] for i in range(2)], axis=1)
    np.testing.assert_allclose(filtered(z, beta), wanted, atol=1e-12)
