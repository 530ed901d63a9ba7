"""Public values check their numbers when they are made, and keep them as plain ones: whatever is asked later can rely on it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import partial
from inspect import signature

import numpy as np
import pytest
import torch

from hushgrad import _check, accounting, clipping, denoise, events, noise, sampling
from hushgrad._value import _is_abstract
from hushgrad.clipping.clipper import Clipper
from hushgrad.denoise.base import Denoiser
from hushgrad.errors import ArgumentError, HushgradError
from hushgrad.noise.base import Mechanism
from hushgrad.sampling.base import Sampler
from hushgrad.testing import members
from hushgrad.train import Plan, make_private

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


ODD = [
    math.nan,
    10**400,
    5e-324,
    "3",
    "x" * 1000,
    b"x",
    None,
    [],
    {},
    {"a": 1},
    [None],
    [[]],
    (1, 2, 3),
    [("a", "b", "c")],
    1j,
    True,
]
ODD += [object(), len, torch.zeros(3), torch.tensor(math.nan), np.zeros(3), np.array(math.nan)]
_PLAN = {"noise_multiplier": 1.0, "delta": 1e-5, "batch_size": 10, "dataset_size": 100}
_ONE = events.Gaussian(1.0)


def _attached(**options):
    model = torch.nn.Linear(2, 1)
    named = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "plan": Plan.dpsgd(steps=5, **_PLAN)}
    make_private(**{**named, **options}).detach()


ASKED = [
    *((f"{value}"[:60], partial(replace, value), {}, [field.name for field in fields(value) if field.init]) for value in VALUES),
    ("Plan.dpsgd", Plan.dpsgd, {**_PLAN, "steps": 5}, None),
    ("Plan.dpftrl", Plan.dpftrl, {**_PLAN, "epochs": 1}, None),
    ("Compose", events.Compose, {}, ["events"]),
    ("OneOf", events.OneOf, {}, ["events"]),
    ("RepeatAndSelect", events.RepeatAndSelect, {"of": _ONE, "mean": 3.0}, ["of", "mean", "shape"]),
    ("epsilon", accounting.epsilon, {"event": _ONE, "delta": 1e-5}, None),
    ("calibrate", accounting.calibrate, {"make_event": events.Gaussian, "epsilon": 1.0, "delta": 1e-5}, ["bracket", "start"]),
    ("Source", noise.Source, {"seed": 1}, None),
    ("make_private", _attached, {}, [name for name in signature(make_private).parameters if name != "model"]),
]


@pytest.mark.parametrize("name, ask, right, names", ASKED, ids=[asked[0] for asked in ASKED])
@pytest.mark.filterwarnings("ignore")
def test_whatever_is_given_is_taken_or_refused_in_a_sentence(name, ask, right, names):
    """Never an error of Python's, numpy's or torch's own: not for a word in place of a list, nor for an array in place of a choice."""
    for argument in signature(ask).parameters if names is None else names:
        for odd in ODD:
            try:
                ask(**{**right, argument: odd})
            except HushgradError as refused:
                assert str(refused), (argument, odd)


@pytest.mark.parametrize("kind", [Sampler, Clipper, Denoiser, Mechanism])
def test_a_file_names_no_class_that_is_only_a_base_of_others(kind):
    """``LowerToeplitz`` was read as a mechanism without any method."""
    names = [name for name, one in kind._classes.items() if _is_abstract(one)]
    assert names or kind is not Mechanism
    for name in names:
        with pytest.raises(ArgumentError, match="to be one of"):
            kind.from_json({kind._family: name})


def test_a_value_that_expects_more_expects_what_its_parent_does():
    @dataclass(frozen=True)
    class _Named(sampling.Poisson):
        word: str = "a"
        expected = _check.each(word=partial(_check.one_of, ("a", "b")))

    assert _Named(rate=np.float64(0.5), steps=3, word="b").rate == 0.5
    for wrong in ({"rate": 2.0}, {"steps": 0}, {"word": "c"}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            _Named(**{"rate": 0.5, "steps": 3, **wrong})
