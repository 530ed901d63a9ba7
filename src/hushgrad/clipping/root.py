"""The hooks on the whole model: every pass is read by a structure that was proved.

A structure is proved on the first pass that looks like it, and again at a few later steps. It is kept under what the passes have in
common: the inputs' sizes without the number of examples, and every plain attribute of the modules. A pass that does something else
inside (other sizes, more or fewer operations, rows in another order) is proved, or read by tags, before its gradients count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from hushgrad.clipping._torch import eagerly, nodes_made, refuse_tracing
from hushgrad.clipping.call import Call
from hushgrad.clipping.costs import AGAIN, TRIES
from hushgrad.clipping.passes import Pass, is_evaluation, may_hold, place_all
from hushgrad.clipping.proof.given import floats
from hushgrad.clipping.proof.inputs import data_of, examples_of, leaves
from hushgrad.clipping.proof.known import Known
from hushgrad.clipping.proof.live import Reader
from hushgrad.clipping.proof.quiet import host_draws
from hushgrad.clipping.proof.state import Attributes
from hushgrad.clipping.proof.structure import NATIVE, Structure, is_packed
from hushgrad.clipping.proof.survey import Run
from hushgrad.clipping.proof.trials import Trials
from hushgrad.errors import CaptureError, NotIsolated

if TYPE_CHECKING:
    from hushgrad.clipping.capture import Capture

__all__ = ["Root"]

_site, _shapes, _kind = attrgetter("site"), attrgetter("shapes"), attrgetter("dtype", "ndim")
_is_nested = attrgetter("is_nested")


class Root:
    """Proves passes, and tells each call of a pass where its examples are."""

    def __init__(self, capture: Capture, *, seal: bool) -> None:
        self.model, self._capture, self._tape, self._seal = capture.model, capture, capture._tape, seal
        self._attributes = Attributes(self.model)
        self._lot = Random(0)  # of its own: a proof takes nobody's numbers, and a run can be repeated
        self.known = Known()
        self._trials = Trials(capture, self._attributes, self._lot, self.known, seal=seal)
        self._reader = Reader(capture, self.deaf, self._lot)
        self._stack: list[Pass | None] = []
        # A plain structure, examples, and the shapes of its calls.
        self._usual: tuple[Structure | None, int, Any] = (None, 0, None)
        self._tries = 0  # proofs that were repeated for what had no gradient
        self.failed: str | None = None
        self.announces = False  # somebody says how many examples each training pass has

    def hooks(self) -> list[Any]:
        """Attach; the handles to detach with."""
        return [
            self.model.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True),
            self.model.register_forward_hook(self._exit, with_kwargs=True, always_call=True),
        ]

    def reset(self) -> None:
        """Forget a pass that was interrupted."""
        if self._stack and not self.proving:
            for here in reversed(self._stack):
                if here is not None:
                    here.leave()
            self._stack.clear()
            self._tape.calls = None

    @property
    def proving(self) -> bool:
        """Whether a pass that runs now is one of a proof."""
        return self._trials.runs is not None

    @contextmanager
    def deaf(self) -> Iterator[None]:
        """Gradients that come back are not a step's."""
        before, self._tape.deaf = self._tape.deaf, True
        try:
            yield
        finally:
            self._tape.deaf = before

    # One pass ------------------------------------------------------------------------------------------------------------

    @eagerly
    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        refuse_tracing()
        tape, proving = self._tape, self._trials.runs is not None
        if tape.silent or module is not self.model or tape.calls is not None or not torch.is_grad_enabled():
            self._stack.append(Pass.aside() if module is self.model and proving else None)
            return
        inputs = (args, kwargs)
        if proving:
            examples, structure = self._trials.of
            here: Pass | None = Pass(inputs, examples, [] if structure is None else [structure], None, fresh=True)
        else:
            here = self._known_or_proved(inputs)
        self._stack.append(here)
        if here is None:  # an evaluation
            return
        batch = tape.enter(here.examples)
        batch.structure = here.structure
        here.before, tape.calls = tape.calls, here.calls
        here.draws, here.times = host_draws() if self._trials.draws else None, self._attributes.times()
        here.enter(training=self.model.training, watched=self._seal and (proving or here.structure is not None))

    @eagerly
    def _exit(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        here = self._stack.pop() if self._stack else None
        if here is None:
            return
        made = nodes_made() - here.nodes
        here.leave()
        if output is not None and self._trials.runs is not None and here.course is not None:
            self._trials.heard(here.course)
        if here.is_aside:
            return
        self._tape.calls = here.before
        if output is None:  # the forward raised
            return
        if self._trials.runs is not None:
            outputs = self._trials.opened(floats(output), here.inputs)
            run = Run(outputs, here.calls, _edges(here.calls), made, 0 if here.course is None else here.course.order)
            self._trials.runs.append(run)
            if here.structure is not None:
                self._read_trial(here, run)
        elif here.examples < 2:
            place_all(here)
        elif here.structure is None:  # parameters in shards: no process can run the model alone
            self._require_first(here)
        elif not self._as_usual(here, made, output):
            self._place(here, Run(floats(output), here.calls, _edges(here.calls), made))
        for call in here.calls:
            call.edges = []  # nodes of the graph know the call: a circle

    def _as_usual(self, here: Pass, made: int, output: Any) -> bool:
        """The usual pass: one output, and the calls and operations that were proved, all as rules expect them, in proved sizes."""
        structure, examples, shapes = self._usual
        if structure is None or structure is not here.structure or structure.nodes is None:
            return False
        if made not in structure.nodes or not here.knows(structure):
            return False
        now = [*map(_shapes, here.calls)]
        if examples != here.examples or now != shapes or [*map(_site, here.calls)] != structure.order:
            if type(output) is not Tensor or len(structure.around) != 1 or not structure.matches(here.calls, here.examples):
                return False
            self._usual = structure, here.examples, now
        for call in here.calls:
            call.place = NATIVE
        return True

    def _read_trial(self, here: Pass, run: Run) -> None:
        assert here.structure is not None
        try:
            self._reader.read(here.structure, run, here.examples, here.packing, by_tags=False)
        except LookupError as error:
            raise CaptureError(
                f"The model does something else each time it is called, so its gradients cannot be attributed: {error}."
            ) from None

    def _place(self, here: Pass, run: Run) -> None:
        """Tell each call where its examples are; a pass that looks otherwise than the proved ones is proved first."""
        if any(self._read(here, s, run) for s in here.candidates):
            return
        structure = here.structure
        if (not here.fresh or self._trials.lifts) and self._capture.whole:
            self._trials.lifts = False  # a model may look at what its parameters are
            with self._trials.drawing(here.draws), self._attributes.at(here.times):  # as the pass began
                structure = self._proved(here.inputs, here.examples)
            here.key = self._key(map(data_of, leaves(here.inputs)))
            if self._read(here, structure, run):
                return
        assert structure is not None
        try:
            here.require_held(structure)
            self._reader.read(structure, run, here.examples, here.packing, by_tags=True, inputs=here.inputs)
        except LookupError as error:
            self._tape.fail(
                f"The model did something else in this pass than in the passes that were proved ({error}), as one with random or "
                "data-dependent branches does, so it cannot be told whose gradient is whose."
            )
        self.known.saw(here.key, structure, run.nodes, here.course)

    def _read(self, here: Pass, structure: Structure, run: Run) -> bool:
        """Whether the pass is as it was proved; then it is read."""
        B = here.examples
        same_nodes = structure.nodes is None or structure.routed or run.nodes in structure.nodes
        if not same_nodes or not structure.matches(run.calls, B) or not here.knows(structure):
            return False
        try:
            self._reader.read(structure, run, B, here.packing, by_tags=False, inputs=here.inputs)
        except LookupError:
            return False
        if structure.plain and not any(structure.around):
            self._usual = (structure, B, [call.shapes for call in run.calls])
        return True

    def _require_first(self, here: Pass) -> None:
        """All calls have the examples where their rules expect them."""
        for call in here.calls:
            shape = call.shapes[0] if call.shapes else ()
            if len(shape) <= call.site.dim or (shape[call.site.dim] != here.examples and not is_packed(call)):
                self._tape.fail(
                    f"{call.site.path or 'The model'} returned a tensor of the shape {tuple(shape)} where the batch has {here.examples} "
                    "examples. With fully_shard, keep the examples in the first dimension of every layer: (B, T, d) rather than (B*T, d), "
                    "and positions as (B, T)."
                )
            call.place = NATIVE

    # Known structures ------------------------------------------------------------------------------------------------------

    def _known_or_proved(self, inputs: Any) -> Pass | None:
        tape, tensors = self._tape, leaves(inputs if inputs[1] else inputs[0])
        expected = tape.expected()
        if self.failed:
            raise NotIsolated(self.failed)
        data = list(map(data_of, tensors))
        if any(map(_is_nested, data)):
            tape.refuse_nested("The model was given")
        aside = self.announces and not self.model.training
        if is_evaluation(tape, tensors, expected, aside=aside):
            return None
        key = self._key(data)
        if expected == 0 or not self._capture.whole:
            B = (examples_of(inputs) or [0])[0] if expected is None else expected
            return Pass(inputs, B, [], key, fresh=False)
        faint: Structure | None = None
        for B, found in self.known.read_as(key, tensors, expected):
            if B == 1 and self.known.proved(key):
                return Pass(inputs, 1, [], key, fresh=False)
            if found and found[0].partly and self._tries < TRIES:  # these data may show more
                self._tries, faint = self._tries + 1, found[0]
            if found and faint is None and not self._again(found[0], inputs, B):
                return Pass(inputs, B, found, key, fresh=False)
        B = expected if expected is not None else self._counted(inputs)
        if B == 0:
            return Pass(inputs, 0, [], key, fresh=False)
        doubtful = aside or (expected is not None and not may_hold(tensors, B))
        try:
            structure = self._proved(inputs, B, for_good=not doubtful, faint=faint)
        except (CaptureError, NotIsolated) as error:
            if not doubtful:
                raise
            tape.failure, tape.aside = None, str(error)  # so it is an evaluation; a gradient that comes back is refused
            return None
        return Pass(inputs, B, [structure] if B > 1 else [], self._key(data), fresh=True)

    def _proved(self, inputs: Any, B: int, *, for_good: bool = True, faint: Structure | None = None) -> Structure:
        """Prove and remember; ``faint``: proved, and enough if these data show no more. Raises NotIsolated, for good, or CaptureError."""
        with self._kept(for_good=for_good):
            structure = self._trials.proved(inputs, B, faint) if B > 1 else self._trials.proved_of_one(inputs)
        if structure is faint:
            return structure
        self._attributes.proved()
        key = self._key(map(data_of, leaves(inputs)))  # what counts passes was found out by the proof
        return self.known.add(key, structure, of_one=B == 1)

    @contextmanager
    def _kept(self, *, for_good: bool) -> Iterator[None]:
        """Proofs inside are no part of a pass; what they refuse stays refused, if it is for good."""
        stack, self._stack = self._stack, []
        try:
            yield
        except NotIsolated as error:
            if self._seal and for_good:
                self.failed = str(error)
            raise
        finally:
            self._stack = stack

    def _again(self, structure: Structure, inputs: Any, B: int) -> bool:
        """Whether the proof is to be repeated, at random. A part of it is repeated at once."""
        lot = self._lot.randrange(4 * AGAIN)
        if 0 < lot < 4:
            with self._kept(for_good=True):
                self._trials.repeat(structure, inputs, B)
        return lot == 0

    def _counted(self, inputs: Any) -> int:
        """How many examples the inputs hold, if nobody has said it: of the first tensor, its first or second dimension."""
        numbers = examples_of(inputs)
        if not numbers:
            self._tape.fail("The number of examples cannot be told from the model's inputs. Call capture.examples(count) first.")
        if numbers[0] < 2 or len(numbers) == 1 or numbers[1] < 2:
            return numbers[0]
        return next((B for B in numbers if self._trials.may_be_read(inputs, B)), numbers[0])

    def _key(self, data: Iterable[Tensor]) -> Any:
        cast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        return self._attributes.key(), cast, *map(_kind, data)


def _edges(calls: list[Call]) -> dict[Call, list[GradientEdge | None]]:
    """Where the graph has the outputs of each call, for as long as somebody holds the pass: the calls forget it."""
    return {call: call.edges for call in calls}
