"""What re-enters a window: the bounds on it hold for every window, and are needed."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushgrad import accounting
from hushgrad.accounting.pld.bounds.compose import Composed, Window, compose
from hushgrad.accounting.pld.bounds.from_above import connect_the_dots
from hushgrad.accounting.pld.bounds.from_below import lower
from hushgrad.accounting.pld.bounds.grid import Masses
from hushgrad.accounting.pld.profiles.curve import Array, GaussianCurve
from hushgrad.accounting.pld.profiles.poisson import PoissonRemove
from hushgrad.events import Gaussian

CURVE, STEP, TIMES = PoissonRemove(GaussianCurve(0.5), 0.3), 0.01, 12
GRIDS = {"upper": connect_the_dots(CURVE, STEP, 1e-13, 2.0), "lower": lower(CURVE, STEP, 1e-13, 2.0)}


def exact(masses: Masses, epsilon: float) -> float:
    """Delta of the sum by plain convolution: no window, no tilt, no FFT."""
    p = np.zeros(int(masses.index[-1] - masses.index[0]) + 1)
    p[masses.index - masses.index[0]] = masses.p
    total: Array = p
    for _ in range(TIMES - 1):
        total = np.convolve(total, p)
    losses = TIMES * (masses.shift + int(masses.index[0]) * STEP) + np.arange(len(total)) * STEP
    return float(np.sum(total * np.maximum(-np.expm1(epsilon - losses), 0.0)))


def composed(side: str, tilt: float, low: float, width: float, exponents: tuple[float, float, float]) -> Composed:
    return compose([(GRIDS[side], TIMES)], Window(tilt, low, low + width, *exponents))


EXPONENT = st.floats(0.05, 20)


@given(
    tilt=st.floats(0.01, 12),
    low=st.floats(-6, 4),
    width=st.floats(0.5, 12),
    exponents=st.tuples(EXPONENT, EXPONENT, EXPONENT),
    epsilon=st.floats(0, 6),
)
@settings(max_examples=300, deadline=None)
def test_both_readings_hold_for_every_window(
    tilt: float, low: float, width: float, exponents: tuple[float, float, float], epsilon: float
) -> None:
    with np.errstate(all="ignore"):
        above = composed("upper", tilt, low, width, exponents).delta(epsilon, upper=True)
        below = composed("lower", tilt, low, width, exponents).delta(epsilon, upper=False)
    assert above >= min(1.0, exact(GRIDS["upper"], epsilon)) * (1 - 1e-9)
    assert below <= exact(GRIDS["lower"], epsilon) * (1 + 1e-9)


def test_a_window_that_begins_just_below_epsilon_is_enough() -> None:
    """Although about half of the tilted losses are smaller."""
    truth = exact(GRIDS["lower"], 1.5)
    narrow = composed("lower", 3.0, 1.4, 7.0, (6.0, 2.0, 2.0))
    assert truth * (1 - 1e-4) < narrow.delta(1.5, upper=False) <= truth <= narrow.delta(1.5, upper=True) < truth * (1 + 1e-6)


@pytest.mark.parametrize(("forgotten", "low", "width", "tilt"), [("raised", 1.5, 2.5, 0.3), ("folded", -1.0, 2.0, 4.0)])
def test_forgetting_what_re_enters_is_caught(forgotten: str, low: float, width: float, tilt: float) -> None:
    honest = composed("lower", tilt, low, width, (8.0, 2.0, 2.0))
    nothing = 0.0 if forgotten == "raised" else (-math.inf, 0.0)
    mutated = replace(honest, **{forgotten: nothing})  # type: ignore[arg-type]
    epsilon = max(low, 0.5)
    assert honest.delta(epsilon, upper=False) <= exact(GRIDS["lower"], epsilon)
    assert mutated.delta(epsilon, upper=False) > exact(GRIDS["lower"], epsilon) * 1.001


def test_forgetting_what_is_under_the_window_is_caught() -> None:
    honest = composed("upper", 6.0, 3.0, 4.0, (0.5, 2.0, 2.0))
    assert honest.delta(0.5, upper=True) >= exact(GRIDS["upper"], 0.5)
    assert replace(honest, under=0.0).delta(0.5, upper=True) < exact(GRIDS["upper"], 0.5)


def test_forgetting_what_is_beyond_is_caught() -> None:
    honest = composed("upper", 2.0, -1.0, 3.0, (8.0, 2.0, 2.0))
    assert honest.delta(1.0, upper=True) >= exact(GRIDS["upper"], 1.0)
    assert replace(honest, beyond=0.0).delta(1.9, upper=True) < exact(GRIDS["upper"], 1.9)


def test_a_curve_of_deltas_is_as_sharp_as_a_single_delta_where_tails_are_cut() -> None:
    event = Gaussian(2.1259024203311085).sampled(rate=1.8661041851233657e-06) * 302
    (found,) = accounting.delta_curve(event, [0.0823])
    assert found <= 1.01 * accounting.delta(
        event, epsilon=0.0823
    )  # the mass that a window cut was taken for delta: 1e15 times it
