"""Passes off the short path: of an unproved structure, of one example or none, or of a proof itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from torch.autograd.graph import GradientEdge

from hushgrad.clipping._torch_compile import eagerly
from hushgrad.clipping.layout import Kind
from hushgrad.clipping.proof.input_variants import floats
from hushgrad.clipping.proof.inputs import data_of, examples_of, leaves
from hushgrad.clipping.proof.messages import of_other_size
from hushgrad.clipping.proof.read_pass import Reader
from hushgrad.clipping.proof.state import Attributes
from hushgrad.clipping.proof.straight_line import StraightLine
from hushgrad.clipping.proof.structure import DROPPED, NATIVE, WHOLE, Known, Structure, is_packed
from hushgrad.clipping.proof.survey import Run
from hushgrad.clipping.proof.survey_notes import not_again
from hushgrad.clipping.proof.trials import Trials
from hushgrad.clipping.site import Call
from hushgrad.errors import CaptureError, NotIsolated

if TYPE_CHECKING:
    from hushgrad.clipping.capture import Capture
    from hushgrad.clipping.root import Pass


class Looks(Protocol):
    """Looks at what a model reads beside its inputs, before and after some of its passes."""

    due: bool  # whether the next pass is looked at; one that needs a proof is in any case
    open: bool  # whether this pass is

    def before(self) -> None:
        """Called before a pass, and before its proof; perhaps twice."""

    def after(self) -> None:
        """Called after such a pass."""

    def backward(self) -> None:
        """Called before a backward pass."""


class Passes:
    """Proves passes, and reads those that need a proof, or tags on their own graph."""

    def __init__(self, capture: Capture, *, seal: bool) -> None:
        self.model, self._capture, self._tape, self._seal = capture.model, capture, capture._tape, seal
        self._whole = capture.whole  # this process may run the model alone
        self.attributes = Attributes(self.model)
        self._lot = Random(0)  # its own generator: a proof draws from no other, and a run can be repeated
        self.known = Known()
        self._trials = Trials(capture, self.attributes, self._lot, self.known, seal=seal)
        self._reader = Reader(capture, self.deaf, self._lot)
        self.running: list[Pass | None] = []
        # A plain structure, examples, and the shapes of its calls.
        self._usual: tuple[Structure | None, int, Any] = (None, 0, None)
        self._line: StraightLine | None = None  # the model, if it is a chain of torch's own layers
        self._lined: dict[int, Structure] = {}  # what its passes were that were traced, by their id
        self._wait = 0  # how many traced passes it is until it is looked at again as a whole
        self._size: tuple[Any, ...] | None = None  # of one example in each input, in the last pass
        self._tries = 0  # proofs repeated because a layer had no gradient
        self.announces = False  # whether the number of examples is announced for each training pass

    @property
    def proving(self) -> bool:
        """Whether a pass that runs now is one of a proof."""
        return self._trials.runs is not None

    @contextmanager
    def deaf(self) -> Iterator[None]:
        """Inside, gradients that come back are not part of a step."""
        before, self._tape.deaf = self._tape.deaf, True
        try:
            yield
        finally:
            self._tape.deaf = before

    @eagerly
    def _look(self) -> None:
        if self._capture.looks is not None:
            self._capture.looks.before()

    @eagerly
    def _looked(self) -> None:
        if self._capture.looks is not None:
            self._capture.looks.after()

    # Before the forward --------------------------------------------------------------------------------------------------

    @eagerly
    def _unknown(
        self, inputs: Any, tensors: list[Any], key: Any, expected: int | None, *, aside: bool, faint: Structure | None
    ) -> tuple[int, list[Structure], Any, bool] | None:
        """For a pass without a known structure: examples, structures, key, and whether it was proved just now. None: an evaluation.

        Args:
            inputs: of the model.
            tensors: among them.
            key: what else identifies the pass.
            expected: how many examples it has, if announced.
            aside: whether it may be an evaluation.
            faint: a proved structure that is sufficient if these data show nothing more.
        """
        if expected == 0 or not self._whole:
            return (examples_of(inputs) or [0])[0] if expected is None else expected, [], key, False
        B = expected if expected is not None else self._counted(inputs)
        if B == 0:
            return 0, [], key, False
        other = expected is not None and not _may_hold(tensors, B)
        doubtful = aside or other
        again = any(structure.fits(tensors, B) for structure in self.known.proved(key))
        try:
            structure = self._proved(inputs, B, for_good=not doubtful, again=again, faint=faint)
        except (CaptureError, NotIsolated) as error:
            if not doubtful:
                raise
            # So it is an evaluation; a gradient that comes back is refused.
            self._tape.failure, self._tape.aside = None, str(error)
            self._put_aside(tensors, B if other else None)
            return None
        return B, [structure] if B > 1 else [], self._key_of(inputs), True

    def _put_aside(self, tensors: list[Any], expected: int | None) -> None:
        """Note why a pass whose inputs do not hold so many examples is not part of the batch, for a gradient that comes back from it."""
        if expected is not None:
            self._tape.aside = of_other_size([tuple(t.data.shape) for t in tensors], expected)

    def _key_of(self, inputs: Any) -> Any:
        return self.attributes.key([*map(data_of, leaves(inputs))])

    def _proved(
        self, inputs: Any, B: int, *, for_good: bool = True, again: bool = False, faint: Structure | None = None
    ) -> Structure:
        """Prove and remember; ``faint`` suffices if these data show nothing more. Raises NotIsolated (for good) or CaptureError."""
        self._look()
        with self._kept(for_good=for_good, again=again):
            structure = self._trials.proved(inputs, B, faint) if B > 1 else self._trials.proved_of_one(inputs)
        if structure is faint:
            return structure
        self.attributes.proved()
        return self.known.add(self._key_of(inputs), structure, of_one=B == 1)  # computed now: the proof has found the clocks

    @contextmanager
    def _kept(self, *, for_good: bool, again: bool) -> Iterator[None]:
        """Proofs inside are not part of a pass; a refusal for good is remembered. ``again``: the pass looks like a proved one."""
        running, self.running = self.running, []
        try:
            yield
        except NotIsolated as error:
            if self._seal and for_good:
                self._capture.not_isolated = str(error)
                self._capture.late = again
            raise
        finally:
            self.running = running

    @eagerly
    def _repeat(self, structure: Structure, inputs: Any, B: int, *, brief: bool) -> None:
        """Repeat a part of the proof, in the state that this pass begins in."""
        with self._kept(for_good=True, again=not brief):
            self._trials.repeat(structure, inputs, B, brief=brief)

    def _counted(self, inputs: Any) -> int:
        """How many examples the inputs hold, if not announced: the first or second dimension of the first tensor."""
        numbers = examples_of(inputs)
        if not numbers:
            self._tape.fail("The number of examples cannot be told from the model's inputs. Call capture.examples(count) first.")
        if numbers[0] < 2 or len(numbers) == 1 or numbers[1] < 2:
            return numbers[0]
        return next((B for B in numbers if self._trials.may_be_read(inputs, B)), numbers[0])

    # After the forward ---------------------------------------------------------------------------------------------------

    @eagerly
    def _tried(self, here: Pass, made: int, output: Any) -> None:
        """End a pass of a proof."""
        assert self._trials.runs is not None
        if here.trace is not None:
            self._trials.heard(here.trace)
        if here.is_aside:
            return
        outputs = self._trials.opened(floats(output), here.inputs)
        run = Run(outputs, here.calls, _edges(here.calls), made, 0 if here.trace is None else here.trace.order)
        self._trials.runs.append(run)
        if here.structure is None:
            return
        try:
            self._reader.read(here.structure, run, here.examples, here.packing, by_tags=False)
        except LookupError as error:
            raise not_again(str(error)) from None

    @eagerly
    def _place(self, here: Pass, made: int, output: Any) -> None:
        """Tell each call where its examples are."""
        if here.examples < 2:
            _place_all(here)
        elif here.structure is None:  # parameters in shards: no process can run the model alone
            self._require_first(here)
        else:
            self._read_anew(here, here.structure, Run(floats(output), here.calls, _edges(here.calls), made))

    def _read_anew(self, here: Pass, structure: Structure, run: Run) -> None:
        """Read the pass by one of its candidate structures; one that differs from the proved ones is proved first."""
        if any(self._read(here, s, run) for s in here.candidates):
            return
        if (not here.fresh or self._trials.lifts) and self._whole:
            self._trials.lifts = False  # the model may depend on its parameters' values
            with self._trials.drawing(here.draws), self.attributes.at(here.times or []):  # as the pass began
                structure = self._proved(here.inputs, here.examples)
            here.key = self._key_of(here.inputs)
            if self._read(here, structure, run):
                return
        try:
            _require_held(here, structure)
            self._reader.read(structure, run, here.examples, here.packing, by_tags=True, inputs=here.inputs)
        except LookupError as error:
            why = self._fused(structure) if "Compiled" in str(error) else "it may have random or data-dependent branches"
            self._tape.fail(
                f"The model did something else in this pass than in the passes that were proved ({error}), so it cannot be told whose "
                f"gradient is whose: {why}."
            )
        self.known.saw(here.key, structure, run.nodes, here.trace)

    def _fused(self, structure: Structure) -> str:
        """For a compiled pass in which shared values and examples meet in one operation: read the layers that have a rule by the rule."""
        layers = {site.path for site in self._capture._sites}
        shared = {number[0].path for number, place in structure.places.items() if place.layout.kind is Kind.SHARED}
        holders = shared | {name.rpartition(".")[0] for name in structure.bare}
        users = sorted({path.rpartition(".")[0] if path in layers else path for path in holders})
        return (
            f"torch.compile has put what they share ({', '.join(sorted(shared | structure.bare))}) and the examples into one operation. "
            "Keep the forward that does so out of it, for module in map(model.get_submodule, "
            f"{users}): module.forward = torch.compiler.disable(module.forward), or compile parts of the model without it"
        )

    def _read(self, here: Pass, structure: Structure, run: Run) -> bool:
        """Read the pass if it is as proved; returns whether it is."""
        B, trace = here.examples, here.trace
        same_nodes = structure.nodes is None or structure.routed or run.nodes in structure.nodes
        if not same_nodes or not structure.matches(run.calls, B):
            return False
        if trace is not None and structure.traces is not None and not structure.traces.know(trace):
            return False
        try:
            self._reader.read(structure, run, B, here.packing, by_tags=False, inputs=here.inputs)
        except LookupError:
            return False
        if structure.plain and not any(structure.around):
            self._usual = (structure, B, [call.shapes for call in run.calls])
        return True

    def _require_first(self, here: Pass) -> None:
        """Require that all calls have the examples where their rules expect them."""
        for call in here.calls:
            shape = call.shapes[0] if call.shapes else ()
            if len(shape) <= call.site.dim or (shape[call.site.dim] != here.examples and not is_packed(call)):
                self._tape.fail(
                    f"{call.site.path or 'The model'} returned a tensor of the shape {tuple(shape)} where the batch has {here.examples} "
                    "examples. With fully_shard, keep the examples in the first dimension of every layer: (B, T, d) rather than (B*T, d), "
                    "and positions as (B, T)."
                )
            call.place = NATIVE


def is_evaluation(tensors: list[Any], expected: int | None, *, aside: bool) -> bool:
    """Whether a pass is not part of the step: in evaluation mode or within an open batch, with another number of examples than announced.

    A gradient that comes back from it is refused.
    """
    return aside if expected is None else not _may_hold(tensors, expected)


def _may_hold(tensors: list[Any], examples: int) -> bool:
    """Whether some tensor has a dimension of this size."""
    return any(n and n % examples == 0 for t in tensors for n in t.data.shape[:2]) if examples else True


def _place_all(here: Pass) -> None:
    """For a single example: everything is its own, in whatever dimension."""
    for call in here.calls:
        dims = call.site.rule.dims(call.site.module, len(call.shapes))
        own = is_packed(call) or all(len(s) > d and s[d] == here.examples for s, d in zip(call.shapes, dims, strict=True))
        call.place = NATIVE if own else WHOLE if here.examples else DROPPED


def _require_held(here: Pass, structure: Structure) -> None:
    """Raises LookupError if a pass did something that no forward of the proof did."""
    if here.trace is not None and structure.traces is not None and not structure.traces.hold(here.trace):
        raise LookupError(structure.traces.beyond(here.trace))


def _edges(calls: list[Call]) -> dict[Call, Sequence[GradientEdge | None]]:
    """The graph edges of each call's outputs, for as long as the pass is alive; the calls themselves do not keep them."""
    return {call: call.edges for call in calls}
