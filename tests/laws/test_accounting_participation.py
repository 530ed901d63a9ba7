"""Which theorem covers which way of sampling, as a table: docs of ``accounting/participation.py``, row by row."""

from __future__ import annotations

import math

import pytest

from hushgrad.accounting.participation import Sampling, Way, kind_of, poisson_rate, sampling, simplified, unamplified
from hushgrad.errors import NoTheorem
from hushgrad.events import (
    ApproxDP,
    BallsInBins,
    CyclicPoisson,
    Event,
    Everyone,
    FixedSize,
    Gaussian,
    GaussianMixture,
    MinSep,
    Once,
    Participation,
    Poisson,
    PureDP,
    RandomizedResponse,
    Relation,
    Sampled,
    TruncatedPoisson,
)

ADD, REPLACE, ZERO = Relation.ADD_REMOVE, Relation.REPLACE_ONE, Relation.ZERO_OUT
STEP = Gaussian(1.5)
TWO, ONE = FixedSize(dataset_size=8, size=2), FixedSize(dataset_size=8, size=1)
NOTHING, UNKNOWN = PureDP(1.0, absent="nothing"), PureDP(1.0)  # type: ignore[arg-type]


def respond(answers: str) -> Event:
    return RandomizedResponse(0.2, 2, answers=answers)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("how", "same"),
    [
        (Everyone(), STEP),
        (Once(), STEP),
        (Poisson(1.0), STEP),
        (Poisson(0.5), None),
        (MinSep(gap=4, times=3), STEP * 3),
        (CyclicPoisson(period=5, rate=0.25), Sampled(Poisson(0.25), STEP)),
        (BallsInBins(bins=4, epochs=3, fresh=True), Sampled(BallsInBins(bins=4), STEP) * 3),
        (BallsInBins(bins=4, epochs=3), None),
        (TWO, None),
    ],
)
def test_what_is_the_same_as_something_simpler(how: Participation, same: Event | None) -> None:
    assert simplified(Sampled(how, STEP)) == same


def test_a_sampled_mixture_is_a_mixture() -> None:
    rare = GaussianMixture(noise_multiplier=1.0, sensitivities=(2.0, 0.5, 1.0), probabilities=(0.75, 0.25, 0.0))
    whole = GaussianMixture(noise_multiplier=1.0, sensitivities=(0.0, 2.0, 0.5, 1.0), probabilities=(0.5, 0.375, 0.125, 0.0))
    assert simplified(Sampled(Poisson(0.5), rare)) == whole
    assert simplified(Sampled(FixedSize(dataset_size=8, size=2), rare)) is None
    unlikely = GaussianMixture(noise_multiplier=1.0, sensitivities=(0.0, 1.0), probabilities=(1.0, 1e-300))
    drawn = simplified(Sampled(Poisson(1e-100), unlikely))
    assert isinstance(drawn, GaussianMixture) and drawn.probabilities[2] == math.ulp(0.0)  # never 0: it may happen


def test_balls_in_bins_without_their_amplification() -> None:
    assert unamplified(Sampled(BallsInBins(bins=4, epochs=3), STEP)) == STEP * 3
    for event in (STEP, Sampled(TWO, STEP), STEP * 2):
        assert unamplified(event) is event


def test_rates_and_kinds() -> None:
    assert poisson_rate(Sampled(Everyone(), STEP)) == 1.0 and poisson_rate(Sampled(Poisson(0.25), STEP)) == 0.25
    assert poisson_rate(STEP) is None and poisson_rate(Sampled(TWO, STEP)) is None
    cut = TruncatedPoisson(rate=0.1, dataset_size=8, size=2)
    kinds = {Poisson(0.1): "poisson", TWO: "fixed size", cut: "truncated", BallsInBins(bins=3): "balls", Once(): "Once"}
    assert {how: kind_of(how) for how in kinds} == kinds


@pytest.mark.parametrize(
    ("how", "of", "relation", "expected"),
    [
        (Poisson(0.1), STEP, ADD, Sampling(Way.AMPLIFIED, 0.1, ADD)),
        (Poisson(0.1), STEP, ZERO, Sampling(Way.AMPLIFIED, 0.1, ZERO)),
        (Poisson(0.1), STEP, REPLACE, Sampling(Way.EXCHANGED, 0.1, REPLACE, attained=False)),
        (Poisson(0.1), UNKNOWN, ADD, Sampling(Way.AMPLIFIED, 0.1, ADD)),
        (Poisson(0.1), UNKNOWN, ZERO, Sampling(Way.SHOWN, 0.1, ZERO)),
        (Poisson(0.1), UNKNOWN, REPLACE, Sampling(Way.SHOWN, 0.1, REPLACE)),
        (FixedSize(dataset_size=8, size=8), STEP, REPLACE, Sampling(Way.SHOWN, 1.0, REPLACE)),
        (FixedSize(dataset_size=8, size=8), respond("unknown"), REPLACE, Sampling(Way.SHOWN, 1.0, REPLACE)),
        (TWO, STEP, REPLACE, Sampling(Way.EXCHANGED, 0.25, REPLACE)),
        (TWO, STEP, ZERO, Sampling(Way.EXCHANGED, 0.25, REPLACE, attained=False)),
        (TWO, NOTHING, REPLACE, Sampling(Way.EXCHANGED, 0.25, REPLACE)),
        (TWO, NOTHING, ZERO, Sampling(Way.SHOWN, 0.25, ZERO, attained=False)),
        (ONE, respond("anonymous"), REPLACE, Sampling(Way.EXCHANGED, 0.125, REPLACE)),
        (TWO, respond("anonymous"), REPLACE, Sampling(Way.EXCHANGED, 0.25, REPLACE, attained=False)),
        (TWO, respond("anonymous"), ZERO, Sampling(Way.SHOWN, 0.25, ZERO)),
        (TWO, respond("named"), REPLACE, Sampling(Way.SHOWN, 0.25, REPLACE)),
        (TWO, respond("named"), ZERO, Sampling(Way.SHOWN, 0.25, ZERO)),
        (TWO, respond("unknown"), REPLACE, Sampling(Way.SHOWN, 0.25, REPLACE, attained=False)),
    ],
)
def test_the_theorem_for_a_sample(how: Participation, of: Event, relation: Relation, expected: Sampling) -> None:
    assert sampling(Sampled(how, of), relation) == expected


@pytest.mark.parametrize(
    ("how", "of", "relation", "sentence"),
    [
        (TWO, STEP, ADD, "keep the size of the data set public"),
        (FixedSize(dataset_size=8, size=8), STEP, ADD, "keep the size of the data set public"),
        (
            BallsInBins(bins=3),
            ApproxDP(1.0, 1e-9),
            ADD,
            "No theorem for single mechanisms covers BallsInBins samples of ApproxDP",
        ),
        (Poisson(0.5), Sampled(TWO, STEP), REPLACE, "drawn from 8 records, but .* a random number of them"),
        (FixedSize(dataset_size=20, size=9), Sampled(TWO, STEP), REPLACE, "drawn from 8 records, but .* gives it 9"),
    ],
)
def test_where_there_is_no_theorem(how: Participation, of: Event, relation: Relation, sentence: str) -> None:
    with pytest.raises(NoTheorem, match=sentence):
        sampling(Sampled(how, of), relation)


def test_a_sample_of_as_many_records_as_it_is_given_is_covered() -> None:
    nested = Sampled(FixedSize(dataset_size=20, size=8), Sampled(TWO, STEP))
    assert sampling(nested, REPLACE).rate == 0.4
