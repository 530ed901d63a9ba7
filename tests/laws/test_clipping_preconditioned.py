"""Gradients that are scaled before they are clipped: norms and sums are those of a loop over single examples, in every way to get there."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hushgrad.clipping import Capture, Flat, PerLayer, rules
from hushgrad.clipping.base import Rule
from hushgrad.denoise import Chain, DelayedPreconditioner, ExponentialAverage, NoiseInfo, ScaleThenPrivatise
from hushgrad.errors import ArgumentError
from hushgrad.release.core import Release
from hushgrad.testing import members
from hushgrad.testing.rules import one_by_one
from hushgrad.train import Plan, make_private

LAYERS = [(layer, inputs) for kind in members(rules, Rule).values() for layer, inputs in kind.examples()]
DENOISERS = [DelayedPreconditioner(delay=1), ScaleThenPrivatise(beta=0.5)]


def factors(model: nn.Module, seed: int = 7) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(p.shape, generator=generator).to(p) * 3 + 0.1 for name, p in model.named_parameters()}


def reference(rows: dict[str, torch.Tensor], scales, clipper):
    """Each example's scaled gradient, its norm, and the clipped sum."""
    scaled = {name: G.double() * scales[name].double() for name, G in rows.items()}
    squares = {name: G.flatten(1).square().sum(1) for name, G in scaled.items()}
    norms = torch.stack(list(squares.values())).sum(0).sqrt()
    groups = clipper.groups(list(rows))
    if groups is None:
        weights = dict.fromkeys(rows, clipper.weights(norms.square()))
    else:
        by = torch.zeros(len(norms), max(groups) + 1, dtype=torch.float64)
        for group, square in zip(groups, squares.values(), strict=True):
            by[:, group] += square
        weights = {name: clipper.weights(by)[:, group] for group, name in zip(groups, rows, strict=True)}
    return norms, {name: torch.tensordot(weights[name], G, dims=1) for name, G in scaled.items()}


def summed(output):
    tensors = [output] if isinstance(output, torch.Tensor) else [t for t in output if isinstance(t, torch.Tensor)]
    return sum((t * t).sum() + t.sum() for t in tensors)


@pytest.mark.parametrize("layer, inputs", LAYERS, ids=lambda v: type(v).__name__)
def test_every_rule(layer, inputs):
    module = copy.deepcopy(layer).double()
    inputs = tuple(v.double() if v.is_floating_point() else v for v in inputs)
    wholes = [v for v in inputs if isinstance(v, torch.Tensor)]
    dim = 1 if getattr(module, "batch_first", True) is False else 0
    scales = factors(module)
    rows = one_by_one(module, inputs, summed, batch_dim=dim)
    norms, _ = reference(rows, scales, Flat(1.0))
    clipper = Flat(float(norms.median()))
    _, sums = reference(rows, scales, clipper)
    capture = Capture(module, loss_reduction="sum")
    capture.scales = lambda: scales
    capture.attach()
    capture.examples(wholes[0].shape[dim], dim=dim)
    summed(module(*inputs)).backward()
    clipped = capture.collect(clipper)
    capture.detach()
    torch.testing.assert_close(clipped.raw_norms, norms, rtol=1e-9, atol=1e-12)
    for name, total in sums.items():
        torch.testing.assert_close(clipped.raw_sums[name], total, rtol=1e-9, atol=1e-9 * float(norms.max()))


class Tied(nn.Module):
    """An embedding that is its own head, a convolution, a parameter that no layer owns, a layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.table, self.conv, self.twice = nn.Embedding(7, 4), nn.Conv1d(4, 4, 3, padding=1), nn.Linear(4, 4)
        self.bare = nn.Parameter(torch.randn(4))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.conv(self.table(ids).transpose(1, 2)).transpose(1, 2).tanh() + self.bare
        return self.head(self.twice(self.twice(x).tanh()))


def losses(model, x, y):
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")


def case(seed: int = 0):
    torch.manual_seed(seed)
    model = Tied().double()
    x, y = torch.randint(7, (8, 5)), torch.randint(7, (8, 5))
    names = dict(model.named_parameters())
    rows = {name: [] for name in names}
    for i in range(len(x)):
        grads = torch.autograd.grad(losses(model, x[i : i + 1], y[i : i + 1]), list(names.values()))
        for name, g in zip(names, grads, strict=True):
            rows[name].append(g)
    return model, x, y, {name: torch.stack(G) for name, G in rows.items()}


@pytest.mark.parametrize("kind", ["plain", "groups", "users", "micro-batches", "probes"])
def test_every_way_to_a_sum(kind):
    model, x, y, rows = case()
    scales = factors(model)
    clipper = PerLayer(2.0) if kind == "groups" else Flat(2.0)
    capture = Capture(model, loss_reduction="sum")
    capture.scales = lambda: scales
    capture.attach()
    if kind == "users":
        ids = torch.tensor([0, 0, 1, 2, 2, 2, 1, 3])
        rows = {name: torch.stack([G[ids == user].sum(0) for user in range(4)]) for name, G in rows.items()}
        capture.units(ids)
    if kind == "micro-batches":
        capture.fold_with(clipper)
        for part in range(0, 8, 3):
            losses(model, x[part : part + 3], y[part : part + 3]).backward()
    elif kind == "probes":
        rows = {name: 1.5 * G for name, G in rows.items()}  # 2 G - G / 2, at one point
        for coefficient in (2.0, -0.5):
            with capture.probe(coefficient):
                losses(model, x, y).backward()
    else:
        losses(model, x, y).backward()
    norms, sums = reference(rows, scales, clipper)
    clipped = capture.collect(clipper)
    torch.testing.assert_close(clipped.raw_norms, norms, rtol=1e-9, atol=0)
    for name, total in sums.items():
        torch.testing.assert_close(clipped.raw_sums[name], total, rtol=1e-9, atol=1e-9)


def data(n: int = 60) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 6, generator=generator) * torch.tensor([8.0, 1.0, 1.0, 0.1, 0.1, 0.01])
    return TensorDataset(x, (x[:, 3] > 0).long())


def private_run(denoise, **changes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"noise_multiplier": 1.0, "delta": 1e-5, "batch_size": 12, "dataset_size": 60, "steps": 12, "max_grad_norm": 0.2}
    plan = Plan.dpsgd(**{**options, "denoise": denoise, **changes})
    return model, optimizer, plan


@pytest.mark.parametrize("certified", [False, True], ids=["ordinary", "certified"])
@pytest.mark.parametrize("denoise", [*DENOISERS, Chain([DENOISERS[0], ExponentialAverage(0.5)])], ids=repr)
def test_a_run_is_what_a_second_computation_says(denoise, certified):
    model, optimizer, plan = private_run(denoise, certified=certified)
    private = make_private(model, optimizer, plan, key=bytes(range(32)))

    report = private.audit(data(), nn.functional.cross_entropy, steps=6)
    assert not report.refuted, str(report)


def test_an_audit_sees_scales_that_are_forgotten(monkeypatch):
    """Clipped as it is and then divided by the scales: the audit's second computation says otherwise."""
    model, optimizer, plan = private_run(DENOISERS[1])
    private = make_private(model, optimizer, plan, key=bytes(range(32)))
    monkeypatch.setattr(Release, "scales", lambda self: None)
    assert private.audit(data(), nn.functional.cross_entropy, steps=6).refuted


