"""The covariance of the rows over many elements, at a false-alarm rate of 1e-6; wrong streams are rejected."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from hushgrad.noise.source import Source
from hushgrad.noise.streams import BandedStream, BufferStream, FilterStream

STEPS, SIZE = 12, 1 << 16
COLUMN = [0.7**j for j in range(4)]


def covariance_is(expected: np.ndarray, stream) -> bool:
    """Empirical second moments of the whitened rows against the identity, each by its normal standard error."""
    like = torch.empty(SIZE)
    rows = np.stack([stream.row(t, 0, like).double().numpy() for t in range(STEPS)])
    white = np.linalg.solve(np.linalg.cholesky(expected), rows)
    deviation = (white @ white.T / SIZE - np.eye(STEPS)) * math.sqrt(SIZE)
    deviation /= np.sqrt(1 + np.eye(STEPS))  # the variance of a squared standard normal is 2
    return bool(np.abs(deviation).max() < stats.norm.isf(1e-6 / STEPS**2) + 0.5)  # 0.5: the chi-square's skewness


def band_matrix() -> np.ndarray:
    return sum(np.diag(np.full(STEPS - j, c), -j) for j, c in enumerate(COLUMN))


def covariance(C: np.ndarray) -> np.ndarray:
    inverse = np.linalg.inv(C)
    return inverse @ inverse.T


def test_right_streams_pass_and_wrong_ones_do_not():
    source, expected = Source(seed=30), covariance(band_matrix())
    inverse_column = np.linalg.inv(band_matrix())[:, 0]
    assert covariance_is(expected, BandedStream(source, lambda t: COLUMN, steps=STEPS))
    assert covariance_is(expected, FilterStream(source, inverse_column, steps=STEPS))
    late = [COLUMN[0], 0.0, *COLUMN[1:]]  # the history off by one row
    assert not covariance_is(expected, BandedStream(source, lambda t: late, steps=STEPS))
    assert not covariance_is(expected, FilterStream(source, COLUMN, steps=STEPS))  # C for its inverse
    assert not covariance_is(expected, FilterStream(source, 0.98 * inverse_column, steps=STEPS))


@pytest.mark.parametrize(("decay", "right"), [(0.8, True), (0.6, False)])
def test_buffered_stream(decay, right):
    column = [1.0] + [0.3 * 0.8 ** (t - 1) for t in range(1, STEPS)]
    C = sum(np.diag(np.full(STEPS - j, c), -j) for j, c in enumerate(column))
    assert covariance_is(covariance(C), BufferStream(Source(seed=31), (decay,), (0.3,), steps=STEPS)) is right
