"""What a plan prints as the name of a mechanism is Python for one of that kind: a reader pastes it."""

from __future__ import annotations

import pytest

from hushgrad import noise
from hushgrad.errors import ArgumentError
from hushgrad.events import MinSep
from hushgrad.noise.suggestions import Run, Suggestion
from hushgrad.train import Plan

_RUNS = (
    Run(steps=64, rate=0.01),
    Run(steps=64, rate=0.01, tune=True),
    Run(steps=64, participation=MinSep(gap=8, times=8), alone=True),
    Run(steps=64, rate=0.01, workload=noise.SGDWorkload(momentum=0.9)),
)
_KINDS = [kind for name in noise.__all__ if isinstance(kind := getattr(noise, name), type) and issubclass(kind, noise.Mechanism)]


def test_every_printed_name_is_python_for_that_mechanism():
    seen = set()
    for kind in _KINDS:
        for one in (one for run in _RUNS for one in kind.suggestions(run) if isinstance(one, Suggestion)):
            seen.add(one.name)
            if one.name == "DP-SGD":  # a method's name, and no word of Python
                continue
            meant, pasted = one.make(), eval(one.name, vars(noise))
            if isinstance(pasted, type):  # without settings: where an instance is wanted, the class is answered by name
                assert pasted is type(meant), one.name
                continue
            assert type(pasted) is type(meant), one.name
            for setting in ("bands", "buffers"):
                assert getattr(pasted, setting, None) == getattr(meant, setting, None), one.name
    assert {"DP-SGD", "Banded(2)", "Banded(32)", "BLT(2)", "BLT(4)", "Tree", "Toeplitz", "Nu"} <= seen


@pytest.mark.parametrize("kind", _KINDS, ids=lambda kind: kind.__name__)
def test_what_a_mechanism_prints_is_python_for_itself(kind):
    for one in kind.examples() if kind is not noise.Mechanism else ():
        assert eval(repr(one), vars(noise)) == one and eval(str(one), vars(noise)) == one


def test_a_class_where_a_mechanism_is_wanted_is_answered_with_what_to_write():
    with pytest.raises(ArgumentError, match=r"That is the class itself: give one of its kind, Nu\(\.\.\.\)"):
        Plan.dpftrl(epsilon=3.0, delta=1e-5, batch_size=10, dataset_size=100, epochs=3, noise=noise.Nu)
