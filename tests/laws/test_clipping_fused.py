"""The room's C library says what torch says, to rounding, for every shape; and a run without it gives the same sums."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from hushgrad.clipping import Capture, Flat, _fused
from hushgrad.clipping.record import clipped
from hushgrad.clipping.rules import linear
from hushgrad.clipping.rules.kernels import Geometry, per_example_kernel
from hushgrad.native import _abi

pytestmark = [
    pytest.mark.skipif(_fused._LIBRARY is None, reason="the C library was not built on this machine"),
    pytest.mark.usefixtures("vector_bytes"),
]


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None)
@given(B=st.integers(0, 70), d=st.integers(1, 200), p=st.integers(1, 300), seed=st.integers(0, 9))
@example(B=3, d=5000, p=1, seed=0)  # longer than what is summed in single precision
def test_outer_products(B: int, d: int, p: int, seed: int) -> None:
    x, g = _random(B, d, seed=seed), _random(B, p, seed=seed + 1)
    made = linear._outer_sq_norms(x, g, 1e30)
    assert made is not None
    sq_g, sq_x = g.double().square().sum(1), x.double().square().sum(1)
    torch.testing.assert_close(made[0], sq_x * sq_g, rtol=3e-7, atol=0)
    torch.testing.assert_close(made[1], sq_g, rtol=3e-7, atol=0)
    largest = float(torch.cat([sq_x, sq_g, torch.zeros(1)]).max())
    assert not made[2]
    assert linear._outer_sq_norms(x, g, largest * 0.999)[2] == (B > 0)
    assert not linear._outer_sq_norms(x, g, largest * 1.001)[2]


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 5), min_size=1, max_size=9), n=st.integers(1, 3000), threads=st.sampled_from([1, 2]))
@example(cuts=[1] * 16, n=(1 << 17) + 5, threads=2)  # so large that threads share the columns
def test_examples_in_several_blocks(cuts: list[int], n: int, threads: int) -> None:
    G, weights, out = _random(sum(cuts), n, seed=n), _random(sum(cuts), seed=1), _random(n, seed=2)
    expected = out.double() + weights.double() @ G.double()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert _fused.add_pieces([part.clone() for part in G.split(cuts)], weights, out)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-5)
    assert not _fused.add_pieces([G.t().contiguous().t()], weights, out) or min(G.shape) < 2
    assert not _fused.add_pieces([G.double()], weights, out)


def test_norms_neither_underflow_nor_overflow() -> None:
    """In single precision the square of 1e-30 is 0 and that of 1e30 is infinite."""
    for size in (1e-45, 1e-38, 1e-30, 1e30, 3e38):
        x = torch.full((2, 37), size)
        expected = x.double().square().sum(1)
        torch.testing.assert_close(_fused.sq_norms(x), expected, rtol=3e-7, atol=0)
        made = linear._outer_sq_norms(x, 1 / x if size < 1e38 and size > 1e-38 else x, 1e90)
        assert made is not None and bool(made[0].isfinite().all()) and bool((made[0] > 0).all())


@settings(deadline=None)
@given(B=st.integers(0, 5), T=st.integers(1, 90), d=st.integers(1, 300), seed=st.integers(0, 9), columns=st.booleans())
@example(B=2, T=40, d=700, seed=0, columns=True)  # deeper than a panel
def test_gram_matrices(B: int, T: int, d: int, seed: int, columns: bool) -> None:
    x = _random(B, d, T, seed=seed).transpose(1, 2) if columns else _random(B, T, d, seed=seed)
    made, expected = _fused.gram(x), torch.bmm(x.double(), x.double().transpose(1, 2))
    assert made is not None
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-13 * d)
    assert torch.equal(made, made.transpose(1, 2))


@settings(deadline=None)
@given(B=st.integers(0, 30), n=st.integers(1, 700), seed=st.integers(0, 9))
def test_squared_norms_of_rows(B: int, n: int, seed: int) -> None:
    x = _random(B, n, seed=seed)
    torch.testing.assert_close(_fused.sq_norms(x), x.double().square().sum(1), rtol=3e-7, atol=0)


@settings(deadline=None)
@given(B=st.integers(0, 150), d=st.integers(1, 90), p=st.integers(1, 40), seed=st.integers(0, 9))
def test_weighted_sums_of_outer_products(B: int, d: int, p: int, seed: int) -> None:
    x, g, w = _random(B, d, seed=seed), _random(B, p, seed=seed + 1), _random(B, seed=seed + 2).abs()
    made = linear._outer_sums(x, g, w)
    if p > _abi.OUTPUTS_AT_MOST:
        assert made is None
        return
    assert made is not None
    weighted = g.double() * w.double().unsqueeze(1)
    torch.testing.assert_close(made[0].double(), weighted.t() @ x.double(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(made[1].double(), weighted.sum(0), rtol=1e-6, atol=1e-5)


@settings(deadline=None)
@given(B=st.integers(1, 40), parts=st.integers(1, 9), factor=st.floats(0.1, 1e4), seed=st.integers(0, 9))
def test_totals_and_their_roots(B: int, parts: int, factor: float, seed: int) -> None:
    rows = [_random(B, seed=seed + k).square().double() for k in range(parts)]
    made = _fused.total(rows, factor)
    assert made is not None
    expected = torch.stack(rows).sum(0) * factor
    torch.testing.assert_close(made[0], expected, rtol=3e-7, atol=0)
    torch.testing.assert_close(made[1], expected.sqrt(), rtol=1e-14, atol=0)
    assert made[2]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_bad_norm_is_noticed_wherever_it_stands(bad: float) -> None:
    for i in range(33):
        row = torch.ones(33, dtype=torch.float64)
        row[i] = bad
        made = _fused.total([torch.ones(33, dtype=torch.float64), row], 1.0)
        assert made is not None
        assert not made[2]


def test_weights_of_a_ball() -> None:
    sq_norms = torch.tensor([0.0, 1e-30, 0.25, 1.0, 4.0, 1e30, float("inf"), float("nan"), -1.0]).double()
    made = clipped(Flat(1.0), [sq_norms], 1.0, torch.float64)
    assert made is not None
    norms, weights, finite = made
    assert not finite
    assert torch.equal(norms[:-2], sq_norms[:-2].sqrt())
    expected = torch.tensor([1, 1, 1, 1, 0.5, 1e-15, 0, 0, 0], dtype=torch.float64)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=0)


def test_a_weight_that_single_precision_would_round_up_is_zero() -> None:
    """1e-45 is 1.4e-45 there: four tenths too much."""
    for made in (
        clipped(Flat(1.0), [torch.tensor([1e90], dtype=torch.float64)], 1.0, torch.float32),
        Flat(1.0).clip([torch.tensor([1e90], dtype=torch.float64)], 1.0),
    ):
        assert made is not None and made[1].tolist() == [0.0] and made[2]


@settings(deadline=None)
@given(
    B=st.integers(0, 40), parts=st.integers(1, 9), factor=st.floats(0.1, 1e4), bound=st.floats(1e-3, 1e3), seed=st.integers(0, 9)
)
def test_a_ball_in_one_call(B: int, parts: int, factor: float, bound: float, seed: int) -> None:
    rows = [_random(B, seed=seed + k).square().double() for k in range(parts)]
    expected = Flat(bound).clip(rows, factor)
    made = clipped(Flat(bound), rows, factor)
    torch.testing.assert_close(made.norms, expected.norms, rtol=1e-6, atol=0)
    torch.testing.assert_close(made.weights, expected.weights, rtol=1e-6, atol=0)
    assert made.finite
    assert expected.finite


def test_a_ball_with_weights_of_its_own_keeps_them() -> None:
    @dataclass(frozen=True)
    class Halved(Flat):
        def weights(self, sq_norms: torch.Tensor) -> torch.Tensor:
            return super().weights(sq_norms) / 2

    assert torch.equal(
        clipped(Halved(1.0), [torch.tensor([0.25, 4.0]).double()], 1.0).weights, torch.tensor([0.5, 0.25]).double()
    )


def _convolution(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, list[int], Geometry]:
    dims, groups = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    kernel, stride, dilation = (tuple(draw(st.integers(1, most)) for _ in range(dims)) for most in (8, 3, 2))
    edges = [draw(st.integers(0, 3)) for _ in range(2 * dims)]
    least = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    size = [n + draw(st.integers(0, 9)) for n in least]
    padded = [n + edges[2 * i] + edges[2 * i + 1] for n, i in zip(size, reversed(range(dims)), strict=True)]
    out = [(n - m) // s + 1 for n, m, s in zip(padded, least, stride, strict=True)]
    B, c_in, c_out, seed = draw(st.integers(1, 5)), draw(st.integers(1, 9)), draw(st.integers(1, 10)), draw(st.integers(0, 9))
    x, g = _random(B, c_in * groups, *size, seed=seed), _random(B, c_out * groups, *out, seed=seed + 1)
    return x, g, edges, Geometry(kernel, stride, dilation, groups)


@settings(max_examples=150, deadline=None)
@given(case=st.composite(_convolution)())
def test_kernels_of_convolutions(case: tuple[torch.Tensor, torch.Tensor, list[int], Geometry]) -> None:
    x, g, edges, geometry = case
    made = _fused.kernel_gradients(x, g, edges, geometry)
    assert made is not None
    padded = nn.functional.pad(x, edges)
    expected = per_example_kernel(padded.double(), g.double(), geometry)
    scale = float(expected.abs().max()) + 1e-30
    torch.testing.assert_close(made[0].double(), expected, rtol=0, atol=2e-6 * scale)
    torch.testing.assert_close(made[1], made[0].double().flatten(1).square().sum(1), rtol=3e-7, atol=0)
    wrong = per_example_kernel(padded.double(), g.double().roll(1, -1), geometry)  # the output shifted by one position
    if g.shape[-1] > 1 and float((wrong - expected).abs().max()) > 1e-3 * scale:
        assert not torch.allclose(made[0].double(), wrong, rtol=0, atol=2e-6 * scale)


def test_threads_share_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fused, "_SHARE", 1000)
    x, g, geometry = _random(23, 3, 9, 9, seed=0), _random(23, 4, 9, 9, seed=1), Geometry((3, 3), (1, 1), (1, 1), 1)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(_fused.kernel_gradients(x, g, [1, 1, 1, 1], geometry))
    finally:
        torch.set_num_threads(threads)
    assert all(
        made is not None and torch.equal(made[0], results[0][0]) and torch.equal(made[1], results[0][1]) for made in results
    )


def test_what_it_cannot_do_is_left_to_torch() -> None:
    x, g, geometry = _random(2, 3, 5, 5, seed=0), _random(2, 4, 3, 3, seed=1), Geometry((3, 3), (1, 1), (1, 1), 1)
    assert _fused.kernel_gradients(x.double(), g.double(), [0] * 4, geometry) is None
    assert _fused.kernel_gradients(x.to(memory_format=torch.channels_last), g, [0] * 4, geometry) is None
    assert linear._outer_sq_norms(x[:, 0].transpose(1, 2)[:, 0], g[:, 0, 0], 1.0) is None
    assert clipped(Flat(1.0), [torch.full((3,), 4.0)], 1.0, torch.float32).weights.tolist() == [0.5] * 3
    assert _fused.gram(x[0].double()) is None and _fused.sq_norms(x[0, 0].double()) is None


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 5, stride=2, padding="valid"), nn.ReLU(), nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.Flatten(), nn.Linear(96, 5)
    )  # fmt: skip


def _sums() -> dict[str, list[float]]:
    model = _model()
    capture = Capture(model)
    capture.attach()
    model(_random(7, 1, 11, 11, seed=3)).square().sum(1).mean().backward()
    return {name: total.flatten().tolist() for name, total in capture.collect(Flat(0.5)).raw_sums.items()}


@cache
def _sums_elsewhere() -> dict[str, list[float]]:
    program = "import json, test_clipping_fused as t; print(json.dumps(t._sums()))"
    environment = {**os.environ, "HUSHGRAD_KERNEL": "numpy", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_a_process_without_the_library_gives_the_same_sums() -> None:
    expected = _sums_elsewhere()
    for name, total in _sums().items():
        torch.testing.assert_close(torch.tensor(total), torch.tensor(expected[name]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_kernel_as_large_as_an_image_of_one_column(dtype: torch.dtype) -> None:
    """Torch gives a dimension of one element any stride, so strides must not be read off such an image."""
    x, g = _random(3, 1, 4, 1, seed=0).to(dtype), _random(3, 2, 1, 1, seed=1).to(dtype)
    geometry = Geometry((4, 1), (1, 2), (1, 1), 1)
    made = per_example_kernel(x, g, geometry)
    assert torch.allclose(made, (g.view(3, 2, 1) * x.view(3, 1, 4)).view(3, 2, 1, 4, 1))
    if dtype is torch.float32:
        fused = _fused.kernel_gradients(x, g, [0] * 4, geometry)
        assert fused is not None
        assert torch.allclose(fused[0], made)
