"""Secure noise: the real sum plus a real Gaussian, correctly rounded to a public grid, the same everywhere."""

from __future__ import annotations

import math
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from hushgrad import Plan, make_private
from hushgrad.errors import ArgumentError, CaptureError, NoTheorem
from hushgrad.noise import BLT, _kernel, secure
from hushgrad.noise._kernel import DOUBLE, KERNEL, LIMIT, SINGLE, NumpyKernel, Rounding, c_kernel
from hushgrad.noise.secure import GRID_BITS, SecureNoise, exact_pair, grid
from hushgrad.noise.source import Source
from hushgrad.noise.streams import BandedStream, BufferStream, FilterStream, IndependentStream, TreeStream

KEY = bytes(range(32))
SUMS = np.random.default_rng(0).standard_normal(4000) * np.repeat([1e-3, 1.0, 1e3, 1e9], 1000)


def whole_steps(values: torch.Tensor, h: float) -> bool:
    return bool(torch.all(torch.frac(values.double() / h) == 0))


@given(st.floats(1e-30, 1e30))
def test_the_grid_is_a_power_of_two_close_below(scale):
    h = grid(scale)
    assert math.frexp(h)[0] == 0.5 and 2.0**GRID_BITS <= scale / h < 2.0 ** (GRID_BITS + 1)


@pytest.mark.parametrize("scale", [1.0, 1.7, 1e-4])
def test_every_number_is_rounded_as_the_real_one_is(scale):
    """Against 400-bit arithmetic with 256 further bits, whatever the sum."""
    noise, h = SecureNoise(KEY), grid(scale)
    out = SUMS.copy()
    noise.write(3, 1, 77, out, scale, fresh=False)
    for i in range(0, SUMS.size, 37):
        assert noise.exact(3, 1, 77 + i, float(SUMS[i]), scale / h, h) == out[i]
    assert np.abs(out).max() <= (LIMIT + 2**12) * h  # clamped


def test_all_kernels_decide_alike_and_any_part_has_the_bits_of_the_whole():
    noise, scale = SecureNoise(KEY), 1.3
    whole = SUMS.copy()
    noise.write(0, 5, 1000, whole, scale, fresh=False)
    for low, high in ((0, 1), (1, 700), (255, 257), (700, 4000), (3000, 3000)):
        part = SUMS[low:high].copy()
        noise.write(0, 5, 1000 + low, part, scale, fresh=False)
        assert np.array_equal(part, whole[low:high])
    h, plain = grid(scale), SUMS.copy()
    doubts = NumpyKernel().draw_rounded(noise._first, (0, 5, 1000), scale / h, h, plain)
    assert np.array_equal(np.delete(plain, doubts), np.delete(whole, doubts)) and len(doubts) < 20


