"""A proof leaves no trace: a run in which every pass is proved anew ends bit for bit where one ends that is proved once.

Otherwise a resumed run, which proves its first pass again, would draw other noise, or see other records, than it had before.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import hushgrad.clipping.root as root
from hushgrad.denoise import Kalman
from hushgrad.noise import BLT
from hushgrad.train import Checkpoint, Plan, make_private
from hushgrad.train.fitting import run_steps

COMMON = {"noise_multiplier": 1.0, "delta": 1e-5, "batch_size": 8, "dataset_size": 64}


def numbers() -> tuple[torch.Tensor, nn.Module]:
    return torch.randn(64, 6), nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 12))


def words() -> tuple[torch.Tensor, nn.Module]:
    return torch.randint(200, (64, 4)), nn.Sequential(nn.EmbeddingBag(200, 8), nn.Dropout(0.3), nn.Linear(8, 3))


RUNS: dict[str, tuple[Callable[[], Plan], Callable[[], tuple[torch.Tensor, nn.Module]], bool]] = {
    "independent": (lambda: Plan.dpsgd(steps=8, **COMMON), numbers, False),
    "certified": (lambda: Plan.dpsgd(steps=8, certified=True, **COMMON), numbers, False),
    "denoised": (lambda: Plan.dpsgd(steps=8, denoise=Kalman(kappa=0.7, gamma=0.5), **COMMON), numbers, False),
    "correlated": (lambda: Plan.dpftrl(epochs=1, noise=BLT(buffers=2), **COMMON), numbers, False),
    "table": (lambda: Plan.dpsgd(steps=8, **COMMON), words, False),
    "lazy table": (lambda: Plan.dpsgd(steps=8, **COMMON), words, True),
}


def _end(name: str, directory: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    plan, parts, lazy = RUNS[name]
    torch.manual_seed(3)
    inputs, model = parts()
    data = TensorDataset(inputs, torch.randint(3, (64,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    private = make_private(model, optimizer, plan(), key=bytes(range(32)), lazy_tables=lazy, loss_reduction="sum")
    checkpoint = Checkpoint(str(directory), private)

    def save(metrics: dict[str, int]) -> None:
        if metrics["step"] == 4:
            checkpoint.save()

    run_steps(private, nn.CrossEntropyLoss(reduction="sum"), data, callbacks=[save])
    return model.state_dict(), torch.get_rng_state()


@pytest.mark.parametrize("name", RUNS)
def test_a_proof_in_mid_run_leaves_no_trace(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root, "REPEAT_ONE_IN", 10**9)
    once, drawn = _end(name, tmp_path / "once")
    monkeypatch.setattr(root, "REPEAT_ONE_IN", 1)
    always, drawn_too = _end(name, tmp_path / "always")
    assert all(torch.equal(once[key], always[key]) for key in once)
    assert torch.equal(drawn, drawn_too)
