"""Proofs of one capture: the passes that they make, the state that each begins in, and what a failed one says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from hushgrad.clipping._torch import checkpoints_off
from hushgrad.clipping.costs import FEW, TAME
from hushgrad.clipping.isolated import culprit
from hushgrad.clipping.proof.inputs import mapped, readings
from hushgrad.clipping.proof.others import swayed
from hushgrad.clipping.proof.prove import prove
from hushgrad.clipping.proof.quiet import ALMOST_ONE, Quiet, as_it_was, buffers_of, put_back
from hushgrad.clipping.proof.seal import Broken, broken
from hushgrad.clipping.proof.state import Attributes, Place, attributes_restored
from hushgrad.clipping.proof.structure import Structure
from hushgrad.clipping.proof.survey import Run, still_there, surveyed
from hushgrad.clipping.runs import leaves_of
from hushgrad.errors import CaptureError, HushgradError, NotIsolated

if TYPE_CHECKING:
    from hushgrad.clipping.capture import Capture
    from hushgrad.clipping.tape import Tape

__all__ = ["Trials", "floats"]


class _Failure(NamedTuple):
    """Why a proof failed: what broke the seal (None: no reading of the inputs explains the outputs), or what was raised."""

    problem: Broken | None
    error: HushgradError | None
    drawn: frozenset[str]


class Trials:
    """Proves passes of a model. A stage of :mod:`~hushgrad.clipping.proof.prove` and :mod:`~hushgrad.clipping.proof.seal`."""

    def __init__(self, capture: Capture, attributes: Attributes, lot: Random, *, seal: bool) -> None:
        self.model: nn.Module = capture.model
        self._capture, self._tape, self._attributes, self._lot, self._seal = capture, capture._tape, attributes, lot, seal
        self.runs: list[Run] | None = None  # of the proof that is running
        self.of: tuple[int, Structure | None] = (0, None)
        self._start: dict[str, Tensor] = {}
        self._clocks: list[Place] | None = None  # until the first pass
        self._quiet = Quiet()
        self._wrote = False

    # Proofs ----------------------------------------------------------------------------------------------------------------

    def proved(self, inputs: Any, B: int) -> Structure:
        """Prove and seal. Raises NotIsolated or CaptureError."""
        first = self._tried(_finite(inputs), B)
        if isinstance(first, Structure):
            return first
        tame = _tamed(inputs)  # extreme numbers overflow: then nothing is told of anybody
        again = first if tame is None else self._tried(tame, B)
        if isinstance(again, Structure):
            return again
        self._refuse(_finite(inputs), B, first)

    def proved_of_one(self, inputs: Any) -> Structure:
        """The same for a batch of one: of it, batches of three are made."""
        first: _Failure | None = None
        for reading in readings(inputs, 1):
            three = reading.only(_finite(inputs), torch.tensor([0, 0, 0]), 1)
            three = reading.changed(three, [1, 2], 3, _jittered)
            found = self._tried(three, 3)
            if isinstance(found, Structure):
                return found
            first = first or found
        assert first is not None
        self._refuse(_finite(inputs), 1, first)

    def may_be_read(self, inputs: Any, B: int) -> bool:
        """Whether some reading of the inputs explains the outputs for so many examples."""
        with self._proving(Quiet()):
            return prove(self, _finite(inputs), B) is not None

    def _tried(self, inputs: Any, B: int) -> Structure | _Failure:
        quiet = Quiet()
        try:
            with self._proving(quiet):
                found = prove(self, inputs, B)
                problem = None if found is None or not self._seal else broken(self, *found, inputs, self._lot)
            if found is not None and problem is None and self._seal and quiet.hushed:
                problem = self._swayed(found[0], inputs, B)
        except HushgradError as error:
            return _Failure(None, error, frozenset(quiet.drawn))
        except RuntimeError as error:
            message = (
                f"{type(self.model).__name__} cannot be run for some of its examples alone, as its proof needs: {error} "
                "Let the model take any number of examples, or vouch for it with check_isolation=False."
            )
            return _Failure(None, CaptureError(message), frozenset(quiet.drawn))
        if found is None or problem is not None:
            return _Failure(problem, None, frozenset(quiet.drawn))
        return self._with_order(found[0], inputs, B)

    def _with_order(self, structure: Structure, inputs: Any, B: int) -> Structure:
        """If other data of as many examples put rows elsewhere, by whatever operation, whose row it is is told in every pass."""
        if structure.moves is None:
            return structure
        n = min(B, FEW)
        some = structure.reading.only(inputs, torch.tensor(self._lot.sample(range(B), n)), B)
        other = structure.reading.changed(some, range(n), n, _shuffled)
        try:
            with self._proving(Quiet()):
                still = still_there(structure, surveyed(self.run(other, n), structure.exits, n))
        except (RuntimeError, ValueError, IndexError, AssertionError):  # such data it does not take
            return structure
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
        if problem is None or problem.influence:
            with as_it_was(self.model), self._capture.pause():
                found = culprit(self.model, inputs[0], inputs[1], B)
        if found is not None:
            message = found
        elif failure.drawn:
            message = (
                f"The model draws random numbers ({', '.join(sorted(failure.drawn))}) of which it cannot be told whether examples "
                "influence each other through them. Switch that off, or vouch for it with check_isolation=False."
            )
        elif problem:
            message = f"{name} lets the examples of a batch influence each other: {problem.what}."
        else:
            message = (
                f"The examples of a batch influence each other in {name}, or it cannot be told which rows of its "
                f"inputs are whose: no way to take {B} examples apart gives what it returns for the batch. Give the examples in the first "
                "dimension, what all share without it or with a first dimension of 1, and take no statistics over the batch."
            )
        self._tape.failure = message
        raise NotIsolated(message)

    @contextmanager
    def _proving(self, quiet: Quiet) -> Iterator[None]:
        tape: Tape = self._tape
        grads = [(p, p.grad) for p in self.model.parameters()]
        self._start, self._quiet, self._clocks = buffers_of(self.model), quiet, None
        self.runs = []
        try:
            with checkpoints_off(), as_it_was(self.model), tape.sandbox(), torch.enable_grad(), quiet:
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
        put_back(self.model, self._start)
        with (
            attributes_restored(self.model, self._note),
            nullcontext() if self._clocks is not None else self._attributes.clocks() as clocks,
        ):
            if after is not None:
                self.model(*after[0], **after[1])
            output = self.model(*inputs[0], **inputs[1])
        if self._clocks is None:
            self._clocks = clocks
        return output

    def _note(self) -> None:
        self._wrote = True

    def wrote(self) -> bool:
        """Whether a pass has left something behind in an attribute."""
        return self._wrote

    def name_of(self, leaf: Tensor) -> str | None:
        """The name of a trained parameter."""
        return self._capture.name_of(leaf)

    def weighed(self, run: Run, exits: Any, us: list[Tensor], weights: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The sum of the examples' gradients with these weights, by the capture, and the examples' norms."""
        self._tape.deaf = False
        try:
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
        with self._attributes.later(self._clocks or [], passes):
            yield bool(self._clocks)

    def precisions(self) -> set[torch.dtype]:
        """What the model casts numbers to."""
        return self._quiet.casts


