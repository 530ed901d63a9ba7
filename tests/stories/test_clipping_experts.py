"""Experts as one parameter of several matrices, multiplied by all chosen rows at once: exact without a gradient for each example."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hushgrad.clipping import Capture, Flat
from hushgrad.clipping.certificate import Certificate
from hushgrad.clipping.rules import experts
from hushgrad.errors import CaptureError
from hushgrad.testing.rules import one_by_one, sum_of_sines

B, T, WIDTH, HIDDEN, EXPERTS = 5, 6, 8, 12, 3


class Mixture(nn.Module):
    """Each token goes to the expert that it chooses; one parameter is used transposed, ``twice``: on two ways."""

    def __init__(self, *, twice=False):
        super().__init__()
        self.first, self.last, self.twice = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), twice
        self.up, self.down = (nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 3) for _ in range(2))
        self.kept = torch.zeros(())

    def forward(self, x):
        tokens = self.first(x).tanh().flatten(0, 1)
        chosen = tokens[:, :EXPERTS].argmax(1)
        order = chosen.argsort(stable=True)
        ends = torch.bincount(chosen, minlength=EXPERTS).cumsum(0).to(torch.int32)
        rows = F.grouped_mm(tokens[order], self.up.transpose(1, 2), offs=ends).tanh()
        if self.twice:
            rows = rows * F.grouped_mm(tokens[order] * 2, self.up.transpose(1, 2), offs=ends).tanh()
        rows = F.grouped_mm(rows, self.down, offs=ends)
        self.kept = rows.sum()
        return self.last((tokens + rows[order.argsort()]).view(len(x), -1, WIDTH)).mean(1)


@pytest.fixture
def dense(monkeypatch):
    """How often the gradients of all examples were made."""
    made, real = [], experts.Routed.dense.fget
    monkeypatch.setattr(experts.Routed, "dense", property(lambda self: made.append(self.examples) or real(self)))
    return made


def later(model, x, **options):
    """The clipped sum of a batch that was not proved, and what its examples give alone; in single precision, as the kernels are."""
    capture = Capture(model, loss_reduction="sum", **options)
    capture.attach()
    sum_of_sines(model(torch.randn(B, T, WIDTH))).backward()
    capture.collect(Flat(1.0))
    with capture.pause():
        rows = one_by_one(model, (x,), sum_of_sines)
    norms = sum(G.flatten(1).double().square().sum(1) for G in rows.values()).sqrt()
    return capture, rows, norms


def agree(clipped, rows, norms, clip):
    torch.testing.assert_close(clipped.raw_norms.double(), norms, rtol=1e-5, atol=1e-6)
    for name, G in rows.items():
        expected = torch.tensordot((clip / norms).clamp(max=1).to(G), G, dims=1)
        torch.testing.assert_close(clipped.raw_sums[name].to(G), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("certificate", [None, Certificate(64, 64, usual=B)], ids=["ordinary", "certified"])
def test_clipped_sums_are_those_of_single_examples_and_no_gradient_is_made(dense, certificate):
    torch.manual_seed(0)
    model, x = Mixture(), torch.randn(B, T, WIDTH)
    capture, rows, norms = later(model, x, certificate=certificate)
    dense.clear()
    sum_of_sines(model(x)).backward()
    clip = float(norms.median())
    agree(capture.collect(Flat(clip)), rows, norms, clip)
    assert not dense


def test_two_uses_of_one_parameter_are_one_gradient(dense):
    torch.manual_seed(1)
    model, x = Mixture(twice=True), torch.randn(B, T, WIDTH)
    capture, rows, norms = later(model, x)
    sum_of_sines(model(x)).backward()
    agree(capture.collect(Flat(0.5)), rows, norms, 0.5)
    assert dense


def test_a_record_that_is_not_finite_is_left_out_alone():
    torch.manual_seed(2)
    model, x = Mixture(), torch.randn(B, T, WIDTH)
    capture, rows, _ = later(model, x)
    x[2, 1, 0] = float("inf")
    sum_of_sines(model(x)).backward()
    clipped = capture.collect(Flat(1e9))
    assert clipped.rejected == 1 and not clipped.raw_norms[2].isfinite()
    for name, G in rows.items():
        torch.testing.assert_close(clipped.raw_sums[name], G.sum(0) - G[2], rtol=1e-4, atol=1e-5)


def test_units_of_several_examples():
    torch.manual_seed(3)
    model, x, units = Mixture(), torch.randn(B, T, WIDTH), torch.tensor([0, 1, 0, 2, 1])
    capture, rows, _ = later(model, x)
    capture.units(units)
    sum_of_sines(model(x)).backward()
    clipped = capture.collect(Flat(1e9))
    by_unit = [G.new_zeros(3, *G.shape[1:]).index_add_(0, units, G).flatten(1).square().sum(1) for G in rows.values()]
    torch.testing.assert_close(clipped.raw_norms, sum(by_unit).sqrt(), rtol=1e-5, atol=1e-6)


def test_a_gradient_past_the_outputs_is_refused():
    torch.manual_seed(4)
    model, x = Mixture(), torch.randn(B, T, WIDTH)
    later(model, x)
    loss = sum_of_sines(model(x))
    with pytest.raises(CaptureError, match="does not come through the outputs"):
        (loss + 0.01 * model.up.square().sum()).backward()


def test_probes_see_what_is_missing():
    torch.manual_seed(5)
    owner = torch.arange(B).repeat(4)
    expert = torch.arange(len(owner)) * EXPERTS // len(owner)
    routed = experts.Routed(torch.randn(len(owner), 4), torch.randn(len(owner), 3), owner, expert, B, EXPERTS)
    total = routed.dense.sum(0)
    assert routed.missing(total) < 1e-5
    for _ in range(5):
        other = torch.outer(torch.randn(4), torch.randn(3))
        changed = total.clone()
        changed[1] += other
        assert routed.missing(changed) > other.norm() / 10  # fails in one of 10^7 cases, five times


def test_some_examples_of_routed_rows():
    torch.manual_seed(6)
    owner, expert = torch.randint(B, (20,)), torch.randint(EXPERTS, (20,)).sort().values
    routed = experts.Routed(torch.randn(20, 4), torch.randn(20, 3), owner, expert, B, EXPERTS)
    index = torch.tensor([3, 0, 3])
    torch.testing.assert_close(routed.of(index).dense, routed.dense[index])
    torch.testing.assert_close(routed.turned.dense, routed.dense.transpose(2, 3))
