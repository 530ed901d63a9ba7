"""Runs the passes of a proof: each starts from the state of the model in which the proof began, and leaves nothing behind."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hushgrad.clipping._torch import checkpoints_off, equal
from hushgrad.clipping.fingerprint import fingerprint
from hushgrad.clipping.layout import Layout
from hushgrad.clipping.proof.call_trace import CallTrace, KnownTraces
from hushgrad.clipping.proof.changed_weights import lifted
from hushgrad.clipping.proof.fixed_randomness import (
    FixedRandomness,
    as_it_was,
    buffers_of,
    draw_from,
    fixing_randomness,
    host_draws,
    put_back,
    randomness_fixed,
)
from hushgrad.clipping.proof.input_variants import copied, floats
from hushgrad.clipping.proof.inputs import leaves
from hushgrad.clipping.proof.state import Attributes, Kept, Place, attributes_of
from hushgrad.clipping.proof.structure import NATIVE, Known, Structure
from hushgrad.clipping.proof.survey import Run
from hushgrad.clipping.proof.variable_lengths import Opening, opened
from hushgrad.errors import CaptureError

if TYPE_CHECKING:
    from hushgrad.clipping.capture import Capture
    from hushgrad.clipping.tape import Tape

_LARGE = 4_000_000  # parameters: 16 MB; for smaller models returning memory costs more than it saves
_KEPT = 8 << 20  # bytes that the C library keeps between the passes of a smaller model's proof


class ProofPasses:
    """Runs a model for proofs; implements :class:`~hushgrad.clipping.proof.seal_runs.Sealing`."""

    def __init__(self, capture: Capture, attributes: Attributes, lot: Random, known: Known, *, seal: bool) -> None:
        self.model: nn.Module = capture.model
        self._capture, self._tape, self._attributes, self._lot, self._seal = capture, capture._tape, attributes, lot, seal
        self._known = known
        self.runs: list[Run] | None = None  # of the running proof
        self.kept: Run | None = None
        self.traces: list[CallTrace] = []  # of all its passes
        self.of: tuple[int, Structure | None] = (0, None)
        self.opening: Opening | None = None  # of outputs that hold examples of different lengths
        self.differentiates = False  # whether the forward computes gradients itself, and needs graphs
        self.lifts = True  # whether zero parameters hold other numbers during a proof
        self._start: dict[str, Tensor] = {}
        self._clocks: list[Place] | None = None  # None before the first pass
        self._counts: list[str] = []  # scalar buffers that a pass changes
        self._times: set[Any] = set()  # values of its clocks at which passes were looked at
        self.moves_buffers = False  # whether some pass has changed a buffer
        self._spares_parameters = not seal  # verified, or not required
        large = sys.platform == "linux" and sum(p.numel() for p in self.model.parameters()) >= _LARGE
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if large else None  # glibc's
        self._keeps = not large
        self._quiet = FixedRandomness()
        self._heard = KnownTraces(frozenset())  # of the intercepted passes
        self._unwatched = False
        self._wrote = False
        self._left: Kept | None = None  # what the attributes held before the last pass
        self.draws = False  # whether some pass draws from Python's or numpy's generator
        self._draws = host_draws()  # each pass starts from this state, so that an example alone takes its batch's branches
        self._drawn = self._draws  # the state after the last pass

    @contextmanager
    def _proving(self, quiet: FixedRandomness) -> Iterator[None]:
        tape: Tape = self._tape
        grads = [(p, p.grad) for p in self.model.parameters()]
        self._start, self._quiet, self._clocks, self._draws = buffers_of(self.model), quiet, None, host_draws()
        self._drawn, self._heard = self._draws, KnownTraces(frozenset())
        self.runs = []
        if (
            self._keeps
        ):  # glibc keeps about as much as the largest block that was freed; new pages for each pass take a tenth of a proof
            torch.empty(_KEPT, dtype=torch.uint8)
        try:
            lift = lifted(self._capture.trained.values() if self.lifts else ())
            with checkpoints_off(), as_it_was(self.model), tape.sandbox(), torch.enable_grad(), fixing_randomness(quiet), lift:
                for p, _ in grads:
                    p.grad = None
                tape.deaf = True
                try:
                    with torch.autograd.set_detect_anomaly(
                        False
                    ):  # no anomaly of the user's: losses that are no numbers are tried
                        yield
                finally:
                    self._undo()
        finally:
            self.runs, self.kept, self._start = None, None, {}
            for p, g in grads:
                p.grad = g

    # What a proof asks (Stage, Sealing) ---------------------------------------------------------------------------------------

    def run(self, inputs: Any, examples: int, structure: Structure | None = None) -> Run:
        """A pass under the capture."""
        assert self.runs is not None
        tape = self._tape
        tape.clear()
        tape.announce(examples=examples)
        self.runs.clear()
        self.of = (examples, structure)
        self._called(inputs)
        return self.runs.pop()

    def run_sealed(self, inputs: Any, examples: int, structure: Structure) -> Run:
        """The pass over the batch, read by its structure: the one that was kept if it can still be read, else a new one."""
        run, self.kept = self.kept, None
        if run is None or not structure.plain or any(structure.around):
            del run
            return self.run(inputs, examples, structure)
        tape = self._tape
        tape.clear()
        tape.announce(examples=examples)
        batch = tape.enter(examples)
        batch.structure = structure
        for call in run.calls:
            call.batch, call.place = batch, NATIVE
        return run

    def _called(self, inputs: Any, *, after: Any = None) -> Any:
        """Call the model in the state in which the proof began; record what it counts."""
        self._give_back()
        self._undo()
        if self._clocks is None:
            return self._first_called(inputs)
        if self._start:
            put_back(self.model, self._start)
        self._left = Kept(self._attributes.all())
        if after is not None:
            self._run(after)
        return self._run(inputs)

    def _undo(self) -> None:
        """Put back what the last pass has written to attributes: not before, since its backward may read that."""
        left, self._left = self._left, None
        self._wrote = (left is not None and left.undo()) or self._wrote

    def _give_back(self) -> None:
        """For a large model, ask the C library to return the memory of earlier passes; fragmentation would keep it otherwise."""
        if self._trim is not None:
            self._trim(0)

    def _run(self, inputs: Any) -> Any:
        args, kwargs = copied(inputs)
        self._quiet.seeds.clear()
        self._quiet.listens = True
        if self._drawn != self._draws:
            draw_from(self._draws)
        try:
            with torch.compiler.set_stance("force_eager") if self._unwatched else randomness_fixed():
                return self.model(*args, **kwargs)
        finally:
            self._quiet.listens = False
            self._drawn = host_draws()
            self.draws = self.draws or self._drawn != self._draws

    def heard(self, trace: CallTrace) -> None:
        """The model's own forward has ended, with this trace; hooks of others may follow."""
        self._quiet.listens = False
        self.differentiates = self.differentiates or not trace.functions.isdisjoint(("grad", "backward"))
        self.traces.append(trace)
        if not self._unwatched:
            self._heard = self._heard.after(trace)

    def _first_called(self, inputs: Any) -> Any:
        """The first, ordinary pass of a proof: shows whether the model writes to parameters, before extreme values could get there."""
        marks = {} if self._spares_parameters else self._marks()
        self._left = Kept(attributes_of(self.model))
        with self._attributes.clocks() as clocks:
            output = self._run(inputs)
        changed = [name for name, mark in self._marks().items() if mark != marks.get(name, mark)] if marks else []
        if changed:
            raise CaptureError(
                f"Parameter {changed[0]} was changed by the forward pass: it holds something of the data without any noise. Use a layer "
                "that keeps nothing (Embedding without max_norm, no running mean), and change parameters after optimizer.step() only."
            )
        self._spares_parameters = True
        now = dict(self.model.named_buffers())
        moved = [n for n, was in self._start.items() if n in now and was.shape == now[n].shape and not equal(was, now[n])]
        self._wrote, self.moves_buffers = self._wrote or bool(moved), self.moves_buffers or bool(moved)
        self._counts = [n for n in moved if self._start[n].numel() == 1 and self._start[n].dtype is not torch.bool]
        self._clocks = clocks
        return output

    def _marks(self) -> dict[str, Any]:
        return {name: fingerprint(p) for name, p in self.model.named_parameters()}

    def keeps_nothing(self) -> bool:
        """Whether no pass so far has written anything: then earlier passes are as good as new ones."""
        self._wrote = self._wrote or (self._left is not None and self._left.is_changed())
        return not self._wrote

    def seeds(self) -> frozenset[int]:
        """The seeds of the generators that the last pass has drawn from."""
        return frozenset(self._quiet.seeds)

    def compared(self) -> tuple[list[float], bool]:
        """The constants that passes compare their tensors with, and whether integers may be tried that do not occur in the batch."""
        # Not with lazy tables, where reading a row draws its noise, nor on devices, where a missing row aborts the process.
        return list(self._quiet.compared), not self._capture.by_rows and all(p.is_cpu for p in self.model.parameters())

    def dim(self) -> int | None:
        """The dimension of the inputs that was declared to hold the examples."""
        said = self._tape.dim
        return said() if callable(said) else said

    def is_declared(self) -> bool:
        """Whether somebody has."""
        return self._tape.dim is not int and self.dim() is not None

    def shared(self, tensor: int, shape: tuple[int, ...]) -> bool:
        """Whether all examples share this input: an earlier proof found it, or the user vouches for the model."""
        return not self._seal or self._known.shared(tensor, shape)

    def placed(self, tensors: int, tensor: int, layout: Layout) -> bool:
        """Whether this input, of so many, had this layout in an earlier proof, or the user vouches for the model."""
        return not self._seal or self._known.placed(tensors, tensor, layout)

    def name_of(self, leaf: Tensor) -> str | None:
        """The name of a trained parameter."""
        return self._capture.name_of(leaf)

    def weighed(self, run: Run, exits: Any, us: list[Tensor], weights: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The sum of the per-example gradients with these weights, as the capture computes it, and the examples' norms."""
        self._tape.deaf = False
        try:
            with randomness_fixed("of a step"):  # a rule may rerun a layer
                torch.autograd.backward([e.edge for e in exits], us)
                return self._capture.weighed(weights)
        finally:
            self._tape.deaf = True

    def alone(self, inputs: Any, *, after: Any = None) -> tuple[list[Tensor], dict[str, nn.Parameter]]:
        """The outputs of a pass, optionally ``after`` another one, and the trained parameters."""
        (made,) = self._called_unwatched(inputs, after) or (self._called(inputs, after=after),)
        outputs = floats(made)
        return self.opened(outputs, inputs), self._capture.trained

    def _called_unwatched(self, inputs: Any, after: Any) -> tuple[Any] | None:
        """Call the model without fixing randomness, at half the cost, if passes with the same trace drew nothing; None if they may have."""
        if not self._heard.orders or not self._quiet.idle:
            return None
        before, self._unwatched = len(self.traces), True
        try:
            made = self._called(inputs, after=after)
        finally:
            self._unwatched = False
        passes = self.traces[before:]
        if passes and all(map(self._heard.know, passes)):
            return (made,)
        del self.traces[before:]
        return None

    def opened(self, outputs: list[Tensor], inputs: Any) -> list[Tensor]:
        """The outputs of a pass with examples of different lengths padded: see :mod:`hushgrad.clipping.proof.variable_lengths`."""
        return outputs if self.opening is None else opened(outputs, self.opening, leaves(inputs))

    def paused(self) -> AbstractContextManager[None]:
        """Passes inside run without the capture."""
        return self._capture.pause()

    def buffers(self) -> dict[str, Tensor]:
        """Copies of all buffers as the last pass left them."""
        return buffers_of(self.model)

    @contextmanager
    def later(self, passes: int, only: int | None = None) -> Iterator[int]:
        """Inside, the model's own counters, or ``only`` one of them, are ``passes`` ahead; yields how many it has."""
        self._undo()
        start, n = self._start, len(self._counts)
        counts = [name for k, name in enumerate(self._counts) if only in (None, k)]
        self._start = start | {name: start[name] + passes for name in counts}
        try:
            with self._attributes.later(self._clocks or [], passes, None if only is None else only - n) as clocks:
                try:
                    yield n + clocks
                finally:
                    self._undo()  # what was kept had the counters ahead
        finally:
            self._start = start

    def precisions(self) -> set[torch.dtype]:
        """The dtypes that the model, or autocast, casts to."""
        cast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        return self._quiet.casts | ({torch.bfloat16} if cast else set())
