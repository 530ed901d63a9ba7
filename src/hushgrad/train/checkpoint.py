"""Checkpoints: a run that is killed at any instant continues bit for bit, ledger included.

**Why no row of noise is ever released with two sums.** The noise and the batch of step t are functions of (key, t). Before the
first step the folder holds the first weights, the journal and, last, the key: a folder with a key is complete, and one without
has released nothing. A resumed run starts from the checkpoint of some step s and repeats the steps after s that the killed run
may have taken: from the same parameters, on the same batch, with the same noise, hence with the same result. Releasing
the very same value twice reveals nothing more, and is charged once. The journal holds a digest of every release, and a repetition
that comes out differently is stopped before it is released: see :mod:`hushgrad.release.journal`.

**Why there is never half a checkpoint.** Everything is one file; it is written next to the old one, flushed to the disk, and
renamed over it, which is atomic; then the directory is flushed. The shards of a sharded run are files of their own, which this one
names: see :mod:`hushgrad.train.shard_files`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from hushgrad import _check
from hushgrad._universal_hash import digest_of
from hushgrad.errors import ArgumentError
from hushgrad.release.atomic import replacing
from hushgrad.release.encryption import wrapping_key
from hushgrad.release.erasure import erase, secrets_of
from hushgrad.release.journal import JOURNAL, WAYS_ON, Journal
from hushgrad.release.journal_history import shown
from hushgrad.release.keys import KEY, read_key, write_key
from hushgrad.release.owner import Owner
from hushgrad.release.placement.world import World
from hushgrad.train.private import Private
from hushgrad.train.shard_files import ShardFiles, cut_noise, cut_tree, join_noise, join_tree
from hushgrad.train.tree import read_tree, rng_state, set_rng_state, understood, write_tree

_STATE = "state.safetensors"
_ITS = {True: "it", False: "its key"}
_SHARDED = ("model", "optimizer", "private")  # the parts of the state that hold tensors in the parameters' shapes


class Stateful(Protocol):
    """A scheduler, an average, a metric: anything with torch's two methods."""

    def state_dict(self) -> dict[str, Any]:
        """What it needs to continue."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Continue."""


