"""The server's directory: key, state and check-ins on disk, each file replaced at once or not at all.

**Why no round's noise is ever used twice.** Clients are not repeatable: asked again, they answer otherwise, or not at all. So a
round that was released must never be repeated, since two sums with the same noise differ by no noise. The new model is
therefore written to disk, with the noise's buffers and the ledger, *before* it leaves the server. A server that is killed
before that has released nothing of the round and may repeat it; one that is killed afterwards goes on with the next.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from hushgrad import _check
from hushgrad.errors import ArgumentError
from hushgrad.release.keys import RunKey
from hushgrad.train.atomic import replacing
from hushgrad.train.plan import Plan
from hushgrad.train.tree import read_tree, write_tree

__all__ = ["ServerDirectory"]

_KEY, _STATE, _COHORTS, _PUBLIC = "key.json", "state.safetensors", "cohorts.safetensors", "privacy.json"


class ServerDirectory:
    """The files of one server's run.

    | file | content | mode | written |
    |---|---|---|---|
    | ``key.json`` | the run's key | 0600 | once, before the first round |
    | ``cohorts.safetensors`` | check-ins and the latest cohort | 0600 | before a cohort is asked |
    | ``state.safetensors`` | model, server optimizer, noise buffers, clip norm, ledger | 0600 | before a round's result is released |
    | ``privacy.json`` | plan, ledger, epsilon so far: public | 0644 | after each round |
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)

    def share_key(self, key: RunKey, plan: Plan) -> RunKey:
        """The key of the run in this directory; ``key`` becomes it if there is none yet."""
        path = self.path / _KEY
        if not path.exists():
            if (self.path / _STATE).exists():
                raise ArgumentError(
                    f"Expected {_KEY} beside {_STATE}: without its key a killed run cannot go on. Start a new run."
                )
            fresh = {"key": key.secret.hex(), "reproducible": key.reproducible, "plan": plan.digest}
            self._write_text(_KEY, json.dumps(fresh), 0o600)
            return key
        mode = stat.S_IMODE(path.stat().st_mode)
        if os.name == "posix" and mode & 0o077:
            _check.fail("mode", oct(mode), f"of {_KEY} to be 0600", "Others may have read the key.")
        content = _key_content(path)
        if content["plan"] != plan.digest:
            remedy = "A key serves one plan. Use a new directory for a new run."
            _check.fail("plan", plan.digest[:12], f"to be the one of this directory, {content['plan'][:12]}", remedy)
        kept = RunKey(bytes.fromhex(content["key"]), reproducible=bool(content["reproducible"]))
        if not key.fresh and key.fingerprint != kept.fingerprint:
            raise ArgumentError("Expected key to be that of the run in this directory, or to be left out.")
        return kept

    def save_state(self, tree: dict[str, Any]) -> None:
        """Replace the state."""
        self._write_tree(_STATE, tree)

    def save_cohorts(self, tree: dict[str, Any]) -> None:
        """Replace the check-ins."""
        self._write_tree(_COHORTS, tree)

    def save_public(self, content: dict[str, Any]) -> None:
        """Replace the public account of the run."""
        self._write_text(_PUBLIC, json.dumps(content, indent=1), 0o644)

    def state(self) -> dict[str, Any] | None:
        """What was saved, or None for a new run."""
        return self._read(_STATE)

    def cohorts(self) -> dict[str, Any] | None:
        """What was saved, or None for a new run."""
        return self._read(_COHORTS)

    def _read(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        return read_tree(path) if path.exists() else None

    def _write_tree(self, name: str, tree: dict[str, Any]) -> None:
        with replacing(self.path / name) as new:
            write_tree(new, tree)

    def _write_text(self, name: str, text: str, mode: int) -> None:
        with replacing(self.path / name, mode=mode) as new:
            new.write_text(text)


def _key_content(path: Path) -> dict[str, Any]:
    """The key file's object. Its text never enters an error: it may hold the key."""
    try:
        content = json.loads(path.read_text())
        if set(content) == {"key", "reproducible", "plan"} and len(bytes.fromhex(content["key"])) == 32:
            return dict(content)
    except (ValueError, TypeError):
        pass
    raise ArgumentError(f"Expected {path.name} to be as it was written; it was damaged. Use a copy, or start a new run.")
