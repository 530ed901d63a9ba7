"""The source's distribution. Each test has a false-alarm rate of at most 1e-6 over the choice of seed, and fixed seeds.

Every check is a function of a source, and is run on the real one and on planted defects that it must reject.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import special, stats

from hushgrad.noise import _kernel
from hushgrad.noise._box_muller import GROUP, GROUP_BYTES, PAIRS
from hushgrad.noise.secure import grid
from hushgrad.noise.source import Source

BLOCKS = GROUP_BYTES // 16

ALARM = 1e-6
SIZE = 1 << 20


def draw(source: Source, step: int, dtype: torch.dtype = torch.float32, size: int = SIZE) -> np.ndarray:
    return source.z(step, 0, torch.empty(size, dtype=dtype)).double().numpy()


def normal_by_kolmogorov_smirnov(source: Source, dtype: torch.dtype = torch.float32) -> bool:
    values = np.sort(np.concatenate([draw(source, t, dtype) for t in range(2)]))
    cdf, n = special.ndtr(values), len(values)
    distance = max(np.max(np.arange(1, n + 1) / n - cdf), np.max(cdf - np.arange(n) / n))
    return bool(2 * math.exp(-2 * n * distance**2) > ALARM)  # Massart's bound: exact level or below


def moments_are_right(source: Source) -> bool:
    """Mean, variance, skewness and kurtosis by their exact normal standard errors; four tests."""
    z = np.concatenate([draw(source, t) for t in range(2)])
    n = len(z)
    scores = [z.mean() * math.sqrt(n), (np.mean(z**2) - 1) * math.sqrt(n / 2)]
    scores += [np.mean(z**3) * math.sqrt(n / 15), (np.mean(z**4) - 3) * math.sqrt(n / 96)]
    return max(map(abs, scores)) < stats.norm.isf(ALARM / 8)


def pairs_are_isotropic(source: Source) -> bool:
    """Squared radius exponential, angle uniform, and the two independent (correlation of their ranks)."""
    pairs = draw(source, 3).reshape(-1, 2, PAIRS)
    x, y = pairs[:, 0].ravel(), pairs[:, 1].ravel()
    radius, angle = np.exp(-(x**2 + y**2) / 2), np.arctan2(y, x) / (2 * math.pi) + 0.5
    values = [stats.kstest(radius, "uniform").pvalue, stats.kstest(angle, "uniform").pvalue]
    values.append(stats.pearsonr(radius, angle).pvalue)
    return min(values) > ALARM / 3


def uncorrelated_at_every_lag(source: Source) -> bool:
    """The cyclic cross-correlation of two rows and the autocorrelation of one, at all lags, by FFT."""
    n = 1 << 18
    spectra = [np.fft.rfft(draw(source, t, size=n)) for t in range(2)]
    cross = np.fft.irfft(spectra[0] * spectra[1].conj()) / math.sqrt(n)
    auto = np.fft.irfft(np.abs(spectra[0]) ** 2)[1:] / math.sqrt(n)
    # Each is a mean of n products of independent normals, close to N(0, 1); 9 instead of the normal quantile 7.1 leaves
    # room for the heavier tail of the product (Chernoff: exp(-81/2 (1 - 9/sqrt(n))) < 1e-17 each, times 2n lags).
    return bool(max(np.abs(cross).max(), np.abs(auto).max()) < 9)


def tail_counts_are_right(source: Source) -> bool:
    """How many of 2^22 numbers lie beyond 3, 4 and 4.5: Poisson, two-sided."""
    z = np.abs(np.concatenate([draw(source, t) for t in range(4)]))
    for bound in (3.0, 4.0, 4.5):
        count, mean = int((z > bound).sum()), len(z) * 2 * stats.norm.sf(bound)
        if min(stats.poisson.cdf(count, mean), stats.poisson.sf(count - 1, mean)) < ALARM / 6:
            return False
    return True


CHECKS = [normal_by_kolmogorov_smirnov, moments_are_right, pairs_are_isotropic, uncorrelated_at_every_lag, tail_counts_are_right]


@pytest.mark.parametrize("check", CHECKS)
def test_the_source_passes(check):
    assert check(Source(seed=20))


def test_double_precision_passes():
    assert normal_by_kolmogorov_smirnov(Source(seed=21), torch.float64)


class TwoPercentTooSmall(Source):
    def _write(self, step, scale, fresh, seen, pieces):
        super()._write(step, 0.98 * scale, fresh, seen, pieces)


class TakenApart(Source):
    """Words, Gaussians and sum one after the other, so that a defect can be put into the words."""

    def _write(self, step, scale, fresh, seen, pieces):
        assert seen is None
        _kernel.Kernel.draw_all(_kernel.KERNEL, self, step, pieces, scale, fresh)

    def words(self, step, index, block, size):
        return self._words(step, index, block // BLOCKS, size // GROUP_BYTES)

    def _words(self, step, index, first, groups):
        return self._stream.words(step, index, first * BLOCKS, groups * GROUP_BYTES)


class RepeatedBlock(TakenApart):
    """Each group of numbers comes twice."""

    def _words(self, step, index, first, groups):
        return super()._words(step, index, first // 2, groups)


class ShiftedCounter(TakenApart):
    """The step moves the counter by one group instead of having a field of its own."""

    def _words(self, step, index, first, groups):
        return super()._words(0, index, first + step, groups)


class StepIgnored(TakenApart):
    def _words(self, step, index, first, groups):
        return super()._words(0, index, first, groups)


class CutTails(TakenApart):
    """The smallest uniforms are missing: nothing beyond 3.72."""

    def _words(self, step, index, first, groups):
        words = super()._words(step, index, first, groups).reshape(-1, 3, PAIRS)
        words[:, 0] |= 0x3FFFFF
        return words.reshape(-1)


class UnevenAngle(TakenApart):
    """One quadrant a little more often: 2 % of the pairs."""

    def _words(self, step, index, first, groups):
        words = super()._words(step, index, first, groups).reshape(-1, 3, PAIRS)
        words[:, 2] &= np.where(words[:, 1] < 0.02 * 2**32, np.uint32(0x3FFFFFFF), np.uint32(0xFFFFFFFF))
        return words.reshape(-1)


@pytest.mark.parametrize(
    ("defect", "check"),
    [
        (TwoPercentTooSmall, normal_by_kolmogorov_smirnov),
        (TwoPercentTooSmall, moments_are_right),
        (RepeatedBlock, uncorrelated_at_every_lag),
        (ShiftedCounter, uncorrelated_at_every_lag),
        (StepIgnored, uncorrelated_at_every_lag),
        (CutTails, tail_counts_are_right),
        (UnevenAngle, pairs_are_isotropic),
    ],
)
def test_planted_defects_are_rejected(defect, check):
    assert not check(defect(seed=20))


def test_tensors_and_steps_are_independent_of_one_another():
    """Correlations between 12 different (step, index) pairs, 66 tests, at a total false-alarm rate of 1e-6."""
    source, n = Source(seed=22), 1 << 16
    rows = np.stack([source.z(t, i, torch.empty(n)).double().numpy() for t in (0, 1, 2, 1 << 30) for i in (0, 1, 7)])
    correlation = rows @ rows.T / math.sqrt(n)
    off = np.abs(correlation[np.triu_indices(len(rows), 1)])
    assert off.max() < stats.norm.isf(ALARM / (2 * len(off)))
    assert GROUP == 2 * PAIRS


def test_secure_noise_is_normal_and_uncorrelated():
    source = Source(seed=23, secure=True)
    values, counts = np.unique(draw(source, 0, torch.float64, 1 << 19), return_counts=True)
    n, below = counts.sum(), np.cumsum(counts) / counts.sum()
    edges = values + grid(1.0) / 2  # a rounded number is at most v where the real one is at most half a step above
    assert 2 * math.exp(-2 * n * np.max(np.abs(special.ndtr(edges) - below)) ** 2) > ALARM
    assert 2 * math.exp(-2 * n * np.max(np.abs(special.ndtr(edges * 0.98) - below)) ** 2) < ALARM
    assert uncorrelated_at_every_lag(source)
