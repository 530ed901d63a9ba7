"""Proofs of one capture: the passes that they make, the state that each begins in, and what a failed one says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from hushgrad.clipping._torch import checkpoints_off
from hushgrad.clipping.costs import FEW
from hushgrad.clipping.isolated import culprit
from hushgrad.clipping.layout import Layout
from hushgrad.clipping.marks import mark_of
from hushgrad.clipping.proof.course import Course, after_all
from hushgrad.clipping.proof.given import copied, finite, floats, jittered, shuffled, tamed
from hushgrad.clipping.proof.inputs import leaves, readings
from hushgrad.clipping.proof.known import Known
from hushgrad.clipping.proof.others import swayed
from hushgrad.clipping.proof.prove import prove
from hushgrad.clipping.proof.quiet import (
    ALMOST_ONE,
    Draws,
    Quiet,
    as_it_was,
    buffers_of,
    draw_from,
    host_draws,
    hushed,
    put_back,
    quieted,
)
from hushgrad.clipping.proof.seal import Broken, broken
from hushgrad.clipping.proof.state import Attributes, Place, attributes_restored
from hushgrad.clipping.proof.structure import Structure
from hushgrad.clipping.proof.survey import Run, still_there, surveyed
from hushgrad.clipping.proof.words import refusal
from hushgrad.clipping.proof.zeros import lifted
from hushgrad.errors import CaptureError, HushgradError, NotIsolated

if TYPE_CHECKING:
    from hushgrad.clipping.capture import Capture
    from hushgrad.clipping.tape import Tape

__all__ = ["Trials"]


class _Failure(NamedTuple):
    """Why a proof failed: what broke the seal (None: no reading of the inputs explains the outputs), or what was raised."""

    problem: Broken | None
    error: HushgradError | None
    drawn: frozenset[str]


class Trials:
    """Proves passes of a model. A stage of :mod:`~hushgrad.clipping.proof.prove` and :mod:`~hushgrad.clipping.proof.seal`."""

    def __init__(self, capture: Capture, attributes: Attributes, lot: Random, known: Known, *, seal: bool) -> None:
        self.model: nn.Module = capture.model
        self._capture, self._tape, self._attributes, self._lot, self._seal = capture, capture._tape, attributes, lot, seal
        self._known = known
        self.runs: list[Run] | None = None  # of the proof that is running
        self.courses: list[Course] = []  # of all its passes
        self.of: tuple[int, Structure | None] = (0, None)
        self.lifts = True  # parameters that are 0 while a model is proved
        self._start: dict[str, Tensor] = {}
        self._clocks: list[Place] | None = None  # until the first pass
        self._counts: list[str] = []  # buffers of one number that a pass changes
        self._spares_parameters = not seal  # shown, or of no concern
        self._quiet = Quiet()
        self._wrote = False
        self.draws = False  # from Python's or numpy's generator, in some pass
        self._draws = host_draws()  # where each pass of a proof begins: one example alone takes the branches that its batch takes

    # Proofs ----------------------------------------------------------------------------------------------------------------

    @contextmanager
    def drawing(self, draws: Draws | None) -> Iterator[None]:
        """Proofs inside draw what a pass drew that began there."""
        now = host_draws() if draws is not None else None
        try:
            if draws is not None:
                draw_from(draws)
            yield
        finally:
            if now is not None:
                draw_from(now)

    def proved(self, inputs: Any, B: int, known: Structure | None = None) -> Structure:
        """Prove and seal; ``known``, if these inputs show no more than it says. Raises NotIsolated or CaptureError."""
        first = self._tried(finite(inputs), B, known)
        if isinstance(first, Structure):
            return first
        tame = tamed(inputs)  # extreme numbers overflow: then nothing is told of anybody
        again = first if tame is None else self._tried(tame, B)
        if isinstance(again, Structure):
            return again
        self._refuse(finite(inputs), B, first)

    def proved_of_one(self, inputs: Any) -> Structure:
        """The same for a batch of one: of it, batches of three are made."""
        first: _Failure | None = None
        for reading in readings(inputs, 1):
            three = reading.only(finite(inputs), torch.tensor([0, 0, 0]), 1)
            three = reading.changed(three, {1: lambda t, _: jittered(t), 2: lambda t, _: jittered(jittered(t))}, 3)
            found = self._tried(three, 3)
            if isinstance(found, Structure):
                return found
            first = first or found
        assert first is not None
        self._refuse(finite(inputs), 1, first)

    def repeat(self, structure: Structure, inputs: Any, B: int) -> None:
        """Of a pass that looks like a proved one: others replaced and made extreme, once more. Raises NotIsolated."""
        inputs = finite(inputs)
        with self._proving(Quiet()):
            problem = swayed(self, structure, inputs, B, self._lot) if self._seal else None
        if problem is not None:
            self._refuse(inputs, B, _Failure(Broken(problem, influence=True), None, frozenset()))

    def may_be_read(self, inputs: Any, B: int) -> bool:
        """Whether some reading of the inputs explains the outputs for so many examples."""
        with suppress(NotIsolated), self._proving(Quiet()):
            return prove(self, finite(inputs), B) is not None
        return False

    def _tried(self, inputs: Any, B: int, known: Structure | None = None) -> Structure | _Failure:
        quiet = Quiet()
        self.courses = []
        try:
            with self._proving(quiet):
                found = prove(self, inputs, B)
                if found is not None and known is not None and found[0].same_as(known):
                    return known  # which was sealed
                problem = None if found is None or not self._seal else broken(self, found[0], inputs, B, self._lot)
            if found is not None and problem is None and self._seal and quiet.hushed:
                problem = self._swayed(found[0], inputs, B)
        except HushgradError as error:
            return _Failure(None, error, frozenset(quiet.drawn))
        except Exception as error:  # noqa: BLE001  the model's own, of whatever kind
            message = (
                f"{type(self.model).__name__} cannot be run for fewer or more examples, as its proof needs: {error} "
                "Let the model take any number of examples, or vouch for it with check_isolation=False."
            )
            return _Failure(None, CaptureError(message), frozenset(quiet.drawn))
        if found is None or problem is not None:
            return _Failure(problem, None, frozenset(quiet.drawn))
        structure = found[0] if found[1] else self._with_order(found[0], inputs, B)
        return structure._replace(courses=after_all(structure.courses, self.courses) if self._seal else None)

    def _with_order(self, structure: Structure, inputs: Any, B: int) -> Structure:
        """If other data of as many examples put rows elsewhere, by whatever operation, whose row it is is told in every pass."""
        if structure.moves is None:
            return structure
        n = min(B, FEW)
        some = structure.reading.only(inputs, torch.tensor(self._lot.sample(range(B), n)), B)
        other = structure.reading.all_changed(some, shuffled)
        try:
            with self._proving(Quiet()):
                still = still_there(structure, surveyed(self.run(other, n), structure.exits, n))
        except Exception:  # noqa: BLE001  such data it does not take, so nothing was shown: tags tell, in every pass
            still = False
        return structure if still else structure._replace(moves=None, plain=False)

    def _swayed(self, structure: Structure, inputs: Any, B: int) -> Broken | None:
        """The same with other numbers in the place of random ones: these may open a branch, or carry a factor, that mixes examples."""
        for uniform, normal in ((1 - ALMOST_ONE, 1.0), (0.5, -1.0)):
            with self._proving(Quiet(uniform=uniform, normal=normal)):
                problem = swayed(self, structure, inputs, B, self._lot)
            if problem is not None:
                return Broken(problem, influence=True)
        return None

    def _refuse(self, inputs: Any, B: int, failure: _Failure) -> NoReturn:
        problem, name = failure.problem, type(self.model).__name__
        if failure.error is not None:
            self._tape.failure = str(failure.error)
            raise failure.error
        found = None
        packed = any(isinstance(t, PackedSequence) for t in leaves(inputs))  # its rows are no examples: no layer is to blame
        if (problem is None or problem.influence) and not packed:
            with as_it_was(self.model), self._capture.pause():
                found = culprit(self.model, inputs[0], inputs[1], B)
        message = found or refusal(name, B, failure.problem, failure.drawn, packed=packed)
        self._tape.failure = message
        raise NotIsolated(message)

    @contextmanager
    def _proving(self, quiet: Quiet) -> Iterator[None]:
        tape: Tape = self._tape
        grads = [(p, p.grad) for p in self.model.parameters()]
        self._start, self._quiet, self._clocks, self._draws = buffers_of(self.model), quiet, None, host_draws()
        self.runs = []
        try:
            lift = lifted(self._capture.trained.values() if self.lifts else ())
            with checkpoints_off(), as_it_was(self.model), tape.sandbox(), torch.enable_grad(), quieted(quiet), lift:
                for p, _ in grads:
                    p.grad = None
                tape.deaf = True
                yield
        finally:
            self.runs, self._start = None, {}
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

    def _called(self, inputs: Any, *, after: Any = None) -> Any:
        """The model, in the state in which the proof began; what it counts is noted."""
        if self._clocks is None:
            return self._first_called(inputs)
        put_back(self.model, self._start)
        with attributes_restored(self.model, self._note):
            if after is not None:
                self._run(after)
            return self._run(inputs)

    def _run(self, inputs: Any) -> Any:
        args, kwargs = copied(inputs)
        self._quiet.seeds.clear()
        self._quiet.listens = True
        draw_from(self._draws)
        try:
            with hushed():
                return self.model(*args, **kwargs)
        finally:
            self._quiet.listens = False
            self.draws = self.draws or host_draws() != self._draws

    def _first_called(self, inputs: Any) -> Any:
        """The first, ordinary pass of a proof. What it writes to parameters is found before anything extreme is written there."""
        marks = {} if self._spares_parameters else self._marks()
        with attributes_restored(self.model, self._note), self._attributes.clocks() as clocks:
            output = self._run(inputs)
        changed = [name for name, mark in self._marks().items() if mark != marks.get(name, mark)] if marks else []
        if changed:
            raise CaptureError(
                f"Parameter {changed[0]} was changed by the forward pass: it holds something of the data without any noise. Use a layer "
                "that keeps nothing (Embedding without max_norm, no running mean), and change parameters after optimizer.step() only."
            )
        self._spares_parameters = True
        now = dict(self.model.named_buffers())
        moved = [n for n, was in self._start.items() if n in now and was.shape == now[n].shape and not torch.equal(was, now[n])]
        self._wrote = self._wrote or bool(moved)
        self._counts = [n for n in moved if self._start[n].numel() == 1 and self._start[n].dtype is not torch.bool]
        self._clocks = clocks
        return output

    def _marks(self) -> dict[str, Any]:
        return {name: mark_of(p) for name, p in self.model.named_parameters()}

    def _note(self) -> None:
        self._wrote = True

    def wrote(self) -> bool:
        """Whether a pass has left something behind in an attribute."""
        return self._wrote

    def seeds(self) -> frozenset[int]:
        """Of the generators that the last pass has drawn from."""
        return frozenset(self._quiet.seeds)

    def compared(self) -> tuple[list[float], bool]:
        """What passes compare their tensors with, and whether whole numbers may be tried that the batch does not have."""
        # Not where a row of a table that is read draws its noise then, nor where one that does not exist ends the process.
        return list(self._quiet.compared), not self._capture.by_rows and all(p.is_cpu for p in self.model.parameters())

    def dim(self) -> int | None:
        """The dimension of the inputs in which somebody has said that the examples are."""
        said = self._tape.dim
        return said() if callable(said) else said

    def shared(self, tensor: int, shape: tuple[int, ...]) -> bool:
        """Whether all examples share this input: so it was in an earlier proof, or somebody vouches for the model."""
        return not self._seal or self._known.shared(tensor, shape)

    def placed(self, tensors: int, tensor: int, layout: Layout) -> bool:
        """Whether this input, of so many, had the examples there in a batch that was proved; or somebody vouches for the model."""
        return not self._seal or self._known.placed(tensors, tensor, layout)

    def name_of(self, leaf: Tensor) -> str | None:
        """The name of a trained parameter."""
        return self._capture.name_of(leaf)

    def weighed(self, run: Run, exits: Any, us: list[Tensor], weights: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The sum of the examples' gradients with these weights, by the capture, and the examples' norms."""
        self._tape.deaf = False
        try:
            with hushed():  # a rule, too, may run a layer again
                torch.autograd.backward([e.edge for e in exits], us)
                return self._capture.weighed(weights)
        finally:
            self._tape.deaf = True

    def alone(self, inputs: Any, *, after: Any = None) -> tuple[list[Tensor], dict[str, nn.Parameter]]:
        """A pass, and the trained parameters; ``after`` another one."""
        return floats(self._called(inputs, after=after)), self._capture.trained

    def paused(self) -> AbstractContextManager[None]:
        """Passes inside are without the capture."""
        return self._capture.pause()

    def buffers(self) -> dict[str, Tensor]:
        """Copies of all buffers, as the last pass has left them."""
        return buffers_of(self.model)

    @contextmanager
    def later(self, passes: int) -> Iterator[bool]:
        """Inside, the model's own counts are so much further; False if it keeps none."""
        start = self._start
        self._start = start | {name: start[name] + passes for name in self._counts}
        try:
            with self._attributes.later(self._clocks or [], passes) as keeps_time:
                yield keeps_time or bool(self._counts)
        finally:
            self._start = start

    def precisions(self) -> set[torch.dtype]:
        """What the model casts numbers to, by itself or by autocast."""
        cast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        return self._quiet.casts | ({torch.bfloat16} if cast else set())