def floats(output: Any) -> list[Tensor]:
    """The floating-point tensors in a model's output."""
    return [t for t in leaves_of(output) if isinstance(t, Tensor) and t.is_floating_point()]


# Inputs that a proof can be made of -----------------------------------------------------------------------------------------


def _finite(inputs: Any) -> Any:
    """Detached; NaN and infinity, of which nothing can be proved, are replaced."""

    def change(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        return t.detach().nan_to_num(0.0, 1e4, -1e4) if t.is_floating_point() else t.detach()

    return mapped(inputs, change)


def _tamed(inputs: Any) -> Any | None:
    """The same with no number far above the others; None if there is none."""
    wild = []

    def change(t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.is_floating_point() or not t.numel():
            return t
        t = t.detach()
        size = t.abs().nan_to_num(0.0, 0.0, 0.0)
        usual = size[size > 0].double().median() if bool((size > 0).any()) else torch.ones((), dtype=torch.float64)
        limit = float(min(max(TAME * float(usual), 1.0), 1e4))
        wild.append(bool((size > limit).any()) or not bool(t.isfinite().all()))
        return t.nan_to_num(0.0, limit, -limit).clamp(-limit, limit)

    made = mapped(inputs, change)
    return made if any(wild) else None


def _jittered(t: Tensor) -> Tensor:
    """Other examples like this one."""
    if not t.is_floating_point() or not t.numel():
        return t
    noise = torch.linspace(-0.3, 0.4, t.numel(), dtype=t.dtype, device=t.device).reshape(t.shape)
    return t + noise * (1 + t.abs())


def _shuffled(t: Tensor) -> Tensor:
    """Examples that differ in whatever may put them in order, in none."""
    if t.is_floating_point():
        return _jittered(t.flip(0))
    if t.dim() > 1 or t.dtype is torch.bool or not t.numel():
        return t.flip(0).roll(1, -1)
    return torch.arange(1, len(t) + 1, device=t.device, dtype=t.dtype).flip(0).roll(1) % (t.max().clamp(min=1) + 1)
