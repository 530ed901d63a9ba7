"""The hooks on the whole model: every pass is read by a structure that was proved.

A structure is proved on the first pass of its kind, and again at a few later steps. It is stored under what such passes have in
common: the inputs' sizes without the number of examples, and every plain attribute of the modules. This file has the short path of a
pass that was proved before; one that does something else inside (other sizes, more or fewer operations, rows in another order) is proved,
or read by tags, before its gradients count (:mod:`hushgrad.clipping.passes`).
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from hushgrad.clipping._torch import (
    AS_TORCH,
    SavedHooks,
    entering,
    is_autocast,
    nodes_made,
    pop_mode,
    pop_packing,
    push_mode,
    push_packing,
    transform,
)
from hushgrad.clipping._torch_compile import eagerly, is_exporting, is_tracing, refuse_tracing
from hushgrad.clipping.passes import Passes, is_evaluation
from hushgrad.clipping.proof.call_trace import CallTrace, Dispatch
from hushgrad.clipping.proof.fixed_randomness import Draws, host_draws
from hushgrad.clipping.proof.inputs import data_of, leaves
from hushgrad.clipping.proof.saved_tensors import Packing, as_they_are
from hushgrad.clipping.proof.state import Time
from hushgrad.clipping.proof.straight_line import StraightLine
from hushgrad.clipping.proof.structure import NATIVE, Structure, are_sized
from hushgrad.clipping.site import Call
from hushgrad.clipping.table_reads import TableReads
from hushgrad.clipping.thresholds import LOOK_AGAIN, MOST_REPEATS, REPEAT_ONE_IN
from hushgrad.errors import NotIsolated

_site, _shapes, _shape, _is_nested = attrgetter("site"), attrgetter("shapes"), attrgetter("shape"), attrgetter("is_nested")
_TENSORS = {Tensor}
_SAVED = entering(as_they_are)


class Pass:
    """One call of the model. ``candidates`` are the structures that it may have; ``fresh``: it was itself used for their proof."""

    packing: Packing | None = None
    fast: bool | None = None  # attention's fast-path setting before the pass
    trace: CallTrace | None = None
    dispatch: Dispatch | None = None
    nodes = 0
    hooks = 0
    draws: Draws | None = None  # the state of other generators than torch's, if the model draws from them
    times: list[Time] | None = None  # the values of the model's clocks at its start
    straight = False  # it must make the calls of an earlier pass that was traced: see proof/straight_line.py
    is_aside = False  # a proof's pass without capture: only its calls are recorded

    def __init__(self, inputs: Any, examples: int, candidates: list[Structure], key: Any = None, fresh: bool = False) -> None:
        self.inputs, self.examples, self.candidates, self.key, self.fresh = inputs, examples, candidates, key, fresh
        self.structure = candidates[0] if candidates else None
        self.calls: list[Call] = []

    def enter(self, *, training: bool, trace: CallTrace | None) -> None:
        """The forward begins, with a trace of its calls if it is watched."""
        for s in self.candidates:
            if s.fragile:
                self.packing = Packing()
                push_packing(self.packing.pack, self.packing.unpack)
                break
        # What the model saves under hooks of its own (checkpoints, save_on_cpu) is handed out to us, too.
        saved_tensors_hooks.__enter__ = _SAVED if self.packing is None else entering(self.packing.handed)  # type: ignore[method-assign]
        # Attention takes a fast path if no parameter requires gradients: none does between a site's hooks.
        if not training:
            self.fast = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
        if trace is not None:
            self.trace = trace
            push_mode(trace)
            if self.structure is not None and self.structure.dispatched:
                self.dispatch = Dispatch()
                self.dispatch.__enter__()
        # Torch counts the hooks that are put on tensors and nodes.
        self.nodes, self.hooks = nodes_made(), RemovableHandle.next_id + SavedHooks.count

    def leave(self) -> None:
        """It has ended, or was interrupted."""
        if self.nodes < 0:
            return
        self.nodes = -1
        saved_tensors_hooks.__enter__ = AS_TORCH  # type: ignore[method-assign]
        if self.dispatch is not None:
            self.dispatch.__exit__(None, None, None)
        if self.trace is not None:
            pop_mode()
        if self.fast is not None:
            torch.backends.mha.set_fastpath_enabled(self.fast)
        if self.packing is not None:
            pop_packing()


class Root(Passes):
    """Tells each call of a pass where its examples are."""

    def hooks(self) -> list[Any]:
        """Attach; returns the handles to detach with."""
        return [
            self.model.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True),
            self.model.register_forward_hook(self._exit, with_kwargs=True, always_call=True),
        ]

    def reset(self) -> None:
        """Forget passes that were interrupted."""
        if not self.proving:
            for here in reversed(self.running):
                if here is not None:
                    here.leave()
            self.running.clear()
            self._tape.calls, self._tape.entered_again = None, False

    # A pass begins -------------------------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_tracing() or is_exporting():
            refuse_tracing()
        tape, proving = self._tape, self._trials.runs is not None
        if tape.silent or module is not self.model or tape.calls is not None or not torch.is_grad_enabled():
            self.running.append(_aside() if module is self.model and proving else None)
            tape.entered_again = tape.entered_again or (tape.calls is not None and module is self.model and not proving)
            return
        if not proving and transform() is not None:
            tape.refuse_transformed("")
        if proving:
            examples, structure = self._trials.of
            here: Pass | None = Pass((args, kwargs), examples, [] if structure is None else [structure], fresh=True)
        else:
            here = self._known_or_proved(args, kwargs)
        self.running.append(here)
        if here is None:  # an evaluation
            return
        tape.enter(here.examples).structure = here.structure
        if not proving:
            tape.rounded = tape.rounded or is_autocast()
            if here.structure is not None:
                sizes = here.structure.sizes or tuple(here.structure.shapes.values())
                tape.sizes.add(sizes)
                if sizes != self._size:
                    self._size, capture = sizes, self._capture
                    capture.first_size, capture.resized = capture.first_size or sizes, capture.first_size is not None
        tape.calls = here.calls
        if self._trials.draws:
            here.draws = host_draws()
        if self.attributes.timed:
            here.times = self.attributes.times()
        tables, watched = self._capture.tables, self._seal and (proving or here.structure is not None)
        if tables and not proving:
            trace: CallTrace | None = TableReads(tables)
        else:
            trace = CallTrace() if watched and (proving or not here.straight) else None
        here.enter(training=self.model.training, trace=trace)

    def _known_or_proved(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pass | None:
        """The pass over these inputs, with structures that were proved, now if necessary. None: an evaluation."""
        tensors = data = [*args]
        usual = not kwargs and {*map(type, args)} == _TENSORS  # most models are given tensors, and nothing else
        if not usual:
            tensors = leaves((args, kwargs) if kwargs else args)
            data = tensors if {*map(type, tensors)} == _TENSORS else [data_of(t) for t in tensors]
        expected, within = self._tape.expected()
        if self._capture.not_isolated:
            raise NotIsolated(self._capture.not_isolated)
        if any(map(_is_nested, data)):
            self._tape.refuse_nested("The model was given")
        aside = self.announces and not self.model.training
        if (aside or within) and is_evaluation(tensors, expected, aside=aside):
            self._put_aside(tensors, expected)
            return None
        looks = self._capture.looks
        if looks is not None and looks.due:
            self._look()
        straight = usual and self._line is not None and self._line.holds()
        key, known, faint = self.attributes.key(data, again=straight), self.known, None
        # Most passes look like the last one.
        same = (key, expected, [*map(_shape, data)]) == known.asked and data is tensors
        for B, found in known.answer if same else known.read_as(key, tensors, expected) if expected != 0 and self._whole else ():
            if B == 1 and known.proved(key):
                return Pass((args, kwargs), 1, [], key)
            if found and found[0].partly and self._tries < MOST_REPEATS:  # these data may show gradients that were missing
                self._tries, faint = self._tries + 1, found[0]
            if found and faint is None:
                lot = int(self._lot.random() * 4 * REPEAT_ONE_IN)  # 0: repeat the whole proof
                if 0 < lot < 4 or (
                    lot and (self._trials.moves_buffers or self.attributes.timed) and self._trials.is_new(found[0])
                ):
                    self._repeat(found[0], (args, kwargs), B, brief=lot >= 4)
                if lot:
                    here = Pass((args, kwargs), B, found, key)
                    here.straight = straight and len(found) == 1 and self._lined.get(id(found[0])) is found[0]
                    return here
        made = self._unknown((args, kwargs), tensors, key, expected, aside=aside, faint=faint)
        return None if made is None else Pass((args, kwargs), *made)

    def _note_line(self, here: Pass) -> None:
        """After a usual pass that was traced: the next one needs no trace if the model is a chain of torch's own layers."""
        self._wait -= 1
        (args, kwargs), structure = here.inputs, here.structure
        known = self._line is not None and self._line.holds()
        if structure is None or structure.traces is None or kwargs or (self._wait >= 0 and not known):
            return
        if {*map(type, args)} != _TENSORS or self.attributes.key(args) != here.key:
            return
        if not known:
            self._line, self._lined, self._wait = StraightLine.of(self.model, self._enter, self._exit), {}, LOOK_AGAIN
        if self._line is not None:
            self._lined[id(structure)] = structure

    # A pass ends ---------------------------------------------------------------------------------------------------------

    def _exit(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        here = self.running[-1] if self.running else None  # popped last: an interrupt may come at any call
        if here is None:
            del self.running[-1:]
            return
        made, hooks = nodes_made() - here.nodes, RemovableHandle.next_id + SavedHooks.count - here.hooks
        here.leave()
        if not here.is_aside:
            self._tape.calls = None
        del self.running[-1]
        if output is None:  # the forward raised
            return
        if hooks not in self._trials.hooks and here.structure is not None:
            self._hooked(here, here.structure, hooks)
        if self._trials.runs is not None:
            self._tried(here, made, output)
        elif not self._as_usual(here, made, output):
            self._place(here, made, output)
        elif type(here.trace) is CallTrace:
            self._note_line(here)
        if self._capture.looks is not None and self._capture.looks.open and self._trials.runs is None:
            self._looked()
        for call in here.calls:
            call.edges = ()  # graph nodes refer to the call: break the cycle

    @eagerly
    def _hooked(self, here: Pass, structure: Structure, hooks: int) -> None:
        """A forward has put so many hooks on the way back; if that was not one of a proof, its way back is looked at now."""
        trials = self._trials
        if trials.runs is None and not here.fresh and self._whole:
            with trials.drawing(here.draws), self.attributes.at(here.times or []), self._kept(for_good=True, again=True):
                trials.repeat_back(structure, here.inputs, here.examples)
        trials.acts_back, trials.hooks = True, trials.hooks | {hooks}

    def _as_usual(self, here: Pass, made: int, output: Any) -> bool:
        """Whether this is an ordinary pass: one output, and the proved calls and operations, in proved sizes and canonical layouts."""
        structure, examples, shapes = self._usual
        if structure is None or structure is not here.structure or structure.nodes is None:
            return False
        trace, traces = here.trace, structure.traces
        if made not in structure.nodes or not (trace is None or traces is None or traces.know(trace)):
            return False
        now = [*map(_shapes, here.calls)]
        if [*map(_site, here.calls)] != structure.order:
            return False
        if examples != here.examples or now != shapes:
            patterns = structure.shapes.values()  # of the calls in their order
            if type(output) is not Tensor or len(structure.around) != 1 or not are_sized(here.calls, patterns, here.examples):
                return False
            self._usual = structure, here.examples, now
        for call in here.calls:
            call.place = NATIVE
        return True


def _aside() -> Pass:
    here = Pass((), 0, [], fresh=True)
    here.is_aside, here.trace = True, CallTrace()
    push_mode(here.trace)
    return here