class Checkpoint:
    """The checkpoint of one run in a directory of its own.

    Make it after :func:`make_private` and before the first step. If the directory holds a run, that run's key and state are
    taken up (``resumed`` is then True, ``notes`` is what was saved); otherwise the first weights, the journal and the key are
    written now. Then call :meth:`save` whenever a later restart should be able to begin there. One process at a time owns the
    directory; ``take_over`` takes it from an owner that is gone where the file system cannot tell (see
    :mod:`hushgrad.release.owner`).

        >>> import tempfile, torch
        >>> from hushgrad.train import Plan, make_private
        >>> model = torch.nn.Linear(3, 1)
        >>> plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=4, dataset_size=16, steps=2)
        >>> private = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     checkpoint = Checkpoint(directory, private)
        ...     checkpoint.save(notes={"epoch": 0})
        ...     checkpoint.resumed, sorted(path.name for path in checkpoint.directory.iterdir())
        (False, ['.lock', 'journal', 'key.json', 'state.safetensors'])

    | file | content | mode |
    |---|---|---|
    | ``state.safetensors`` | model, optimizer, ledger, filter, random states, ``extras``, buffers of correlated noise | 0600 |
    | ``key.json`` | the run's key, written last | 0600 |
    | ``journal`` | what the run is bound to, and 8 bytes for every release | 0600 |
    | ``.lock`` | who owns the directory, while somebody does | 0600 |
    | ``shard-<save>-<process>.safetensors`` | of several processes: each one's part of the noise and of sharded tensors | 0600 |

    All are as secret as the data: key and buffers give the noise away. What is released is ``model.state_dict()``.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        private: Private,
        *,
        extras: Mapping[str, Stateful] | None = None,
        take_over: bool = False,
    ) -> None:
        self.directory = Path(directory)
        self._private, self._extras = private, dict(extras or {})
        self._world = World.here()
        self._shards = ShardFiles(self.directory, self._world)
        self._generation = 0
        self._owner: Owner | None = None
        self._start = ""
        self.resumed = False
        self.notes: dict[str, Any] = {}
        with self._world.leaving():
            with self._world.together():
                found = self._found(take_over) if self._world.rank == 0 else 0
            if self._world.largest(found):
                self._resume()
            else:
                self._begin()

    def _found(self, take_over: bool) -> int:
        """Whether there is a run to continue. What a run left that died before its first step is removed."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._owner = Owner(self.directory, take_over=take_over, newest=True)
        there = [name for name in (KEY, JOURNAL, _STATE) if (self.directory / name).exists()]
        if len(there) == 3:
            return 1
        if KEY in there or self._is_begun():
            missing = ", ".join(sorted({KEY, JOURNAL, _STATE} - set(there)))
            why = "nobody knows what this run has released" if KEY in there else "an interrupted run cannot go on"
            raise ArgumentError(f"Expected {missing} beside {' and '.join(there)}: without {_ITS[KEY in there]} {why}. {WAYS_ON}")
        if self._private.steps:
            raise ArgumentError(
                "Expected a Checkpoint before the first step, so that the key is on disk before anything is released."
            )
        if self._private.journal.durable:
            raise ArgumentError(
                "Expected a run without a Checkpoint: this one has another folder, and two folders with its key could both be resumed. "
                "One run, one folder."
            )
        erase(secrets_of(self.directory))
        return 0

    def _is_begun(self) -> bool:
        """Whether a folder without a key shows that a step was begun."""
        journal, state = self.directory / JOURNAL, self.directory / _STATE
        if journal.exists() and shown(journal).is_begun:
            return True
        with understood(state):
            return state.exists() and read_tree(state)["private"]["journal"]["position"] > 0

    def _begin(self) -> None:
        """Write the first weights, the journal, and last the key."""
        private, key = self._private, self._private.key
        self._start = digest_of(private.model.state_dict()) if self._private.sharding is None else "sharded"
        self.save()
        with self._world.together():
            if self._world.rank == 0 and self._owner is not None:
                bound = {"plan": private.plan.digest, "start": self._start, "world": self._world.size}
                bound["run"] = key.run_name()
                private.keep_journal(Journal.create(self.directory / JOURNAL, key, self._owner, bound))
                write_key(self.directory / KEY, key, plan=private.plan.digest)

    def save(self, notes: Mapping[str, Any] | None = None) -> None:
        """Replace the checkpoint by the present state of the run. ``notes``: plain values to find again (an epoch, metrics).

        Every process must call it, with the same folder. Process 0 writes what all have in common, and each its own shards.
        """
        with self._world.leaving():
            self._save(notes)

    def _save(self, notes: Mapping[str, Any] | None) -> None:
        if self._owner is not None:
            self._owner.require()
        self.notes = dict(notes or {})
        private = self._private
        tree: dict[str, Any] = {
            "version": 1,
            "start": self._start,
            "model": dict(private.model.state_dict()),
            "optimizer": private.optimizer.state_dict(),
            "optimizer_type": type(private.optimizer).__qualname__,
            "private": private.state_dict(),
            "noise": private.noise_state(),
            "attendance": private.attendance_state(),
            "extras": {name: extra.state_dict() for name, extra in self._extras.items()},
            "rng": rng_state(),
            "notes": self.notes,
        }
        if private.spread:
            tree = self._with_shards(tree)
        private.journal.flush()  # after a crash the state must not be ahead of its journal
        if self._world.rank == 0:
            with replacing(self.directory / _STATE) as temporary:
                write_tree(temporary, tree)
            self._shards.remove_others(tree.get("shards", []))
        if private.spread:
            self._world.total(0)  # a barrier: no process continues before the checkpoint is complete

    def destroy(self) -> None:
        """Call when the run is finished: erases key, journal and state, so that nobody can subtract its noise any more."""
        self._private.journal.close()
        if self._owner is not None:
            self._owner.require()
            erase(secrets_of(self.directory))
            self._owner.release()

    def _with_shards(self, tree: dict[str, Any]) -> dict[str, Any]:
        pieces: dict[str, Any] = {}
        cut = {name: cut_tree(tree[name], pieces) for name in _SHARDED}
        # Shards are not encrypted: with a wrapping key a stream's buffers are drawn again from the key.
        noise = None if wrapping_key() is not None else cut_noise(tree["noise"], pieces)
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
        noise = None if tree["noise"] is None else join_noise(tree["noise"], read, self._private.ranges())
        return {**tree, **joined, "noise": noise, "rng": self._shards.rng(files)}

    def _resume(self) -> None:
        private = self._private
        private.adopt_key(read_key(self.directory / KEY, plan=private.plan.digest, offered=private.key))
        with understood(self.directory / _STATE):
            self._load(read_tree(self.directory / _STATE))

    def _load(self, tree: dict[str, Any]) -> None:
        private = self._private
        if tree.get("version") not in (1, 2):
            _check.fail("version", tree.get("version"), "to be 1 or 2", "This checkpoint was written by another version.")
        if self._private.sharding is not None and not tree.get("sharded", tree["version"] == 2):
            raise ArgumentError("Expected a checkpoint of a sharded run. Resume this one without fully_shard.")
        if tree["version"] == 2:
            tree = self._without_shards(tree)
        if set(tree["extras"]) != set(self._extras):
            _check.fail("extras", sorted(self._extras), f"to be those of the interrupted run: {sorted(tree['extras'])}")
        kind = type(private.optimizer).__qualname__
        if tree["optimizer_type"] != kind:
            _check.fail("optimizer", kind, f"to be the interrupted run's, {tree['optimizer_type']}", "Its state is that one's.")
        private.require_resumable(tree["private"])  # before anything is loaded
        with self._world.together():
            if self._owner is not None:
                private.keep_journal(self._journal(tree, self._owner))
        private.model.load_state_dict(tree["model"])
        private.optimizer.load_state_dict(tree["optimizer"])
        private.load_state_dict({**tree["private"], "noise": tree["noise"]})
        for name, extra in self._extras.items():
            extra.load_state_dict(tree["extras"][name])
        private.load_attendance(tree["attendance"])
        set_rng_state(tree["rng"])
        self.notes, self.resumed, self._start = tree["notes"], True, tree["start"]

    def _journal(self, tree: dict[str, Any], owner: Owner) -> Journal:
        """The journal of the run in ``tree``; refuses one of another run, or one that is behind the state."""
        private = self._private
        journal = Journal.open(self.directory / JOURNAL, private.key, owner)
        expected = {"key": private.key.fingerprint, "plan": private.plan.digest, "start": tree["start"]}
        wrong = [name for name, value in expected.items() if journal.bound.get(name) != value]
        if wrong:
            raise ArgumentError(f"Expected the journal and the state of one run; they differ in their {wrong[0]}. {WAYS_ON}")
        journal.seek(tree["private"]["journal"]["position"], bytes.fromhex(tree["private"]["journal"]["chain"]))
        if journal.ahead and journal.bound["world"] != self._world.size:
            raise ArgumentError(
                f"Expected {journal.bound['world']} processes: {journal.ahead} releases since the last checkpoint must be repeated, "
                f"and their sums are rounded otherwise in another number of processes. {WAYS_ON}"
            )
        journal.rebind("world", self._world.size)
        return journal
