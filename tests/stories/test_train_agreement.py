"""Several processes are given the same things, or all refuse; and what one of them finds is in the guarantee of each."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest
from several_processes import run

PROGRAM = Path(__file__).with_name("agreement_program.py")
BEGUN = {
    "nothing": "",
    "order": "the same data in",
    "data": "the same data in",
    "number": "the same data in",
    "code": "the same data in",
    "augmented": "",
    "unseeded": "Records of several processes",
    "groups": "the same groups in",
    "groups or none": "groups=None",
    "clip norm": "the same plan.clip in",
    "batch": "the same plan.batch_size",
    "noise": "the same plan.noise_multiplier in",
    "steps": "the same plan.steps",
    "options": "the same unused in",
    "model": "the same model in",
    "lr": "the same optimizer in",
}
NOTES = {"nothing": "", "loss": "The loss is vouched for", "optimizer": "Another optimizer"}
TAKEN = [*NOTES, "data", "foreign", "late"]


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    return run(PROGRAM, tmp_path_factory.mktemp("agreement"), 2, {"begun": [*BEGUN], "taken": TAKEN})


@pytest.mark.parametrize("what", BEGUN)
def test_processes_that_are_given_different_things_refuse_together(together, what):
    said = [found["begun"][what] for found in together]
    if not BEGUN[what]:
        assert said == ["", ""]
    else:
        assert said[0] == said[1] and BEGUN[what] in said[0]


@pytest.mark.parametrize("what", TAKEN)
def test_what_one_process_finds_is_in_the_guarantee_of_each(together, what):
    found = [results["taken"][what] for results in together]
    if what in NOTES:
        assert all(0 < epsilon < inf for epsilon, _ in found) and found[0] == found[1]
        assert [note for note in found[0][1] if note.startswith(NOTES[what])] == found[0][1]
        assert bool(found[0][1]) == (what != "nothing")
    else:
        assert [epsilon for epsilon, _ in found] == [inf, inf]
