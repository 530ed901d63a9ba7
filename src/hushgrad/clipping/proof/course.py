"""The course of a pass: which functions of torch it calls, what it asks of its tensors, and what kinds of numbers it computes with.

A forward is a program. A branch on a counter that nobody sees, on a rare token or on the clock may be taken for the first time long after
the proof, and one without gradients leaves no node in the graph. So each pass is watched: one that calls other functions than those that
were proved, or gets another answer (``if (x == 0).any()``), or whose numbers are of another kind (a factor that was 0, a shift that was 0)
is proved itself before its gradients count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hushgrad.clipping._torch import is_transformed

__all__ = ["Course", "Courses", "after_all", "joined"]

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
# Their whole numbers are sizes and places, which follow the data.
_SIZED = frozenset(
    (
        "__getitem__",
        "__setitem__",
        "arange",
        "as_strided",
        "chunk",
        "empty",
        "expand",
        "flatten",
        "linspace",
        "narrow",
        "new_empty",
        "new_ones",
        "new_zeros",
        "ones",
        "pad",
        "permute",
        "repeat",
        "reshape",
        "select",
        "split",
        "split_with_sizes",
        "tensor_split",
        "tile",
        "transpose",
        "unflatten",
        "unfold",
        "unsqueeze",
        "view",
        "zeros",
    )
)
# A factor, a shift or a threshold lets nothing through if it is 0, all as it is if it is 1, anything if it is huge, else something:
# schedules stay within a kind.
_HUGE = 1e6  # no threshold that data reach


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
            elif (kwargs or len(args) > 1) and name not in _SIZED:
                # The kinds of the numbers it is called with; written out here, because torch.compile follows no other function of ours.
                kinds: tuple[int | str, ...] = ()
                for value in (*args, *kwargs.values()) if kwargs else args:
                    for v in value if type(value) is tuple or type(value) is list else (value,):
                        if type(v) is int or type(v) is float or type(v) is bool:
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
        """Note whether a tensor that is made of numbers has a 0, or nothing else."""
        if isinstance(made, Tensor) and made.is_cpu and not is_transformed():
            self.answers.add((len(self._called), name, (made.numel() > 1, bool(made.any()), bool(made.all()))))

    @property
    def order(self) -> int:
        """A number for the functions in their order."""
        return hash(tuple(self._called))

    @property
    def functions(self) -> frozenset[str]:
        """The functions without their order."""
        return frozenset(self._called)


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
