"""Random small modules are exact or refused; a defect in what tells the rows apart is found by them."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushgrad.clipping.proof import live, trials
from hushgrad.testing.modules import examine


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.integers(0, 1 << 30))
def test_a_random_module_is_exact_or_refused(number):
    verdict = examine(Random(number))
    assert verdict.word == ("refused" if verdict.mixes else "exact"), verdict.what


def test_a_planted_defect_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trials, "broken", lambda *_: None)  # nothing is sealed
    monkeypatch.setattr(live, "straight", lambda *_: True)  # and rows that are moved are believed to stay
    assert any(examine(Random(number)).word == "wrong" for number in (4, 26))
