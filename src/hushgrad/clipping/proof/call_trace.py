"""A trace of the calls that a pass makes.

It holds the torch functions that are called, the answers to questions about tensors (``if (x == 0).any()``), and the kinds of the
constants in the computation (0, tiny, 1, huge). A forward is a program: a branch on a hidden counter, a rare token or the clock may be
taken for the first time long after the proof, and one without gradients leaves no node in the graph. So every pass is traced, and one that
calls other functions, gets other answers or uses constants of another kind (a factor that used to be 0) is proved before its gradients
count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hushgrad.clipping._torch import is_transformed
from hushgrad.clipping._torch_compile import SIGNATURES, is_compiling
from hushgrad.clipping.thresholds import HUGE_WEIGHT

Answer = tuple[
    Any, str, Any
]  # the number of the call in its pass, the function's name, and its answer or the kinds of its numbers
# Among the answers whenever something was called. torch.compile traces this mode, too, and after a compiled graph replays what it would
# have recorded; so what the compiled code really called, `addmm` for a `linear`, disappears from the answers as it does from the names.
_FOLLOWED: Answer = (0, "", ())
_BEFORE = 3  # preceding functions that locate a call where the order may change

# Queries about a tensor, and hooks on it: nothing is computed.
_NOTHING = frozenset(
    (
        "__get__ __set__ _is_view _set_grad_enabled detach dim is_contiguous is_inference numel register_hook requires_grad_ size"
    ).split()
)
# torch functions that are written in Python are traced with all their arguments, in the order of the signature; torch.compile shows only
# those that were passed. This function shows them in another order.
_ATTENTION = "multi_head_attention_forward"
_ASKED = frozenset(("__bool__", "item", "any", "all", "equal", "allclose", "is_nonzero"))
LIFTED = "lift_fresh.default"  # what ``from_numpy`` and legacy constructors do, visible only to dispatch modes
_MADE = frozenset(("tensor", "as_tensor", "asarray", "new_tensor"))  # from the caller's own numbers
# Integer arguments of these functions are sizes and positions, which vary with the data. Only whether the result has no, one or several
# elements in each dimension counts: an empty part of the batch, or groups of one, mix nothing, but larger ones may.
_SIZED = frozenset(
    (
        "__getitem__ __setitem__ arange as_strided empty expand linspace narrow new_empty new_ones new_zeros ones pad "
        "repeat reshape select split split_with_sizes tensor_split tile unflatten unfold view zeros"
    ).split()
)
# A factor, shift or threshold blocks everything if it is 0, passes too little to be seen if tiny, changes nothing if it is 1, and passes
# anything if it is huge. Counts, ranks and sums of a batch reach a bound or not, and an exponent or divisor amplifies small differences: so
# magnitudes are compared as powers of four (the seal's crowds exceed the batch by that factor). A schedule stays within a few kinds. A
# small integer may be a dimension, and counts as it is.
_TINY = 1e-3  # influence of a thousandth still shows in a proof in single precision
_RANK = 6  # more dimensions than tensors usually have
_NUMBERS = (int, float, np.number, np.bool_)


class CallTrace(TorchFunctionMode):
    """Records the torch calls of a pass, from ``__enter__`` to ``__exit__``."""

    def __init__(self) -> None:  # the base class's does nothing; skipping it saves time in every pass
        self.called: list[str] = []
        self.answers: set[Answer] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs) if kwargs else func(*args)
        name = getattr(func, "__name__", "")
        if name not in _NOTHING:
            self.called.append(name)
            self.answers.add(_FOLLOWED)
            if name in _ASKED:
                self._ask(name, made)
            elif name in _MADE or name == LIFTED:
                self._look(name, made)
            elif kwargs or len(args) > 1 or name in _SIZED:
                # The kinds of its arguments; inlined, because torch.compile traces no other function of ours.
                kinds: tuple[Any, ...] = ()
                if name in _SIZED:
                    chosen = False  # by a tensor: the data decide how many
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
                        for v in (*args, *kwargs.values()) if kwargs else args:
                            if type(v) is float:
                                kinds += (0 if v == 0 else "tiny" if -_TINY < v < _TINY else "some",)
                else:
                    values = (*args, *kwargs.values()) if kwargs else args
                    if name in SIGNATURES and (name == _ATTENTION or is_compiling()):
                        names, defaults, given = *SIGNATURES[name], kwargs or {}
                        if len(args) <= len(names) and all(key in names for key in given):
                            values = (*args, *[given.get(key, defaults.get(key)) for key in names[len(args) :]])
                    for value in values:
                        if isinstance(value, Tensor):  # most are
                            continue
                        for v in value if type(value) is tuple or type(value) is list else (value,):
                            if type(v) is str or (type(v) is int and -_RANK < v < _RANK):
                                kinds += (v,)
                            elif isinstance(v, _NUMBERS):
                                if -_TINY < v < _TINY:
                                    kinds += ("tiny" if v else 0,)
                                elif -HUGE_WEIGHT < v < HUGE_WEIGHT:
                                    kinds += (1,) if v == 1 else (v > 0, int(v) if -4 < v < 4 else int(v).bit_length() // 2 + 3)
                                else:
                                    kinds += ("huge",)
                            elif type(v) is complex:
                                kinds += ("tiny" if abs(v) < _TINY else "complex",)
                if kinds:
                    self.answers.add((len(self.called), name, kinds))
        return made

    def _ask(self, name: str, made: Any) -> None:
        """Record a yes-or-no answer about a whole tensor."""
        if isinstance(made, Tensor) and made.numel() == 1 and made.dtype is torch.bool and not is_transformed():
            made = bool(made)
        if type(made) is bool:
            self.answers.add((len(self.called), name, made))

    def _look(self, name: str, made: Any) -> None:
        """Record the kinds of the numbers that a new tensor is made of."""
        if isinstance(made, Tensor) and made.is_cpu and not is_transformed():
            self.answers.add((len(self.called), name, kinds_of(made)))

    @property
    def order(self) -> int:
        """A hash of the called functions in their order."""
        return hash(tuple(self.called))

    @property
    def placed(self) -> frozenset[Answer]:
        """The answers, each located by the functions called just before it: in a loop of varying length call numbers would differ."""
        return frozenset((tuple(self.called[max(0, n - _BEFORE) : n - 1]), name, said) for n, name, said in self.answers if n)

    @property
    def functions(self) -> frozenset[str]:
        """The set of called functions."""
        return frozenset(self.called)


class Dispatch(TorchDispatchMode):
    """Makes a trace see operations that only dispatch shows, as :class:`FixedRandomness` does during a proof: ``from_numpy``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def kinds_of(t: Tensor) -> tuple[Any, ...]:
    """The kind of a tensor's numbers: any nonzero? no zero? 0, 1, 2, ... in order? all tiny? For a scalar: its sign and magnitude."""
    if t.numel() == 1 and not t.is_complex():
        v = t.item()
        if -_TINY < v < _TINY or not -HUGE_WEIGHT < v < HUGE_WEIGHT:
            return v == 0, v > 0, "tiny" if abs(v) < _TINY else "huge"
        return v > 0, int(v) if -4 < v < 4 else int(v).bit_length() // 2 + 3
    ordered = t.dim() == 1 and t.dtype is torch.int64 and torch.equal(t, torch.arange(len(t), device=t.device))
    tiny = t.is_floating_point() and t.numel() > 0 and bool(t.detach().abs().amax() < _TINY)
    return t.numel() > 1, bool(t.any()), bool(t.all()), ordered, tiny


