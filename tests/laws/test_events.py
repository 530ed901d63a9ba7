"""The event algebra: equality by content, JSON both ways, and refusal of what is not understood."""

from __future__ import annotations

import json
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushgrad import events
from hushgrad.errors import ArgumentError
from hushgrad.events import (
    ApproxDP,
    Compose,
    Event,
    FixedSize,
    Gaussian,
    GaussianMixture,
    Laplace,
    Participation,
    Poisson,
    PureDP,
    Relation,
    Repeat,
    RepeatAndSelect,
    Sampled,
)

positive = st.floats(1e-6, 1e6)
counts = st.integers(1, 10**9)
rates = st.floats(1e-9, 1.0)


@st.composite
def fixed_sizes(draw):
    n = draw(counts)
    return FixedSize(dataset_size=n, size=draw(st.integers(1, n)))


participations = st.one_of(
    st.builds(Poisson, rates),
    st.builds(events.TruncatedPoisson, rate=rates, dataset_size=counts, size=counts),
    fixed_sizes(),
    st.builds(events.CyclicPoisson, period=counts, rate=rates),
    st.builds(events.MinSep, gap=counts, times=counts),
    st.builds(events.BallsInBins, bins=counts, epochs=counts),
    st.just(events.Once()),
    st.just(events.Everyone()),
)
mixtures = st.builds(
    lambda s, q: GaussianMixture(noise_multiplier=s, sensitivities=(0.0, 1.0), probabilities=(1 - q, q)), positive, rates
)
leaves = st.one_of(
    st.builds(Gaussian, st.one_of(st.just(0.0), positive)),
    st.builds(Laplace, positive),
    st.builds(events.DiscreteGaussian, positive, counts),
    st.builds(events.DiscreteLaplace, positive, counts),
    st.builds(events.RandomizedResponse, st.floats(0, 1), st.integers(2, 1000)),
    st.builds(events.Exponential, positive),
    st.builds(PureDP, positive),
    st.builds(ApproxDP, positive, st.floats(0, 0.99, allow_subnormal=False)),
    st.builds(events.ZCDP, positive),
    mixtures,
    st.just(events.NonPrivate()),
    st.builds(events.Unanalysed, st.text(max_size=20)),
)
all_events = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(Sampled, participations, inner),
        st.builds(Repeat, inner, st.integers(0, 10**6)),
        st.builds(Compose, st.lists(inner, max_size=4)),
        st.builds(events.OneOf, st.lists(inner, min_size=1, max_size=4)),
        st.builds(RepeatAndSelect, of=inner, mean=positive, shape=st.one_of(st.just(math.inf), st.floats(-0.5, 10))),
    ),
    max_leaves=6,
)


@given(all_events)
def test_json_round_trip_of_every_event(event):
    text = json.dumps(event.to_json(), allow_nan=False)
    assert Event.from_json(text) == event
    assert hash(Event.from_json(text)) == hash(event)
    assert isinstance(str(event), str)


def test_the_strategy_above_draws_every_event_and_participation():
    tested = {
        *("Gaussian Laplace DiscreteGaussian DiscreteLaplace RandomizedResponse Exponential PureDP ApproxDP ZCDP".split()),
        *("GaussianMixture NonPrivate Unanalysed Sampled Repeat Compose OneOf RepeatAndSelect".split()),
    }
    assert set(Event._classes) == tested
    assert set(Participation._classes) == set(
        "Poisson TruncatedPoisson FixedSize CyclicPoisson MinSep BallsInBins Once Everyone".split()
    )


@given(participations)
def test_json_round_trip_of_every_participation(participation):
    assert Participation.from_json(json.dumps(participation.to_json())) == participation


@given(leaves, st.integers(0, 50), st.integers(0, 50))
def test_repeats_are_never_nested(event, a, b):
    assert (event * a) * b == Repeat(event, a * b) or a * b == 1 or b == 1


@given(leaves, leaves, leaves)
def test_composition_is_associative(a, b, c):
    assert (a + b) + c == a + (b + c) == Compose([a, b, c])


def test_readable():
    run = Gaussian(1.1).sampled(rate=64 / 15_000) * 14_040 + Laplace(2) * 3
    assert str(run) == "14040 x Poisson(0.00426667) Gaussian(1.1) + 3 x Laplace(2)"
    assert str(Compose()) == "nothing"
    assert str(Relation.REPLACE_ONE) == "replace one"


def test_events_are_frozen_and_picklable_values():
    event = Gaussian(1.0)
    with pytest.raises(AttributeError):
        event.noise_multiplier = 2.0
    assert pickle.loads(pickle.dumps(event * 3)) == event * 3


