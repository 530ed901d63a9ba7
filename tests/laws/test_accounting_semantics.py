"""What an event says about absent records and about names decides which theorem covers a sample; the truth is enumerated."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Hashable
from functools import cache

import pytest

from hushgrad.accounting import epsilon, epsilon_interval
from hushgrad.errors import ArgumentError, NoTheorem
from hushgrad.events import (
    ZCDP,
    Absent,
    Answers,
    ApproxDP,
    BallsInBins,
    CyclicPoisson,
    Event,
    Everyone,
    Exponential,
    FixedSize,
    Gaussian,
    MinSep,
    Once,
    Participation,
    Poisson,
    PureDP,
    RandomizedResponse,
    Relation,
    Sampled,
)

Law = dict[Hashable, float]
DELTAS = (0.2, 0.05, 1e-3, 1e-6)


def _subsets(how: Participation, n: int) -> list[tuple[tuple[int, ...], float]]:
    """Every sample of n records with its probability."""
    if isinstance(how, FixedSize):
        chosen = list(itertools.combinations(range(n), how.size))
        return [(sample, 1 / len(chosen)) for sample in chosen]
    assert isinstance(how, Poisson)
    every = itertools.chain.from_iterable(itertools.combinations(range(n), k) for k in range(n + 1))
    return [(sample, how.rate ** len(sample) * (1 - how.rate) ** (n - len(sample))) for sample in every]


def _responses(data: tuple[int, ...], how: Participation, p: float, k: int, *, named: bool) -> Law:
    """The law of all answers of a sample: beside the records' names, or sorted."""
    law: Law = {}
    for sample, weight in _subsets(how, len(data)):
        for answers in itertools.product(range(k), repeat=len(sample)):
            mass = weight * math.prod((1 - p) * (data[i] == a) + p / k for i, a in zip(sample, answers, strict=True))
            output = tuple(zip(sample, answers, strict=True)) if named else tuple(sorted(answers))
            law[output] = law.get(output, 0.0) + mass
    return law


def _excess(p: Law, q: Law, e: float) -> float:
    return sum(max(0.0, mass - math.exp(e) * q.get(output, 0.0)) for output, mass in p.items())


def _epsilon(p: Law, q: Law, delta: float) -> float:
    low, high = 0.0, 60.0
    if _excess(p, q, 0.0) <= delta:
        return 0.0
    for _ in range(70):
        middle = (low + high) / 2
        low, high = (middle, high) if _excess(p, q, middle) > delta else (low, middle)
    return high


def _worst(law_of: Callable[[tuple[int, ...]], Law], n: int, k: int, delta: float) -> float:
    """Over all data sets and all replacements of one record; a pair within the largest so far is not searched."""
    laws, worst = cache(law_of), 0.0
    for rest in itertools.product(range(k), repeat=n - 1):
        for x, y in itertools.permutations(range(k), 2):
            p, q = laws((x, *rest)), laws((y, *rest))
            if _excess(p, q, worst) > delta:
                worst = max(worst, _epsilon(p, q, delta))
    return worst


@cache
def _truth(how: Participation, n: int, p: float, k: int, delta: float, *, named: bool) -> float:
    """The same for every relation, and however the event says that its answers are known."""
    return _worst(lambda data: _responses(data, how, p, k, named=named), n, k, delta)


SAMPLES: list[tuple[Participation, int]] = [
    (Poisson(0.01), 1),
    (Poisson(0.3), 2),
    (FixedSize(dataset_size=3, size=1), 3),
    (FixedSize(dataset_size=3, size=2), 3),
    (FixedSize(dataset_size=4, size=2), 4),
]


@pytest.mark.parametrize("relation", ["replace_one", "zero_out"])
@pytest.mark.parametrize(("how", "n"), SAMPLES)
@pytest.mark.parametrize(("p", "k"), [(0.1, 2), (0.5, 2), (0.3, 3)])
@pytest.mark.parametrize("answers", list(Answers))
def test_sampled_responses_against_all_data_sets(
    answers: Answers, p: float, k: int, how: Participation, n: int, relation: str
) -> None:
    event = Sampled(how, RandomizedResponse(p, k, answers=answers))
    for delta in DELTAS:
        named, counted = (_truth(how, n, p, k, delta, named=named) for named in (True, False))
        low, high = epsilon_interval(event, delta=delta, relation=relation)
        if answers is Answers.ANONYMOUS:
            named = counted
        assert high >= named * (1 - 1e-9)
        smallest = named if answers is Answers.NAMED else counted
        if relation == "replace_one" or answers is not Answers.ANONYMOUS:
            assert low <= smallest * (1 + 1e-9) or isinstance(how, Poisson)  # Poisson: attained by one record
        if answers is Answers.NAMED:
            assert high == pytest.approx(low, rel=1e-6)
            assert high == pytest.approx(named, rel=1e-6)
        for accountant in ("rdp", "basic", "advanced", "optimal"):
            assert epsilon(event, delta=delta, relation=relation, accountant=accountant) >= high * (1 - 1e-9)


