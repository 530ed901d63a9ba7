"""Guarantees and ledgers: honest sentences, group privacy, nothing lost and nothing counted twice."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushgrad.accounting import epsilon, for_group
from hushgrad.errors import ArgumentError, NoTheorem
from hushgrad.events import ZCDP, Compose, FixedSize, Gaussian, Laplace, PureDP, Relation, Repeat, Sampled, Unanalysed
from hushgrad.guarantee import Entry, Guarantee, Ledger, questions


def guarantee(epsilon=1.0, delta=1e-5, **fields):
    return Guarantee(epsilon=epsilon, delta=delta, accountant="pld", event=Gaussian(1.0), **fields)


@given(st.floats(1e-6, 1e6))
def test_the_printed_epsilon_is_never_below_the_true_one(epsilon):
    printed = float(re.match(r"\(([^,]+),", str(guarantee(epsilon))).group(1))
    assert printed >= epsilon * (1 - 1e-9)
    assert printed <= epsilon * 1.0011 + 1


@given(st.floats(0, 1), st.floats(0, 1))
def test_the_printed_delta_is_never_below_the_true_one(epsilon, delta):
    epsilon_printed, delta_printed = re.match(r"\(([^,]+), ([^)]+)\)", str(guarantee(epsilon, delta))).groups()
    assert float(epsilon_printed) >= epsilon * (1 - 1e-9)
    assert delta * (1 - 1e-9) <= float(delta_printed) <= delta * (1 + 2e-5) + 1e-290
    assert "1e-05)" in str(guarantee()) and "1.42858e-05)" in str(guarantee(delta=1 / 70_000))


def test_one_honest_sentence():
    text = str(guarantee(3.00001, relation=Relation.REPLACE_ONE, unit="user", notes=("Reproducible: not private.",)))
    assert text == "(3.001, 1e-05)-DP per user (replace one; pld accountant) for Gaussian(1). Reproducible: not private."
    assert str(guarantee(math.inf)).startswith("No privacy guarantee")


@given(st.floats(0, 50), st.floats(0, 1), st.integers(1, 1000))
def test_group_privacy_is_the_theorem_and_never_overflows(epsilon, delta, k):
    group = guarantee(epsilon, delta).for_group(k)
    assert group.epsilon == pytest.approx(k * epsilon)
    assert delta <= group.delta <= 1 or group.delta == pytest.approx(delta)
    if k * epsilon < 500 and epsilon > 1e-3:
        expected = min(1.0, delta * math.expm1(k * epsilon) / math.expm1(epsilon))
        assert group.delta == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("delta", [0.0, 5e-324, 1e-310, 3e-300, 1e-6, 0.01])
def test_a_group_is_never_promised_more_than_holds(delta):
    mp.mp.dps = 60
    for k in (2, 3, 5, 11, 10**6):
        for one in (0.0, 1e-12, 1e-3, 0.1, 0.3, 0.7, 1.0, 1.1, 17.3):
            group = guarantee(one, delta).for_group(k)
            assert Fraction(group.epsilon) >= k * Fraction(one)
            growth = mp.expm1(k * mp.mpf(one)) / mp.expm1(mp.mpf(one)) if one else k
            exact = min(1, mp.mpf(delta) * growth)
            assert exact <= group.delta <= max(exact * (1 + mp.mpf(2e-12)), sys.float_info.min) and (delta or not group.delta)
    assert Fraction(for_group(PureDP(0.7), 3).epsilon) >= 3 * Fraction(0.7) and for_group(ZCDP(0.7), 3).rho >= 9 * Fraction(0.7)
    assert all(3 * Fraction(for_group(Gaussian(s), 3).noise_multiplier) <= Fraction(s) for s in (1.1, 0.7, 2.0, 5.0))


def test_a_group_changes_no_number_that_a_sample_counts_on():
    sampled = Sampled(FixedSize(dataset_size=10, size=3), Gaussian(1.0))
    one = Guarantee(epsilon=1.0, delta=1e-5, accountant="pld", event=sampled)
    with pytest.raises(NoTheorem, match="public number of records"):
        one.for_group(2)
    assert replace(one, relation="replace_one").for_group(2).epsilon == 2.0


@pytest.mark.parametrize(
    ("claim", "records", "asked"),
    [
        ((20.0, 0.999e-3), None, ()),
        ((20.1, None), None, ("An epsilon of 20.1 promises",)),
        ((math.inf, 0.0), None, ("An infinite epsilon promises",)),
        ((None, 1e-3), None, ("A delta of 0.001 .* 1 / the number of records",)),
        ((None, 1e-3), 10, ("A delta of 0.001 .* 1 / 10 records",)),
        ((None, 0.5e-3), 2000, ("1 / 2000 records",)),
        ((None, 0.499e-3), 2000, ()),
        ((None, 1.0), 2000, ()),
        ((None, None), 2000, ()),
        ((21.0, 0.5), None, ("An epsilon of 21 ", "A delta of 0.5 ")),
    ],
)
def test_what_a_reader_should_ask(claim, records, asked):
    found = questions(*claim, records=records)
    assert len(found) == len(asked) and all(map(re.search, asked, found))


def test_a_group_of_one_changes_nothing():
    g = guarantee(2.0)
    assert g.for_group(1) == g
    with pytest.raises(ArgumentError, match="size"):
        g.for_group(0)


@given(st.floats(0, 1e9) | st.just(math.inf), st.floats(0, 1), st.sampled_from(list(Relation)))
def test_guarantee_json_round_trip(epsilon, delta, relation):
    g = guarantee(epsilon, delta, relation=relation, unit="user", notes=("a", "b"))
    assert Guarantee.from_json(json.dumps(g.to_json(), allow_nan=False)) == g


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("epsilon", {"epsilon": -1.0}),
        ("epsilon", {"epsilon": float("nan")}),
        ("epsilon", {"epsilon": True}),
        ("delta", {"delta": 1.5}),
        ("delta", {"delta": float("nan")}),
        ("relation", {"relation": "swap"}),
        ("notes", {"notes": "one sentence"}),
        ("notes", {"notes": (1,)}),
        ("unit", {"unit": 3}),
        ("event", {"event": "Gaussian(1)"}),
        ("accountant", {"accountant": None}),
    ],
)
def test_a_guarantee_that_makes_no_sense_is_refused(name, fields):
    with pytest.raises(ArgumentError, match=f"Expected {name}="):
        replace(guarantee(), **fields)
    assert guarantee(notes=["a"]).notes == ("a",)


steps = st.sampled_from([Gaussian(1.0), Gaussian(2.0), Laplace(3.0)])


@given(st.lists(st.tuples(steps, st.integers(1, 5), st.sampled_from(["", "", "run-a", "run-b"])), max_size=12))
def test_a_ledger_keeps_every_step_and_survives_json(lines):
    ledger = Ledger()
    for event, times, stream in lines:
        ledger.record(event, times=times, stream=stream)
    assert ledger.steps == sum(times for _, times, _ in lines)
    again = Ledger.from_json(json.dumps(ledger.to_json()))
    assert again == ledger
    assert again.event() == ledger.event()


def test_equal_steps_share_one_line_and_streams_are_charged_once():
    ledger = Ledger()
    for _ in range(100):
        ledger.record(Gaussian(5.0))
    for _ in range(10):
        ledger.record(Gaussian(0.7), stream="run-a")
    ledger.record(Gaussian(5.0))
    ledger.record(Gaussian(0.7), stream="run-a")  # the same run goes on
    ledger.record(Gaussian(0.7), stream="run-b")  # another run of the same mechanism is another charge
    assert len(ledger) == 5
    assert ledger.event() == Compose([Gaussian(5.0) * 100, Gaussian(0.7), Gaussian(5.0), Gaussian(0.7)])


def test_a_ledger_is_its_lines():
    ledger, other = Ledger(), Ledger()
    ledger.record(Gaussian(1.0), stream="a run")
    assert (ledger == other, ledger == list(ledger), ledger == 3) == (False, False, False)
    assert list(ledger) == [Entry(Gaussian(1.0), 1, "a run", "", "", 0)] == [Entry(Gaussian(1.0), stream="a run")]
    twice = ledger + ledger
    assert [entry.part for entry in twice] == [0, 1]
    twice.record(Gaussian(1.0), stream="a run")  # goes on in the latest part
    assert [(entry.part, entry.times) for entry in twice] == [(0, 1), (1, 2)]
    for run, times in (("one", 2), ("two", 3)):  # the same steps in the next phase
        other.record(Gaussian(2.0), times=times, run=run)
    assert len(other) == 2 and other.event() == Gaussian(2.0) * 5


def test_counts_of_numpy_can_be_written():
    ledger = Ledger()
    ledger.record(Gaussian(1.0), times=np.int64(3))
    ledger.record(Gaussian(1.0), times=np.int32(2))
    assert Ledger.from_json(json.dumps(ledger.to_json())) == ledger and ledger.steps == 5


def test_ledgers_add_up():
    with pytest.raises(TypeError, match="unsupported operand"):
        Ledger() + 3
    a, b = Ledger(), Ledger()
    a.record(Gaussian(1.0), times=3)
    b.record(Gaussian(1.0), times=4)
    b.record(Unanalysed("a foreign batch"))
    total = a + b
    assert total.steps == 8
    assert len(total) == 2
    assert (a.steps, b.steps) == (3, 5)


@pytest.mark.parametrize(
    "data",
    ["", "[]", {"ledger": 2, "entries": []}, {"entries": []}, {"ledger": 1, "entries": [{"statement": "Entry"}]}, None],
)
def test_a_damaged_ledger_is_refused(data):
    with pytest.raises(ArgumentError):
        Ledger.from_json(data)


def test_a_ledger_entry_is_checked():
    ledger = Ledger()
    with pytest.raises(ArgumentError, match="times"):
        ledger.record(PureDP(1.0), times=0)
    with pytest.raises(ArgumentError, match="event"):
        ledger.record("PureDP")
    assert len(ledger) == 0


# Sums of ledgers ------------------------------------------------------------------------------------------------------------

lines = st.tuples(steps, st.integers(1, 3), st.sampled_from(["", "", "search", "run-a"]), st.sampled_from(["", "one", "two"]))


def _ledger(content):
    ledger = Ledger()
    for event, times, stream, run in content:
        ledger.record(event, times=times, stream=stream, run=run, content="x" if run else "")
    return ledger


def _charges(event):
    """How often each event is charged."""
    if isinstance(event, Compose):
        return sum((_charges(part) for part in event.events), Counter())
    return Counter({event.of: event.times}) if isinstance(event, Repeat) else Counter({event: 1})


@given(st.lists(st.lists(lines, max_size=8), min_size=3, max_size=3))
def test_a_sum_of_ledgers_never_drops_a_charge(contents):
    a, b, c = map(_ledger, contents)
    assert _charges((a + b).event()) == _charges(a.event()) + _charges(b.event())
    assert (a + b) + c == a + (b + c) and Ledger() + a == a == a + Ledger()
    assert (a + b).steps == a.steps + b.steps
    again = Ledger.from_json(json.dumps((a + b).to_json()))
    assert again == a + b and again.event() == (a + b).event()


@pytest.mark.parametrize(
    "wrong",
    [{"event": 1.0}, {"times": 0}, {"times": 1.5}, {"stream": 1}, {"run": b"a"}, {"content": 7}, {"part": -1}, {"part": 0.5}],
)
def test_an_entry_of_another_type_is_refused(wrong):
    with pytest.raises(ArgumentError):
        Entry(**({"event": Gaussian(1.0)} | wrong))


def test_a_run_that_goes_on_after_a_sum_of_ledgers_is_charged_once():
    first, second = _ledger([(Gaussian(1.0), 5, "a run", "")]), _ledger([(Gaussian(2.0), 3, "another", "")])
    whole = first + second
    expected = epsilon(whole.event(), delta=1e-5)
    for stream, event in (("a run", Gaussian(1.0)), ("another", Gaussian(2.0))):
        whole.record(event, stream=stream)
        assert epsilon(whole.event(), delta=1e-5) == expected


def test_the_same_stream_name_in_two_ledgers_is_two_charges():
    ledgers = [_ledger([(Gaussian(1.0), 5, "search", "")]) for _ in range(2)]
    assert epsilon((ledgers[0] + ledgers[1]).event(), delta=1e-5) == epsilon(Gaussian(1.0) * 2, delta=1e-5)


@settings(max_examples=15, deadline=None)
@given(st.lists(lines, min_size=1, max_size=5), st.lists(lines, max_size=5), st.booleans())
def test_two_contents_of_one_run_are_infinite(first, second, swapped):
    a, b = _ledger(first), _ledger(second)
    a.record(Gaussian(9.0), run="forked", content="x")
    b.record(Gaussian(9.0), run="forked", content="y")
    assert math.isinf(epsilon((b + a if swapped else a + b).event(), delta=1e-5))
    assert math.isfinite(epsilon((a + a).event(), delta=1e-5))
