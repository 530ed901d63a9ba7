"""Every test draws from entropy that its own name fixes (conftest.py at the root); a child made by fork does not."""

from __future__ import annotations

import os
import random
import secrets

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
