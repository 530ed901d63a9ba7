"""Checkpoints: a run that is killed at any instant goes on, bit for bit, ledger included.

**Why no step is ever released twice with different noise.** The noise and the batch of step t are functions of (key, t). The
key is on disk before the first step. A resumed run starts from a complete checkpoint of some step s and repeats the steps
after s that the killed run may have taken: from the same parameters, on the same batch, with the same noise, hence with the
same result. What is released a second time is the very same value, which tells nobody anything, and is charged once. This
needs arithmetic that repeats itself: the same data, code, hardware and number of threads.

**Why it is never half a checkpoint.** Everything is one file; it is written beside the old one, flushed to the disk, and
renamed over it, which the file system does at once or not at all; then the directory is flushed. The shards of a sharded run
are files of their own, which this one names: see :mod:`hushgrad.train.shard_files`.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from hushgrad import _check
from hushgrad.errors import ArgumentError
from hushgrad.release.keys import RunKey
from hushgrad.release.placement.world import World
from hushgrad.train.atomic import replacing
from hushgrad.train.private import Private
from hushgrad.train.shard_files import ShardFiles, cut_noise, cut_tree, join_noise, join_tree
from hushgrad.train.tree import read_tree, rng_state, set_rng_state, write_tree

__all__ = ["Checkpoint", "Stateful"]

_STATE, _KEY = "state.safetensors", "key.json"
_SHARDED = ("model", "optimizer", "private")  # the parts of the state that hold tensors in the parameters' shapes
_KEY_FIELDS = {"key": str, "reproducible": bool, "plan": str, "fingerprint": str}


class Stateful(Protocol):
    """A scheduler, an average, a metric: anything with torch's two methods."""

    def state_dict(self) -> dict[str, Any]:
        """What it needs to continue."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Continue."""


class Checkpoint:
    """The checkpoint of one run in a directory of its own.

    Make it after :func:`make_private` and before the first step. If the directory holds a run, that run's key and state are
    taken up (``resumed`` is then True, ``notes`` is what was saved); otherwise the key is written now. Then call :meth:`save`
    whenever a later restart should be able to begin there.

        >>> import tempfile, torch
        >>> from hushgrad.train import Plan, make_private
        >>> model = torch.nn.Linear(3, 1)
        >>> plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=4, dataset_size=16, steps=2)
        >>> private = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     checkpoint = Checkpoint(directory, private)
        ...     checkpoint.save(notes={"epoch": 0})
        ...     checkpoint.resumed, sorted(path.name for path in checkpoint.directory.iterdir())
        (False, ['key.json', 'state.safetensors'])

    | file | content | mode |
    |---|---|---|
    | ``state.safetensors`` | model, optimizer, ledger, filter, random states, ``extras``, buffers of correlated noise | 0600 |
    | ``key.json`` | the run's key | 0600 |
    | ``shard-<save>-<process>.safetensors`` | of several processes: each one's part of the noise and of sharded tensors | 0600 |

    All are as secret as the data: key and buffers give the noise away. What is released is ``model.state_dict()``.
    """

    def __init__(
        self, directory: str | os.PathLike[str], private: Private, *, extras: Mapping[str, Stateful] | None = None
    ) -> None:
        self.directory = Path(directory)
        self._private, self._extras = private, dict(extras or {})
        self._world = World.here()
        self._shards = ShardFiles(self.directory, self._world)
        self._generation = 0
        self.resumed = False
        self.notes: dict[str, Any] = {}
        self.directory.mkdir(parents=True, exist_ok=True)
        exists = bool(self._world.largest((self.directory / _STATE).exists()))  # before any process writes anything
        self._take_or_leave_key()
        if exists:
            self._resume()

    def save(self, notes: Mapping[str, Any] | None = None) -> None:
        """Replace the checkpoint by the run as it is now. ``notes``: plain values to find again (an epoch, metrics).

        Every process must call it; they need the same folder. Process 0 writes what all have alike, and each its own shards.
        """
        self.notes = dict(notes or {})
        private = self._private
        tree: dict[str, Any] = {
            "version": 1,
            "model": dict(private.model.state_dict()),
            "optimizer": private.optimizer.state_dict(),
            "private": private.state_dict(),
            "noise": private.noise_state(),
            "extras": {name: extra.state_dict() for name, extra in self._extras.items()},
            "rng": rng_state(),
            "notes": self.notes,
        }
        if private.spread:
            tree = self._with_shards(tree)
        if self._world.rank == 0:
            with replacing(self.directory / _STATE) as temporary:
                write_tree(temporary, tree)
            self._shards.remove_others(tree.get("shards", []))
        if private.spread:
            self._world.total(0)  # nobody goes on before the checkpoint is complete

    def _with_shards(self, tree: dict[str, Any]) -> dict[str, Any]:
        pieces: dict[str, Any] = {}
        cut = {name: cut_tree(tree[name], pieces) for name in _SHARDED}
        noise = cut_noise(tree["noise"], pieces)
        self._generation += 1
        files = self._shards.write(pieces, self._generation)
        sharded = self._private.sharding is not None
        return {
            **tree, **cut, "noise": noise, "version": 2, "generation": self._generation, "shards": files, "sharded": sharded
        }  # fmt: skip

    def _without_shards(self, tree: dict[str, Any]) -> dict[str, Any]:
        files, sharding = tree["shards"], self._private.sharding
        self._shards.verify(files)
        self._generation = tree["generation"]
        read = self._shards.reader(files)
        joined = {name: join_tree(tree[name], read, sharding) for name in _SHARDED}
        noise = join_noise(tree["noise"], read, self._private.ranges())
        return {**tree, **joined, "noise": noise, "rng": self._shards.rng(files)}

    def _resume(self) -> None:
        tree = read_tree(self.directory / _STATE)
        if tree.get("version") not in (1, 2):
            _check.fail("version", tree.get("version"), "to be 1 or 2", "This checkpoint was written by another version.")
        if self._private.sharding is not None and not tree.get("sharded", tree["version"] == 2):
            raise ArgumentError("Expected a checkpoint of a sharded run. Resume this one without fully_shard.")
        if tree["version"] == 2:
            tree = self._without_shards(tree)
        if set(tree["extras"]) != set(self._extras):
            _check.fail("extras", sorted(self._extras), f"to be those of the interrupted run: {sorted(tree['extras'])}")
        private = self._private
        private.require_resumable(tree["private"])  # before anything is loaded
        private.model.load_state_dict(tree["model"])
        private.optimizer.load_state_dict(tree["optimizer"])
        private.load_state_dict({**tree["private"], "noise": tree["noise"]})
        for name, extra in self._extras.items():
            extra.load_state_dict(tree["extras"][name])
        set_rng_state(tree["rng"])
        self.notes, self.resumed = tree["notes"], True

    # The key ---------------------------------------------------------------------------------------------------------

    def _take_or_leave_key(self) -> None:
        path = self.directory / _KEY
        if path.exists():
            self._private.adopt_key(_read_key(path, self._private))
        elif (self.directory / _STATE).exists():
            raise ArgumentError(
                f"Expected {_KEY} beside {_STATE}: without its key an interrupted run cannot go on. Start a new run."
            )
        elif self._private.steps:
            raise ArgumentError(
                "Expected a Checkpoint before the first step, so that the key is on disk before anything is released."
            )
        elif self._world.rank == 0:
            _write_key(path, self._private)


