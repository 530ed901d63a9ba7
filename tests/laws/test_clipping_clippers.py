"""Clippers: every public one keeps its promise, and broken ones are found out."""

import json
from dataclasses import dataclass
from math import hypot, inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hushgrad import clipping
from hushgrad.clipping import Adaptive, Automatic, Clipped, Clipper, Flat, PerLayer, clipped_sum
from hushgrad.clipping.record import clipped
from hushgrad.errors import ArgumentError
from hushgrad.events import Gaussian, Relation
from hushgrad.testing import members
from hushgrad.testing.clippers import check_clipper
from hushgrad.testing.rules import one_by_one

EXAMPLES = [clipper for kind in members(clipping, Clipper).values() for clipper in kind.examples()]


@pytest.mark.parametrize("clipper", EXAMPLES, ids=repr)
def test_conformance(clipper):
    check_clipper(clipper)
    assert Clipper.from_json(json.loads(json.dumps(clipper.to_json()))) == clipper


# Planted defects -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Broken(Flat):
    """A flat clipper with one thing wrong."""

    defect: str = ""

    def groups(self, names):
        return {"groups": [0, 2, 2, 2], "few": [0]}.get(self.defect)

    def weights(self, sq_norms):
        good = super().weights(sq_norms)
        wrong = {
            "larger than its sensitivity": lambda: good * 1.001,
            "squared norm taken for norm": lambda: (self.max_grad_norm / sq_norms).clamp(max=1).nan_to_num(nan=0.0),
            "nan": lambda: torch.rsqrt(sq_norms).mul(self.max_grad_norm).clamp(max=1),
            "infinite": lambda: good.masked_fill(sq_norms.isinf(), 1.0),
            "negative": lambda: good - 1e-3,
            "mixes": lambda: good * (good / good.max().clamp(min=1e-9)).flip(0) if len(good) else good,
            "in place": lambda: super(_Broken, self).weights(sq_norms.mul_(1.01)),
        }
        return wrong[self.defect]() if self.defect in wrong else good

    def clip(self, rows, factor, dtype=torch.float64):
        norms, weights, finite = super().clip(rows, factor, dtype)
        wrong = {
            "clips by another rule": (norms, (weights * 2).clamp(max=1), finite),
            "squares for norms": (norms.square(), weights, finite),
            "overlooks nan": (norms, weights, True),
        }
        return Clipped(*wrong.get(self.defect, (norms, weights, finite)))

    def sensitivity(self, relation):
        return {
            "replace": self.max_grad_norm,
            "infinite sensitivity": inf,
            "zero": 0.0,
            "nan sensitivity": nan,
        }.get(self.defect, super().sensitivity(relation))

    def to_json(self):
        data = super().to_json()
        return {**data, "max_grad_norm": 9.0} if self.defect == "json" else data

    @classmethod
    def from_json(cls, data):
        return cls(data["max_grad_norm"], data["defect"])


@pytest.mark.parametrize(
    "defect",
    [
        "larger than its sensitivity",
        "squared norm taken for norm",
        "nan",
        "infinite",
        "negative",
        "mixes",
        "in place",
        "groups",
        "few",
        "replace",
        "infinite sensitivity",
        "zero",
        "nan sensitivity",
        "json",
        "clips by another rule",
        "squares for norms",
        "overlooks nan",
    ],
)
def test_a_broken_clipper_is_rejected(defect):
    with pytest.raises(AssertionError):
        check_clipper(_Broken(0.3, defect))


def test_the_broken_clippers_are_right_without_their_defect():
    check_clipper(_Broken(0.3))


def test_layers_that_forget_to_share_the_ball_are_rejected():
    @dataclass(frozen=True)
    class _Whole(PerLayer):
        def norms(self, groups):
            return [self.max_grad_norm] * groups  # sensitivity is sqrt(K) C, not C

    with pytest.raises(AssertionError, match="more than the sensitivity"):
        check_clipper(_Whole(0.3))


# Per layer -------------------------------------------------------------------------------------------------------------


def model_and_batch():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), torch.randn(7, 3).double()


def squared(out):
    return out.square().sum()


