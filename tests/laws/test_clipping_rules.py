"""Every rule equals a loop of single-example backward passes, whatever the shape."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hushgrad.clipping import rules
from hushgrad.clipping.base import _RULES, Rule, rule_for
from hushgrad.clipping.rules import conv, kernels, linear
from hushgrad.testing import members
from hushgrad.testing.rules import check_rule

EXAMPLES = [(layer, inputs) for kind in members(rules, Rule).values() for layer, inputs in kind.examples()]
few = settings(max_examples=25, deadline=None)
size = st.integers(1, 6)
batch = st.sampled_from([0, 1, 2, 5])


@pytest.mark.parametrize(("layer", "inputs"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_conformance(layer, inputs):
    assert rule_for(layer, [name for name, _ in layer.named_parameters(recurse=False)]) is not None
    check_rule(lambda: _shaken(copy.deepcopy(layer)), inputs, tolerance=1e-9)


def test_every_layer_with_a_rule_is_an_example():
    ours = {layer for layer in _RULES if not layer.__module__.startswith("tests.")}  # tests register layers of their own
    assert {type(layer) for layer, _ in EXAMPLES} | {nn.modules.linear.NonDynamicallyQuantizableLinear} == ours


@few
@given(batch, st.lists(st.integers(1, 9), max_size=2), size, size, st.booleans())
def test_linear(B, positions, d, p, bias):
    check_rule(lambda: nn.Linear(d, p, bias=bias), torch.randn(B, *positions, d))


@pytest.mark.parametrize("way", ["kept", "gram for time", "gram for memory"])
@pytest.mark.parametrize("at_once", [1, 30, 1 << 22])
def test_linear_by_every_way_and_in_blocks(monkeypatch, way, at_once):
    monkeypatch.setattr(linear, "_PIECE", at_once)
    monkeypatch.setattr(linear, "_READ_COST", 10**9 if way == "gram for time" else 0)
    monkeypatch.setattr(linear, "_SPARE", 0 if way == "gram for memory" else 1 << 40)
    assert linear._prefers_gram(5, 3, 20, 30) == (way != "kept")
    check_rule(lambda: nn.Linear(20, 30), torch.randn(5, 3, 20, generator=torch.Generator().manual_seed(0)))


@settings(max_examples=6, deadline=None)
@given(batch, size)
def test_fallback(B, d):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.inner = nn.Parameter(torch.randn(d)), nn.Linear(d, 3)

        def forward(self, x):
            return self.inner(x * self.scale), (x * self.scale).sum(-1)

    check_rule(Scaled, torch.randn(B, d))


@few
@given(batch, st.lists(st.integers(1, 9), max_size=2), size, st.sampled_from([None, 0, 1]), st.integers(2, 7))
def test_embedding(B, positions, d, padding_idx, vocabulary):
    ids = torch.randint(vocabulary, (B, *positions))
    if ids.dim() == 1:  # one id per example: not 0, 1, ..., B-1, which may as well be positions
        ids = ids.flip(0) if B < 2 else torch.cat([torch.tensor([1, 0]), ids[2:]])
    check_rule(lambda: nn.Embedding(vocabulary, d, padding_idx=padding_idx), ids)


@few
@given(batch, st.lists(st.integers(1, 5), max_size=2), st.lists(st.integers(2, 5), min_size=1, max_size=2), st.booleans())
def test_layer_norm(B, positions, shape, bias):
    check_rule(lambda: _shaken(nn.LayerNorm(shape, bias=bias)), torch.randn(B, *positions, *shape) + 3, tolerance=1e-9)


@few
@given(st.sampled_from([1, 2, 5]), st.sampled_from([(4, 2), (6, 3), (6, 1), (4, 4)]), st.lists(st.integers(1, 5), max_size=3))
def test_group_norm(B, channels, positions):
    C, groups = channels
    check_rule(lambda: _shaken(nn.GroupNorm(groups, C)), torch.randn(B, C, 2, *positions) + 3, tolerance=1e-9)


def _shaken(module):
    for p in module.parameters():
        nn.init.normal_(p)
    return module


@st.composite
def convolutions(draw):
    dims = draw(st.sampled_from([1, 2, 2, 3]))
    each = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(dims))  # noqa: E731
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    C_in, C_out = groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 3))
    options = {"kernel_size": each(1, 3), "stride": each(1, 2), "dilation": each(1, 2), "groups": groups}
    options["padding_mode"] = draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"]))
    options["padding"] = draw(st.sampled_from([0, 1, 2]))
    if draw(st.booleans()) and all(s == 1 for s in options["stride"]):
        options["padding"] = "same"
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    shape = (draw(batch), C_in, *each(5, 7))
    return kind, C_in, C_out, options, shape, draw(st.booleans())


@settings(max_examples=60, deadline=None)
@given(convolutions(), st.sampled_from(["single", "offsets", "patches", "gram"]))
def test_convolution_by_each_way(case, way):
    kind, C_in, C_out, options, shape, bias = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_FEW_CHANNELS", 1000 if way == "patches" else 0)
        patch.setattr(kernels, "_prefers_single", lambda x, g, geometry: way == "single")
        patch.setattr(conv, "_KEEP_AT_MOST", 0 if way == "gram" else 1 << 30)
        patch.setattr(conv, "CACHE", 200)
        patch.setattr(kernels, "CACHE", 200)
        check_rule(lambda: kind(C_in, C_out, bias=bias, **options), torch.randn(shape))