@pytest.mark.parametrize("rate", [0.01, 0.4])
@pytest.mark.parametrize("pure", [0.5, 2.0])
def test_a_mechanism_that_counts_its_records_is_not_amplified(rate: float, pure: float) -> None:
    """It prints how many records it was given and a randomised bit of the one: pure-DP when a record is replaced or zeroed."""
    truth = math.exp(pure) / (1 + math.exp(pure))
    present: Law = {(): 1 - rate, (1, 1): rate * truth, (1, 0): rate * (1 - truth)}
    null: Law = {(): 1 - rate, (1, 1): rate * (1 - truth), (1, 0): rate * truth}
    for delta in DELTAS:
        attained = _epsilon(present, null, delta)
        for relation in ("zero_out", "replace_one"):
            for event in (PureDP(pure), ApproxDP(pure, 0.0)):
                for accountant in ("pld", "rdp", "basic", "optimal", "advanced"):
                    said = epsilon(event.sampled(rate=rate), delta=delta, relation=relation, accountant=accountant)
                    assert said >= attained * (1 - 1e-9)
        assert epsilon(PureDP(pure).sampled(rate=rate), delta=delta, relation="zero_out") == pytest.approx(attained, rel=1e-6)


@pytest.mark.parametrize("event", [PureDP(1.0), ApproxDP(1.0, 1e-9), Exponential(1.0), ZCDP(0.5)])
def test_a_word_about_absent_records_buys_the_amplification(event: Event) -> None:
    accountant = "rdp" if isinstance(event, ZCDP) else "pld"
    said = type(event)(**{**{f: getattr(event, f) for f in event.__dataclass_fields__}, "absent": "nothing"})  # type: ignore[attr-defined]
    assert said.absent is Absent.NOTHING and event.absent is Absent.UNKNOWN
    costs = [epsilon(e.sampled(rate=0.05), delta=1e-6, relation="zero_out", accountant=accountant) for e in (event, said)]
    added = epsilon(event.sampled(rate=0.05), delta=1e-6, relation="add_remove", accountant=accountant)
    assert costs[1] == pytest.approx(added, rel=1e-12) and costs[1] < 0.6 * costs[0]


def test_old_files_read_the_same() -> None:
    for event in (PureDP(2.0), ApproxDP(1.0, 1e-6), ZCDP(0.1), Exponential(1.0), RandomizedResponse(0.1)):
        old = event.to_json()
        assert "absent" not in old and "answers" not in old
        assert Event.from_json(json.dumps(old)) == event
    said = RandomizedResponse(0.1, answers=Answers.NAMED)
    assert said.to_json()["answers"] == "named" and Event.from_json(said.to_json()) == said
    assert (
        str(said) == "RandomizedResponse(0.1, 2, answers=named)" and str(RandomizedResponse(0.1)) == "RandomizedResponse(0.1, 2)"
    )
    with pytest.raises(ArgumentError, match="absent"):
        Event.from_json({"event": "PureDP", "epsilon": 1.0, "absent": "gone"})


def test_what_no_theorem_covers_is_refused_with_a_remedy() -> None:
    for event, relation in [
        (RandomizedResponse(0.5).sampled(rate=0.1), Relation.ADD_REMOVE),
        (Sampled(FixedSize(dataset_size=9, size=3), Gaussian(1.0)), Relation.ADD_REMOVE),
        ((PureDP(1.0) * 3).sampled(rate=0.1), Relation.ADD_REMOVE),
    ]:
        with pytest.raises(NoTheorem, match=r"Ask|Sample"):
            epsilon(event, delta=1e-6, relation=relation)


@pytest.mark.parametrize("pure, size", [(1.0, 1), (0.3, 2), (2.0, 3)])
@pytest.mark.parametrize("accountant", ["pld", "rdp", "basic", "advanced", "optimal"])
@pytest.mark.parametrize("kind", [PureDP, Exponential, lambda e, absent: ApproxDP(e, 1e-12, absent=absent)])
def test_a_guarantee_that_is_stated_for_zero_out_is_not_used_for_replace_one(
    kind: Callable[..., Event], accountant: str, pure: float, size: int
) -> None:
    """One answer may be e^eps likelier with the record than with its null, and e^-eps as likely with another in its place."""
    g = size / 4
    with_record, with_null = ((1 - g) * math.exp(-pure) + g * odds for odds in (math.exp(pure), 1.0))
    event = Sampled(FixedSize(dataset_size=4, size=size), kind(pure, absent="nothing"))
    found = epsilon(event, delta=1e-12, relation="zero_out", accountant=accountant)
    assert math.log(with_record / with_null) <= found + 1e-6
    if accountant == "pld":
        assert epsilon_interval(event, delta=1e-12, relation="zero_out")[0] <= math.log(with_record / with_null)