@pytest.mark.parametrize("denoise", DENOISERS, ids=repr)
def test_one_record_moves_the_sum_by_one_clip_norm_whatever_the_scales(denoise):
    """The largest record that a search over sizes finds, in steps of every phase; without noise the step shows the sum."""
    state: dict = {}
    model = nn.Linear(6, 2)
    for step in range(5):
        scales = denoise.scales(state)
        for size in (1e-3, 1.0, 1e6):
            capture = Capture(model, loss_reduction="sum")
            capture.scales = lambda scales=scales: scales
            capture.attach()
            (model(size * torch.randn(1, 6)) * size).sum().backward()
            sums = capture.collect(Flat(0.2)).raw_sums
            capture.detach()
            assert float(torch.cat([s.flatten() for s in sums.values()]).norm()) <= 0.2 * (1 + 1e-4)
        grads = {
            name: torch.randn_like(p) * (10.0 ** -torch.arange(p.numel())).view_as(p) for name, p in model.named_parameters()
        }
        denoise(grads, _info(step), state)
    assert denoise.scales(state) is None or step


@pytest.mark.parametrize("size", [1e6, 1e9, 1e12])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_one_record_more_moves_the_sum_by_one_clip_norm_beside_records_that_cancel(kind, size):
    """Gradients whose parts cancel over positions are all rounding: they must round alike whoever else is there."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16) if kind == "linear" else nn.Conv1d(16, 16, 3)
    shape = (61, 12, 16) if kind == "linear" else (61, 16, 12)
    x, scales = torch.randn(shape), factors(model)
    signs = torch.tensor([1.0, -1.0] * 6).view(12, 1) if kind == "linear" else torch.tensor([1.0, -1.0] * 5)
    x[:30] = x[:30, :1] if kind == "linear" else x[:30, :, :1]  # one position over and over, with gradients that cancel
    sums = []
    for count in (60, 61):
        capture = Capture(model, loss_reduction="sum")
        capture.scales = lambda: scales
        capture.attach()
        (model(x[:count]) * signs * size).sum().backward()
        sums.append(capture.collect(Flat(0.5)).raw_sums)
        capture.detach()
    moved = torch.cat([(b - a).flatten().double() for a, b in zip(*(s.values() for s in sums), strict=True)])
    assert 0 < float(moved.norm()) <= 0.5 * (1 + 1e-4)


def test_rare_coordinates_come_through():
    """A coordinate whose gradient is a hundredth of another's: its noise is smaller by the same measure, once it is known."""
    denoise = ScaleThenPrivatise(beta=0.5, eps=0.01)
    state: dict = {}
    denoise({"w": torch.tensor([1.0, 0.01])}, _info(0), state)
    scales = denoise.scales(state)["w"]
    assert float(scales[1] / scales[0]) == pytest.approx(1.007071 / 0.017071, rel=1e-3)
    back = denoise({"w": torch.ones(2)}, _info(1), state)["w"]  # noise of one size in the scaled space
    assert float(back[0] / back[1]) == pytest.approx(float(scales[1] / scales[0]), rel=1e-5)


def test_a_chain_rescales_in_its_first_place_only():
    with pytest.raises(ArgumentError, match="Put it first"):
        Chain([ExponentialAverage(0.5), DelayedPreconditioner()])
    assert Chain([DelayedPreconditioner()]).rescales and not Chain([ExponentialAverage(0.5)]).rescales


def _info(step: int):
    return NoiseInfo(std=0.1, step=step, max_grad_norm=0.2)
