"""The hooks on one captured module, and one call of it, with the record of the gradients that come back.

Between its forward pre-hook and its forward hook a captured module runs on parameters that do not require gradients. Autograd
therefore records only the path back to the *activations*, and ``backward`` computes no weight gradient that would be thrown away:
the weighted sums of ``collect`` are the only ones. A parameter that is used anywhere else (``F.linear(x, other.weight)``) requires its
gradient there, and is read at the frontier (:mod:`hushgrad.clipping.proof.graph`). The module's output is passed on unchanged; only a
graph node with a hook is added.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hushgrad.clipping import gradient_layout
from hushgrad.clipping._torch import backward_task, holders, transform, unwatched
from hushgrad.clipping.base import Rule
from hushgrad.clipping.grad_scaler import scaled_tasks
from hushgrad.clipping.inner_graph import Inner
from hushgrad.clipping.outputs import Outputs, is_reshape, tensors_of, with_tensors
from hushgrad.clipping.proof.structure import NATIVE, Place
from hushgrad.clipping.record import Record, versions_of

if TYPE_CHECKING:
    from hushgrad.clipping.collecting import Batch
    from hushgrad.clipping.tape import Tape


class Call:
    """One call of a captured module; it becomes part of its batch when a gradient comes back to it.

    ``place``: where its examples are (None: not proved); ``rows``: the example of each row if there is no rule for it; ``index``: that of
    each row which its rule treats as an example.
    """

    __slots__ = (
        "args", "batch", "edges", "index", "kwargs", "memory", "place", "record", "rows", "rule", "shapes", "site", "sq_norms", "tasks",
        "totals", "versions",
    )  # fmt: skip

    def __init__(self, site: Site, batch: Batch, args: tuple[Any, ...], kwargs: Mapping[str, Any], memory: Any) -> None:
        self.site, self.batch, self.args, self.kwargs, self.memory = site, batch, args, kwargs, memory
        self.rule: Rule = site.rule
        self.versions = versions_of(args, kwargs)
        self.place: Place | None = None
        self.index: Tensor | None = None
        self.rows: Tensor | None = None
        self.shapes: list[torch.Size] = []
        self.edges: Sequence[GradientEdge | None] = ()
        self.record: Record | None = None
        self.sq_norms: dict[str, Tensor] | None = None
        self.tasks: list[int] = []
        self.totals: dict[int, Tensor] = {}  # for shared outputs: the total gradient over all examples

    # Gradients come back -------------------------------------------------------------------------------------------------

    def arrive(self, *grads: Tensor | None) -> None:
        """Hook of the layer's outputs: a gradient, or None, for each."""
        tape = self.site.tape
        if tape.deaf:
            return
        if self.place is not NATIVE:
            gradient_layout.arrive(self, self.place, grads)
            return
        self.add(grads)
        if self.rule.hot:
            tape.quiet(self.prepare)

    take, require_all, _add_again = gradient_layout.take, gradient_layout.require_all, gradient_layout.add_again

    def add(self, grads: tuple[Tensor | None, ...], x: Tensor | None = None) -> None:
        """Open the record, with ``x`` in place of the input; or add a second loss over the same pass."""
        site, batch = self.site, self.batch
        tape, task = site.tape, backward_task()
        if batch is not tape.current or task in scaled_tasks or torch.is_grad_enabled():
            tape.refuse_arrival(self)
        batch.tasks.add(task)
        batch.summed.add(tape.summing)
        self.tasks.append(task)
        args, kwargs = (self.args, self.kwargs) if x is None else ((x,), {})
        for value in (*args, *grads):
            if isinstance(value, Tensor) and value.dtype is not site.dtype:
                args, grads = site.ready(args), site.ready(grads)
                break
        if self.record is not None:
            self._add_again(self.record, grads)
            return
        if self.versions != versions_of(self.args, self.kwargs):
            tape.fail(self.stale_message())
        if kwargs:
            kwargs = dict(zip(kwargs, site.ready(tuple(kwargs.values())), strict=True))
        if kwargs or args is not self.args:
            self.versions = versions_of(args, kwargs)
        self.record = Record(site.module, site.names, args, kwargs, grads, self.memory, tape.most)
        self.args, self.kwargs = (), {}
        batch.calls.append(self)

    @property
    def examples(self) -> int:
        """How many rows the rule treats as examples."""
        return self.batch.examples if self.index is None or self.rule.positions else len(self.index)

    def units(self, units: Tensor | None) -> Tensor | None:
        """The privacy unit of each row, from those of the examples (None: each its own)."""
        if self.index is None or self.rule.positions:
            return units
        return self.index if units is None else units.to(self.index.device)[self.index]

    def stale_message(self) -> str:
        """The error message for an input that is still needed and was changed in place."""
        path = self.site.path or "the model"
        return f"The input of {path} was changed in place after the module had used it. Write the operation out of place."

    def prepare(self) -> dict[str, Tensor]:
        """The squared norms by local name (on a device perhaps not all); frees what is no longer needed."""
        if self.sq_norms is None:
            record = self.record
            assert record is not None
            self.sq_norms = self.rule.sq_norms(record)
            if (record.kept or record.pieces) and record.complete:
                record.release()
        return self.sq_norms

    def measure(self) -> dict[str, Tensor]:
        """The squared norms of all parameters by local name."""
        made = self.prepare()
        if len(made) < len(self.site.names):
            assert self.record is not None
            missing = [name for name in self.site.names if name not in made]
            made = self.sq_norms = made | self.rule.rest(self.record, missing)
        return made


