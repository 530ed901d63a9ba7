"""Laplacian smoothing: it inverts its operator on every length, and the factors of the paper are what it does to noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hushgrad.denoise import Laplacian, NoiseInfo, beta, gamma
from hushgrad.denoise import _laplacian_solver as geometric
from hushgrad.testing.denoisers import apply_operator, check_laplacian

INFO = NoiseInfo(std=1.0, step=0, max_grad_norm=1.0)
BOUNDARIES = ("periodic", "neumann")


def spectrum(sigma: float, d: int) -> np.ndarray:
    return 1 / (1 + 4 * sigma * np.sin(np.pi * np.arange(d) / d) ** 2)


def by_fft(v: torch.Tensor, sigma: float) -> torch.Tensor:
    """The paper's own formula, in float64: an oracle that shares nothing with the blocked recursion."""
    return torch.from_numpy(np.fft.ifft(np.fft.fft(v.double().numpy()) * spectrum(sigma, v.numel())).real)


@given(st.integers(1, 5000), st.floats(-6, 4), st.sampled_from(BOUNDARIES), st.integers(0, 2**31))
@settings(max_examples=150, deadline=None)
def test_inverts_its_operator_on_every_length(d, log_sigma, boundary, seed):
    check_laplacian(Laplacian(10.0**log_sigma, boundary=boundary), (d,), seed=seed)


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize(
    "shape", [(3, 3), (1, 5), (2, 2), (28, 28), (2, 4, 3, 3), (2, 1, 19, 20), (2, 2, 2, 3, 4), (2, 1, 7, 8, 9)]
)
def test_inverts_its_operator_on_grids(shape, boundary):
    check_laplacian(Laplacian(2.5, scope="grid", boundary=boundary), shape)


@given(st.integers(1, 3000), st.floats(-3, 3), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_equals_the_paper_fft(d, log_sigma, seed):
    sigma = 10.0**log_sigma
    v = torch.randn(d, generator=torch.Generator().manual_seed(seed))
    expected = by_fft(v, sigma)
    torch.testing.assert_close(Laplacian(sigma).smooth(v.double()), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(Laplacian(sigma).smooth(v).double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("d", [100_003, 131_072])
@pytest.mark.parametrize("sigma", [1e-30, 1.0, 1e4, 1e12])
def test_long_vectors_and_extreme_strengths(d, sigma):
    v = torch.randn(d, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(Laplacian(sigma).smooth(v), by_fft(v, sigma), rtol=0, atol=1e-11)


def test_the_check_rejects_a_wrong_kernel(monkeypatch):
    exact = geometric._ghosts
    monkeypatch.setattr(geometric, "_ghosts", lambda v, rate, boundary: tuple(0 * g for g in exact(v, rate, boundary)))
    with pytest.raises(AssertionError, match="differs from v"):
        check_laplacian(Laplacian(1.0), (1000,))  # zero boundary instead of periodic
    monkeypatch.setattr(geometric, "_ghosts", exact)
    monkeypatch.setattr(geometric, "decay_rate", lambda sigma: 1.001 * 2 * math.asinh(0.5 / math.sqrt(sigma)))
    with pytest.raises(AssertionError, match="differs from v"):
        check_laplacian(Laplacian(1.0), (1000,))


@given(st.integers(1, 400), st.floats(-4, 4))
@settings(max_examples=100, deadline=None)
def test_factors_equal_their_sums(d, log_sigma):
    sigma = 10.0**log_sigma
    assert gamma(sigma, d) == pytest.approx(spectrum(sigma, d).mean(), rel=1e-9)
    assert beta(sigma, d) == pytest.approx((spectrum(sigma, d) ** 2).mean(), rel=1e-9)


def test_factors_are_traces_of_the_operator_that_is_applied():
    d, sigma = 53, 1.7
    inverse = torch.stack([Laplacian(sigma).smooth(row) for row in torch.eye(d, dtype=torch.float64)])
    assert gamma(sigma, d) == pytest.approx(float(inverse.trace()) / d, rel=1e-12)
    assert beta(sigma, d) == pytest.approx(float(inverse.square().sum()) / d, rel=1e-12)


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
def test_precisions(dtype, tolerance):
    v = torch.randn(999, generator=torch.Generator().manual_seed(0)).to(dtype)
    out = Laplacian(2.0).smooth(v)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), by_fft(v, 2.0), rtol=0, atol=tolerance)


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_one_and_two_cells(boundary):
    one = torch.tensor([3.0])
    assert torch.equal(Laplacian(5.0, boundary=boundary).smooth(one), one)
    u = Laplacian(5.0, boundary=boundary).smooth(torch.tensor([1.0, 0.0], dtype=torch.float64))
    jump = 20.0 if boundary == "periodic" else 10.0  # on a circle of two, each cell is the other's neighbour twice
    assert u.sum().item() == pytest.approx(1.0) and (u[0] - u[1]).item() == pytest.approx(1 / (1 + jump))


def test_scopes_smooth_what_they_say():
    generator = torch.Generator().manual_seed(5)
    grads = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in {"conv": (4, 2, 3, 3), "linear": (10, 12), "bias": (10,)}.items()
    }
    per_tensor = Laplacian(1.0)(grads, INFO, {})
    torch.testing.assert_close(per_tensor["linear"].reshape(-1), by_fft(grads["linear"].reshape(-1), 1.0))
    whole = Laplacian(1.0, scope="global", skip_1d=False)(grads, INFO, {})
    flat = torch.cat([g.reshape(-1) for g in grads.values()])
    torch.testing.assert_close(torch.cat([g.reshape(-1) for g in whole.values()]), by_fft(flat, 1.0))
    grid = Laplacian(1.0, scope="grid")(grads, INFO, {})
    torch.testing.assert_close(apply_operator(grid["conv"], 1.0, "periodic", 2), grads["conv"])
    assert torch.equal(grid["linear"], grads["linear"])  # a matrix of unknown layout
    pictured = Laplacian(1.0, scope="grid", grid=(2, 3))(grads, INFO, {})["linear"].reshape(10, 2, 2, 3)
    torch.testing.assert_close(apply_operator(pictured, 1.0, "periodic", 2), grads["linear"].reshape(10, 2, 2, 3))
    for out in (per_tensor, Laplacian(1.0, scope="global")(grads, INFO, {}), grid):
        assert torch.equal(out["bias"], grads["bias"])


def test_strided_and_low_rank_inputs():
    v = torch.randn(6, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.testing.assert_close(Laplacian(1.0).smooth(v.T), Laplacian(1.0).smooth(v.T.contiguous()))
    assert Laplacian(1.0).smooth(torch.tensor(2.0)).shape == ()
    assert Laplacian(1.0).smooth(torch.empty(0)).shape == (0,)
    assert not Laplacian(1.0).smooth(v.requires_grad_()).requires_grad


def test_mean_is_kept_and_noise_shrinks_by_beta():
    v = torch.randn(1_000_000, generator=torch.Generator().manual_seed(11), dtype=torch.float64) + 0.5
    u = Laplacian(3.0).smooth(v)
    assert u.mean().item() == pytest.approx(v.mean().item(), abs=1e-12)
    assert u.var().item() == pytest.approx(beta(3.0, v.numel()), rel=0.01)  # a relative error of 1 % is 5 standard errors
