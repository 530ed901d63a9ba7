"""The head of a ledger, noted elsewhere: what finds a ledger that was put back to an earlier copy of itself.

A chain of hashes proves that nothing *before* its head was changed. Whoever replaces the whole file by last week's copy gives back what
was spent since, and the copy is whole. Only a head that was noted in a place which they cannot change tells it. So a line is appended
to the notes whenever the head moves, and the noted one must still be in the chain.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from hushgrad import _check
from hushgrad._printed import reason
from hushgrad.budget.chain import Verification
from hushgrad.budget.ledger import Ledger
from hushgrad.errors import StorageError


def noted_heads(notes: str | os.PathLike[str]) -> list[str]:
    """The heads in a file of notes, oldest first; empty if there is no such file. A last line that was cut short does not count.

    Raises:
        ArgumentError: where a whole line is none that :func:`note_head` writes.
    """
    path = Path(notes)
    if not path.exists():
        return []
    heads = [line.partition(" ")[0] for line in path.read_text(encoding="ascii", errors="replace").split("\n")[:-1]]
    for head in heads:
        if len(head) != 64 or set(head) - set("0123456789abcdef"):
            _check.fail("notes", str(path), f"to hold one head in each line; {head[:40]!r} is none", "Use another file.")
    return heads


def note_head(ledger: Ledger, notes: str | os.PathLike[str]) -> Verification:
    """Check that the chain goes through the last noted head; if so, note the present one where it is new.

    **Formal guarantee.** If the notes are out of reach of whoever can write the ledger, rows that were there at the time of a note can
    be neither changed nor taken away without a verification that fails. Rows written after the last note are not covered.
    """
    known = noted_heads(notes)
    verdict = ledger.verify(head=known[-1] if known else None)  # its hash covers every row before it, and so all earlier notes
    if verdict.ok and (not known or known[-1] != verdict.head):
        _append(Path(notes), f"{verdict.head} {verdict.rows}\n", whole=not known)
    return verdict


def watched(ledger: Ledger, notes: str | os.PathLike[str], *, every: float = 10.0) -> Iterator[Verification]:
    """Note the head again and again, ``every`` so many seconds; ends with the first verification that fails."""
    pause = _check.positive(every=every)
    while True:
        verdict = note_head(ledger, notes)
        yield verdict
        if not verdict.ok:
            return
        time.sleep(pause)


def _append(path: Path, line: str, *, whole: bool) -> None:
    """One write of one line, on the disk before it is believed; what a killed watcher left of a line is cut off first."""
    try:
        if path.exists() and not whole:
            content = path.read_bytes()
            if not content.endswith(b"\n"):
                os.truncate(path, content.rfind(b"\n") + 1)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line.encode("ascii"))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StorageError(f"Expected to be able to write {str(path)!r}: {reason(error)}. Choose another file.") from None
