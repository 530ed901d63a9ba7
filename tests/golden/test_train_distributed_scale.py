"""The cost model of docs/scale.md: its formulas by hand, and its comparison with figures made from the model itself."""

from __future__ import annotations

import runpy
from itertools import pairwise
from pathlib import Path

import pytest

MODEL = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "scale_model.py"))
MACHINE = MODEL["Machine"](flops=1e12, draws=1e9, memory=1e10, network=1e9, latency=0.0)
cost = MODEL["cost"]


def test_by_hand():
    """10^9 parameters on 4 processes, 1000 tokens each, BLT with 2 buffers."""
    ddp = cost(MACHINE, MODEL["blt"](2), parameters=1e9, ranks=4, tokens=1000, sharded=False)
    assert (ddp.compute, ddp.noise, ddp.state, ddp.optimizer) == pytest.approx((6.0, 0.25, 0.4, 2.8))
    assert ddp.received == pytest.approx(2 * 3 / 4 * 4e9) and ddp.network == pytest.approx(6.0)
    assert ddp.held == pytest.approx((4 + 2 / 4) * 4e9)
    fsdp = cost(MACHINE, MODEL["blt"](2), parameters=1e9, ranks=4, tokens=1000, sharded=True, unit=0.01)
    assert (fsdp.compute, fsdp.noise, fsdp.state, fsdp.optimizer) == pytest.approx((6.0, 0.25, 0.4, 0.7))
    assert fsdp.received == pytest.approx(3 * 3 / 4 * 4e9)
    assert fsdp.held == pytest.approx(6 * 4e9 / 4 + 4 * 0.01 * 4e9)


def test_the_rows_way_to_a_device():
    """10^9 numbers of 4 bytes over a link of 4 GB/s take a second; where they are drawn there, none."""
    options = {"parameters": 1e9, "ranks": 1, "tokens": 1000, "sharded": False}
    there, copied = (cost(MODEL["replace"](MACHINE, link=link), MODEL["SGD"], **options) for link in (float("inf"), 4e9))
    assert (there.copied, copied.copied) == (0.0, 1.0) and copied.seconds == there.seconds + 1


def test_state_of_mechanisms():
    """BLT reads and writes all its buffers; banded noise reads b - 1 rows and writes one."""
    assert [(n.state, n.traffic) for n in (MODEL["SGD"], MODEL["blt"](4), MODEL["banded"](64))] == [(0, 0), (4, 8), (63, 64)]


def test_sharding_makes_noise_and_memory_smaller_and_never_the_network():
    costs = [cost(MACHINE, MODEL["blt"](4), parameters=1e10, ranks=w, tokens=1e4, sharded=True) for w in (2, 8, 64, 4096)]
    assert all(a.noise > b.noise and a.state > b.state and a.held > b.held for a, b in pairwise(costs))
    assert all(a.received < b.received < 3 * 4e10 for a, b in pairwise(costs))
    assert costs[-1].private_share < 0.001 < costs[0].private_share


def _measured(shared_noise: bool = True):
    """Figures as the benchmark writes them, made from the model: 100 ms of passes, 10 ms of norms, noise of 20 and 40 ms."""
    rows = []
    part = {"independent": 0.02, "blt": 0.04}
    for parallel in ("ddp", "fsdp"):
        for world in (1, 2, 3):
            wire = 0.03 * 2 * (world - 1) / world
            divide = world if shared_noise else 1
            best = {"plain cpu": 0.1 + wire, **{f"{n} cpu": 0.11 + wire + t / divide for n, t in part.items()}}
            rows += [
                {
                    "parallel": parallel,
                    "noise": n,
                    "world": world,
                    **best,
                    "ratio": 1.0,
                    "noise part": part,
                }
                for n in part
            ]
    rows += [{"noise": "blt", "world": w, "peak": 30 + 70 / w + 2 * (w > 1), "parameter MB": 10, "unit MB": 1} for w in (1, 2, 3)]
    return rows


def test_predictions_are_right_where_the_model_is_true_and_wrong_where_it_is_not():
    found = MODEL["check"](_measured())
    assert len(found) == 8 + 2 and all(measured == pytest.approx(predicted) for _, _, measured, predicted in found)
    planted = MODEL["check"](_measured(shared_noise=False))  # a run that draws all noise in every process
    for style in ("ddp", "fsdp"):
        assert any(abs(predicted / measured - 1) > 0.05 for what, _, measured, predicted in planted if style in what)
