"""Errors of the mechanisms at known sizes.

Sources: for the tree, the square root, BSR, BISR and tuned one-parameter mechanisms the published closed forms, evaluated
independently; for BLT and optimised banded Toeplitz the optimisers of jax-privacy 2.0.0 (same values to four digits); for the
dense optimum its own certificate; for the stationary losses the elliptic integral K.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from patience import calls_in, memory_of
from scipy.special import ellipk

from hushgrad.events import CyclicPoisson, MinSep, Once
from hushgrad.noise import (
    BLT,
    AntiPGD,
    Banded,
    BandedInverse,
    Dense,
    Independent,
    Nu,
    SGDWorkload,
    Spectral,
    Toeplitz,
    Tree,
    optimise_blt,
)

ONCE = {
    1024: [
        (Independent(), 22.638, 32.000),
        (Tree(variant="plain"), 7.417, 10.488),
        (Tree(variant="online"), 5.650, 7.989),
        (Toeplitz(), 3.110, 3.273),
        (Nu(), 3.066, 3.335),
        (AntiPGD(), 4.809, 5.867),
        (Banded.square_root(bands=8), 9.536, 13.415),
        (Banded(bands=8), 8.4443, 11.7313),
        (Banded(bands=64), 4.0659, 5.2186),
        (Banded(bands=16, loss="max"), 6.3737, 8.6259),
        (BandedInverse(bands=64), 3.448, 4.303),
        (BLT(buffers=1), 3.457, 3.971),
        (BLT(buffers=2), 3.0840, 3.4083),
        (BLT(buffers=3), 3.0587, 3.3570),
        (BLT(buffers=4), 3.0574, 3.3526),
        (BLT(buffers=4, loss="max"), 3.1101, 3.2729),
    ],
    16384: [
        (Tree(variant="plain"), 10.247, 14.491),
        (Tree(variant="online"), 7.650, 10.819),
        (Toeplitz(), 3.993, 4.155),
        (BandedInverse(bands=64), 10.537, 14.722),
        (BLT(buffers=4), 3.943, 4.246),
    ],
}

TEN_EPOCHS = [
    (Independent(), 70.75, 100.00),
    (Toeplitz(), 15.72, 16.54),
    (Nu(), 12.69, 15.57),
    (AntiPGD(), 15.25, 18.83),
    (Banded.square_root(bands=64), 13.71, 18.30),
    (Banded.square_root(bands=100), 12.10, 15.69),
    (BandedInverse(bands=64), 12.37, 15.40),
    (BLT(buffers=2), 12.19, 15.19),
    (BLT(buffers=2, loss="max"), 12.40, 14.95),
]


@pytest.mark.parametrize(("steps", "mechanism", "rmse", "worst"), [(n, *row) for n, rows in ONCE.items() for row in rows])
def test_one_participation(steps, mechanism, rmse, worst):
    error = mechanism.error(steps=steps, participation=Once())
    assert error.rmse == pytest.approx(rmse, abs=6e-4)
    assert error.max == pytest.approx(worst, abs=1.1e-3)
    assert error.lower_bound < error.rmse


@pytest.mark.parametrize(("mechanism", "rmse", "worst"), TEN_EPOCHS)
def test_ten_epochs_of_a_hundred_steps(mechanism, rmse, worst):
    error = mechanism.error(steps=1000, participation=MinSep(gap=100, times=10))
    assert (error.rmse, error.max) == pytest.approx((rmse, worst), abs=6e-3)


def test_lower_bound_of_prefix_sums():
    for steps, bound in ((256, 2.471), (1024, 2.910), (4096, 3.350), (16384, 3.791), (10**6, 5.0995)):
        assert BLT(buffers=1).error(steps=steps, participation=Once()).lower_bound == pytest.approx(bound, abs=6e-4)


def test_full_honaker():
    error = Tree(variant="full").error(steps=256, participation=Once())
    assert (error.rmse, error.max) == pytest.approx((3.102, 3.757), abs=6e-4)


def test_completion_joins_trees_with_less_noise():
    # 10 trees of 100 steps: 7 levels without completion (a step lies in nodes of 1..64 steps), 8 with it.
    who = MinSep(gap=100, times=10)
    plain, complete = (Tree(variant="plain", restart=100, completion=c) for c in (False, True))
    assert plain.sensitivity(steps=1000, participation=who) ** 2 == pytest.approx(70)
    assert complete.sensitivity(steps=1000, participation=who) ** 2 == pytest.approx(80)
    assert plain.error(steps=1000, participation=who).rmse == pytest.approx(34.18, abs=6e-3)
    assert complete.error(steps=1000, participation=who).rmse < 25


@pytest.mark.parametrize(
    ("steps", "loss", "value"),
    [
        (256, "mean", 2.5245),
        pytest.param(256, "max", 2.5335, marks=pytest.mark.slow),
        pytest.param(1024, "mean", 2.9556, marks=pytest.mark.slow),
    ],
)
def test_dense_optimum(steps, loss, value):
    found = Dense.optimum(steps=steps, loss=loss)
    assert found.upper <= value + 5e-5 and found.gap <= 1e-3
    error = Dense(found.strategy).error(steps=steps, participation=Once())
    assert (error.rmse if loss == "mean" else error.max) == pytest.approx(found.upper, rel=1e-9)


def test_blt_for_millions_of_steps():
    for steps, buffers, loss, value in ((10**6, 4, "max", 5.5476), (10**6, 4, "mean", 5.3033), (10**7, 3, "mean", 6.4741)):

        def ask(steps=steps, buffers=buffers, loss=loss, value=value):
            optimise_blt.optimise_blt.cache_clear()
            error = BLT.optimal(steps=steps, buffers=buffers, loss=loss).error(steps=steps, participation=Once())
            assert (error.max if loss == "max" else error.rmse) == pytest.approx(value, abs=1e-4)

        assert calls_in(ask) < 100_000 and memory_of(ask) < 1_000_000  # the work does not grow with the number of steps


def test_blt_with_more_buffers_is_never_worse():
    errors = [BLT.optimal(steps=500, buffers=k).error(steps=500, participation=Once()).rmse for k in (1, 2, 3, 5, 10)]
    assert all(b <= a * (1 + 1e-6) for a, b in pairwise(errors))


def test_amplified_banded_noise_multiplier():
    # The event of BandMF with the cut square root, 2 bands: ||c||² = 1 + 1/4 (Choquette-Choo et al. 2023, Theorem 4).
    event = Banded.square_root(bands=2).event(1.0, CyclicPoisson(period=10, rate=0.1), 2000)
    assert str(event) == "200 x Poisson(0.1) Gaussian(0.894427)"


@pytest.mark.parametrize(("eta", "value"), [(0.3, 0.1243), (0.1, 0.02108), (0.01, 0.0004566), (0.001, 8.191e-06)])
def test_stationary_loss_of_mean_estimation(eta, value):
    spectral = Spectral(curvatures=(1.0,), learning_rate=eta)
    a = 1 - eta
    assert spectral.excess_loss(rho=0.5) == pytest.approx(eta**2 * (2 / np.pi * ellipk(a * a)) ** 2, rel=1e-8)
    assert spectral.excess_loss(rho=0.5) == pytest.approx(value, rel=5e-4)


def test_one_curvature_is_nu():
    spectral = Spectral(curvatures=(0.5,), learning_rate=0.1)
    assert np.allclose(spectral.noising_coefficients(2000), Nu(nu=0.05).noising_coefficients(2000), atol=1e-12)


def _stationary_loss(beta: np.ndarray, curvatures: np.ndarray, eta: float) -> float:
    """(eta²/2 rho) <|N|² S> <|N|^-2> at rho = 1/2, by the time domain: variances of the filtered noise, no quadrature."""
    total = 0.0
    for curvature in curvatures:
        response = np.zeros(len(beta))
        x = 0.0
        for t, b in enumerate(beta):  # theta = (1 - eta l) theta + eta noise
            x = (1 - eta * curvature) * x + b
            response[t] = x
        total += curvature * np.sum(response**2)
    c = Toeplitz(coefficients=tuple(beta)).noising_coefficients(len(beta))  # 1 / N
    return eta**2 * total * float(np.sum(c**2))


def test_spectral_noise_attains_its_bound_and_no_other_does():
    eta, curvatures = 0.2, (1.0,) + (1 / 8,) * 7
    spectral, steps = Spectral(curvatures=curvatures, learning_rate=eta), 3000
    bound = spectral.excess_loss(rho=0.5)
    spectrum = np.array(curvatures)
    assert _stationary_loss(spectral.noising_coefficients(steps), spectrum, eta) == pytest.approx(bound, rel=1e-6)
    for other in (Independent(), Nu(nu=0.0421), AntiPGD(damping=0.722)):
        assert _stationary_loss(other.noising_coefficients(steps), spectrum, eta) > 1.005 * bound


def test_error_of_a_real_optimiser():
    # Cooling down the learning rate forgives late noise: the error is smaller than with a constant rate.
    schedule = SGDWorkload(learning_rate=tuple(np.linspace(1.0, 0.0, 200).tolist()), momentum=0.9)
    constant = SGDWorkload(learning_rate=1.0, momentum=0.9)
    a, b = (BLT(buffers=3).error(steps=200, participation=Once(), workload=w) for w in (schedule, constant))
    assert a.rmse < b.rmse and a.lower_bound < a.rmse and b.lower_bound < b.rmse
