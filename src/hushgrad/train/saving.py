"""What a run keeps for a later process: its state, its key, its journal, who took part. A base class of :class:`Private`."""

from __future__ import annotations

from typing import Any

from hushgrad import _check
from hushgrad.clipping import Clipper
from hushgrad.errors import ArgumentError
from hushgrad.release.journal import Journal
from hushgrad.release.keys import RunKey
from hushgrad.release.placement.sharded import Sharded
from hushgrad.sampling.attendance import Attendance
from hushgrad.train.plan import Plan
from hushgrad.train.stepping import Stepping

_WITHOUT_JOURNAL = (
    "The run was continued from a state without a journal: that nothing was released after it, or is repeated as it was, is vouched "
    "for, not shown (a Checkpoint shows it)"
)


class Saving(Stepping):
    """A run that can be interrupted and continued, bit for bit, under the same plan and the same key."""

    _key: RunKey
    _resumed: int | None = None  # the number of steps of the loaded state

    def state_dict(self, *, with_key: bool = False) -> dict[str, Any]:
        """Everything that a resumed run needs besides the model's and the optimizer's own state.

        Secrets are left out unless asked for: the key, and the buffers of correlated noise (which are drawn again from the key
        at loading). Whoever has them can subtract the noise; store them separately (mode 0600), as a ``Checkpoint`` does.
        """
        if self._averaged is not None:
            self._averaged.require_outside("a state to be saved")
        self.settle()
        self._later.settle()
        self._look_back()
        state = {
            "plan": self.plan.to_json(),
            "key_fingerprint": self._key.fingerprint,
            "reproducible": self._key.reproducible,
            "books": self._books.state_dict(),
            "clip": self._release.clip.to_json(),
            "filter": dict(self._release.filter_state),
            "lazy_tables": self._lazy is not None,
            "threads": self._own.threads,
            "loss_vouched": self.losses.vouched,
            "loss_rounded": self.losses.rounded,
            "batches_prepared": self.losses.handed.prepared,
            "average": {} if self._averaged is None else self._averaged.state_dict(),
            "journal": {"position": self._journal.position, "chain": self._journal.chain.hex()},
        }
        if not with_key:
            return state
        noise = (
            {} if self._world.size > 1 else {"noise": self.noise_state()}
        )  # each process has only a part of it: it is drawn again
        return {**state, **noise, "key": self._key.secret}

    def ranges(self) -> list[tuple[int, int]]:
        """(offset, count) of the part of each trainable parameter whose noise is drawn in this process."""
        return self.placement.ranges()

    @property
    def spread(self) -> bool:
        """Whether several processes hold the run's state: each has a part of the noise and, with ``fully_shard``, of the parameters."""
        return self.placement.in_parts or self._world.size > 1

    @property
    def sharding(self) -> Sharded | None:
        """The placement, if each process holds a part of every parameter; otherwise None."""
        return self.placement if isinstance(self.placement, Sharded) else None

    def noise_state(self) -> dict[str, Any]:
        """The buffers of correlated noise (counts only, for independent noise): as secret as the key."""
        self._release.settle(self.steps)
        return self._release.stream.state_dict()

    def load_state_dict(self, state: dict[str, Any], *, key: bytes | None = None) -> None:
        """Continue an interrupted run, bit for bit. It must have the same plan and the same key.

        ``key`` is needed unless this object was made with it, or ``state`` was saved ``with_key``. A run cannot continue under
        another key: steps after the last checkpoint may have been released, and would be repeated with fresh noise.
        """
        self.require_resumable(state)
        if not self._journal.durable and self._world.rank == 0:  # a journal detects different results; one process has it
            self._require_threads(state)
        self.settle()  # going back must not drop noise that is owed
        self.losses.vouched = bool(state.get("loss_vouched", True))
        self.losses.rounded = bool(state.get("loss_rounded", False))
        self.losses.handed.prepared = bool(state.get("batches_prepared", True))
        secret = key if key is not None else state.get("key", self._key.secret)
        self._later.settle()
        self.adopt_key(RunKey(secret, reproducible=bool(state["reproducible"])))
        if self._key.fingerprint != state["key_fingerprint"]:
            raise ArgumentError("Expected key to be the interrupted run's. Load it from its own file, or start a new run.")
        self._journal.seek(state["journal"]["position"], bytes.fromhex(state["journal"]["chain"]))
        if not self._journal.durable and self._world.rank == 0:  # one process has the journal of all
            for note in (_WITHOUT_JOURNAL,) if self._journal.position else self._key.notes:
                self._journal.vouched(note)
        self._books.load_state_dict(state["books"])
        self._resumed = self.steps
        self._release.use_key(self._key)
        self._release.load_noise(state.get("noise"), self.steps)
        self._release.use_clip(Clipper.from_json(state["clip"]))
        self._release.filter_state = dict(state["filter"])
        if self._averaged is not None:
            self._averaged.load_state_dict(state["average"])
        self._issued = None
        self._capture.discard()
        self._guard.released.renew()

    def require_resumable(self, state: dict[str, Any]) -> None:
        """Refuse a state of another plan, or of an earlier step: two releases with the same noise reveal a difference of bare gradients."""
        if Plan.from_json(state["plan"]) != self.plan:
            _check.fail("plan", self.plan.digest[:12], "to be the plan of the interrupted run", "Make a new run for a new plan.")
        was_lazy = state.get("lazy_tables", False)
        if was_lazy != (self._lazy is not None):
            _check.fail("lazy_tables", not was_lazy, f"to be {was_lazy} as in the interrupted run, whose noise must be repeated")
        taken = state["books"]["issued"] + state["books"]["foreign"]
        if taken < self.steps:
            raise ArgumentError(
                f"Expected a state of step {self.steps} or later, got one of step {taken}: the steps since then are released, and "
                "their noise serves once. Load the weights alone, or start a run with a fresh key and prior=private.ledger."
            )

    def _require_threads(self, state: dict[str, Any]) -> None:
        was, now = state.get("threads"), self._own.threads
        if None not in (was, now) and was != now:
            raise ArgumentError(
                f"Expected {was} of torch's threads, as in the interrupted run, got {now}: steps that are repeated would come out with "
                f"other last bits. Call torch.set_num_threads({was}) before make_private, or resume from a Checkpoint, which compares them."
            )

    def adopt_key(self, key: RunKey) -> None:
        """Continue under the key of an interrupted run; refused once a step has been taken with another one."""
        if key.fingerprint == self._key.fingerprint:
            return
        if self.steps:
            raise ArgumentError(f"Expected a run without steps to adopt a key, got one at step {self.steps}.")
        self._key, self._journal = key, Journal(key, notes=())  # the interrupted run's journal knows whether the user gave it
        self._books.run = key.run_name()
        self._release.use_key(key)

    def keep_journal(self, journal: Journal) -> None:
        """Record every release in ``journal`` from now on."""
        self._later.settle()
        self._journal = journal

    @property
    def journal(self) -> Journal:
        """Every release of this run, on disk if a checkpoint keeps it there."""
        self._later.settle()
        return self._journal

    def attendance_state(self) -> dict[str, Any]:
        """Who took part how often: as secret as the key. Empty before the first loader."""
        return {} if self._attendance is None else self._attendance.state_dict()

    def load_attendance(self, state: dict[str, Any]) -> None:
        """Continue the record of who took part."""
        if state:
            self._attendance = Attendance(self.plan.participation, units=len(state["count"]))
            self._attendance.load_state_dict(state)

    @property
    def key(self) -> RunKey:
        """The run's key: as secret as the data."""
        return self._key
