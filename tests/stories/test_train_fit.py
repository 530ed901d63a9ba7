"""fit: the same result in parts, metrics that are what they say, budgets, users, denoisers that probe."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from hushgrad import accounting, denoise
from hushgrad.clipping import Adaptive
from hushgrad.errors import ArgumentError
from hushgrad.events import Gaussian
from hushgrad.guarantee import Ledger
from hushgrad.train import Plan, fit
from hushgrad.train.callbacks import JsonLines
from hushgrad.train.progress import EpsilonSoFar

DATA = TensorDataset(torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3)


def plan(**change):
    return Plan.dpsgd(**{"noise_multiplier": 1.0, "delta": 1e-5, "batch_size": 20, "dataset_size": 60, "steps": 12, **change})


def trained(chosen, data=DATA, loss=F.cross_entropy, **options):
    torch.manual_seed(1)
    model = nn.Linear(4, 3)
    guarantee = fit(model, loss, torch.optim.SGD(model.parameters(), lr=0.5), data, chosen, progress=False, seed=5, **options)
    return model, guarantee


def test_micro_batches_change_nothing():
    whole, parts = trained(plan())[0], trained(plan(), max_physical_batch=3)[0]
    assert torch.allclose(whole.weight, parts.weight, atol=1e-6)


def test_metrics_and_epsilon_so_far():
    seen = []
    _, guarantee = trained(plan(), callbacks=[seen.append])
    assert [m["step"] for m in seen] == list(range(1, 13))
    for metrics in seen:
        exact = plan().guarantee(steps=metrics["step"]).epsilon
        assert exact - 1e-9 <= metrics["epsilon"] <= guarantee.epsilon + 1e-9
        assert 0 <= metrics["raw_clipped_fraction"] <= 1 and 0 <= metrics["raw_accuracy"] <= 1 and metrics["raw_loss"] > 0
    assert seen[-1]["epsilon"] == pytest.approx(guarantee.epsilon)
    assert guarantee.event == plan().event()


def test_signal_to_noise_is_estimated_from_what_was_released():
    """Nearly without noise the ratio is large; with overwhelming noise the estimate is near 0: d = 15 coordinates."""
    ratios = {}
    for multiplier in (1e-3, 1e3):
        seen = []
        trained(plan(noise_multiplier=multiplier, steps=6), callbacks=[seen.append])
        ratios[multiplier] = [m["signal_to_noise"] for m in seen]
    assert min(ratios[1e-3]) > 100 and max(ratios[1e3]) < 2
    seen = []
    trained(plan(denoise=denoise.Laplacian(1.0)), callbacks=[seen.append])
    assert all(m["signal_to_noise"] is None for m in seen)  # a filtered gradient is not signal plus noise


def test_metrics_follow_a_clip_norm_that_moves():
    """From far too large a norm adaptive clipping comes down to the median; metrics of the first norm would never see it clip."""
    seen = []
    clip = Adaptive(50.0, learning_rate=1.0, batch_size=20, count_noise=2.0)
    trained(plan(clip=clip, steps=30), callbacks=[seen.append])
    fractions = [m["raw_clipped_fraction"] for m in seen]
    assert fractions[0] == 0.0 and sum(fractions[-10:]) / 10 > 0.2
    # The estimate is sqrt(max(0, |released|² - d std²) / (d std²)): with the first step's std it would be 0 from the second on.
    assert any(m["signal_to_noise"] > 0 for m in seen[10:])


def test_epsilon_table_includes_earlier_phases():
    prior = Ledger()
    prior.record(Gaussian(2.0))
    alone, after = EpsilonSoFar(plan()), EpsilonSoFar(plan(), prior=prior)
    assert all(after.after(t) > alone.after(t) for t in (1, 6, 12))
    assert trained(plan(), prior=prior)[1].epsilon == pytest.approx(after.after(12))


def test_epsilon_so_far_is_asked_for_once_for_all_runs_of_a_plan(monkeypatch):
    chosen, told, asked, answer = plan(noise_multiplier=1.0625, steps=320), [], [], accounting.epsilon
    monkeypatch.setattr(accounting, "epsilon", lambda *words, **options: asked.append(words) or answer(*words, **options))
    for _ in range(2):
        told.append([EpsilonSoFar(chosen).after(step) for step in (1, 3, 4, 20, 21, 320, 400)])
    assert len(asked) == 5 and told[0] == told[1]  # for the steps 3, 5, 20, 40, 320
    assert told[0] == [chosen.guarantee(steps=mark).epsilon for mark in (3, 3, 5, 20, 40, 320, 320)]


def test_a_budget_ends_the_run_cleanly():
    limit = plan().guarantee(steps=7).epsilon
    seen = []
    _, guarantee = trained(plan(), max_epsilon=limit + 1e-9, callbacks=[seen.append])
    assert len(seen) == 7 and guarantee.epsilon <= limit + 1e-9


def test_empty_batches_and_probing_denoisers():
    seen = []
    trained(plan(batch_size=1, dataset_size=600, steps=20, denoise=denoise.Kalman()), callbacks=[seen.append])
    assert any("raw_loss" not in m for m in seen) and len(seen) == 20  # steps on nobody are steps too


def test_users_and_dicts():
    class Rows(Dataset):
        def __len__(self):
            return len(DATA)

        def __getitem__(self, i):
            return {"input": DATA[i][0], "label": DATA[i][1]}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, input, label):
            return self.linear(input)

    model = Model()
    chosen = plan(unit="user", batch_size=4, dataset_size=12)
    guarantee = fit(
        model,
        lambda scores, batch: F.cross_entropy(scores, batch["label"]),
        torch.optim.SGD(model.parameters(), lr=0.1),
        Rows(),
        chosen,
        groups=lambda i: i % 12,
        max_physical_batch=8,
        progress=False,
    )
    assert guarantee.unit == "user" and math.isfinite(guarantee.epsilon)


def test_stored_metrics_have_nothing_raw(tmp_path):
    trained(plan(steps=3), callbacks=[JsonLines(tmp_path / "public.jsonl"), JsonLines(tmp_path / "all.jsonl", raw=True)])
    public, everything = ([json.loads(line) for line in (tmp_path / name).open()] for name in ("public.jsonl", "all.jsonl"))
    assert len(public) == len(everything) == 3
    assert any(name.startswith("raw_") for name in everything[0]) and not any(name.startswith("raw_") for name in public[0])


def test_a_loss_that_diverged_is_still_json(tmp_path):
    with JsonLines(tmp_path / "metrics.jsonl") as lines:
        lines({"step": 1, "test_loss": math.nan, "epsilon": math.inf})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "test_loss": null, "epsilon": null}\n'


def test_hooks_are_gone_even_after_an_error():
    def fails(metrics):
        raise RuntimeError("stop")

    torch.manual_seed(1)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(RuntimeError, match="stop"):
        fit(model, F.cross_entropy, optimizer, DATA, plan(), callbacks=[fails], progress=False)
    before = model.weight.detach().clone()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()  # an ordinary step again: 0.5 x gradient 1
    assert torch.allclose(model.weight, before - 0.5)
    with pytest.raises(ArgumentError, match="max_physical_batch"):
        trained(plan(), max_physical_batch=0)
