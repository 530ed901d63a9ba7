"""Every denoiser in a real private run: with each kind of noise, in each precision, resumed in the middle bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from hushgrad.denoise import (
    Chain,
    DebiasedSecondMoment,
    DelayedPreconditioner,
    Denoiser,
    JamesStein,
    Kalman,
    Laplacian,
    LowPass,
    ScaleThenPrivatise,
    SoftThreshold,
)
from hushgrad.noise import BLT, Banded
from hushgrad.train import Plan, make_private

KEY = bytes(range(32))
STEPS = 8
DENOISERS: dict[str, Denoiser] = {
    "laplacian": Laplacian(1.0),
    "laplacian-global": Laplacian(2.0, scope="global", boundary="neumann"),
    "kalman": Kalman(0.7, 0.5),
    "kalman-one-probe": Kalman.one_probe(0.6),
    "low-pass": LowPass(),
    "james-stein": JamesStein(),
    "soft-threshold": SoftThreshold(),
    "second-moment": DebiasedSecondMoment(),
    "delayed": DelayedPreconditioner(delay=2),
    "scale-first": ScaleThenPrivatise(),
    "chain": Chain([LowPass(), Laplacian(1.0)]),
}
NOISES = {"independent": None, "blt": BLT(buffers=2), "banded": Banded(bands=3)}


def data(dtype: torch.dtype) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(32, 4, generator=generator).to(dtype), torch.randint(2, (32,), generator=generator))


def start(denoise: Denoiser | None, noise: str, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    common = {"noise_multiplier": 1.0, "delta": 1e-5, "batch_size": 8, "dataset_size": 32, "denoise": denoise}
    if NOISES[noise] is None:
        plan = Plan.dpsgd(steps=STEPS, **common)
    else:
        plan = Plan.dpftrl(epochs=2, noise=NOISES[noise], **common)
    return model, optimizer, make_private(model, optimizer, plan, key=KEY)


def take(model, optimizer, private, until: int) -> None:
    for x, y in private.loader(data(model[0].weight.dtype)):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x).float(), y)
            loss.backward()
            return loss

        optimizer.step(closure)
        if private.steps == until:
            return


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def run(denoise, noise, dtype=torch.float32, resume_at: int | None = None):
    model, optimizer, private = start(denoise, noise, dtype)
    if resume_at is not None:
        take(model, optimizer, private, resume_at)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), private.state_dict(with_key=True)))
        model, optimizer, private = start(denoise, noise, dtype)
        for part, state in zip((model, optimizer, private), saved, strict=True):
            part.load_state_dict(state)
    take(model, optimizer, private, STEPS)
    assert private.steps == STEPS
    return weights(model), private


@pytest.mark.parametrize("noise", sorted(NOISES))
@pytest.mark.parametrize("name", sorted(DENOISERS))
def test_a_denoised_run_resumes_bit_for_bit_and_spends_what_a_plain_one_does(name, noise):
    straight, private = run(DENOISERS[name], noise)
    resumed, again = run(DENOISERS[name], noise, resume_at=3)
    plain, bare = run(None, noise)
    assert straight.isfinite().all()
    assert torch.equal(straight, resumed) and private.ledger == again.ledger
    assert not torch.equal(straight, plain)  # the denoiser did something
    assert private.spent().epsilon == bare.spent().epsilon  # and that was free


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", sorted(DENOISERS))
def test_other_precisions_stay_theirs(name, dtype):
    straight, _ = run(DENOISERS[name], "blt", dtype)
    resumed, _ = run(DENOISERS[name], "blt", dtype, resume_at=3)
    assert straight.dtype == dtype and straight.isfinite().all()
    assert torch.equal(straight, resumed)


def test_a_filter_whose_state_is_lost_would_be_noticed():
    model, optimizer, private = start(DENOISERS["low-pass"], "blt")
    take(model, optimizer, private, 3)
    private._release.filter_state = {}
    take(model, optimizer, private, STEPS)
    assert not torch.equal(weights(model), run(DENOISERS["low-pass"], "blt")[0])