def hooked(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """``tensor.register_hook(hook)`` without a handle for removal, in half the time: each layer of each pass calls it."""
    if tensor._backward_hooks is not None or tensor.grad_fn is None:
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        return
    tensor._backward_hooks = hooks = OrderedDict[int, Callable[[Tensor], Tensor | None]]()
    tensor.grad_fn._register_hook_dict(tensor)
    hooks[-1] = hook  # torch counts from 0


class _Root(torch.autograd.Function):
    """Marks the output of a first layer as part of the graph, in place, and hands its gradient to the call that made it.

    ``output.requires_grad_()`` would do so as well, but makes it a leaf, which an in-place activation behind it may not change.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, call: Call | None) -> Tensor:
        ctx.call = call
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        if ctx.call is not None:
            ctx.call.arrive(*grads)
        return None, None, None


_root = super(torch.autograd.Function, _Root).apply  # without its check for functorch transforms, half of its time


class Site:
    """A captured module, its rule, and its trainable parameters; ``full`` has their names in the model."""

    __slots__ = (
        "_folds", "_holders", "_remembers", "dim", "dtype", "full", "module", "names", "params", "path", "rule", "switched_off", "tape",
    )  # fmt: skip

    def __init__(
        self, tape: Tape, path: str, module: nn.Module, rule: Rule, params: dict[str, nn.Parameter], full: dict[str, str]
    ) -> None:
        self.tape, self.path, self.module, self.rule, self.full = tape, path, module, rule, full
        self.names, self.params = tuple(params), list(params.values())
        self._holders = holders(module, self.names)
        self._remembers = getattr(rule.remember, "__func__", None) is not Rule.remember
        self._folds = getattr(rule.folds, "__func__", None) is not Rule.folds
        self.dim = rule.dims(module, 1)[0]  # of the examples in the first output, as the rule expects them
        dtype = self.params[0].dtype
        self.dtype = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype  # norms and sums need the bits
        # A stack, since a module may call itself: parameters that were switched off, the rule's memory, and the inner graph.
        self.switched_off: list[tuple[list[nn.Parameter], Any, Inner | None] | None] = []

    def hooks(self) -> list[Any]:
        """Attach; returns the handles to detach with."""
        return [
            self.module.register_forward_pre_hook(self._before, with_kwargs=True),
            # Next to the forward: an earlier hook may replace the module's output.
            self.module.register_forward_hook(self._after, prepend=True, with_kwargs=True, always_call=True),
        ]

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.tape.silent or not torch.is_grad_enabled():
            self.switched_off.append(None)
            return None
        for (held, leaf), p in zip(self._holders, self.params, strict=True):
            if held[leaf] is not p:  # functional_call: its replacement is read at the frontier
                self.switched_off.append(None)
                return None
        off: list[nn.Parameter] = []
        with unwatched():
            matrix = bool(args) and isinstance(args[0], Tensor) and args[0].dim() < 3  # nothing to fold
            if self._folds and not matrix and self._runs_inside(module, args, kwargs):
                inner = Inner()
                self.switched_off.append((off, self.rule.remember(module) if self._remembers else None, inner))
                return inner.given(args), inner.given(kwargs)
            # Recorded first: an interrupt may come at any call.
            self.switched_off.append((off, self.rule.remember(module) if self._remembers else None, None))
            for p in self.params:
                if p.requires_grad:  # an outer call has not already turned it off
                    off.append(p)
                    p.requires_grad = False
        return None

    def _runs_inside(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this call computes differently if the parameters require no gradients, so that it needs an inner graph."""
        return self.rule.folds(module, args, kwargs) and Inner.possible() and transform() is None

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        noted = self.switched_off[-1] if self.switched_off else None  # empty: somebody's pre-hook raised before ours was called
        if noted is None:
            del self.switched_off[-1:]
            return None
        off, memory, inner = noted
        with unwatched():
            for p in off:
                p.requires_grad = True
            del self.switched_off[-1]  # last: an interrupt may come at any call
            if output is None or type(output) is Tensor:  # None: the forward raised
                return None if output is None else self._watch(args, kwargs, output, memory, inner)
        return self._watch(args, kwargs, output, memory, inner)

    def restore(self) -> None:
        """Restore what a forward that was interrupted (Ctrl-C) between the hooks, or in them, left switched off."""
        for noted in self.switched_off:
            for p in noted[0] if noted else ():
                p.requires_grad = True
        self.switched_off.clear()

    def _watch(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, memory: Any, inner: Inner | None) -> Any:
        """Hook the output of this call."""
        tape = self.tape
        if transform() is not None:
            tape.refuse_transformed(self.path)
        call = Call(self, tape.current or tape.batch(), args, kwargs, memory)
        if isinstance(output, Tensor) and output.is_nested:
            tape.refuse_nested(f"{self.path or 'The model'} returned")
        shapes, edges = list[torch.Size](), list[GradientEdge | None]()
        if isinstance(output, Tensor) and inner is None:
            output, edge = self._watch_one(call, output)
            shapes, edges = [output.shape], [edge]
        elif made := tensors_of(output):
            made = made if inner is None else inner.handed_out(made)
            made = list(Outputs.apply(tape.anchor, call, *made))  # type: ignore[no-untyped-call]
            output = with_tensors(output, iter(made))
            shapes, edges = [y.shape for y in made], [get_gradient_edge(y) if y.requires_grad else None for y in made]
        if tape.calls is not None:
            call.shapes, call.edges = shapes, edges
            tape.calls.append(call)
        else:
            tape.outside(call, again=backward_task() != -1)
        return output

    def _watch_one(self, call: Call, y: Tensor) -> tuple[Tensor, GradientEdge]:
        """The output, and the graph edge with the hook, which stays whatever happens to the output."""
        # A module may return its own parameter, or a view of it (``self.position[:, :T]``); it requires gradients again by now.
        own, base = False, y._base if y.requires_grad else None
        for p in self.params if y.requires_grad else ():
            own = own or p is y or p is base
        if not y.requires_grad or own:
            # An in-place operation on a view would move the hooks' node out of the graph; a detached tensor is no view.
            plain = y.detach().clone() if own else y.detach() if y._is_view() else y
            y = at = _root(plain, self.tape.anchor, call)  # type: ignore[no-untyped-call]
        elif base is not None and y._is_view() and is_reshape(y, base, call.args):
            at, shape = base, y.shape  # likewise: the base's node stays whatever happens to its view
            hooked(at, lambda g: call.arrive(g.reshape(shape)))
        else:
            at = y
            hooked(at, call.arrive)
        node = at.grad_fn  # as get_gradient_edge does, in a tenth of the time
        return y, get_gradient_edge(at) if node is None else GradientEdge(node, at.output_nr)

    def param(self, local: str) -> nn.Parameter:
        """The parameter with this local name."""
        return self.params[self.names.index(local)]

    def ready(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Inputs and gradients in the precision of norms and sums; the very same tuple if they have it already."""
        dtype = self.dtype
        for i, value in enumerate(values):
            if isinstance(value, Tensor) and value.dtype is not dtype and value.is_floating_point():
                self.tape.rounded = self.tape.rounded or value.dtype.itemsize < 4
                return self.ready((*values[:i], value.to(dtype), *values[i + 1 :]))
        return values
