"""Nothing fails by chance: every test, fixture and module draws from entropy that its own name fixes.

``HUSHGRAD_TEST_ENTROPY=fresh pytest ...`` draws anew instead (hypothesis too) and prints the word that draws the same again.
A process that a test starts draws from the system, as a user's does: what is said about it must hold for every draw.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import importlib
import itertools
import os
import random
import secrets
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import settings

# Before the first product of matrices, as certified runs ask for: rows whose bits do not depend on their place.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
# Where a test asks for two threads, the one that waits sleeps. Otherwise it turns in a circle and takes the core from whoever works: 5 s of
# CPU in place of 0.2 s beside other processes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _in_memory() -> bool:
    """Whether temporary files can lie in memory, with all that the tests ask of a disk: room, attributes, programs that run."""
    try:
        place = os.statvfs("/dev/shm")
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            os.setxattr(folder, "user.test", b"1")
    except (OSError, AttributeError):
        return False
    return place.f_bavail * place.f_frsize > 2 << 30 and not place.f_flag & os.ST_NOEXEC


# Journals and ledgers ask the disk thousands of times to be sure, 0.1 s each on a busy one. TMPDIR=FOLDER puts them there all the same.
if "TMPDIR" not in os.environ and _in_memory():
    os.environ["TMPDIR"], tempfile.tempdir = "/dev/shm", None

_WORD = os.environ.get("HUSHGRAD_TEST_ENTROPY", "")
if _WORD == "fresh":
    _WORD = os.environ["HUSHGRAD_TEST_ENTROPY"] = secrets.token_hex(8)  # the workers of one run inherit it
settings.register_profile("house", derandomize=not _WORD, deadline=None, print_blob=True)
settings.load_profile("house")

# Imports and collected tests are no garbage, so nobody looks for any until they are there; then after so many objects, not after 700
# (a tenth of the suite's time). What a test says about freed memory it says after a gc.collect() of its own.
gc.disable()
gc.set_threshold(20_000, 20, 20)

_MANY = 50  # modules

_SYSTEM = os.urandom


class _Stream:
    """Bytes that a name fixes, in place of ``os.urandom`` and of everything in ``secrets``."""

    def __init__(self, name: str) -> None:
        self._seed = hashlib.sha256(f"{_WORD}\0{name}".encode()).digest()
        self._calls, self._process = itertools.count(), os.getpid()

    def __call__(self, size: int, /) -> bytes:
        if os.getpid() != self._process:  # a child made by fork must not repeat its parent's keys
            return _SYSTEM(size)
        return hashlib.shake_256(self._seed + next(self._calls).to_bytes(8, "big")).digest(size)

    def start(self) -> None:
        self.install()
        word = int.from_bytes(self._seed[:4], "big")
        random.seed(word)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(word)
        if "torch" in sys.modules:  # without a device torch.manual_seed writes down its whole stack for later, three times: 1 ms
            torch = sys.modules["torch"]
            (torch if torch.cuda.is_available() else torch.default_generator).manual_seed(word)

    def install(self) -> None:
        os.urandom = random._urandom = self  # type: ignore[assignment, attr-defined]


_stream = _Stream("")


def _begin(name: str) -> None:
    global _stream
    _stream = _Stream(name)
    _stream.start()


@contextmanager
def _apart(name: str) -> Iterator[None]:
    """What several tests share is drawn under its own name, whichever of them comes first."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    outer, states = _stream, (random.getstate(), numpy and numpy.random.get_state(), torch and torch.random.get_rng_state())
    _begin(name)
    try:
        yield
    finally:
        globals()["_stream"] = outer
        outer.install()
        random.setstate(states[0])
        if states[1]:
            numpy.random.set_state(states[1])
        if states[2] is not None:
            torch.random.set_rng_state(states[2])


def pytest_terminal_summary(terminalreporter):
    """The word that repeats a run with fresh entropy."""
    if _WORD:
        terminalreporter.write_line(f"HUSHGRAD_TEST_ENTROPY={_WORD} draws the same again.")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """A module draws under its own name."""
    with _apart(collector.nodeid):
        return (yield)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    """What was imported and collected stays: no later look for garbage goes through it.

    Nor through what the first optimizer would import: 316 modules of torch's compiler and all of sympy, which made every
    ``gc.collect()`` of a proof cost 64 ms in place of 1.
    """
    if "torch" in sys.modules and len(session.items) > 1:
        importlib.import_module("torch._dynamo")
    _freeze()
    gc.enable()


_frozen: tuple[int, object] = 0, None  # modules, and the file whose tests run


def _freeze(file: object = None) -> None:
    global _frozen
    gc.freeze()
    _frozen = len(sys.modules), file


# Until the very end, when some libraries count what is left of theirs; pytest's own looks for garbage before it are cheap so.
atexit.register(gc.unfreeze)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """So does a test. What the files before it have left, and modules that the tests before it have imported, stay, too.

    Otherwise each proof, which looks for garbage, goes through what all the tests before it have left: five times the time of some.
    """
    if item.path != _frozen[1] or len(sys.modules) > _frozen[0] + _MANY:
        gc.collect()
        _freeze(item.path)
    _begin(item.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    """No test may leave hooks of all modules, under which the tests after it would run."""
    if "torch" not in sys.modules:
        return
    module = sys.modules["torch"].nn.modules.module
    tables = [getattr(module, f"_global_{kind}_hooks") for kind in ("forward_pre", "forward", "backward_pre", "backward")]
    if any(tables):
        for table in tables:
            table.clear()
        pytest.fail(f"{item.nodeid} has left hooks of all modules.", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """And what several tests share."""
    if fixturedef.scope == "function":
        return (yield)
    with _apart(f"{fixturedef.baseid}::{fixturedef.argname}[{getattr(request, 'param_index', 0)}]"):
        return (yield)
