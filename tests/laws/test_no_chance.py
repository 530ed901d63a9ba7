"""Every test draws from entropy that its own name fixes (conftest.py at the root); a child made by fork does not."""

from __future__ import annotations

import ast
import os
import random
import secrets
from pathlib import Path

import numpy as np
import pytest
import torch

EXPECTED: dict[str, tuple] = {}


def drawn() -> tuple:
    return (
        secrets.token_bytes(8),
        secrets.randbelow(10**9),
        os.urandom(4),
        random.random(),
        np.random.rand(),
        float(torch.rand(())),
    )


IMPORTED = drawn()


@pytest.fixture(scope="module")
def shared() -> tuple:
    return drawn()


@pytest.mark.parametrize("turn", [1, 2])
def test_the_name_fixes_every_draw(turn, request, shared):
    found = drawn()
    if "HUSHGRAD_TEST_ENTROPY" in os.environ:
        pytest.skip("fresh entropy was asked for")
    import hashlib

    word = int.from_bytes(hashlib.sha256(f"\0{request.node.nodeid}".encode()).digest()[:4], "big")
    assert found[3] == random.Random(word).random() and found[5] == float(
        torch.rand((), generator=torch.Generator().manual_seed(word))
    )
    assert len({found, shared, IMPORTED, drawn()}) == 4
    EXPECTED[f"turn {turn}"] = shared
    assert len(set(EXPECTED.values())) == 1  # whichever test comes first


def test_a_forked_child_does_not_repeat_its_parents_draws():
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, secrets.token_bytes(16))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 16) != secrets.token_bytes(16)


def test_laws_are_searched_in_the_same_order_every_time():
    from hypothesis import settings

    assert settings().derandomize is ("HUSHGRAD_TEST_ENTROPY" not in os.environ) and settings().deadline is None


# What says how busy the machine is, and nothing about the program; tests/stories/patience.py has what to use instead.
CLOCKS = {"clock_gettime", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "process_time_ns"}
CLOCKS |= {"thread_time", "thread_time_ns", "ru_utime", "ru_stime"}
TESTS = Path(__file__).parents[1]
FILES = [file for file in sorted(TESTS.rglob("*.py")) if file.parent.name != "rigorous" and file.name != "patience.py"]


def _by_chance(text: str) -> list[str]:
    """What in a test depends on how long something takes: a clock that is read, and a limit that is none of ``HANGS``."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr in CLOCKS and isinstance(node.ctx, ast.Load):
            found.append(f"line {node.lineno}: {node.attr}")
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            limits = [word.value for word in node.keywords if word.arg == "timeout"]
            limits += node.args[name == "wait_for" :] if name in ("communicate", "wait", "wait_for") else []
            found += [f"line {node.lineno}: {name}({limit.value})" for limit in limits if isinstance(limit, ast.Constant)]
    return found


# Whose clock decides when they give up.
GIVE_UP = {"federated_deployment.py": ["monotonic", "monotonic", "wait"], "several_processes.py": ["monotonic"] * 3}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_verdict_depends_on_the_time_that_something_takes(file):
    found = _by_chance(file.read_text())
    assert sorted(line.split()[-1].partition("(")[0] for line in found) == GIVE_UP.get(file.name, []), found


@pytest.mark.parametrize(
    "line",
    ["assert time.process_time() - began < 1", "child.communicate(timeout=30)", "event.wait(60)", "run(words, timeout=100)"],
)
def test_a_clock_that_is_asked_and_a_limit_of_its_own_are_seen(line):
    assert _by_chance(line) and not _by_chance("child.communicate(timeout=HANGS); wait_until(path.exists); event.wait(HANGS)")
