"""The denoisers' C library and their torch form agree to rounding, whatever the vectors and the threads."""

from __future__ import annotations

import pytest
import torch

from hushgrad.denoise import DebiasedSecondMoment, Laplacian, NoiseInfo, _c_kernels, second_moment
from hushgrad.denoise import _laplacian_solver as geometric

INFO = NoiseInfo(std=0.5, step=0, max_grad_norm=1.0)
needs_c = pytest.mark.skipif(_c_kernels.FUSED is None, reason="the C libraries are not built here")
pytestmark = pytest.mark.usefixtures("vector_bytes")


def signal(d: int) -> torch.Tensor:
    return torch.randn(d, generator=torch.Generator().manual_seed(d))


@needs_c
@pytest.mark.parametrize("boundary", ["periodic", "neumann"])
@pytest.mark.parametrize("sigma", [1e-6, 0.3, 1.0, 99.0, 399.0])
@pytest.mark.parametrize("d", [2, 3, 15, 16, 17, 31, 4095, 4096, 4097, 20_011])
def test_the_scan_is_the_product_of_matrices(d, sigma, boundary, monkeypatch):
    v = signal(d)
    exact = Laplacian(sigma, boundary=boundary).smooth(v.double())
    called = []
    real = _c_kernels.FUSED._smooth
    monkeypatch.setattr(_c_kernels.FUSED, "_smooth", lambda *given: (called.append(given), real(*given)))
    torch.testing.assert_close(Laplacian(sigma, boundary=boundary).smooth(v).double(), exact, rtol=0, atol=2e-6)
    assert len(called) == 1


@needs_c
def test_a_lost_ghost_cell_would_be_noticed(monkeypatch):
    v, real = signal(1000), _c_kernels.FUSED.smooth
    monkeypatch.setattr(_c_kernels.FUSED, "smooth", lambda *given, before, **options: real(*given, before=0.0, **options))
    assert (Laplacian(1.0).smooth(v).double() - Laplacian(1.0).smooth(v.double())).abs().max() > 1e-3


@needs_c
def test_threads_change_no_bit(monkeypatch):
    v, threads = signal(3 * _c_kernels._SHARE + 77), torch.get_num_threads()
    results = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            state: dict = {}
            adam = [DebiasedSecondMoment()({"w": v}, INFO, state)["w"] for _ in range(2)]
            results.append([Laplacian(50.0).smooth(v), *adam, *(state[k] for k in ("mean.w", "square.w"))])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    exact = geometric.smooth_vector(v.double(), 50.0, "periodic")
    torch.testing.assert_close(results[0][0].double(), exact, rtol=0, atol=1e-6)


@needs_c
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("floor", [None, 1e-3])
def test_adam_in_one_pass_is_adam_in_eight(dtype, floor, monkeypatch):
    denoiser = DebiasedSecondMoment(floor=floor)
    fused: dict = {}
    plain: dict = {}
    for step in range(5):
        g = {"w": (signal(1000 + step)[:1000].view(20, 50) * 0.7).to(dtype)}
        ours = denoiser(g, INFO, fused)["w"]
        with monkeypatch.context() as patch:
            patch.setattr(second_moment, "FUSED", None)
            theirs = denoiser(g, INFO, plain)["w"]
        assert ours.dtype == dtype and ours.shape == g["w"].shape
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=2e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)
    for name in ("mean.w", "square.w"):
        torch.testing.assert_close(fused[name], plain[name], rtol=1e-6, atol=1e-7)
