"""The register of defects: each can be planted and removed, is caught by the deep audit, and right runs are not refuted.

``make audit-power`` runs all of them and 200 right runs; here is a part of it. Keys follow from the tests' names: nothing fails by chance.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from hushgrad.audit import Auditor, audit_run, step_bounds
from hushgrad.audit.bench import Bench
from hushgrad.errors import ArgumentError
from hushgrad.release.core import Release
from hushgrad.testing.defects import BEDS, DEFECTS, SERVERS, audited, bench, patched
from hushgrad.testing.defects.base import replaced
from hushgrad.train import Plan

SHARP = (  # one for each check
    "noise two per cent too small",
    "uniform noise",
    "the row of step 3 again in step 40",
    "every second row is the one before, one place on",
    "one key for all runs",
    "noise of tables missing",
    "1.2 times a small rate",
    "neighbours are dealt together",
    "parts that cancel are added one by one",
    "a buffer remembers the batch",
    "norms leak into the parameters",
    "a row in mid-run is an earlier one in another order",
    "batches that do not depend on the key",
    "every record of a batch twice",
    "a filter's second probe has the wrong sign",
    "a denoiser remembers the bare gradient",
    "the average takes in a bare step",
    "an adaptive clip norm follows the bare count of large batches",
    "a lazy table owes the noise of one step only",
)


def test_there_are_enough_of_them_and_each_has_a_law_and_a_bed() -> None:
    assert len(DEFECTS) >= 40
    for name, defect in DEFECTS.items():
        assert defect.name == name and defect.law and defect.bed in {*BEDS, *SERVERS}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_removed_again(name: str) -> None:
    before = dict(vars(Release)), torch.nn.Module.__dict__.copy()
    with DEFECTS[name].plant():
        pass
    with DEFECTS[name].plant():  # it can be planted again
        pass
    assert (dict(vars(Release)), torch.nn.Module.__dict__.copy()) == before


@pytest.mark.parametrize("name", SHARP)
def test_a_defect_is_caught(name: str) -> None:
    with DEFECTS[name].plant():
        assert audit_run(bench(DEFECTS[name].bed), tries=25, steps=1).refuted


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(DEFECTS) - set(SHARP)))
def test_every_other_defect_is_caught(name: str) -> None:
    with DEFECTS[name].plant():
        assert audited(DEFECTS[name].bed).refuted


@pytest.mark.parametrize("bed", ["tied", "users", "lazy", "secure", "half", "one step", "server"])
def test_a_right_run_is_not_refuted(bed: str) -> None:
    report = audited(bed)
    assert not report.refuted, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("bed", [*BEDS, *SERVERS])
def test_right_runs_are_not_refuted(bed: str) -> None:
    for seed in range(5):
        report = audited(bed, seed=seed)
        assert not report.refuted, str(report)


def test_a_defect_that_changes_nothing_is_refused() -> None:
    with pytest.raises(AttributeError), patched(Release, "_no_such_method", None):
        pass


def test_a_defect_that_cannot_be_called_is_refused() -> None:
    """It would raise in the run, which the audit reports as a finding: as if the mistake had been caught."""
    with pytest.raises(TypeError, match="does not take \\['buffers'\\]"):
        replaced(Release, "_add", lambda right, self, step: None)
    with replaced(Release, "_add", lambda right, self, step, **rest: None):
        pass


def test_a_server_without_a_population_must_be_told_how_many_users_there_are() -> None:
    from flwr.app import Array, ArrayRecord
    from flwr.serverapp.strategy import FedAvg

    from hushgrad.federated import DPFTRL

    strategy = DPFTRL(FedAvg(), SERVERS["correlated server"]())
    with pytest.raises(ArgumentError, match="users=None"):
        strategy.audit(ArrayRecord({"w": Array(np.zeros(3))}))


def test_a_part_that_the_library_refuses_is_a_finding() -> None:
    own = bench("layers")
    mixed = Bench(build=lambda: _mixing(own), plan=own.plan, dataset=own.dataset, loss_fn=own.loss_fn)
    report = audit_run(mixed)
    assert "releases" in report.refuted_by and "refused" in str(report)


def _mixing(own: Bench) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


README = {"epsilon": 3.0, "delta": 1e-5, "max_grad_norm": 1.0, "batch_size": 256, "dataset_size": 60_000, "epochs": 10}


def test_the_bound_for_the_readme_plan_is_half_of_the_claim_and_halved_noise_is_refuted_by_it() -> None:
    plan = Plan.dpsgd(**README)
    right = {bound.method: bound for bound in step_bounds(plan, canaries=400, steps=30)}
    assert 1.5 <= right["steps f-dp"].epsilon <= right["steps gdp"].epsilon <= 3.0
    assert all("attacker" in bound.threat for bound in right.values())
    with DEFECTS["noise halved"].plant():
        wrong = step_bounds(plan, canaries=400, steps=30, confidence=0.9999)
    assert all(bound.epsilon > 3.0 for bound in wrong)


def test_the_verdict_of_a_canary_audit_uses_the_bound() -> None:
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=4, dataset_size=1000, steps=30)
    report = Auditor(plan, canaries=300).run()
    assert not report.refuted and report.lower_bound == report.bound("steps f-dp") > 0
    with DEFECTS["noise halved"].plant():
        assert {"bound", "noise"} <= set(Auditor(plan, canaries=300).run().refuted_by)
