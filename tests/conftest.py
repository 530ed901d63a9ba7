"""For all tests: the house needs no network, so a test that reaches for it fails; and Ctrl-C reaches every command that one starts."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path

import pytest

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell's background job; the commands that tests interrupt would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

_CONNECT = socket.socket.connect
_LOOKUP = socket.getaddrinfo
_HOME = ("127.", "::1", "localhost", "0.0.0.0")


def _at_home(host: object) -> bool:
    return host is None or str(host).startswith(_HOME) or str(host) == socket.gethostname()


def _connect(self: socket.socket, address: object) -> object:
    if self.family in (socket.AF_INET, socket.AF_INET6) and not _at_home(address[0]):  # type: ignore[index]
        raise AssertionError(f"network access to {address!r}: nothing in the house may need it at run time")
    return _CONNECT(self, address)  # type: ignore[arg-type]


def _lookup(host: object, *args: object, **options: object) -> object:
    if not _at_home(host):
        raise AssertionError(f"name lookup of {host!r}: nothing in the house may need it at run time")
    return _LOOKUP(host, *args, **options)  # type: ignore[arg-type]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Programs that tests start and searches that they share have no examples; each process would import all that they need."""
    return True if collection_path.suffix == ".py" and not collection_path.name.startswith("test_") else None


@pytest.fixture(autouse=True)
def another_process():
    """Every test stands for a process of its own, which has released nothing."""
    if (key_reuse := sys.modules.get("hushgrad.release.key_reuse")) is not None:
        key_reuse.forget()


@pytest.fixture
def on_another_machine(monkeypatch):
    """A copied folder does not find its original, as on another machine; beside its original no copy goes on."""
    from hushgrad.release.journal_history import JournalHistory

    monkeypatch.setattr(JournalHistory, "_copied", lambda *_: "")


@pytest.fixture(autouse=True, scope="session")
def no_network():
    """Only this machine can be reached; see tests/stories/test_secrets.py for the commands, which run in other processes."""
    socket.socket.connect, socket.getaddrinfo = _connect, _lookup  # type: ignore[method-assign, assignment]
    yield
    socket.socket.connect, socket.getaddrinfo = _CONNECT, _LOOKUP  # type: ignore[method-assign]


@pytest.fixture(params=[16, 32, 64], scope="module")
def vector_bytes(request: pytest.FixtureRequest):
    """The C kernels with vectors of so many bytes, as other processors have them; skipped where this one has none so wide."""
    from hushgrad import native

    libraries = [library for library in (native.EXACT, native.CONTRACTED) if library is not None]
    try:
        if {library.vectors(request.param) for library in libraries} != {request.param}:
            pytest.skip("there are no such vectors here")
        yield request.param
    finally:
        for library in libraries:
            library.vectors(64)


@pytest.fixture
def put_secret():
    """Writes a secret of a run under one of its names, as the run does; under a temporary name, half of one."""
    from safetensors.torch import save_file

    from hushgrad.release.journal_frames import Frames
    from hushgrad.release.keys import RunKey, write_key
    from hushgrad.train import shard_files
    from hushgrad.train.tree import write_tree

    def put(path):
        if path.name.startswith("."):
            path.write_bytes(b"half")
        elif path.name == "key.json":
            write_key(path, RunKey.make(), plan="p")
        elif path.name == "journal":
            Frames(path, new=True).close()
        elif path.name.startswith("shard"):
            save_file({}, path, metadata={shard_files._HEADER: "{}"})
        else:
            write_tree(path, {"step": 1})
        path.chmod(0o600)

    return put
