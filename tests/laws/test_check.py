"""One sentence shape for all refusals; NaN and bool pass no check."""

from __future__ import annotations

import math
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hushgrad import _check
from hushgrad.errors import ArgumentError, HushgradError

NUMBER_CHECKS = [
    _check.number,
    _check.positive,
    _check.non_negative,
    _check.probability,
    _check.rate,
    _check.delta,
]


@pytest.mark.parametrize("check", [*NUMBER_CHECKS, _check.integer, _check.positive_int])
@pytest.mark.parametrize("value", [float("nan"), math.inf, True, "1", None, [1], 1j])
def test_no_check_takes_these(check, value):
    with pytest.raises(ArgumentError, match=r"^Expected answer="):
        check(answer=value)


@pytest.mark.parametrize("check", NUMBER_CHECKS)
@pytest.mark.parametrize("kind", [float, np.float64, np.float32, Fraction])
def test_number_checks_take_every_real_type_and_return_a_float(check, kind):
    result = check(answer=kind(0.5))
    assert type(result) is float
    assert result == 0.5


@given(st.floats())
@example(5e-324)
@example(sys.float_info.min)
def test_delta_is_the_open_unit_interval(value):
    """But for the floats next to 0, which have lost their digits."""
    if sys.float_info.min <= value < 1:
        assert _check.delta(delta=value) == value
    else:
        with pytest.raises(ArgumentError):
            _check.delta(delta=value)


def test_integers_are_integers():
    assert type(_check.positive_int(steps=np.int64(3))) is int
    with pytest.raises(ArgumentError, match="to be an integer of at least 1"):
        _check.positive_int(steps=3.0)
    with pytest.raises(ArgumentError, match="to be an integer of at least 1"):
        _check.positive_int(steps=0)


def test_the_remedy_stands_at_the_end_and_long_values_are_cut():
    with pytest.raises(ArgumentError) as caught:
        _check.positive("Use a larger one.", sigma=-1)
    assert str(caught.value) == "Expected sigma=-1 to be greater than 0. Use a larger one."
    with pytest.raises(ArgumentError) as caught:
        _check.number(x="y" * 1000)
    assert len(str(caught.value)) < 150


def test_every_error_of_the_house_has_one_base():
    from hushgrad import errors

    for name in errors.__all__:
        assert issubclass(vars(errors)[name], HushgradError)
    assert issubclass(ArgumentError, ValueError)
