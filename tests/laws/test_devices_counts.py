"""A step on a device waits for nothing, copies nothing but its batch, takes few launches, and clips what a processor clips."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hushgrad import clipping, noise
from hushgrad.clipping import Capture, Flat
from hushgrad.clipping.rules import linear
from hushgrad.testing import devices
from hushgrad.testing.doctor import private_step
from hushgrad.testing.models import MODELS

# Launches at most, with an optimizer that updates all tensors together, as torch's does on CUDA.
LIMITS = {"MLP": 40, "CNN": 60, "WRN-16-4": 250, "GPT, 4 blocks": 350}
VARIANTS = {
    "users": {"users": True},
    "blt": {"noise": noise.BLT(buffers=2)},
    "banded": {"noise": noise.Banded(bands=2)},
    "adaptive": {"clip": clipping.Adaptive(1.0, batch_size=8, count_noise=2.0)},
}
SLOW = pytest.mark.slow


def total(counter):
    return sum(counter.values())


@pytest.mark.parametrize("name", ["MLP", "CNN", *(pytest.param(name, marks=SLOW) for name in ("WRN-16-4", "GPT, 4 blocks"))])
def test_launches_are_few_and_nobody_waits(name):
    meter = private_step(MODELS[name])
    assert total(meter.launches) <= LIMITS[name], meter.launches
    assert not meter.syncs and not meter.copies


@pytest.mark.slow
def test_tied_weights_wait_for_nothing():
    meter = private_step(MODELS["GPT, tied"])
    assert not meter.syncs and not meter.copies


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_wait_for_nothing(name):
    meter = private_step(MODELS["MLP"], **VARIANTS[name])
    assert not meter.syncs, meter.syncs
    ids = {place: count for place, count in meter.bytes.items() if "clipping/grouping.py" in place}
    assert meter.bytes == ids and (not ids or name == "users")  # whose record it is belongs to the batch


@pytest.mark.parametrize("options", [{}, {"noise": noise.BLT(buffers=2)}, {"noise": noise.Tree()}], ids=["dpsgd", "blt", "tree"])
def test_a_row_that_the_host_draws_is_one_copy_and_nobody_waits(options):
    meter = private_step(MODELS["MLP"], cipher="aes256", **options)
    numbers = sum(p.numel() for p in MODELS["MLP"](1).model.parameters())
    assert not meter.syncs and total(meter.copies) == 1 and total(meter.bytes) == 4 * numbers
    assert total(meter.launches) <= LIMITS["MLP"], meter.launches


def models() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    torch.manual_seed(0)
    return {
        "rows": (nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), (6,)),
        "positions": (nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), (4, 6)),
        "images": (
            nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 3)),
            (2, 4, 4),
        ),
        "groups": (
            nn.Sequential(nn.Conv2d(4, 4, 3, groups=2, dilation=2, padding=2), nn.Flatten(), nn.Linear(100, 3)),
            (4, 5, 5),
        ),
    }


def collected(model: nn.Module, x: torch.Tensor, *, there: bool) -> tuple[list[torch.Tensor], torch.Tensor, int]:
    """Clipped sums (C = 1), norms, and how many examples were rejected."""
    with devices.pretend() as device:
        if there:
            model, x = device.put(model), x.to("pretend")
        capture = Capture(model, loss_reduction="sum", check_isolation=False)
        capture.attach()
        capture.examples(len(x))
        model(x).square().flatten(1).sum(1).sum().backward()
        made = capture.collect(Flat(1.0))
        capture.detach()
        rejected = made.rejected if isinstance(made.rejected, int) else int((~devices.on_host(made.rejected).isfinite()).sum())
        return [devices.on_host(s).clone() for s in made.raw_sums.values()], devices.on_host(made.raw_norms).float(), rejected


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("name", models())
def test_records_that_are_no_numbers_are_left_out_there_too(name, bad):
    (model, shape), (copy, _) = models()[name], models()[name]
    x = torch.randn(7, *shape)
    x[2].view(-1)[0] = bad
    x[5] *= bad
    sums, norms, rejected = collected(model, x, there=False)
    theirs, their_norms, their_rejected = collected(copy, x, there=True)
    assert their_rejected == rejected
    good = norms.isfinite()
    assert torch.equal(their_norms.isfinite(), good) and torch.allclose(their_norms[good], norms[good], rtol=1e-5)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(theirs, sums, strict=True))


@pytest.mark.parametrize("double", [True, False], ids=["double", "single"])
@pytest.mark.parametrize("size", [1.0, 1e3, 1e6])
def test_parts_that_cancel_move_the_sum_by_a_clip_norm_at_most(size, double):
    """One record whose positions cancel: alone, and beside others, whose sum it must leave alone."""
    others, heavy = torch.randn(5, 8, 4), torch.randn(1, 8, 4)
    heavy[:, 1::2] = heavy[:, ::2]

    def summed(x: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        with devices.pretend(double=double) as device:
            model = device.put(nn.Sequential(nn.Linear(4, 3)))
            x, signs = x.to("pretend"), signs.to("pretend")
            capture = Capture(model, loss_reduction="sum", check_isolation=False)
            capture.attach()
            capture.examples(len(x))
            (model(x).sum(2) * signs).sum().backward()
            made = capture.collect(Flat(1.0))
            capture.detach()
            return torch.cat([devices.on_host(s).flatten() for s in made.raw_sums.values()])

    alternating = torch.tensor([1.0, -1.0]).repeat(4) * size
    alone = summed(heavy, alternating[None])
    signs = torch.ones(5, 8)
    difference = summed(torch.cat([others, heavy]), torch.cat([signs, alternating[None]])) - summed(others, signs)
    assert alone.norm() <= 1 + 1e-4 and difference.norm() <= 1 + 1e-4


def test_gram_matrices_in_single_precision_let_nobody_be_longer_than_the_clip_norm(monkeypatch):
    """Their terms nearly cancel, so that a norm may come out too small by rounding: it is taken from above."""
    monkeypatch.setattr(linear, "_KEEP_AT_MOST", 0)
    for seed in range(4):
        for mean in (0.0, 8.0, 16.0, 25.0):
            torch.manual_seed(seed)
            x, weights = torch.randn(1, 6, 150) + mean, torch.randn(1, 6, 150)
            weights -= weights.mean(1, keepdim=True)
            with devices.pretend(double=False) as device:
                capture = Capture(device.put(model := nn.Sequential(nn.Linear(150, 150, bias=False))), loss_reduction="sum")
                capture.attach()
                capture.examples(1)
                (model(x.to("pretend")) * weights.to("pretend")).sum().backward()
                made = capture.collect(Flat(1.0))
                capture.detach()
                norm = torch.cat([devices.on_host(s).flatten() for s in made.raw_sums.values()]).double().norm()
            assert 0.99 <= norm <= 1 + 1e-6
