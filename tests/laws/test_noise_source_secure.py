"""Secure noise: everything on the public grid, exactly rounded, the same everywhere."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hushgrad.errors import ArgumentError, NoTheorem
from hushgrad.noise import secure
from hushgrad.noise.secure import SecureNoise, effective_noise_multiplier, grid
from hushgrad.noise.source import Source
from hushgrad.noise.streams import BandedStream, BufferStream, FilterStream, IndependentStream, TreeStream

KEY = bytes(range(32))


def whole_steps(values: torch.Tensor, h: float) -> bool:
    return bool(torch.all(torch.frac(values.double() / h) == 0))


@given(st.floats(1e-30, 1e30))
def test_the_grid_is_a_power_of_two_close_below(scale):
    h = grid(scale)
    assert math.frexp(h)[0] == 0.5 and 2.0**26 <= scale / h < 2.0**27


def test_sums_are_rounded_to_the_grid_and_noise_is_whole():
    source, scale = Source(KEY, secure=True), 1.7
    h, g = grid(scale), torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    noise = source.z(3, 1, g, scale=scale)
    assert whole_steps(noise, h)
    out = g.clone()
    assert source.z(3, 1, g, out=out, scale=scale) is out
    assert torch.equal(out, h * torch.round(g / h) + noise) and whole_steps(out, h)


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


def test_any_shard_has_the_bits_of_the_whole():
    source = Source(KEY, secure=True)
    whole = source.z(0, 0, torch.empty(2000, dtype=torch.float64))
    for low, high in ((0, 1), (1, 700), (700, 2000), (255, 257)):
        assert torch.equal(source.z(0, 0, torch.empty(high - low, dtype=torch.float64), offset=low), whole[low:high])
    assert not torch.equal(whole, Source(KEY).z(0, 0, torch.empty(2000, dtype=torch.float64)))


def test_double_precision_decides_as_320_bits_do(monkeypatch):
    """With an error bound of 1 every number is in doubt and computed in 320 bits: the same whole numbers."""
    noise, ratio = SecureNoise(KEY), 1.9 * 2**26
    quick = noise.integers(0, 0, 0, 1024, ratio)
    doubles = secure._doubles
    monkeypatch.setattr(secure, "_doubles", lambda words: (doubles(words)[0], np.ones_like(doubles(words)[1])))
    assert np.array_equal(noise.integers(0, 0, 0, 1024, ratio), quick)


def test_the_error_bound_holds():
    """Against 320 bits: the double-precision numbers are within the stated error, with room."""
    import mpmath

    words = np.random.default_rng(0).integers(0, 1 << 32, (2, 4, 128), dtype=np.uint32)
    words[0, 0] >>= np.arange(128, dtype=np.uint32) % 20  # tails too
    z, error = secure._doubles(words)
    worst = 0.0
    with mpmath.workprec(400):
        for g in range(2):
            for i in range(128):
                a, b, t, s = (int(w) for w in words[g, :, i])
                for extra in (bytes(64), b"\xff" * 64):
                    exact = secure._exact_pair((a << 32) | b, (t << 32) | s, extra)
                    worst = max(worst, *(float(abs(exact[c] - float(z[g, c, i])) / float(error[g, 0, i])) for c in (0, 1)))
    assert worst < 0.5


def test_doubt_is_rare_and_is_resolved(monkeypatch):
    noise, asked = SecureNoise(KEY), []
    exact = SecureNoise._exact
    monkeypatch.setattr(SecureNoise, "_exact", lambda self, *a: asked.append(1) or exact(self, *a))
    noise.integers(0, 0, 0, 1 << 20, 1.9 * 2**26)
    assert 0 < len(asked) < 40  # about 2 · 2⁻⁴⁸ E[r] · 1.9 · 2²⁶ = 1.1e-6 each way


def test_effective_noise_multiplier_is_smaller_and_close():
    assert effective_noise_multiplier(2.0, parameters=1) < 2.0
    assert effective_noise_multiplier(1.0, parameters=10**9) > 0.9995
    # scale = s D, h <= scale 2^-26: D + h sqrt(d) must not exceed D s / s'
    s, d = 3.0, 12345
    assert 1 + grid(s) * math.sqrt(d) <= s / effective_noise_multiplier(s, parameters=d) * (1 + 1e-12)


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
