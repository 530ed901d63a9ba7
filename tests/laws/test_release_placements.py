"""The laws of a step hold wherever the parameters lie: whole, replicated in several processes, or sharded over them."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch
from several_processes import run

sys.path.insert(0, str(Path(__file__).parents[2] / "faults"))
import worst

PROGRAM = Path(__file__).parents[1] / "stories" / "placements_program.py"
CASES = runpy.run_path(str(PROGRAM))["CASES"]
# The second group serves an accelerator only, as NCCL's does: what lies in main memory must find another way.
PLACES = {"sharded, alone": (True, 1, "gloo"), "replicated": (False, 2, "cuda:gloo"), "sharded": (True, 2, "gloo")}
ONE_PROCESS_ONLY = {"lazy"}
REFUSED = {"around": ("CaptureError", "NotIsolated"), "scaled": ("ArgumentError",)}  # the second one if sharded


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    (found,) = run(PROGRAM, tmp_path_factory.mktemp("whole"), 1, {"sharded": False}, group=False)
    return found


@pytest.fixture(scope="module", params=PLACES.values(), ids=list(PLACES))
def placed(request, tmp_path_factory):
    """What each process of this placement found, and nothing is run twice."""
    sharded, world, backend = request.param
    return run(PROGRAM, tmp_path_factory.mktemp("placed"), world, {"sharded": sharded, "backend": backend})


def _distance(a: list[float], b: list[float]) -> float:
    assert len(a) == len(b) > 0
    return float((torch.tensor(a, dtype=torch.float64) - torch.tensor(b, dtype=torch.float64)).abs().max())


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.contributes and name not in REFUSED])
def test_one_record_contributes_one_clip_norm(whole, placed, name):
    for found in (whole, *placed):
        assert found[name]["contributes"] == pytest.approx(CASES[name].contributes, abs=1e-4), found[name]


@pytest.mark.parametrize("name", [name for name in CASES if name not in REFUSED.keys() | ONE_PROCESS_ONLY])
def test_a_step_is_the_same_wherever_the_parameters_lie(whole, placed, name):
    expected, close = whole[name], CASES[name].close
    assert "refused" not in expected, expected
    norms = []
    for found in placed:
        assert "refused" not in found[name], found[name]
        assert _distance(found[name]["weights"], expected["weights"]) < close
        assert found[name]["clip"] == pytest.approx(expected["clip"], rel=1e-6)
        assert "average" not in expected or _distance(found[name]["average"], expected["average"]) < close
        norms += found[name]["norms"]
    if not CASES[name].users:  # a user's examples are all in one process, but users are dealt as they come
        assert sorted(norms) == pytest.approx(expected["norms"], rel=1e-4 if close < 1e-2 else 0.1)
    assert all(found[name]["weights"] == placed[0][name]["weights"] for found in placed)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_attributed_everywhere_is_exact_or_refused(whole, placed, name):
    assert "refused" not in whole[name]
    for found in placed:
        if "refused" in found[name]:
            assert found[name]["refused"].startswith(REFUSED[name])
            assert name != "scaled" or "sharded model's tensors" in found[name]["refused"]
        else:
            assert _distance(found[name]["weights"], whole[name]["weights"]) < CASES[name].close


@pytest.mark.parametrize("name", sorted(ONE_PROCESS_ONLY))
def test_what_needs_one_process_says_so(whole, placed, name):
    assert "refused" not in whole[name]
    for found in placed:
        assert "to be 1, without fully_shard" in found[name]["refused"]


def test_no_record_is_found_that_moves_the_sum_of_two_processes_by_more_than_the_clip_norm(tmp_path):
    """A few records on every path and in both modes; ``make worst`` tries more."""
    first, second = run(PROGRAM.with_name("worst_program.py"), tmp_path, 2, {"place": "replicated", "tries": 3})
    assert first == second
    for mode in first.values():
        strange = {name: found for name, found in mode.items() if isinstance(found, str) or not 0.9 < found <= worst.BOUND}
        assert not strange
