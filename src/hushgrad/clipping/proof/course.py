"""The course of a pass: which functions of torch it calls, what it asks of its tensors, and what kinds of numbers it computes with.

A forward is a program. A branch on a counter that nobody sees, on a rare token or on the clock may be taken for the first time long after
the proof, and one without gradients leaves no node in the graph. So each pass is watched: one that calls other functions than those that
were proved, or gets another answer (``if (x == 0).any()``), or whose numbers are of another kind (a factor that was 0, a shift that was 0)
is proved itself before its gradients count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hushgrad.clipping._torch import is_transformed

__all__ = ["Course", "Courses", "after_all", "joined", "kinds_of"]

Answer = tuple[int, str, Any]  # the number of the function in its pass, its name, and what it said or the kinds of its numbers

# What a tensor is, and hooks on it: nothing is computed.
_NOTHING = frozenset(
    (
        "__get__",
        "__set__",
        "_is_view",
        "_set_grad_enabled",
        "detach",
        "dim",
        "is_contiguous",
        "is_inference",
        "numel",
        "register_hook",
        "requires_grad_",
        "size",
    )
)
_ASKED = frozenset(("__bool__", "item", "any", "all", "equal", "allclose", "is_nonzero"))
_MADE = frozenset(("tensor", "as_tensor", "asarray", "new_tensor"))  # of the caller's own numbers
# Their whole numbers are sizes and places, which follow the data: what counts is whether the result has nothing, one or several in each
# dimension. A part of the batch that is empty, or groups of one, do not mix; later they may have grown.
_SIZED = frozenset(
    (
        "__getitem__",
        "__setitem__",
        "arange",
        "as_strided",
        "empty",
        "expand",
        "linspace",
        "narrow",
        "new_empty",
        "new_ones",
        "new_zeros",
        "ones",
        "pad",
        "repeat",
        "reshape",
        "select",
        "split",
        "split_with_sizes",
        "tensor_split",
        "tile",
        "unflatten",
        "unfold",
        "view",
        "zeros",
    )
)
# What a number is compared with: counts, ranks and sums of a batch reach it or do not. So its size counts, as a power of four: the seal's
# crowds are larger than the batch by as much.
_BOUNDS = frozenset(
    (
        "__eq__",
        "__ge__",
        "__gt__",
        "__le__",
        "__lt__",
        "__ne__",
        "clamp",
        "clamp_",
        "clamp_max",
        "clamp_min",
        "clip",
        "eq",
        "fmax",
        "fmin",
        "ge",
        "greater",
        "greater_equal",
        "gt",
        "hardtanh",
        "kthvalue",
        "le",
        "less",
        "less_equal",
        "lt",
        "ne",
        "not_equal",
        "quantile",
        "softshrink",
        "threshold",
        "topk",
    )
)
# A factor, a shift or a threshold lets nothing through if it is 0, all as it is if it is 1, anything if it is huge, else something:
# schedules stay within a kind. A small whole number may be a dimension.
_HUGE = 1e6  # no threshold that data reach
_RANK = 6  # of the tensors that people have
_NUMBERS = (int, float, np.number, np.bool_)


class Course(TorchFunctionMode):
    """Watches a pass, from ``__enter__`` to ``__exit__``."""

    def __init__(self) -> None:
        super().__init__()
        self._called: list[str] = []
        self.answers: set[Answer] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs) if kwargs else func(*args)
        name = getattr(func, "__name__", "")
        if name not in _NOTHING:
            self._called.append(name)
            if name in _ASKED:
                self._ask(name, made)
            elif name in _MADE:
                self._look(name, made)
            elif kwargs or len(args) > 1 or name in _SIZED:
                # The kinds of what it is called with; written out here, because torch.compile follows no other function of ours.
                kinds: tuple[Any, ...] = ()
                if name in _SIZED:
                    chosen = False  # by a tensor: as many as the data say
                    if name == "__getitem__" or name == "__setitem__":
                        for v in args[1] if type(args[1]) is tuple else (args[1],):
                            chosen = chosen or isinstance(v, Tensor)
                            if isinstance(v, (list, np.ndarray)):
                                inside = v if isinstance(v, list) else v.ravel().tolist()
                                kinds += ([e for e in inside if type(e) is int] == list(range(len(inside))),)
                    if not chosen:
                        found = made if name != "__setitem__" else args[0].detach()[args[1]]
                        several = found if type(found) is tuple or type(found) is list else (found,)
                        kinds += (
                            *dict.fromkeys([tuple([n if n < 2 else 2 for n in t.shape]) for t in several if not t.is_nested]),
                        )
                else:
                    for value in (*args, *kwargs.values()) if kwargs else args:
                        for v in value if type(value) is tuple or type(value) is list else (value,):
                            if type(v) is str or (type(v) is int and -_RANK < v < _RANK):
                                kinds += (v,)
                            elif isinstance(v, _NUMBERS):
                                if name in _BOUNDS and -_HUGE < v < _HUGE:
                                    kinds += (v > 0, int(v).bit_length() // 2)
                                else:
                                    kinds += (0 if v == 0 else 1 if v == 1 else "some" if -_HUGE < v < _HUGE else "huge",)
                if kinds:
                    self.answers.add((len(self._called), name, kinds))
        return made

    def _ask(self, name: str, made: Any) -> None:
        """Note a yes or no about a whole tensor."""
        if isinstance(made, Tensor) and made.numel() == 1 and made.dtype is torch.bool and not is_transformed():
            made = bool(made)
        if type(made) is bool:
            self.answers.add((len(self._called), name, made))

    def _look(self, name: str, made: Any) -> None:
        """Note of what kinds the numbers are that a tensor is made of."""
        if isinstance(made, Tensor) and made.is_cpu and not is_transformed():
            self.answers.add((len(self._called), name, kinds_of(made)))

    @property
    def order(self) -> int:
        """A number for the functions in their order."""
        return hash(tuple(self._called))

    @property
    def functions(self) -> frozenset[str]:
        """The functions without their order."""
        return frozenset(self._called)


def kinds_of(t: Tensor) -> tuple[Any, ...]:
    """Of the numbers of a tensor: others than 0? no 0? whole ones in order? Of a number that stands alone, its size."""
    if t.numel() == 1 and not t.is_complex():
        v = t.item()
        return v == 0, v > 0, int(v).bit_length() // 2 if -_HUGE < v < _HUGE else "huge"
    ordered = t.dim() == 1 and t.dtype is torch.int64 and torch.equal(t, torch.arange(len(t), device=t.device))
    return t.numel() > 1, bool(t.any()), bool(t.all()), ordered


class Courses(NamedTuple):
    """Of all passes of a proof. ``orders`` is None where the order follows from the number of examples: one by one, expert by expert."""

    orders: frozenset[int] | None = None
    functions: frozenset[str] = frozenset()
    answers: frozenset[Answer] = frozenset()

    def know(self, course: Course) -> bool:
        """Whether a pass did what passes of the proof did."""
        if self.orders is None:
            return self.hold(course)
        return course.order in self.orders and course.answers <= self.answers

    def hold(self, course: Course) -> bool:
        """Whether a pass, in whatever order, did nothing that no pass of the proof did."""
        known = {answer[1:] for answer in self.answers}
        return course.functions <= self.functions and {answer[1:] for answer in course.answers} <= known

    def beyond(self, course: Course) -> str:
        """What a pass did that no pass of the proof did, in words."""
        new = sorted(course.functions - self.functions)
        return f"it called {', '.join(new[:3])}" if new else "it took a branch, or computed with a number, that no proof has seen"

    def after(self, course: Course) -> Courses:
        """With one more."""
        orders = None if self.orders is None else self.orders | {course.order}
        return Courses(orders, self.functions | course.functions, self.answers | course.answers)


def after_all(courses: Courses | None, passes: Sequence[Course]) -> Courses | None:
    """With these."""
    for course in passes:
        courses = courses and courses.after(course)
    return courses


def joined(courses: Sequence[Courses | None], *, same: bool = False) -> Courses | None:
    """All of them together; ``same``: an order counts only if they have one in common, else it follows from the sizes."""
    every = [c for c in courses if c is not None]
    if len(every) < len(courses):
        return None
    orders = [c.orders for c in every if c.orders is not None]
    ordered = len(orders) == len(every) and (not same or bool(frozenset.intersection(*orders)))
    functions = frozenset(name for c in every for name in c.functions)
    answers = frozenset(answer for c in every for answer in c.answers)
    return Courses(frozenset(order for found in orders for order in found) if ordered else None, functions, answers)