def test_what_the_low_bits_tell():
    """The attack: two neighbouring sums that differ by less than a grid step. Plain noise tells them apart by their low bits."""
    first, second = torch.zeros(100, dtype=torch.float64), torch.full((100,), 2.0**-40, dtype=torch.float64)
    plain, safe = Source(KEY), Source(KEY, secure=True)

    def low_bits_differ(source: Source) -> bool:
        a, b = (source.z(0, 0, g, out=g.clone(), scale=1.0) for g in (first, second))
        return bool((torch.frac(a * 2**26) != torch.frac(b * 2**26)).any())

    assert low_bits_differ(plain)
    assert not low_bits_differ(safe)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types_are_rounded_once_at_the_end(dtype):
    source = Source(KEY, secure=True)
    g = torch.randn(500, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = source.z(0, 0, g.double(), out=g.double(), scale=0.3)
    assert torch.equal(source.z(0, 0, g, out=g.clone(), scale=0.3), exact.to(dtype))
    stream = IndependentStream(Source(KEY, secure=True))
    assert torch.equal(stream.row(0, 0, g, out=g.clone(), scale=0.3), exact.to(dtype))


# The error bounds -------------------------------------------------------------------------------------------------------


def _adversarial(groups: int) -> np.ndarray:
    """Words of every size of u and near every corner of the angle."""
    rng = np.random.default_rng(7)
    words = rng.integers(0, 1 << 32, (groups, 3, 128), dtype=np.uint32)
    top = words[:, 0] & np.uint32(1 << 31)
    words[:, 0] = top | ((words[:, 0] & np.uint32((1 << 31) - 1)) >> rng.integers(0, 32, (groups, 128), dtype=np.uint32))
    corner = np.array([0, 1, (1 << 29) - 1, 1 << 29, (1 << 30) - 1], np.uint32)
    words[: groups // 4, 2, :5] = (words[: groups // 4, 2, :5] & np.uint32(3 << 30)) | corner
    return words


def _off(words: np.ndarray, dtype: type, bound: Rounding) -> np.ndarray:
    """How much of the bound a precision needs, against double precision (or for double precision: against 400 bits)."""
    z, wide = np.empty(words.shape[0] * 256, dtype), np.empty(words.shape[0] * 256)
    KERNEL.gaussians(words.reshape(-1), z)
    KERNEL.gaussians(words.reshape(-1), wide)
    pairs = np.abs(wide.reshape(-1, 2, 128))
    spread = np.broadcast_to(pairs.sum(1, keepdims=True), pairs.shape).reshape(-1)
    error = np.abs(z.astype(np.float64) - wide) / (bound.relative * spread + bound.absolute)
    return error[spread <= bound.far]


def test_single_precision_is_within_its_proved_bound():
    random = np.random.default_rng(1).integers(0, 1 << 32, (1 << 12, 3, 128), dtype=np.uint32)
    for words in (random, _adversarial(1 << 10)):
        needed = _off(words, np.float32, SINGLE)
        assert 0.05 < needed.max() < 0.8  # the bound is not met by chance, nor is it empty


@pytest.mark.slow
def test_all_angles_are_within_the_bound():
    """All 2³⁰ words of the angle, each with a random radius: cosine and sine of single against double precision."""
    rng = np.random.default_rng(2)
    for first in range(0, 1 << 30, 1 << 22):
        words = rng.integers(0, 1 << 32, (1 << 15, 3, 128), dtype=np.uint32)
        words[:, 2] = np.arange(first, first + (1 << 22), dtype=np.uint32).reshape(-1, 128)
        assert _off(words, np.float32, SINGLE).max() < 0.8


def test_double_precision_is_within_its_proved_bound_whatever_bits_are_missing():
    words = _adversarial(4)
    wide = np.empty(4 * 256)
    KERNEL.gaussians(words.reshape(-1), wide)
    worst = 0.0
    for g in range(4):
        for i in range(128):
            pair = wide.reshape(-1, 2, 128)[g, :, i]
            spread = float(np.abs(pair).sum())
            if spread > DOUBLE.far:
                continue
            for extra in (bytes(64), b"\xff" * 64):
                exact = exact_pair(*(int(w) for w in words[g, :, i]), extra)
                off = max(abs(float(exact[c] - float(pair[c]))) for c in (0, 1))
                worst = max(worst, off / (DOUBLE.relative * spread + DOUBLE.absolute))
    assert 0.5 < worst <= 1


def test_a_bound_that_is_too_small_gives_wrong_roundings(monkeypatch):
    """Planted: single precision is believed to be exact. So the doubtful ones matter."""
    if not getattr(KERNEL, "cipher", 0):
        pytest.skip("single precision decides in the C kernel only")
    noise, scale, honest = SecureNoise(KEY), 1.9, np.zeros(1 << 20)
    noise.write(0, 0, 0, honest, scale, fresh=True)
    monkeypatch.setattr(c_kernel, "SINGLE", Rounding(-_kernel.ARITHMETIC, -_kernel.ARITHMETIC * LIMIT, 1e9))
    planted = np.zeros(1 << 20)
    noise.write(0, 0, 0, planted, scale, fresh=True)
    assert 0 < np.count_nonzero(planted != honest) < 1000


def test_doubt_is_rare_and_is_resolved(monkeypatch):
    noise, asked = SecureNoise(KEY), []
    exact = SecureNoise.exact
    monkeypatch.setattr(SecureNoise, "exact", lambda self, *a: asked.append(1) or exact(self, *a))
    noise.write(0, 0, 0, np.zeros(1 << 20), 1.9, fresh=True)
    assert len(asked) < 40  # about 2 · (7.5e-10 · 1.6 + 2e-10) · 122 + 2⁻²⁰ = 1.3e-6 each


def test_threads_that_decide_at_once_leave_each_other_the_precision(monkeypatch):
    """Each logarithm raises the precision while it works, as mpmath's own may, and waits meanwhile."""

    def raised(log):
        def slow(x):
            before, secure._MP.prec = secure._MP.prec, secure._MP.prec + 100
            time.sleep(0.002)
            try:
                return log(x)
            finally:
                secure._MP.prec = before

        return slow

    noise, h = SecureNoise(KEY), grid(1.0)
    alone = [noise.exact(0, 0, i, 0.3 * i, 1.0 / h, h) for i in range(8)]
    for name in ("log", "log1p"):
        monkeypatch.setattr(secure._MP, name, raised(getattr(secure._MP, name)))
    found: list[list[float]] = []
    decide = lambda: found.append([noise.exact(0, 0, i, 0.3 * i, 1.0 / h, h) for i in range(8)])  # noqa: E731
    threads = [threading.Thread(target=decide) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [alone] * 3
    assert secure._MP.prec == 400


def test_a_sum_that_is_no_number_is_not_released():
    with pytest.raises(CaptureError, match="not finite"):
        SecureNoise(KEY).write(0, 0, 0, np.array([0.0, math.nan]), 1.0, fresh=False)


# The law ------------------------------------------------------------------------------------------------------------------


def _p_value(steps: np.ndarray, ratio: float) -> float:
    """Chi-square of grid steps against P[n] = Phi((n + 1/2) / ratio) - Phi((n - 1/2) / ratio), in 64 classes."""
    from scipy.stats import chi2, norm

    edges = np.unique(np.rint(ratio * norm.ppf(np.linspace(0, 1, 65)[1:-1])))
    expected = np.diff(np.concatenate([[0], norm.cdf((edges + 0.5) / ratio), [1]])) * steps.size
    observed = np.bincount(np.searchsorted(edges, steps, side="left"), minlength=edges.size + 1)
    return float(chi2.sf(((observed - expected) ** 2 / expected).sum(), edges.size))


def test_grid_noise_has_the_law_of_a_rounded_gaussian():
    """One key, fixed: the test cannot fail by chance. A noise that is 1 % too small, or cut to even steps, is rejected."""
    scale, out = 1.3, np.zeros(1 << 20)
    SecureNoise(KEY).write(2, 3, 0, out, scale, fresh=True)
    ratio, steps = scale / grid(scale), out / grid(scale)
    assert _p_value(steps, ratio) > 1e-3
    assert _p_value(steps, ratio * 1.01) < 1e-9
    even = np.bincount((steps.astype(np.int64) & 1), minlength=2)
    assert abs(even[0] - even[1]) < 5 * math.sqrt(steps.size)


@settings(max_examples=20, derandomize=True, deadline=None)
@given(shift=st.floats(-3, 3))
def test_the_sum_moves_the_law_and_not_its_grid(shift):
    out = np.full(2000, shift)
    SecureNoise(KEY).write(0, 0, 0, out, 1.0, fresh=False)
    assert np.all(out / grid(1.0) % 1 == 0) and abs(out.mean() - shift) < 0.2


# Refusals, and the way into a run ------------------------------------------------------------------------------------------


def test_correlated_streams_refuse_it():
    source = Source(KEY, secure=True)
    for make in (
        lambda: BandedStream(source, lambda t: [1.0, 0.5], steps=3),
        lambda: FilterStream(source, [1.0, -0.5], steps=3),
        lambda: BufferStream(source, (0.5,), (0.1,), steps=3),
        lambda: TreeStream(source, steps=3),
    ):
        with pytest.raises(NoTheorem, match="secure source"):
            make()
    for scale in (0.0, -1.0):
        with pytest.raises(ArgumentError):
            source.z(0, 0, torch.empty(3), scale=scale)
    assert repr(source) == "Source(key=…, secure=True)"


COMMON = {"delta": 1e-5, "batch_size": 4, "dataset_size": 16}


def test_a_plan_says_whether_it_is_secure_and_old_plans_keep_their_digest():
    plain, safe = (Plan.dpsgd(noise_multiplier=1.0, steps=2, secure=secure, **COMMON) for secure in (False, True))
    assert "secure" not in plain.to_json() and safe.to_json()["secure"] is True
    assert Plan.from_json(safe.to_json()) == safe and safe.digest != plain.digest and "public grid" in str(safe)
    certified = Plan.dpsgd(noise_multiplier=1.0, steps=2, certified=True, **COMMON)
    assert safe.certified and safe.event() == certified.event()  # post-processing: nothing is due for the grid
    with pytest.raises(NoTheorem, match="correctly rounded"):
        Plan.dpftrl(noise_multiplier=1.0, epochs=1, noise=BLT(buffers=2), secure=True, **COMMON)
    with pytest.raises(ArgumentError, match="positive with secure"):
        Plan.dpsgd(noise_multiplier=0.0, steps=2, secure=True, **COMMON)


def test_a_secure_step_releases_points_of_the_grid():
    plan = Plan.dpsgd(noise_multiplier=1.0, steps=3, secure=True, max_grad_norm=0.7, **COMMON)
    assert plan.certified and "public grid" in str(plan)
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    private = make_private(model, optimizer, plan, seed=3, loss_reduction="sum")
    h, seen = grid(0.7 / 4), []
    data = TensorDataset(torch.randn(16, 3, dtype=torch.float64), torch.randn(16, 2, dtype=torch.float64))
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in model.parameters()))
    for x, y in private.loader(data):
        optimizer.zero_grad()
        (model(x) - y).square().mean(1).sum().backward()
        optimizer.step()
    assert len(seen) == 6 and all(whole_steps(grad, h) for grad in seen)
