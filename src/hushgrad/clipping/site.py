"""The hooks on one captured module.

Between its forward pre-hook and its forward hook a captured module runs on parameters that do not require gradients. Autograd
therefore records only the way back to the *activations*, and ``backward`` computes no weight gradient that would be thrown away:
the weighted sums of ``collect`` are the only ones. A parameter that is used anywhere else (``F.linear(x, other.weight)``) requires its
gradient there, and is read at the frontier (:mod:`hushgrad.clipping.proof.graph`).

The module's output is handed on as it is: a node of the graph to hang a hook on is all that is added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hushgrad.clipping._torch import backward_task, hooked, transform, unwatched
from hushgrad.clipping.base import Rule
from hushgrad.clipping.call import Call
from hushgrad.clipping.inner import Inner
from hushgrad.clipping.outputs import tensors_of, with_tensors

if TYPE_CHECKING:
    from hushgrad.clipping.tape import Tape

__all__ = ["Site"]


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


class _Outputs(torch.autograd.Function):
    """Hands out several outputs from one node of the graph, and their gradients to the call that made them.

    These are the gradients of what leaves the module. A hook on the outputs themselves would see more, if the module computes one
    from another (an LSTM cell its h from its c), or also returns its input.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: Call, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(y.detach() for y in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.call.arrive(*grads)
        return None, None, *grads


# What Function.apply comes to after it has looked for functorch's transforms, which takes as long again: a fortieth of a small step.
_root = super(torch.autograd.Function, _Root).apply


class Site:
    """A captured module, its rule, and the trainable parameters that it answers for.

    ``full`` has their names in the model by their names in the module.
    """

    __slots__ = ("_folds", "_off", "_remembers", "dim", "dtype", "full", "module", "names", "params", "path", "rule", "tape")

    def __init__(
        self, tape: Tape, path: str, module: nn.Module, rule: Rule, params: dict[str, nn.Parameter], full: dict[str, str]
    ) -> None:
        self.tape, self.path, self.module, self.rule, self.full = tape, path, module, rule, full
        self.names, self.params = tuple(params), list(params.values())
        self._remembers = getattr(rule.remember, "__func__", None) is not Rule.remember
        self._folds = getattr(rule.folds, "__func__", None) is not Rule.folds
        self.dim = rule.dims(module, 1)[0]  # of the examples in the first output, as the rule expects them
        dtype = self.params[0].dtype
        self.dtype = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype  # norms and sums need the bits
        # A stack, for a module may call itself: the parameters that were turned off, what the rule noted, and its inner graph.
        self._off: list[tuple[list[nn.Parameter], Any, Inner | None] | None] = []

    def hooks(self) -> list[Any]:
        """Attach; the handles to detach with."""
        return [
            self.module.register_forward_pre_hook(self._before, with_kwargs=True),
            # Next to the forward itself: a hook that was there before may make another output of the module's own.
            self.module.register_forward_hook(self._after, prepend=True, with_kwargs=True, always_call=True),
        ]

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.tape.silent or not torch.is_grad_enabled():
            self._off.append(None)
            return None
        off: list[nn.Parameter] = []
        with unwatched():
            matrix = bool(args) and isinstance(args[0], Tensor) and args[0].dim() < 3  # of which there is nothing to fold
            if self._folds and not matrix and self._runs_inside(module, args, kwargs):
                inner = Inner()
                self._off.append((off, self.rule.remember(module) if self._remembers else None, inner))
                return inner.given(args), inner.given(kwargs)
            for p in self.params:
                if p.requires_grad:  # an outer call has not already turned it off
                    p.requires_grad = False
                    off.append(p)
        self._off.append((off, self.rule.remember(module) if self._remembers else None, None))
        return None

    def _runs_inside(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this call computes otherwise if the parameters require no gradients, so that it gets a graph of its own."""
        return self.rule.folds(module, args, kwargs) and Inner.possible() and transform() is None

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        noted = self._off.pop() if self._off else None  # empty: somebody's pre-hook raised before ours was called
        if noted is None:
            return None
        off, memory, inner = noted
        with unwatched():
            for p in off:
                p.requires_grad = True
            if output is None or type(output) is Tensor:  # None: the forward raised
                return None if output is None else self._watch(args, kwargs, output, memory, inner)
        return self._watch(args, kwargs, output, memory, inner)

    def restore(self) -> None:
        """Give back what a forward that was interrupted between the hooks (Ctrl-C) left turned off."""
        for noted in self._off:
            for p in noted[0] if noted else ():
                p.requires_grad = True
        self._off.clear()

    def _watch(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, memory: Any, inner: Inner | None) -> Any:
        """Wait for the gradient of this call's output."""
        tape = self.tape
        if transform() is not None:
            tape.fail(
                f"{self.path or 'The model'} was called inside of torch.func (vmap, grad, jvp), where no gradient of its output can be "
                "waited for. Call it on the whole batch, or have the module that does so run by example: "
                "hushgrad.clipping.rule(ThatModule)(hushgrad.clipping.rules.VmapTree)."
            )
        call = Call(self, tape.current or tape.batch(), args, kwargs, memory)
        if isinstance(output, Tensor) and output.is_nested:
            tape.refuse_nested(f"{self.path or 'The model'} returned")
        shapes: list[torch.Size] = []
        edges: list[GradientEdge | None] = []
        if isinstance(output, Tensor) and inner is None:
            output, edge = self._watch_one(call, output)
            shapes, edges = [output.shape], [edge]
        elif made := tensors_of(output):
            made = made if inner is None else inner.handed_out(made)
            made = list(_Outputs.apply(tape.anchor, call, *made))  # type: ignore[no-untyped-call]
            output = with_tensors(output, iter(made))
            shapes, edges = [y.shape for y in made], [get_gradient_edge(y) if y.requires_grad else None for y in made]
        if tape.calls is not None:
            call.shapes, call.edges = shapes, edges
            tape.calls.append(call)
        else:
            tape.outside(call, again=backward_task() != -1)
        return output

    def _watch_one(self, call: Call, y: Tensor) -> tuple[Tensor, GradientEdge]:
        """The output, and where the graph has the hook: that stays in it whatever happens to the output."""
        # A module may return its own parameter, or a view of it (``self.position[:, :T]``); it requires gradients again by now.
        own, base = False, y._base if y.requires_grad else None
        for p in self.params if y.requires_grad else ():
            own = own or p is y or p is base
        if not y.requires_grad or own:
            # An in-place operation on a view would move the hooks' node out of the graph; a detached tensor is no view.
            plain = y.detach().clone() if own else y.detach() if y._is_view() else y
            y = at = _root(plain, self.tape.anchor, call)  # type: ignore[no-untyped-call]
        elif base is not None and y._is_view() and _is_reshape(y, base) and not any(_shares(a, base) for a in call.args):
            at, shape = base, y.shape  # the same reason: the base's node stays whatever happens to its view
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
        """Inputs and gradients as the rule gets them, in the precision of norms and sums: the very same tuple where they have it."""
        dtype = self.dtype
        for i, value in enumerate(values):
            if isinstance(value, Tensor) and value.dtype is not dtype and value.is_floating_point():
                self.tape.rounded = self.tape.rounded or value.dtype.itemsize < 4
                return self.ready((*values[:i], value.to(dtype), *values[i + 1 :]))
        return values


def _is_reshape(y: Tensor, base: Tensor) -> bool:
    return base.numel() == y.numel() and base.is_contiguous() and y.is_contiguous()


def _shares(value: Any, base: Tensor) -> bool:
    return isinstance(value, Tensor) and (value is base or value._base is base)
