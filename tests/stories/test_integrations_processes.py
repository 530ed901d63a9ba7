"""Trainer and Lightning under several processes: the weights of one."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from several_processes import USUAL, run

NEEDED = {"transformers": "hf", "peft": "hf", "lightning": "lightning"}
if missing := [
    f"{name} is not installed: pip install 'hushgrad[{extra}]'" for name, extra in NEEDED.items() if not find_spec(name)
]:
    pytest.skip("; ".join(missing), allow_module_level=True)
IMPORTS = (
    *USUAL,
    "hushgrad.integrations.huggingface",
    "hushgrad.integrations.lightning",
    "peft",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
)

PROGRAM = Path(__file__).with_name("integrations_program.py")


@cache
def _alone(which: tuple[str, ...], **options: bool) -> dict[str, Any]:
    """One process, nothing sharded: tests that compare with the same run look at one."""
    with TemporaryDirectory() as folder:
        asked = {**options, "which": list(which), "sharded": False}
        (found,) = run(PROGRAM, Path(folder), 1, asked, imports=IMPORTS, group=False)
    return found


def _same_as_alone(
    tmp_path: Path, world: int, *, sharded: bool, which: list[str], **options: bool
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    alone = _alone(tuple(which), **options)
    together = run(PROGRAM, tmp_path, world, {**options, "which": which, "sharded": sharded}, imports=IMPORTS)
    for name in which:
        for found in together:
            assert found[name]["steps"] == alone[name]["steps"] and found[name]["spent"] == alone[name]["spent"]
            distance = torch.tensor(found[name]["weights"]) - torch.tensor(alone[name]["weights"])
            assert float(distance.abs().max()) < 1e-6
            assert found[name]["weights"] == together[0][name]["weights"]
    return alone, together


def test_two_processes_give_the_weights_of_one(tmp_path):
    _same_as_alone(tmp_path, 2, sharded=False, which=["trainer", "lora", "lightning", "lightning, sharded"])


@pytest.mark.slow
def test_three_processes_give_the_weights_of_one(tmp_path):
    _same_as_alone(tmp_path, 3, sharded=False, which=["trainer", "lora", "lightning", "lightning, sharded"])


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_model_that_was_sharded_before_gives_the_weights_of_one_process(tmp_path, world):
    _same_as_alone(tmp_path, world, sharded=True, which=["trainer", "lora"])


@pytest.mark.parametrize("sharded", [False, True], ids=["data-parallel", "sharded"])
def test_a_process_without_an_example_passes_rows_that_do_not_count(tmp_path, sharded):
    """Neither GPT-2 nor Llama reads a batch without a row. Trainer's loss is the mean over all examples, whoever has them."""
    which = ["trainer", "lora", "llama", "loop", "llama, loop"]
    alone, together = _same_as_alone(tmp_path, 2, sharded=sharded, which=which, rare=True)
    for name in which:
        shares = list(zip(*(found[name]["counts"] for found in together), strict=True))
        assert [sum(share) for share in shares] == alone[name]["counts"] and 0 in alone[name]["counts"]
        assert any(min(share) == 0 < max(share) for share in shares)
    for name in which[:3]:
        assert together[0][name]["losses"] == pytest.approx(alone[name]["losses"], abs=2e-4)  # they are logged with four digits


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["data-parallel", "sharded"])
def test_a_run_that_moves_from_2_to_1_to_2_processes_gives_the_weights_of_one_that_does_not(tmp_path, sharded):
    """Adapters and all weights, with Trainer; every run goes on where the one before it was ended."""
    which = ["trainer", "lora"]
    (alone,) = run(PROGRAM, tmp_path, 1, {"which": which, "sharded": False}, imports=IMPORTS, group=False)
    for world, stop in ((2, 2), (1, 3), (2, 100)):
        options = {"which": which, "sharded": sharded, "folder": str(tmp_path / "runs"), "stop": stop}
        moved = run(PROGRAM, tmp_path, world, options, imports=IMPORTS)
        assert all(found[name]["steps"] == min(stop, alone[name]["steps"]) for found in moved for name in which)
    for name in which:
        assert moved[0][name]["weights"] == moved[1][name]["weights"] and moved[0][name]["spent"] == alone[name]["spent"]
        distance = torch.tensor(moved[0][name]["weights"]) - torch.tensor(alone[name]["weights"])
        assert float(distance.abs().max()) < 1e-6
