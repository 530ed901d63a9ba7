"""The deep audit: somebody's own run, looked at part by part; right runs pass, and what the canary audit cannot see is found.

Each statistical check has a false-alarm rate of at most 1e-4. With fresh keys a right run fails here once in about a thousand runs of one
audit; the keys follow from the tests' names, so that it does not happen by chance.
"""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hushgrad import Plan, make_private
from hushgrad.audit import Bench, audit_run
from hushgrad.audit.bench import copied
from hushgrad.noise import BLT, Tree
from hushgrad.release.core import Release

N = 200


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(N, 8, generator=generator), torch.randint(3, (N,), generator=generator))


def dpsgd(**changes: object) -> Plan:
    return Plan.dpsgd(**{"noise_multiplier": 1.0, "delta": 1e-5, "batch_size": 16, "dataset_size": N, "steps": 60, **changes})


def dpftrl(noise: object) -> Plan:
    return Plan.dpftrl(noise_multiplier=2.0, delta=1e-5, batch_size=20, dataset_size=N, epochs=6, noise=noise)


def bench(plan: Plan) -> Bench:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Bench(build=copied(model, optimizer), plan=plan, dataset=data(), loss_fn=nn.functional.cross_entropy)


@pytest.mark.parametrize("noise", [None, BLT(buffers=3), Tree()], ids=["dp-sgd", "blt", "tree"])
def test_a_right_run_is_not_refuted_and_its_bound_is_close(noise: object) -> None:
    report = audit_run(bench(dpsgd() if noise is None else dpftrl(noise)))
    assert not report.refuted, str(report)
    assert 0.5 * report.certified_low < report.lower_bound <= report.claimed.epsilon
    assert all(bound.threat and bound.assumption for bound in report.lower_bounds)
    assert "not refuted" in str(report) and type(report).from_json(report.to_json()) == report


def test_a_private_run_is_audited_where_it_stands_and_is_not_touched() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seen: list[object] = []
    model.register_forward_hook(lambda *_: seen.append(None))  # a hook of the user's own, which stays
    private, records = make_private(model, optimizer, dpsgd(), seed=3), data()
    batches = iter(private.loader(records))
    for x, y in islice(batches, 2):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    before = [p.clone() for p in model.parameters()]
    report = private.audit(records, nn.functional.cross_entropy)
    assert not report.refuted, str(report)
    assert private.steps == 2 and all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    x, y = next(batches)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert private.steps == 3 and private.spent().epsilon < 10


def plant(monkeypatch: pytest.MonkeyPatch, change: object) -> None:
    add = Release._add

    def wrong(self: Release, step: int, buffers: dict[str, torch.Tensor]) -> None:
        noise = {name: torch.zeros_like(total) for name, total in buffers.items()}
        add(self, step, noise)
        for name, row in change(step, noise).items():
            buffers[name].add_(row)

    monkeypatch.setattr(Release, "_add", wrong)


def after_fifty(step: int, noise: dict) -> dict:
    return {name: row * (step < 50) for name, row in noise.items()}


def doubled(step: int, noise: dict) -> dict:
    return {
        name: row.flatten()[::2].repeat_interleave(2)[: row.numel()].view_as(row) if row.numel() % 2 == 0 else row
        for name, row in noise.items()
    }


def no_bias(step: int, noise: dict) -> dict:
    return {name: row * (0 if name.endswith("bias") else 1) for name, row in noise.items()}


@pytest.mark.parametrize(
    ("change", "checks"),
    [
        (after_fifty, {"exact release", "noise amplitude"}),
        (doubled, {"exact release", "noise pairs", "noise projection"}),
        (no_bias, {"exact release", "noise amplitude"}),
    ],
)
def test_what_canaries_cannot_see_is_found(change: object, checks: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, change)
    assert checks <= set(audit_run(bench(dpsgd())).refuted_by)