@pytest.mark.parametrize("how", [Poisson(0.5), FixedSize(dataset_size=10, size=2), BallsInBins(bins=3)])
@pytest.mark.parametrize("accountant", ["pld", "rdp", "basic"])
def test_a_sample_inside_a_sample_counts_the_records_that_it_is_given(how: Participation, accountant: str) -> None:
    inner = Sampled(FixedSize(dataset_size=10, size=2), Gaussian(1.0))
    for of in (inner, inner * 3, inner + Gaussian(1.0), Sampled(Everyone(), inner)):
        with pytest.raises(NoTheorem):
            epsilon(Sampled(how, of), delta=1e-5, relation="replace_one", accountant=accountant)
    nested = Sampled(FixedSize(dataset_size=20, size=10), inner)
    assert 0 < epsilon(nested, delta=1e-5, relation="replace_one", accountant="rdp") < math.inf


def _twice(data: tuple[int, ...], how: Participation, p: float, k: int, step_of: Callable[[int], tuple[int, ...]]) -> Law:
    """The law of two steps on one sample: in each, those who meet it answer, and the answers are shown without names."""
    law: Law = {}
    for sample, weight in _subsets(how, len(data)):
        slots = [(step, i) for i in sample for step in step_of(i)]
        for answers in itertools.product(range(k), repeat=len(slots)):
            mass = weight * math.prod((1 - p) * (data[i] == a) + p / k for (_, i), a in zip(slots, answers, strict=True))
            named = sorted((slot, a) for slot, a in zip(slots, answers, strict=True))
            law[tuple(named)] = law.get(tuple(named), 0.0) + mass
    return law


def _unnamed(law: Law) -> Law:
    found: Law = {}
    for output, mass in law.items():
        key = tuple(sorted((step, a) for (step, _), a in output))  # type: ignore[attr-defined]
        found[key] = found.get(key, 0.0) + mass
    return found


@pytest.mark.parametrize("relation", ["replace_one", "zero_out"])
@pytest.mark.parametrize("how", [FixedSize(dataset_size=3, size=1), FixedSize(dataset_size=3, size=2), Poisson(0.3)])
@pytest.mark.parametrize("answers", [Answers.NAMED, Answers.UNKNOWN])
def test_what_is_made_of_named_answers_is_named(answers: Answers, how: Participation, relation: str) -> None:
    """A composition, a repetition or a sample of answers beside names is one too: no sample hides who was asked."""
    of = RandomizedResponse(0.2, 2, answers=answers)
    made = [of * 2, of + of, Sampled(Everyone(), of) * 2, of + RandomizedResponse(0.2, 2, answers=Answers.ANONYMOUS)]
    for delta in DELTAS:
        truth = _worst(lambda data: _twice(data, how, 0.2, 2, lambda _: (0, 1)), 3, 2, delta)
        for event in made:
            assert event.answers is answers
            for accountant in ("pld", "rdp", "basic", "optimal", "advanced"):
                assert _said(Sampled(how, event), delta, relation, accountant) >= truth * (1 - 1e-9)
        once = _worst(lambda data: _responses(data, how, 0.2, 2, named=True), 3, 2, delta)
        for event in (Sampled(Poisson(0.999999), of), Sampled(FixedSize(dataset_size=2, size=1), of)):
            assert event.answers is answers
        for accountant in ("rdp", "basic", "optimal", "advanced"):
            said = _said(Sampled(how, Sampled(Poisson(0.999999), of)), delta, relation, accountant)
            assert said >= once * (1 - 1e-3)


@pytest.mark.parametrize("place", [Once(), MinSep(gap=1, times=1), CyclicPoisson(period=2, rate=1.0)])
def test_a_place_by_who_one_is_is_a_name(place: Participation) -> None:
    """The first record alone meets the first step, so an answer there tells that it was drawn."""
    event = Sampled(place, RandomizedResponse(0.2, 2, answers=Answers.ANONYMOUS))
    for how in (FixedSize(dataset_size=3, size=1), FixedSize(dataset_size=3, size=2)):
        for delta in DELTAS:
            truth = _worst(lambda data, how=how: _unnamed(_twice(data, how, 0.2, 2, lambda i: (min(i, 1),))), 3, 2, delta)  # type: ignore[misc]
            for accountant in ("pld", "rdp", "basic", "optimal", "advanced"):
                assert _said(Sampled(how, event), delta, "replace_one", accountant) >= truth * (1 - 1e-9)


def _said(event: Event, delta: float, relation: str, accountant: str) -> float:
    try:
        return epsilon(event, delta=delta, relation=relation, accountant=accountant)
    except NoTheorem:
        return math.inf
