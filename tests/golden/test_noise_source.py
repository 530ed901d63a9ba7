"""The source against 40-digit arithmetic, against AES written out, and against its own past."""

from __future__ import annotations

import hashlib

import mpmath
import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from hushgrad.noise._box_muller import GROUP, PAIRS, gaussians
from hushgrad.noise.source import Source


def box_muller(a: int, b: int, t: int) -> tuple[float, float]:
    """The pair that the words a, b, t stand for, in 40 digits."""
    with mpmath.workdps(40):
        v = (mpmath.mpf(((a & 0x7FFFFFFF) << 31) + (b >> 1)) + 0.5) / 2**63
        radius = mpmath.sqrt(-2 * mpmath.log1p(-v)) if a >> 31 else mpmath.sqrt(-2 * mpmath.log(v))
        s = ((t << 2) | 2) & 0xFFFFFFFF
        angle = mpmath.pi / 4 * mpmath.mpf(s - (s >> 31 << 32)) / 2**31
        x, y = radius * mpmath.cos(angle) * (-1) ** (t >> 31), radius * mpmath.sin(angle)
        return (float(y), float(x)) if t >> 30 & 1 else (float(x), float(y))


@pytest.mark.parametrize(("real", "tolerance"), [(np.float32, 6e-7), (np.float64, 1e-15)])
def test_the_transform_against_forty_digits(real, tolerance):
    rng = np.random.default_rng(1)
    a, b, t = rng.integers(0, 1 << 32, (3, PAIRS), dtype=np.uint32)
    a[:32] >>= np.arange(32, dtype=np.uint32)  # down to the far tail
    a[32:64] = a[:32] | np.uint32(1 << 31)  # and to radii close to 0
    z = np.empty(GROUP, real)
    gaussians(np.concatenate([a, b, t]), z)
    exact = np.array([box_muller(int(i), int(j), int(k)) for i, j, k in zip(a, b, t, strict=True)]).T.ravel()
    assert np.max(np.abs(z - exact) / np.abs(exact)) < tolerance


def test_tails_go_beyond_six_point_six():
    """32-bit uniforms end at sqrt(2 · 32 ln 2) = 6.66. Chosen words reach every quantile down to a mass of 2^-64."""
    words = np.zeros((3, PAIRS), np.uint32)
    words[1, :31] = np.uint32(2) ** np.arange(1, 32, dtype=np.uint32)  # v = (2^k + 1/2) 2^-63, k = 0 .. 30
    z = np.empty(GROUP, np.float32)
    gaussians(words.ravel(), z)
    expected = np.sqrt(-2 * np.log((2.0 ** np.arange(31) + 0.5) * 2.0**-63))
    np.testing.assert_allclose(np.hypot(z[:31], z[PAIRS : PAIRS + 31]), expected, rtol=1e-6)
    assert expected.min() > 6.7 and expected.max() > 9.3
    smallest = np.hypot(z[31], z[PAIRS + 31])  # all bits zero
    assert smallest == pytest.approx(np.sqrt(2 * 64 * np.log(2)), rel=1e-6)


def test_no_number_is_zero():
    words = np.zeros((3, PAIRS), np.uint32)
    words[0] = 1 << 31  # u closest to 1
    words[2] = np.arange(PAIRS, dtype=np.uint32) << 30  # angle closest to the axes, in all quadrants
    for real in (np.float32, np.float64):
        z = np.empty(GROUP, real)
        gaussians(words.ravel(), z)
        assert np.all(z != 0)


def test_the_words_are_aes_256_in_counter_mode():
    """Recomputed with one block cipher call for each counter (NIST SP 800-38A, 6.5)."""
    key, step, index, offset = bytes(range(32)), 7, 3, 5 * GROUP
    derived = hashlib.blake2b(key, digest_size=32, person=b"hushgrad noise").digest()
    block = Cipher(algorithms.AES(derived), modes.ECB()).encryptor()
    counters = [step.to_bytes(6, "big") + index.to_bytes(4, "big") + (5 * 96 + i).to_bytes(6, "big") for i in range(96)]
    words = np.frombuffer(b"".join(block.update(c) for c in counters), "<u4")
    z = np.empty(GROUP, np.float32)
    gaussians(words, z)
    assert torch.equal(Source(key).z(step, index, torch.empty(GROUP), offset=offset), torch.from_numpy(z))


def test_the_bits_have_not_changed():
    """Own values, first written in version 0.1: a run resumed under a later version must continue with the same noise."""
    assert Source(bytes(32)).z(0, 0, torch.empty(3)).tolist() == FIRST32
    assert Source(bytes(32)).z(0, 0, torch.empty(3, dtype=torch.float64)).tolist() == FIRST64
    assert Source(seed=0).z(1, 2, torch.empty(2), offset=1000).tolist() == SEEDED


FIRST32 = [-0.790982723236084, 1.10850191116333, -1.588162899017334]
FIRST64 = [-0.7909826430888144, 1.1085019212679668, -1.5881628721007426]
SEEDED = [1.0804728269577026, 0.6610962748527527]
