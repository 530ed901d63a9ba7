"""A run's key reaches every process, and nobody who listens to the group learns it."""

from __future__ import annotations

import threading

import pytest
from patience import HANGS

from hushgrad.release.placement.shared_secret import shared_secret


class _Wire:
    """Processes as threads: what each hands in is gathered, and everything that was sent is kept."""

    def __init__(self, size: int) -> None:
        self._barrier, self._slots, self.sent = threading.Barrier(size), [b""] * size, []

    def gathered(self, rank: int, content: bytes) -> list[bytes]:
        self._slots[rank] = content
        self._barrier.wait(timeout=HANGS)
        all_of_them = list(self._slots)
        if rank == 0:
            self.sent += all_of_them
        self._barrier.wait(timeout=HANGS)
        return all_of_them


@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_have_the_first_ones_secret_and_the_wire_does_not(size):
    wire, found = _Wire(size), {}
    secrets = [bytes([rank]) * 33 for rank in range(1, size + 1)]

    def work(rank: int) -> None:
        found[rank] = shared_secret(secrets[rank], rank, lambda content: wire.gathered(rank, content))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(size), secrets[0])
    everything = b"".join(wire.sent)
    assert len({message for message in wire.sent if len(message) == 32}) == size  # every key pair is fresh
    for start in range(33 - 7):
        assert secrets[0][start : start + 8] not in everything


def test_every_message_has_a_key_of_its_own():
    """The same secret for three receivers: three ciphertexts; and again: three others."""
    seen = set()
    for _ in range(2):
        wire = _Wire(3)
        threads = [
            threading.Thread(target=lambda r=r, w=wire: shared_secret(b"s" * 33, r, lambda content: w.gathered(r, content)))
            for r in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (sealed,) = {message for message in wire.sent if len(message) == 3 * 49 and any(message)}
        seen |= {sealed[k : k + 49] for k in (0, 49, 98)}
    assert len(seen) == 6