@pytest.mark.parametrize(
    ("clipper", "groups", "norms"),
    [
        (PerLayer(0.3), [0, 0, 1, 1], [0.3 / 2**0.5] * 2),
        (PerLayer(0.3, by="parameter"), [0, 1, 2, 3], [0.15] * 4),
        (PerLayer.with_norms({"0": 0.1, "2": 0.2, "2.bias": 0.05}), [0, 0, 1, 2], [0.1, 0.2, 0.05]),
    ],
)
def test_per_layer_is_a_loop_over_examples_and_groups(clipper, groups, norms):
    model, x = model_and_batch()
    rows = one_by_one(model, (x,), squared)
    names = list(rows)
    assert clipper.groups(names) == groups
    assert clipper.sensitivity(Relation.ADD_REMOVE) == pytest.approx(hypot(*norms))
    expected = {name: torch.zeros_like(G[0]) for name, G in rows.items()}
    for i in range(len(x)):
        for k, C in enumerate(norms):
            mine = [name for name, group in zip(names, groups, strict=True) if group == k]
            norm = sum(rows[name][i].square().sum() for name in mine).sqrt()
            for name in mine:
                expected[name] += rows[name][i] * min(1.0, C / float(norm))
    clipped = clipped_sum(model, squared, (x,), clipper, loss_reduction="sum")
    assert clipped.raw_weights.shape == (7, len(norms))
    for name, value in expected.items():
        torch.testing.assert_close(clipped.raw_sums[name], value, rtol=1e-12, atol=1e-12)


def test_without_examples_there_are_no_weights():
    assert PerLayer(1.0).weights(torch.empty(0)).shape == (0, 1)