@pytest.mark.parametrize(
    "data",
    [
        {"event": "Gausian", "noise_multiplier": 1.0},
        {"event": "Gaussian", "noise_multiplier": 1.0, "clip": 3},
        {"event": "Gaussian"},
        {"participation": "Poisson", "rate": 0.1},
        {"noise_multiplier": 1.0},
        {"event": 3},
        {"event": "Sampled", "how": {"event": "PureDP", "epsilon": 1.0}, "of": {"event": "PureDP", "epsilon": 1.0}},
        {"event": "Compose", "events": 5},
        {"event": "Value"},
        [],
        None,
        "not json",
        '{"event": "Gaussian", "noise_multiplier": NaN}',
        "[" * 100_000,
    ],
)
def test_what_is_not_understood_is_refused(data):
    with pytest.raises(ArgumentError):
        Event.from_json(data)


def test_a_deeply_nested_description_is_refused_not_crashed_on():
    data = {"event": "PureDP", "epsilon": 1.0}
    for _ in range(5000):
        data = {"event": "Sampled", "how": {"participation": "Once"}, "of": data}
    with pytest.raises(ArgumentError):
        Event.from_json(data)


NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("noise_multiplier", lambda: Gaussian(-1.0)),
        ("noise_multiplier", lambda: Gaussian(NAN)),
        ("noise_multiplier", lambda: Gaussian(math.inf)),
        ("noise_multiplier", lambda: Gaussian(True)),
        ("noise_multiplier", lambda: Gaussian("1")),
        ("rate", lambda: Gaussian(1.0).sampled(rate=1.5)),
        ("rate", lambda: Gaussian(1.0).sampled(rate=0.0)),
        ("rate", lambda: Gaussian(1.0).sampled(rate=NAN)),
        ("times", lambda: Gaussian(1.0) * -1),
        ("times", lambda: Gaussian(1.0) * 2.0),
        ("times", lambda: Gaussian(1.0) * True),
        ("delta", lambda: ApproxDP(1.0, 1.0)),
        ("delta", lambda: ApproxDP(1.0, -1e-9)),
        ("epsilon", lambda: PureDP(-0.1)),
        ("scale", lambda: Laplace(0.0)),
        ("size", lambda: FixedSize(dataset_size=10, size=11)),
        ("categories", lambda: events.RandomizedResponse(0.5, 1)),
        ("probabilities", lambda: GaussianMixture(noise_multiplier=1.0, sensitivities=(1.0,), probabilities=(0.5,))),
        ("probabilities", lambda: GaussianMixture(noise_multiplier=1.0, sensitivities=(), probabilities=())),
        ("mean", lambda: RepeatAndSelect(of=PureDP(1.0), mean=0.0)),
        ("shape", lambda: RepeatAndSelect(of=PureDP(1.0), mean=2.0, shape=-1.0)),
        ("relation", lambda: Relation.of("replace")),
        ("of", lambda: Repeat("Gaussian", 3)),
        ("times", lambda: Repeat(Repeat(PureDP(1.0), 2**40), 2**40)),
    ],
)
def test_bad_values_are_refused_by_name(name, make):
    with pytest.raises(ArgumentError, match=rf"Expected {name}="):
        make()


def test_a_misspelt_word_is_answered_with_the_right_one():
    with pytest.raises(ArgumentError, match="Did you mean 'Gaussian'"):
        Event.from_json({"event": "Gausian", "noise_multiplier": 1.0})


def test_equal_descriptions_in_a_list_are_read_once() -> None:
    kinds = [Gaussian(1.0).sampled(rate=0.01), Gaussian(2.0), Laplace(3.0)]
    long = Compose(kinds * 20_000)
    again = Event.from_json(long.to_json())
    assert again == long
    assert len({id(part) for part in again.events}) == 3


def test_equal_numbers_of_different_types_are_not_confused() -> None:
    """1 == True in Python: a list must not let the second pass because the first did."""
    good = {"event": "Repeat", "of": {"event": "NonPrivate"}, "times": 1}
    with pytest.raises(ArgumentError):
        Event.from_json({"event": "Compose", "events": [good, {**good, "times": True}]})


@pytest.mark.parametrize(
    "text", ['{"event": "PureDP", "epsilon": 9.0, "epsilon": 1.0}', "[" * 5000 + "]" * 5000, "[[1.1, 0.01, 5], [1.1, 0.01]]"]
)
def test_there_is_one_reader_of_json(text: str) -> None:
    """What names a thing twice is refused by every door, or one of them would answer for the other number."""
    for read in (Event.from_json, Event.read):
        with pytest.raises(ArgumentError, match="Expected"):
            read(text)
