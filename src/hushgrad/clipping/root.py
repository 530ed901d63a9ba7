"""The hooks on the whole model: every pass is read by a structure that was proved.

A structure is proved on the first pass that looks like it, before that pass runs, and again at a few later steps. It is kept under what
the passes have in common: the inputs' sizes without the number of examples, training flags, precisions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from hushgrad.clipping._torch import checkpoints_off, refuse_tracing
from hushgrad.clipping.call import Call
from hushgrad.clipping.costs import AGAIN, LENGTHS, TRIES
from hushgrad.clipping.isolated import culprit
from hushgrad.clipping.layout import Kind
from hushgrad.clipping.proof.graph import Graph
from hushgrad.clipping.proof.inputs import examples_of, leaves, mapped
from hushgrad.clipping.proof.prove import Run, exits_of, one_owner_each, prove, rows_of, sources_of
from hushgrad.clipping.proof.quiet import ALMOST_ONE, Quiet, as_it_was
from hushgrad.clipping.proof.seal import Broken, broken, swayed
from hushgrad.clipping.proof.shares import Sink, watch
from hushgrad.clipping.proof.structure import DROPPED, NATIVE, WHOLE, Place, Structure, numbered
from hushgrad.clipping.proof.tags import Owners, tagged
from hushgrad.clipping.runs import leaves_of
from hushgrad.errors import CaptureError, HushgradError, NotIsolated

if TYPE_CHECKING:
    from hushgrad.clipping.capture import Capture
    from hushgrad.clipping.tape import Tape

__all__ = ["Root"]


class _Pass:
    """One call of the model."""

    __slots__ = ("before", "calls", "examples", "inputs", "structure")

    def __init__(self, inputs: Any, examples: int, structure: Structure | None, before: Any) -> None:
        self.inputs, self.examples, self.structure, self.before = inputs, examples, structure, before
        self.calls: list[Call] = []


class Root:
    """Proves passes, and tells each call of a pass where its examples are."""

    def __init__(self, capture: Capture, *, seal: bool) -> None:
        self.model, self._capture, self._tape, self._seal = capture.model, capture, capture._tape, seal
        self.known: dict[Any, list[Structure]] = {}
        self._stack: list[_Pass | None] = []
        self._trial: list[Run] | None = None
        self._trial_of: tuple[int, Structure | None] = (0, None)
        self._modules = list(self.model.modules())
        self._lot = Random(0)  # of its own: a proof takes nobody's numbers, and a run can be repeated
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
        if self._stack and self._trial is None:
            self._stack.clear()
            self._tape.calls, self._tape.with_edges = None, False

    # One pass ------------------------------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        refuse_tracing()
        tape = self._tape
        if tape.silent or module is not self.model or tape.calls is not None or not torch.is_grad_enabled():
            self._stack.append(None)
            return
        inputs = (args, kwargs)
        if self._trial is not None:
            examples, structure = self._trial_of
        else:
            found = self._known_or_proved(inputs)
            if found is None:  # an evaluation
                self._stack.append(None)
                return
            examples, structure = found
        batch = tape.enter(examples)
        batch.structure = structure
        here = _Pass(inputs, examples, structure, (tape.calls, tape.with_edges))
        self._stack.append(here)
        tape.calls, tape.with_edges = here.calls, self._trial is not None or (structure is not None and not structure.plain)

    def _exit(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        here = self._stack.pop() if self._stack else None
        if here is None:
            return
        tape = self._tape
        tape.calls, tape.with_edges = here.before
        if output is None:  # the forward raised
            return
        if self._trial is not None:
            run = Run(_floats(output), here.calls)
            self._trial.append(run)
            if here.structure is not None:
                self._place(here, run)
            return
        if here.examples < 2:
            for call in here.calls:  # of one example alone everything is its own, wherever its dimension is
                own = _fits(call, NATIVE, None, here.examples)
                call.place = NATIVE if own else WHOLE if here.examples else DROPPED
            return
        structure = here.structure
        if structure is None:  # parameters in shards: no process can run the model alone
            _require_first(self._tape, here)
            return
        if structure.plain and _as_proved(here.calls, structure, here.examples):
            return
        self._place(here, Run(_floats(output), here.calls))

    def _place(self, here: _Pass, run: Run) -> None:
        """Tell each call where its examples are, and watch the frontier; a pass that looks otherwise is proved first."""
        assert here.structure is not None
        try:
            self._read(here.structure, here, run)
        except LookupError:
            if self._trial is not None:
                raise CaptureError(
                    "The model does something else each time it is called, so its gradients cannot be attributed."
                ) from None
            structure = self._proved(here.inputs, here.examples)
            try:
                self._read(structure, here, run)
            except LookupError as error:
                self._tape.fail(
                    f"The model did something else in this pass than in the passes that were proved ({error}), as one with random or "
                    "data-dependent branches does, so it cannot be told whose gradient is whose."
                )

    def _read(self, structure: Structure, here: _Pass, run: Run) -> None:
        B = here.examples
        calls = numbered(run.calls)
        for number, call in calls.items():
            place = structure.places.get(number)
            if place is None or not _fits(call, place, structure.ranks[number], B):
                raise LookupError(number[0].path)
            call.place = place
        if any(p.layout.kind is Kind.ROWS for p in structure.places.values()):  # an expert may get no rows
            self._tape.batch().routed = self._capture.idle(run.calls)
        shared = {n for n, call in calls.items() if call.place is not None and call.place.layout.kind is Kind.SHARED}
        routed = [call for call in run.calls if call.place is not None and call.place.layout.kind is Kind.ROWS]
        if not shared and not structure.bare and not routed:
            return
        exits = exits_of(run, structure.exits)
        graph = Graph(e.edge for e in exits)
        edges, names = sources_of(self, run, graph, shared)
        if not names <= structure.bare:
            raise LookupError(min(names - structure.bare))
        borders = structure.frontier.again(graph, edges)
        loud = [b.node for b in borders if any(x is not None and not x.regular for x in b.layouts)]
        owners: dict[Any, Any] = {}
        if routed or loud:
            owners = self._tagged(exits, routed, edges, loud, B)
        watch(borders, self._sinks(calls, shared, graph, names), B, owners, self.deaf)

    def _tagged(self, exits: Any, routed: list[Call], edges: list[Any], nodes: list[Any], B: int) -> dict[Any, Any]:
        """The owners of rows that follow no rule, in this pass."""
        live = [(call, call.edges[0]) for call in routed if call.edges[0] is not None]
        with self.deaf():
            found, at_nodes = tagged(exits, [e for _, e in live] + [s.edge for s in edges], nodes, B)
        for (call, _), made in zip(live, found, strict=False):
            owners = made if made.each is None else Owners(made.each.reshape(call.shapes[0]), made.proved)
            if owners.each is not None and owners.proved and not (owners.clean and one_owner_each(owners.each)):
                raise LookupError(call.site.path)
            call.index = rows_of(owners, call.shapes[0])
        return at_nodes

    def _sinks(self, calls: dict[Any, Call], shared: set[Any], graph: Graph, names: set[str]) -> list[Sink]:
        sinks = []
        for number in shared:
            call = calls[number]
            for k, edge in enumerate(call.edges):
                if edge is not None and edge.node in graph.nodes:
                    sinks.append(Sink(edge, partial(call.take, k)))
        for name in names:
            call = self._capture.bare_call(name)
            edge = call.edges[0]
            assert edge is not None
            sinks.append(Sink(edge, partial(call.take, 0)))
        return sinks

    # Known structures ------------------------------------------------------------------------------------------------------

    def _known_or_proved(self, inputs: Any) -> tuple[int, Structure | None] | None:
        tape, tensors = self._tape, leaves(inputs)
        expected = tape.expected()
        if self.failed:
            raise NotIsolated(self.failed)
        if not self.model.training and self.announces and (expected is None or not _may_hold(tensors, expected)):
            return None
        if expected is not None and expected < 2:
            return expected, None
        known = self.known.get(self._key(tensors), [])
        any_length = len(known) >= LENGTHS and all(s.same_as(known[0]) for s in known[1:])
        for structure in known:
            B = structure.examples(tensors) if expected is None else expected
            if B is not None and B < 2:
                return B, None
            if B is not None and structure.fits(tensors, B, any_length=any_length) and not self._again(structure):
                return B, structure
        if not self._capture.whole:
            return (examples_of(inputs) or [0])[0] if expected is None else expected, None
        B = expected if expected is not None else self._counted(inputs)
        return (B, None) if B < 2 else (B, self._proved(inputs, B))

    def _again(self, structure: Structure) -> bool:
        """Whether the proof is to be repeated: at random, or because these data may show more."""
        if structure.partly and self._tries < TRIES:
            self._tries += 1
            return True
        return self._lot.randrange(AGAIN) == 0

    def _counted(self, inputs: Any) -> int:
        """How many examples the inputs hold, if nobody has said it: of the first tensor, its first or second dimension."""
        numbers = examples_of(inputs)
        if not numbers:
            self._tape.fail("The number of examples cannot be told from the model's inputs. Call capture.examples(count) first.")
        if numbers[0] < 2 or len(numbers) == 1 or numbers[1] < 2:
            return numbers[0]
        return next((B for B in numbers if self._may_be_read(inputs, B)), numbers[0])

    def _may_be_read(self, inputs: Any, B: int) -> bool:
        with self._proving():
            return prove(self, _finite(inputs), B) is not None

    def _key(self, tensors: list[Any]) -> Any:
        flags = tuple([m.training for m in self._modules])
        cast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        return flags, cast, tuple([(t.data.dtype, t.data.dim()) for t in tensors])

    # Proofs ----------------------------------------------------------------------------------------------------------------

    def _proved(self, inputs: Any, B: int) -> Structure:
        """Prove, seal and remember. Raises NotIsolated or CaptureError, for good."""
        tensors = leaves(inputs)
        inputs = _finite(inputs)
        with self._proving() as quiet:
            try:
                found = prove(self, inputs, B)
                problem = None if found is None or not self._seal else broken(self, *found, inputs, self._lot)
            except RuntimeError as error:
                if isinstance(error, HushgradError):
                    raise
                self._tape.fail(
                    f"{type(self.model).__name__} cannot be run for some of its examples alone, as its proof needs: {error} "
                    "Let the model take any number of examples, or vouch for it with check_isolation=False."
                )
        if found is not None and problem is None and self._seal and quiet.hushed:
            problem = self._swayed(found[0], inputs, B)
        if found is None or problem:
            self._refuse(inputs, B, problem, quiet)
        structure = found[0]
        kept = [s for s in self.known.get(self._key(tensors), []) if s.sizes != structure.sizes]
        self.known[self._key(tensors)] = [structure, *kept]
        return structure

    def _swayed(self, structure: Structure, inputs: Any, B: int) -> Broken | None:
        """The same with other numbers in the place of random ones: these may open a branch, or carry a factor, that mixes examples."""
        for uniform, normal in ((1 - ALMOST_ONE, 1.0), (0.5, -1.0)):
            with self._proving(Quiet(uniform=uniform, normal=normal)):
                problem = swayed(self, structure, inputs, B, self._lot)
            if problem is not None:
                return problem
        return None

    def _refuse(self, inputs: Any, B: int, problem: Broken | None, quiet: Quiet) -> NoReturn:
        found = None
        if problem is None or problem.influence:
            with as_it_was(self.model), self._capture.pause():
                found = culprit(self.model, inputs[0], inputs[1], B)
        if found is not None:
            message = found
        elif quiet.drawn:
            message = (
                f"The model draws random numbers ({', '.join(sorted(quiet.drawn))}) of which it cannot be told whether examples influence "
                "each other through them. Switch that off, or vouch for it with check_isolation=False."
            )
        elif problem:
            message = f"{type(self.model).__name__} lets the examples of a batch influence each other: {problem.what}."
        else:
            message = (
                f"The examples of a batch influence each other in {type(self.model).__name__}, or it cannot be told which rows of its "
                f"inputs are whose: no way to take {B} examples apart gives what it returns for the batch. Give the examples in the first "
                "dimension, what all share without it or with a first dimension of 1, and take no statistics over the batch."
            )
        if self._seal:
            self.failed = message
        self._tape.failure = message
        raise NotIsolated(message)

    @contextmanager
    def _proving(self, quiet: Quiet | None = None) -> Iterator[Quiet]:
        tape, quiet = self._tape, quiet or Quiet()
        grads = [(p, p.grad) for p in self.model.parameters()]
        stack, self._stack, self._trial = self._stack, [], []
        try:
            with checkpoints_off(), as_it_was(self.model), tape.sandbox(), torch.enable_grad(), quiet:
                for p, _ in grads:
                    p.grad = None
                tape.deaf = True
                yield quiet
        finally:
            self._stack, self._trial = stack, None
            for p, g in grads:
                p.grad = g

    @contextmanager
    def deaf(self) -> Iterator[None]:
        """Gradients that come back are not a step's."""
        before, self._tape.deaf = self._tape.deaf, True
        try:
            yield
        finally:
            self._tape.deaf = before

    # What a proof asks (Stage, Sealing) ---------------------------------------------------------------------------------------

    def run(self, inputs: Any, examples: int, structure: Structure | None = None) -> Run:
        """A pass under the capture."""
        assert self._trial is not None
        tape = self._tape
        tape.clear()
        tape.announce(examples=examples)
        self._trial.clear()
        self._trial_of = (examples, structure)
        args, kwargs = inputs
        self.model(*args, **kwargs)
        return self._trial.pop()

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

    def alone(self, inputs: Any) -> tuple[list[Tensor], dict[str, nn.Parameter]]:
        """A pass, and the trained parameters."""
        args, kwargs = inputs
        return _floats(self.model(*args, **kwargs)), self._capture.trained

    def paused(self) -> AbstractContextManager[None]:
        """Passes inside are without the capture."""
        return self._capture.pause()


