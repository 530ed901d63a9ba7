"""Public values check their numbers when they are made, and keep them as plain ones: whatever is asked later can rely on it."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest

from hushgrad import clipping, denoise, noise, sampling
from hushgrad.clipping.clipper import Clipper
from hushgrad.denoise.base import Denoiser
from hushgrad.errors import HushgradError
from hushgrad.noise.base import Mechanism
from hushgrad.sampling.base import Sampler
from hushgrad.testing import members

ROOMS = [(sampling, Sampler), (clipping, Clipper), (denoise, Denoiser), (noise, Mechanism)]
VALUES = [value for room, kind in ROOMS for family in members(room, kind).values() for value in family.examples()]
NUMBERS = [
    pytest.param(value, field.name, id=f"{value}-{field.name}"[:80])
    for value in VALUES
    for field in fields(value)
    if field.init and isinstance(getattr(value, field.name), int | float) and not isinstance(getattr(value, field.name), bool)
]


@pytest.mark.parametrize("bad", [math.nan, "3", -1.0, [1]], ids=str)
@pytest.mark.parametrize("value, name", NUMBERS)
def test_what_is_no_number_or_a_wrong_one_is_refused(value, name, bad):
    with pytest.raises(HushgradError):
        replace(value, **{name: bad})


@pytest.mark.parametrize("value, name", NUMBERS)
def test_numbers_of_other_libraries_become_plain_ones(value, name):
    plain = getattr(value, name)
    wrapped = np.int64(plain) if isinstance(plain, int) else np.float64(plain)
    made = replace(value, **{name: wrapped})
    assert made == value and type(getattr(made, name)) is type(plain)
