"""Looks for what the loop writes where the model reads it: attributes, hooks, globals, arrays, weights that it puts back before the step.

A proof runs the model on parts of a batch. What the loop has computed from a whole batch, and put where a pass reads it, is the same in
all of these passes, so no proof can show it. It shows here: a pass finds it other than it was before the first batch. What passes
themselves write is left out; the proof tests that memory.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from math import inf, log1p
from random import Random
from types import FunctionType
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
from torch import Tensor, nn

from hushgrad.clipping._torch import global_hooks
from hushgrad.clipping.fingerprint import fingerprint
from hushgrad.release.placement.sharded import is_sharded
from hushgrad.train.reachable_state import content_of
from hushgrad.train.what_is_reached import SILENT, Names, Reached, hooks_in, reached_from, words_in

_MOST = 1 << 14  # objects that are looked at, the nearest first
_RARELY = 256  # batches, one of which is looked at; batches 1, 2, 4, 8 and so on, the last one, and what needs a proof always are
_LEAVES = (int, float, complex, str, bytes, bool, type(None), Tensor)
_LOOSE = (list, dict, set, deque)
_LONG = 64  # a list of so many numbers and words is compared as a whole

Node = tuple[int, Names]  # an object, and the attributes of it that are looked at
Place = tuple[Node, Any]


class ModelState:
    """What a model can reach besides its inputs and its trained parameters: what every object holds, and where.

    >>> class Scaled(nn.Linear):
    ...     scale = 1.0
    ...
    ...     def forward(self, x):
    ...         return super().forward(x) * self.scale
    >>> model = Scaled(2, 1)
    >>> before = ModelState.of(model)
    >>> model.scale = 2.0
    >>> len(before.changes(ModelState(model, before.names), passes=0, own=set()))
    1

    Args:
        model: of a run.
        names: that code uses anywhere: objects may be given to other functions than those that hold them.
    """

    def __init__(self, model: nn.Module, names: frozenset[str]) -> None:
        self.names, self._used = names, set[str]()
        self.root: Node = (id(model), names)
        # A mark of every value that an object holds, and the object that it is.
        self.held: dict[Node, dict[Any, tuple[Any, Node | None]]] = {self.root: {}}
        self.loose: set[Node] = set()  # lists and dicts
        self.hooked: list[tuple[ReferenceType[Tensor], int]] = []  # results of a pass that are kept, and how many hooks they have
        self._alive: list[Any] = [model]  # another object would get the same id
        self._queue: deque[tuple[Node, Reached]] = deque([(self.root, Reached((), model, names))])
        self._hold(self.root, [one for k, table in enumerate(global_hooks()) for one in hooks_in(table, f"of all modules, {k}")])
        while self._queue and len(self.held) < _MOST:
            node, reached = self._queue.popleft()
            if isinstance(reached.value, FunctionType):
                self._used |= words_in(reached.value.__code__)
            self._hold(node, reached_from(reached.value, node[1]))

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        """The state, with the names that all code uses that is reached."""
        state = cls(model, frozenset())
        while not state.names.issuperset(state._used):
            state = cls(model, state.names.union(state._used))
        return state

    def _hold(self, node: Node, inside: list[Reached]) -> None:
        for one in inside:
            self._alive.append(one.value)
            mark, whole = self._mark(one.value)
            at: Node | None = None if whole else (id(one.value), None if one.names is None else self.names | one.names)
            self.held[node][one.at] = mark, at
            if at is not None and at not in self.held:
                self.held[at] = {}
                self._queue.append((at, one))
                if isinstance(one.value, _LOOSE):
                    self.loose.add(at)

    def _mark(self, value: Any) -> tuple[Any, bool]:
        """What identifies a value, and whether it is all of it; otherwise what it holds is compared as well."""
        if isinstance(value, Tensor):
            if value.grad_fn is not None:
                self.hooked.append((ref(value), len(value._backward_hooks or ())))
            here = value.to_local() if is_sharded(value) else value  # type: ignore[attr-defined]
            return (0 if value.requires_grad else content_of(here)), True
        if isinstance(value, _LEAVES):
            return (type(value), str(value) if type(value) is float else value), True  # NaN is equal to itself
        if isinstance(value, (np.ndarray, array, bytearray, memoryview)):
            return content_of(value), not (isinstance(value, np.ndarray) and value.dtype.hasobject)
        if type(value) in (list, tuple) and len(value) > _LONG and set(map(type, value)) <= {int, float, str, bool, bytes}:
            return hash(tuple(value)), True
        return getattr(value, "__code__", type(value)), False

    def changes(self, now: ModelState, *, passes: int, own: set[Place]) -> list[Place]:
        """Where ``now`` differs, but for places of ``own``, and for whole numbers that may have counted so many ``passes``."""
        found: list[Place] = []
        pairs, seen = [(self.root, now.root)], {(self.root, now.root)}
        while pairs:
            a, b = pairs.pop()
            here, there = self.held[a], now.held[b]
            for at in here.keys() | there.keys():
                place = (a, None) if a in self.loose else (a, at)
                if place in own or (isinstance(at, tuple) and at[0] == SILENT):
                    continue
                before, after = here.get(at), there.get(at)
                if before is None or after is None or not _same(before[0], after[0], passes):
                    found.append(place)
                elif before[1] is not None and after[1] is not None and (before[1], after[1]) not in seen:
                    seen.add((before[1], after[1]))
                    pairs.append((before[1], after[1]))
        return found


def _same(before: Any, after: Any, passes: int) -> bool:
    counts = isinstance(before, tuple) and isinstance(after, tuple) and before[:1] == after[:1] == (int,)
    return bool(before == after) or (counts and 0 <= after[1] - before[1] <= passes)


class LoopWrites:
    """Compares what the model reads beside its inputs with what it was before the run's first batch.

    Args:
        model: of the run.
        steps: how many the run has.
        found: called once, when the loop has written something.
    """

    def __init__(self, model: nn.Module, steps: int, found: Callable[[], None]) -> None:
        self._model, self._steps, self._found = model, steps, found
        self._first: ModelState | None = None
        self._own: set[Place] = set()  # where passes write
        self._after: ModelState | None = None  # after the last pass that was looked at, until its backward
        self._trained: list[tuple[int, Any]] | None = None  # parameters when the last batch that is looked at was handed out
        self.passes = 0  # that were issued
        self._lot = Random(0)  # of its own: a run can be repeated
        self.kept: list[tuple[ReferenceType[Tensor], int]] = []  # results of the last pass that had hooks to be compared
        self.due, self.open = False, False  # whether the next pass is looked at; whether this one is
        self._start = 0
        self.looked, self.next = -1, 0.0  # steps between which nothing is looked at

    def issued(self, step: int, *, trained: bool = True) -> None:
        """Called when the batch of a step that is looked at is about to be handed out; ``trained``: only a step changes what is trained."""
        if self._first is None or step < self._start:
            self._start = step
        self._first = self._first or ModelState.of(self._model)
        self.due, self.looked, self.next = True, step, self._following(step)
        self._trained = self._weights() if trained else None

    def _following(self, step: int) -> float:
        """The next step after this one that is looked at."""
        doubled = self._start + (1 << (step - self._start + 1).bit_length()) - 1
        drawn = step + 1 + int(log1p(-self._lot.random()) / log1p(-1 / _RARELY))
        return min(doubled, drawn, self._steps - 1 if step < self._steps - 1 else inf)

    def before(self) -> None:
        """Called before a pass of a batch, and before its proof."""
        if self._first is not None and not self.open:
            self.open = True
            if not self._as_issued() or self._first.changes(
                ModelState(self._model, self._first.names), passes=self.passes, own=self._own
            ):
                self._tell()

    def after(self) -> None:
        """Called after such a pass."""
        self.open = False
        if self._first is not None:
            now = ModelState(self._model, self._first.names)
            self._own.update(self._first.changes(now, passes=0, own=self._own))
            self.kept, self._after = now.hooked, now

    def backward(self) -> None:
        """Called before a backward pass: what the loop changes for it alone, it puts back before the next pass."""
        after, self._after = self._after, None
        if after is not None and (
            not self._as_issued() or after.changes(ModelState(self._model, after.names), passes=0, own=self._own)
        ):
            self._tell()

    def _weights(self) -> list[tuple[int, Any]]:
        """The trained parameters that a pass reads, and what they hold; a look at those of a device would wait for it."""
        return [(id(p), fingerprint(p)) for p in self._model.parameters() if p.requires_grad and p.is_cpu and not is_sharded(p)]

    def _as_issued(self) -> bool:
        """Whether trained parameters are what they were when the batch was handed out: who puts them back before the step hides it."""
        return self._trained is None or self._trained == self._weights()

    def before_step(self) -> None:
        """Called before the step if results are ``kept``: hooks that were put on one after its pass are the loop's."""
        kept, self.kept = ((reference(), count) for reference, count in self.kept), []
        if any(tensor is not None and len(tensor._backward_hooks or ()) > count for tensor, count in kept):
            self._tell()

    def _tell(self) -> None:
        self._found()
        self._first, self._after, self._trained, self.kept, self.due, self.open = None, None, None, [], False, False
        self.looked, self.next = -1, inf  # it is said once

    def __reduce__(self) -> tuple[type[object], tuple[()]]:
        return object, ()  # a copy of the model is watched by nobody
