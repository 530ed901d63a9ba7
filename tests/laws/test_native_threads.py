"""Threads: each job is done once, on whatever threads there are, and what goes wrong in one of them is raised."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from patience import HANGS

from hushgrad.native import threads as native_threads
from hushgrad.noise import Source

WAYS = ["torch's threads", "threads of its own"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The threads of torch's OpenMP, where it has them under this name, or a pool."""
    if request.param == WAYS[1]:
        monkeypatch.setattr(native_threads, "_parallel", lambda: None)
    elif native_threads._parallel() is None:
        pytest.skip("torch has no OpenMP of this name here")
    return str(request.param)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_every_job_is_done_once(way: str, threads: int, count: int) -> None:
    done: list[int] = []
    native_threads.in_turns(range(count), done.append, threads)
    assert sorted(done) == list(range(count))


def test_the_work_is_shared(way: str) -> None:
    seen: set[int] = set()
    both = threading.Barrier(2)

    def work(_: int) -> None:
        both.wait(timeout=HANGS)  # nobody passes alone
        seen.add(threading.get_ident())

    native_threads.in_turns(range(2), work, 2)
    assert len(seen) == 2


@pytest.mark.parametrize("error", [ValueError("bad job"), KeyboardInterrupt()])
@pytest.mark.parametrize("threads", [1, 2])
def test_what_goes_wrong_is_raised_and_the_rest_is_left(way: str, threads: int, error: BaseException) -> None:
    done: list[int] = []

    def work(job: int) -> None:
        if job == 3:
            raise error
        time.sleep(0.001)
        done.append(job)

    with pytest.raises(type(error)):
        native_threads.in_turns(range(1000), work, threads)
    assert len(done) < 1000
    after: list[int] = []
    native_threads.in_turns(range(5), after.append, threads)
    assert sorted(after) == [0, 1, 2, 3, 4]


def test_noise_on_any_threads_has_the_same_bits(way: str) -> None:
    before = torch.get_num_threads()
    draws = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            draws.append(Source(seed=3).z(5, 1, torch.empty(1_000_003)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(draws[0], other) for other in draws[1:])


def test_the_first_draw_of_a_key_on_many_threads_at_once(way: str) -> None:
    """Each thread may find that the key is not yet prepared; what one prepares must not be lost while another draws from it."""
    before = torch.get_num_threads()
    expected = Source(seed=4).z(0, 0, torch.empty(600_000))
    wrong: list[int] = []

    def draw(_: int) -> None:
        for step in range(30):
            if not torch.equal(Source(seed=4).z(0, 0, torch.empty(600_000)), expected):
                wrong.append(step)

    try:
        torch.set_num_threads(3)
        threads = [threading.Thread(target=draw, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    finally:
        torch.set_num_threads(before)
    assert not wrong


FORKED = """
import os, signal, torch
from hushgrad.noise import Source
torch.set_num_threads(2)
torch.randn(10_000_000).exp_()
whole = Source(seed=3).z(5, 1, torch.empty(1_000_003))
child = os.fork()
if child == 0:
    signal.alarm(60)  # torch itself would wait for ever for threads that stayed behind
    os._exit(0 if bytes(Source(seed=3).z(5, 1, torch.empty(1_000_003)).numpy()) == bytes(whole.numpy()) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_a_forked_child_does_not_wait_for_the_parents_threads() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=HANGS, check=True, env=environment
    )
    assert done.stdout.strip() == "0"