def _write_key(path: Path, private: Private) -> None:
    key = private.key
    content = {
        "key": key.secret.hex(),
        "reproducible": key.reproducible,
        "plan": private.plan.digest,
        "fingerprint": key.fingerprint,  # a damaged key would silently give other noise
    }
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content))


def _read_key(path: Path, private: Private) -> RunKey:
    if os.name == "posix" and stat.S_IMODE(path.stat().st_mode) & 0o077:
        _check.fail("mode", oct(stat.S_IMODE(path.stat().st_mode)), f"of {path.name} to be 0600", "Others may have read the key.")
    content = _key_content(path)
    if content["plan"] != private.plan.digest:
        remedy = "A key serves one plan. Use a new directory for a new run."
        _check.fail("plan", private.plan.digest[:12], f"to be the one of this directory, {content['plan'][:12]}", remedy)
    key = RunKey(bytes.fromhex(content["key"]), reproducible=bool(content["reproducible"]))
    if key.fingerprint != content["fingerprint"]:
        raise _damaged_key(path)
    if not private.key.fresh and private.key.fingerprint != key.fingerprint:
        raise ArgumentError("Expected key to be that of the run in this directory, or to be left out.")
    return key


def _key_content(path: Path) -> dict[str, Any]:
    """The key file's object. Its text never enters an error: it may hold the key."""
    try:
        content = json.loads(path.read_text())
        whole = set(content) == set(_KEY_FIELDS) and all(isinstance(content[name], kind) for name, kind in _KEY_FIELDS.items())
        if whole and bytes.fromhex(content["key"]).hex() == content["key"]:  # the very letters that were written
            return content
    except (ValueError, TypeError):  # not even the reason is told: it may quote the file
        raise _damaged_key(path) from None
    raise _damaged_key(path)


def _damaged_key(path: Path) -> ArgumentError:
    return ArgumentError(f"Expected {path.name} to be as it was written; it was damaged. Use a copy, or start a new run.")