class KnownTraces(NamedTuple):
    """The traces of all passes of a proof. ``orders`` is None if the order depends on the number of examples (a loop over experts, say)."""

    orders: frozenset[int] | None = None
    functions: frozenset[str] = frozenset()
    answers: frozenset[Answer] = frozenset()
    placed: frozenset[Answer] = frozenset()  # the answers, each with the functions called just before it

    def know(self, trace: CallTrace) -> bool:
        """Whether a pass did what some pass of the proof did."""
        if self.orders is None:
            return trace.functions <= self.functions and trace.placed <= self.placed
        return hash(tuple(trace.called)) in self.orders and trace.answers <= self.answers

    def hold(self, trace: CallTrace) -> bool:
        """Whether a pass made only calls, and got only answers, that occurred in the proof, in any order."""
        known = {answer[1:] for answer in self.answers}
        return trace.functions <= self.functions and {answer[1:] for answer in trace.answers} <= known

    def beyond(self, trace: CallTrace) -> str:
        """A sentence about what a pass did that no pass of the proof did."""
        new = sorted(trace.functions - self.functions)
        return f"it called {', '.join(new[:3])}" if new else "it took a branch, or computed with a number, that no proof has seen"

    @property
    def dispatched(self) -> bool:
        """Whether the proof saw an operation that only dispatch shows: a pass without :class:`Dispatch` would look different."""
        return any("." in name for name in self.functions)

    def after(self, trace: CallTrace) -> KnownTraces:
        """These and one more."""
        orders = None if self.orders is None else self.orders | {trace.order}
        return KnownTraces(orders, self.functions | trace.functions, self.answers | trace.answers, self.placed | trace.placed)


def after_all(traces: KnownTraces | None, passes: Sequence[CallTrace]) -> KnownTraces | None:
    """These and all ``passes``; None stays None."""
    for trace in passes:
        traces = traces and traces.after(trace)
    return traces


def joined(traces: Sequence[KnownTraces | None], *, same: bool = False) -> KnownTraces | None:
    """The union of several; ``same``: keep orders only if all have one in common, else the order depends on the sizes."""
    every = [c for c in traces if c is not None]
    if len(every) < len(traces):
        return None
    orders = [c.orders for c in every if c.orders is not None]
    ordered = len(orders) == len(every) and (not same or bool(frozenset.intersection(*orders)))
    functions = frozenset(name for c in every for name in c.functions)
    answers, placed = (frozenset(answer for c in every for answer in getattr(c, which)) for which in ("answers", "placed"))
    return KnownTraces(frozenset(order for found in orders for order in found) if ordered else None, functions, answers, placed)
