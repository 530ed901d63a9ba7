"""Live noise has the predicted distribution: fixed seeds, stated false-alarm rates, and mutations that are rejected."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from hushgrad.events import MinSep, Once
from hushgrad.noise import BLT, AntiPGD, Banded, BandedInverse, Nu, SGDWorkload, Source, Toeplitz, Tree
from hushgrad.testing.mechanisms import covariance_is_right

STEPS, COLUMNS = 40, 4000
FALSE_ALARM = 1e-6

MECHANISMS = [Tree(), Tree(restart=16, completion=True), Toeplitz(), Nu(nu=0.05), AntiPGD(damping=0.7), BandedInverse(bands=5)]
MECHANISMS += [Banded(bands=5).resolved(steps=STEPS, participation=Once()), BLT.optimal(steps=STEPS, buffers=3)]


def _noise(mechanism, seed=3):
    stream = mechanism.stream(Source(seed=seed), steps=STEPS)
    like = torch.zeros(COLUMNS)
    return np.stack([stream.row(t, 0, like).double().numpy() for t in range(STEPS)])


def _error_is_predicted(outputs: np.ndarray, B: np.ndarray) -> bool:
    """Sum of squares of the outputs: a weighted chi-square, compared through its two first moments (Satterthwaite)."""
    weights = np.linalg.svd(B, compute_uv=False) ** 2
    freedom = COLUMNS * weights.sum() ** 2 / np.sum(weights**2)
    statistic = np.sum(outputs**2) / weights.sum() / COLUMNS * freedom
    return bool(chi2.ppf(FALSE_ALARM / 2, freedom) < statistic < chi2.isf(FALSE_ALARM / 2, freedom))


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda m: str(m)[:40])
def test_the_error_of_live_noise_is_the_predicted_one(mechanism):
    noise = _noise(mechanism)
    for work in (None, SGDWorkload(momentum=0.9)):
        A = np.tri(STEPS) if work is None else work.matrix(STEPS)
        rmse = mechanism.unit_error(steps=STEPS, workload=work)[0]
        B = A @ mechanism.noising(STEPS)
        assert rmse == pytest.approx(np.sqrt(np.sum(B**2) / STEPS))
        assert _error_is_predicted(A @ noise, B)
        assert not _error_is_predicted(1.1 * A @ noise, B)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda m: str(m)[:40])
def test_the_covariance_test_rejects_other_mechanisms(mechanism):
    noise = _noise(mechanism)
    assert covariance_is_right(noise, mechanism.noising(STEPS))
    assert not covariance_is_right(noise, np.eye(STEPS))
    assert not covariance_is_right(np.roll(noise, 1, axis=0), mechanism.noising(STEPS))


def test_the_covariance_test_does_not_cry_wolf():
    N = Toeplitz().noising(12)
    rng = np.random.default_rng(0)
    alarms = sum(not covariance_is_right(N @ rng.normal(size=(12, 500)), N) for _ in range(1000))
    assert alarms <= 2  # expected about 0.001 x a small-sample excess; three or more would mean a wrong threshold


def test_tensors_of_a_model_have_unrelated_noise():
    stream = BLT.optimal(steps=4, buffers=2, participation=MinSep(gap=2, times=2)).stream(Source(seed=0), steps=4)
    like = torch.zeros(20_000)
    a, b = (stream.row(0, index, like).double() for index in (0, 1))
    assert abs(float(a @ b)) / np.sqrt(len(like)) < 5.5  # a standard normal if they are: false alarm 4e-8