def test_a_nan_in_one_layer_takes_the_whole_example_out():
    model, x = model_and_batch()
    x[2, 0] = nan
    clipped = clipped_sum(model, squared, (x,), PerLayer(0.3), loss_reduction="sum")
    others = clipped_sum(model, squared, (torch.cat([x[:2], x[3:]]),), PerLayer(0.3), loss_reduction="sum")
    assert clipped.rejected == 1 and not clipped.raw_weights[2].any()
    for name, value in others.raw_sums.items():
        torch.testing.assert_close(clipped.raw_sums[name], value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PerLayer(0.0), "max_grad_norm"),
        (lambda: PerLayer(1.0, by="modul"), "Did you mean 'module'"),
        (lambda: PerLayer.with_norms({"0": 1.0}).groups(["0.weight", "2.weight"]), r"cover the parameter 2\.weight"),
        (lambda: PerLayer.with_norms({"0": 1.0, "1": 1.0}).groups(["0.weight"]), "unlike '1'"),
        (lambda: PerLayer(1.0, shares=(("a", 1.0), ("a", 2.0))), "every prefix once"),
        (lambda: Automatic(1.0, stability=0.0), "stability"),
        (lambda: Adaptive(1.0, batch_size=10, quantile=1.5), "quantile"),
        (lambda: Adaptive(1.0, batch_size=10).moved(nan), "noisy_count"),
        (lambda: Adaptive(1.0, batch_size=10).gradient_noise(1.0), "less than 2 count_noise"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()


# Automatic ---------------------------------------------------------------------------------------------------------------


def test_automatic_scales_with_its_norm_alone():
    model, x = model_and_batch()
    one, seven = (clipped_sum(model, squared, (x,), Automatic(C), loss_reduction="sum").raw_sums for C in (1.0, 7.0))
    for name, value in one.items():
        torch.testing.assert_close(seven[name], 7 * value)


# Adaptive ----------------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 100), max_size=30), st.floats(0.01, 100), st.floats(0, 1e6))
@settings(max_examples=50, deadline=None)
def test_one_example_moves_the_count_by_one_half(norms, C, extra):
    clip = Adaptive(C, batch_size=10)
    with_it, without = (clip.raw_count(torch.tensor(rows, dtype=torch.float64)) for rows in ([*norms, extra], norms))
    assert abs(with_it - without) == 0.5


def test_rejected_examples_are_counted_as_above():
    clip = Adaptive(1.0, batch_size=10)
    assert clip.raw_count(torch.tensor([nan, inf, 0.5])) == -0.5
    assert clip.raw_count(torch.tensor([])) == 0


@given(st.floats(0.1, 5), st.floats(10, 1000))
@settings(max_examples=50, deadline=None)
def test_the_split_of_the_noise_is_theorem_1(z, count_noise):
    clip = Adaptive(1.0, batch_size=100, count_noise=count_noise)
    gradient = clip.gradient_noise(z)
    assert gradient > z and clip.combined_noise(gradient) == pytest.approx(z)
    assert gradient == pytest.approx((z**-2 - (2 * count_noise) ** -2) ** -0.5)
    assert clip.count_event() == Gaussian(2 * count_noise)


def test_the_pair_of_releases_moves_by_no_more_than_the_theorem_says():
    """Brute force over what one example can add: its scaled gradient (norm <= 1) and its vote (+-1/2)."""
    clip = Adaptive(1.0, batch_size=100, count_noise=3.0)
    z = 0.8
    gradient = clip.gradient_noise(z)
    vote = max(abs(clip.raw_count(torch.tensor([n]))) for n in (0.0, 0.5, 1.0, 2.0, inf, nan))
    distance = hypot(1 / gradient, vote / clip.count_noise)  # in standard deviations of the joint noise
    assert distance == pytest.approx(1 / z)
    assert hypot(1 / z, vote / clip.count_noise) > 1 / z  # unsplit noise would spend more than it says


def test_the_norm_finds_the_quantile():
    generator = torch.Generator().manual_seed(0)
    clip = Adaptive(0.01, batch_size=200, quantile=0.7, count_noise=10.0)
    for _ in range(150):
        norms = torch.empty(200).log_normal_(1.0, 0.5, generator=generator)
        clip = clip.moved(clip.raw_count(norms) + clip.count_noise * float(torch.randn((), generator=generator)))
    truth = float(torch.empty(100_000).log_normal_(1.0, 0.5, generator=generator).quantile(0.7))
    assert clip.max_grad_norm == pytest.approx(truth, rel=0.1)
    assert clip.moved(1e9).max_grad_norm > 0 and clip.moved(-1e9).max_grad_norm < inf


def test_what_is_not_said():
    """A promise does not change with a default."""
    assert Automatic() == Automatic(max_grad_norm=1.0, stability=0.01)
    assert Adaptive(1.0, batch_size=4).learning_rate == 0.2
    assert PerLayer(1.0, shares=[["a", 1]]) == PerLayer(1.0, shares=(("a", 1.0),))


def test_a_subclass_with_weights_of_its_own_is_clipped_by_them():
    """The C library knows the flat weights alone."""

    class _Half(Flat):
        def weights(self, sq_norms):
            return super().weights(sq_norms) / 2

    squares = [torch.rand(6).double() + 1, torch.rand(6).double() + 1]  # of two parameters' gradients
    for dtype in (None, torch.float64, torch.float32):
        whole, half = (clipped(kind(0.3), [row.clone() for row in squares], 1.0, dtype) for kind in (Flat, _Half))
        assert whole.weights.dtype is half.weights.dtype is (dtype or torch.float64)
        torch.testing.assert_close(whole.norms.double(), (squares[0] + squares[1]).sqrt(), rtol=1e-6, atol=0)
        torch.testing.assert_close(whole.weights, 2 * half.weights, rtol=1e-6, atol=0)


def test_the_count_of_a_device_is_the_hosts():
    """Rows that fill a batch up have a negative norm and do not count."""
    clip, real = Adaptive(0.7, batch_size=6, quantile=0.3, count_noise=1.0), [0.0, 0.1, 0.7, 0.71, inf, nan]
    norms, here = torch.tensor([*real, -1.0, -1.0], dtype=torch.float64), None
    squares = torch.tensor([0.0, 0.25, 0.36, 4.0, inf, nan], dtype=torch.float64)
    for noise in (1.25, -3.5, 1e9, -1e9):
        there = clip.counted_there(norms, lambda count, noise=noise: count.add_(noise), here)
        clip, here = clip.moved(clip.raw_count(torch.tensor(real, dtype=torch.float64)) + noise), there.norm
        assert here.shape == (1,) and there.fetched.max_grad_norm == pytest.approx(clip.max_grad_norm, rel=1e-12)
        torch.testing.assert_close(there.weights(squares.clone()), clip.weights(squares.clone()))
        for relation in (Relation.ADD_REMOVE, Relation.REPLACE_ONE):
            assert float(there.sensitivity(relation)) == pytest.approx(clip.sensitivity(relation), rel=1e-12)
    assert clip.max_grad_norm == pytest.approx(5.184705528587072e21, rel=1e-12)  # e^50


@pytest.mark.parametrize("wrong", [0.0, -1.0, nan])
def test_no_gradient_noise_is_made_of_none(wrong):
    with pytest.raises(ArgumentError, match="noise_multiplier"):
        Adaptive(1.0, batch_size=4, count_noise=1.0).gradient_noise(wrong)