def _as_proved(calls: list[Call], structure: Structure, B: int) -> bool:
    """The usual pass: the same calls as in the proof, all as their rules expect them."""
    if [call.site for call in calls] != structure.order:
        return False
    for call in calls:
        shape = call.shapes[0] if call.shapes else ()
        if len(shape) <= call.site.dim or (shape[call.site.dim] != B and not _is_packed(call)):
            return False
        call.place = NATIVE
    return True


def _require_first(tape: Tape, here: _Pass) -> None:
    """All calls have the examples where their rules expect them."""
    for call in here.calls:
        shape = call.shapes[0] if call.shapes else ()
        if len(shape) <= call.site.dim or (shape[call.site.dim] != here.examples and not _is_packed(call)):
            tape.fail(
                f"{call.site.path or 'The model'} returned a tensor of the shape {tuple(shape)} where the batch has {here.examples} "
                "examples. With fully_shard, keep the examples in the first dimension of every layer: (B, T, d) rather than (B*T, d), and "
                "positions as (B, T)."
            )
        call.place = NATIVE


def _is_packed(call: Call) -> bool:
    return bool(call.args) and isinstance(call.args[0], tuple)


def _fits(call: Call, place: Place, ranks: tuple[int, ...] | None, B: int) -> bool:
    if ranks is not None and tuple(len(s) for s in call.shapes) != ranks:
        return False
    if place.native:
        dims = call.site.rule.dims(call.site.module, len(call.shapes))
        return _is_packed(call) or all(len(s) > d and s[d] == B for s, d in zip(call.shapes, dims, strict=True))
    return all(place.layout.fits(s, B) for s in call.shapes)


def _may_hold(tensors: list[Any], examples: int) -> bool:
    return any(n and n % examples == 0 for t in tensors for n in t.data.shape[:2]) if examples else True


def _floats(output: Any) -> list[Tensor]:
    return [t for t in leaves_of(output) if isinstance(t, Tensor) and t.is_floating_point()]


def _finite(inputs: Any) -> Any:
    """Detached; NaN and infinity, of which nothing can be proved, are replaced."""

    def change(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        return t.detach().nan_to_num(0.0, 1e4, -1e4) if t.is_floating_point() else t.detach()

    return mapped(inputs, change)
