"""One pass through the model, and what can be told of it before it is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hushgrad.clipping._torch import nodes_made, pop_packing, push_packing
from hushgrad.clipping.call import Call
from hushgrad.clipping.proof.course import Course, Dispatch
from hushgrad.clipping.proof.packing import Packing
from hushgrad.clipping.proof.quiet import Draws
from hushgrad.clipping.proof.state import Time
from hushgrad.clipping.proof.structure import DROPPED, NATIVE, WHOLE, Structure, is_packed

if TYPE_CHECKING:
    from hushgrad.clipping.tape import Tape

__all__ = ["Pass", "is_evaluation", "may_hold", "place_all"]


class Pass:
    """One call of the model."""

    __slots__ = (
        "before", "calls", "candidates", "course", "dispatch", "draws", "examples", "fast", "fresh", "inputs", "is_aside", "key", "nodes",
        "packing", "structure", "times",
    )  # fmt: skip

    def __init__(self, inputs: Any, examples: int, candidates: list[Structure], key: Any, *, fresh: bool) -> None:
        self.inputs, self.examples, self.candidates, self.key, self.fresh = inputs, examples, candidates, key, fresh
        self.structure = candidates[0] if candidates else None
        self.calls: list[Call] = []
        self.before: list[Call] | None = None  # of the pass around this one
        self.packing: Packing | None = None
        self.fast: bool | None = None  # attention's fast path, as it was
        self.nodes = 0
        self.course: Course | None = None
        self.dispatch: Dispatch | None = None
        self.draws: Draws | None = None  # where it began to draw, of a model that draws from other generators than torch's
        self.times: list[Time] = []  # what the model's clocks said when it began
        self.is_aside = False

    @classmethod
    def aside(cls) -> Pass:
        """A pass of a proof that is not captured: only what it does is noted."""
        here = cls((), 0, [], None, fresh=True)
        here.is_aside, here.course = True, Course()
        here.course.__enter__()
        return here

    def enter(self, *, training: bool, watched: bool) -> None:
        """The forward begins."""
        for s in self.candidates:
            if s.fragile:
                self.packing = Packing()
                push_packing(self.packing.pack, self.packing.unpack)
                break
        # Attention takes a fast path if no parameter requires gradients: none does between a site's hooks.
        if not training:
            self.fast = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
        if watched:
            self.course = Course()
            self.course.__enter__()
            if self.structure is not None and self.structure.dispatched:
                self.dispatch = Dispatch()
                self.dispatch.__enter__()
        self.nodes = nodes_made()

    def leave(self) -> None:
        """It has ended, or was interrupted."""
        if self.nodes < 0:
            return
        if self.dispatch is not None:
            self.dispatch.__exit__(None, None, None)
        if self.course is not None:
            self.course.__exit__(None, None, None)
        if self.fast is not None:
            torch.backends.mha.set_fastpath_enabled(self.fast)
        if self.packing is not None:
            pop_packing()
        self.nodes = -1

    def knows(self, structure: Structure) -> bool:
        """Whether the forward did what forwards of the proof did."""
        return self.course is None or structure.courses is None or structure.courses.know(self.course)

    def require_held(self, structure: Structure) -> None:
        """Raises LookupError if it did something that no forward of the proof did."""
        if self.course is not None and structure.courses is not None and not structure.courses.hold(self.course):
            raise LookupError(structure.courses.beyond(self.course))


def place_all(here: Pass) -> None:
    """Of one example alone everything is its own, wherever its dimension is."""
    for call in here.calls:
        dims = call.site.rule.dims(call.site.module, len(call.shapes))
        own = is_packed(call) or all(len(s) > d and s[d] == here.examples for s, d in zip(call.shapes, dims, strict=True))
        call.place = NATIVE if own else WHOLE if here.examples else DROPPED


def is_evaluation(tape: Tape, tensors: list[Any], expected: int | None, *, aside: bool) -> bool:
    """A pass that is no part of the step: of another number of examples than was said, in evaluation mode or within an open batch.

    A gradient that comes back from it is refused.
    """
    if expected is None:
        return aside
    return (aside or tape.is_open) and not may_hold(tensors, expected)


def may_hold(tensors: list[Any], examples: int) -> bool:
    """Whether some tensor has a dimension for so many examples."""
    return any(n and n % examples == 0 for t in tensors for n in t.data.shape[:2]) if examples else True
