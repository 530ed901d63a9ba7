"""Tables 3 and 4 of Wang et al., "DP-LSSGD" (MSML 2020): all thirty entries, and the limits."""

from __future__ import annotations

import math

import pytest

from hushgrad.denoise import beta, gamma
from hushgrad.errors import ArgumentError

SIGMAS = (1, 2, 3, 4, 5)
TABLE_3 = dict(zip(SIGMAS, (0.447, 0.333, 0.277, 0.243, 0.218), strict=True))  # gamma, the same row for each dimension
TABLE_4 = dict(zip(SIGMAS, (0.268, 0.185, 0.149, 0.128, 0.114), strict=True))  # beta
DIMENSIONS = (1000, 10_000, 100_000)


@pytest.mark.parametrize("d", DIMENSIONS)
@pytest.mark.parametrize("sigma", SIGMAS)
def test_table_3(sigma, d):
    assert round(gamma(sigma, d), 3) == TABLE_3[sigma]
    assert round(gamma(sigma + 0.1, d), 3) != TABLE_3[sigma]  # the bar is fine enough to tell sigma from sigma + 0.1


@pytest.mark.parametrize("d", DIMENSIONS)
@pytest.mark.parametrize("sigma", SIGMAS)
def test_table_4(sigma, d):
    assert round(beta(sigma, d), 3) == TABLE_4[sigma]
    assert round(beta(sigma + 0.1, d), 3) != TABLE_4[sigma]


@pytest.mark.parametrize("sigma", [1e-9, 0.5, 1.0, 7.0, 1e3])
def test_limits(sigma):
    """The factor gamma falls to 1/sqrt(4 sigma + 1), not to 0 as the remark in Proposition 5 has it."""
    assert gamma(sigma, 10**6) == pytest.approx(1 / math.sqrt(4 * sigma + 1), rel=1e-12)
    assert beta(sigma, 10**6) == pytest.approx((1 + 2 * sigma) / (1 + 4 * sigma) ** 1.5, rel=1e-12)
    falling = [gamma(sigma, d) for d in (1, 2, 4, 8, 1000)]
    assert falling == sorted(falling, reverse=True) and falling[0] == pytest.approx(1.0)


def test_printed_closed_form_of_proposition_8():
    """The paper's own expression, with xi = -sqrt(1 + 4 sigma)/sigma, gives the same beta; with +xi it does not."""
    for sigma in SIGMAS:
        omega, d = (2 * sigma + 1 - math.sqrt(4 * sigma + 1)) / (2 * sigma), 10
        values = []
        for xi in (-math.sqrt(1 + 4 * sigma) / sigma, math.sqrt(1 + 4 * sigma) / sigma):
            top = 2 * omega ** (2 * d + 1) - xi * omega ** (2 * d) + 2 * xi * d * omega**d - 2 * omega + xi
            values.append(top / (sigma**2 * xi**3 * (1 - omega**d) ** 2))
        assert values[0] == pytest.approx(beta(sigma, d), rel=1e-9)
        assert abs(values[1] / beta(sigma, d) - 1) > 0.05


def test_no_smoothing_and_refusals():
    assert gamma(0, 10) == beta(0, 10) == 1.0
    assert gamma(3.0, 1) == pytest.approx(1.0) and beta(3.0, 1) == pytest.approx(1.0)
    for call in (lambda: gamma(-1, 10), lambda: beta(-1, 10), lambda: gamma(1, 0), lambda: beta(1, 2.5)):
        with pytest.raises(ArgumentError):
            call()
