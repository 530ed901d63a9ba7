"""The hooks on one captured module, and one call of it.

Between its forward pre-hook and its forward hook a captured module runs on parameters that do not require gradients. Autograd
therefore records only the way back to the *activations*, and ``backward`` computes no weight gradient that would be thrown away:
the weighted sums of ``collect`` are the only ones. A parameter that is used anywhere else (``F.linear(x, other.weight)``) still
requires its gradient there; that gradient arrives in ``p.grad``, where the capture notices it and refuses the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from hushgrad.clipping.base import Record, Rule
from hushgrad.clipping.rules.vmap import tensors_of, with_tensors

if TYPE_CHECKING:
    from hushgrad.clipping.tape import Batch, Tape

__all__ = ["Call", "Site"]


class Call:
    """One call of a captured module; it becomes part of its batch when a gradient comes back to it."""

    __slots__ = ("args", "batch", "kwargs", "memory", "record", "site", "sq_norms", "tasks", "versions")

    def __init__(self, site: Site, batch: Batch, args: tuple[Any, ...], kwargs: Mapping[str, Any], memory: Any) -> None:
        self.site, self.batch, self.args, self.kwargs, self.memory = site, batch, args, kwargs, memory
        self.versions = _versions(args, kwargs)
        self.record: Record | None = None
        self.sq_norms: dict[str, Tensor] | None = None
        self.tasks: list[int] = []

    def arrive(self, g: Tensor) -> None:
        """Tensor hook of a layer with one output."""
        self.arrive_all((g,))

    def arrive_all(self, grads: Any) -> None:
        """Hook of a layer with several outputs: a gradient, or None, for each."""
        tape = self.site.tape
        self.tasks.append(tape.arrived(self))
        grads = self.site.ready(tuple(grads))
        if self.record is None:
            self._open(grads)
            if self.site.rule.hot:
                tape.quiet(self.measure)
        elif not self.record.grads:
            tape.fail(
                f"A second backward came back to {self.site.path or 'the model'}, whose input is already released. Add the "
                "losses and run one backward."
            )
        else:  # a second loss over the same pass: per-example gradients are linear in g
            self.record.grads = tuple(_plus(a, b) for a, b in zip(self.record.grads, grads, strict=True))
            self.record.kept, self.record.pieces, self.record.masses, self.sq_norms = {}, {}, {}, None

    def _open(self, grads: tuple[Tensor | None, ...]) -> None:
        site = self.site
        if self.versions != _versions(self.args, self.kwargs):
            site.tape.fail(self.stale_message())
        args, kwargs = site.ready(self.args), self.kwargs
        if kwargs:
            kwargs = dict(zip(kwargs, site.ready(tuple(kwargs.values())), strict=True))
        if kwargs or args is not self.args:
            self.versions = _versions(args, kwargs)
        self.record = Record(site.module, site.names, args, kwargs, grads, self.memory)
        self.args, self.kwargs = (), {}
        self.batch.calls.append(self)

    def stale(self) -> bool:
        """Whether an input that is still needed was changed in place since the gradient came back."""
        record = self.record
        return record is not None and bool(record.grads) and self.versions != _versions(record.args, record.kwargs)

    def stale_message(self) -> str:
        """What to say then."""
        path = self.site.path or "the model"
        return f"The input of {path} was changed in place after the module had used it. Write the operation out of place."

    def measure(self) -> dict[str, Tensor]:
        """The squared norms by local name; the first time they are computed, and what is no longer needed is released."""
        if self.sq_norms is None:
            record = self.record
            assert record is not None
            self.sq_norms = self.site.rule.sq_norms(record)
            if (record.kept or record.pieces) and record.complete:
                record.release()
        return self.sq_norms


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
            ctx.call.arrive_all(grads)
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
        ctx.call.arrive_all(grads)
        return None, None, *grads


# What Function.apply comes to after it has looked for functorch's transforms, which takes as long again: a fortieth of a small step.
_root = super(torch.autograd.Function, _Root).apply


class Site:
    """A captured module, its rule, and the trainable parameters that it answers for.

    ``full`` has their names in the model by their names in the module.
    """

    __slots__ = ("_off", "dtype", "full", "module", "names", "params", "path", "rule", "tape")

    def __init__(
        self, tape: Tape, path: str, module: nn.Module, rule: Rule, params: dict[str, nn.Parameter], full: dict[str, str]
    ) -> None:
        self.tape, self.path, self.module, self.rule, self.full = tape, path, module, rule, full
        self.names, self.params = tuple(params), list(params.values())
        dtype = self.params[0].dtype
        self.dtype = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype  # norms and sums need the bits
        # A stack, for a module may call itself: the parameters that were turned off, and what the rule noted.
        self._off: list[tuple[list[nn.Parameter], Any] | None] = []

    def hooks(self) -> list[Any]:
        """Attach; the handles to detach with."""
        return [
            self.module.register_forward_pre_hook(self._before, with_kwargs=True),
            # Next to the forward itself: a hook that was there before may make another output of the module's own.
            self.module.register_forward_hook(self._after, prepend=True, with_kwargs=True, always_call=True),
        ]

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.tape.silent or not torch.is_grad_enabled():
            self._off.append(None)
            return
        off = []
        for p in self.params:
            if p.requires_grad:  # an outer call has not already turned it off
                p.requires_grad = False
                off.append(p)
        self._off.append((off, self.rule.remember(module)))

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        noted = self._off.pop() if self._off else None  # empty: somebody's pre-hook raised before ours was called
        if noted is None:
            return None
        off, memory = noted
        for p in off:
            p.requires_grad = True
        return None if output is None else self._watch(args, kwargs, output, memory)  # None: the forward raised

    def restore(self) -> None:
        """Give back what a forward that was interrupted between the hooks (Ctrl-C) left turned off."""
        for noted in self._off:
            for p in noted[0] if noted else ():
                p.requires_grad = True
        self._off.clear()

    def _watch(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, memory: Any) -> Any:
        """Wait for the gradient of this call's output."""
        count = self.rule.examples(self.module, args, kwargs)
        batch = self.tape.batch_of(count, lambda: count is None or self.rule.shared(count, args, kwargs))
        call = Call(self, batch, args, kwargs, memory)
        if isinstance(output, Tensor):
            return self._watch_one(call, output, count)
        if count is not None and count != batch.examples:
            self.tape.wrong_count(self.path, count)
        outputs = tensors_of(output)
        return with_tensors(output, iter(_Outputs.apply(self.tape.anchor, call, *outputs))) if outputs else output  # type: ignore[no-untyped-call]

    def _watch_one(self, call: Call, y: Tensor, count: int | None) -> Tensor:
        B = call.batch.examples
        spread = (count is not None and count != B) or (y.dim() > 0 and y.shape[0] == 1 != B)  # a row for all: positions
        # A module may return its own parameter, or a view of it (``self.position[:, :T]``); it requires gradients again by now.
        own = any(p is y or p is y._base for p in self.params) if y.requires_grad else False
        if not y.requires_grad or own:
            # An in-place operation on a view would move the hooks' node out of the graph; a detached tensor is no view.
            plain = y.detach().clone() if own else y.detach() if y._is_view() else y
            y = _root(plain, self.tape.anchor, None if spread else call)  # type: ignore[no-untyped-call]
            if not spread:
                return y
        if spread:
            y = self._spread(call, y)
        base = y._base if y._is_view() else None
        if base is not None and _is_reshape(y, base) and not any(_shares(a, base) for a in call.args):
            shape = y.shape  # the same reason: the base's node stays whatever happens to its view
            base.register_hook(lambda g: call.arrive(g.reshape(shape)))  # type: ignore[no-untyped-call]
        else:
            y.register_hook(call.arrive)  # type: ignore[no-untyped-call]
        return y

    def _spread(self, call: Call, output: Tensor) -> Tensor:
        """A shared row (position ids) is used by every example: give each example its own, so that gradients stay apart."""
        B = call.batch.examples
        spread = self.rule.broadcast(output, B)
        if spread is None:
            self.tape.wrong_count(self.path, output.shape[0])
        call.args = tuple(self.rule.spread(a, B) if isinstance(a, Tensor) else a for a in call.args)
        call.kwargs = {k: self.rule.spread(a, B) if isinstance(a, Tensor) else a for k, a in call.kwargs.items()}
        return spread

    def param(self, local: str) -> nn.Parameter:
        """The parameter with this local name."""
        return self.params[self.names.index(local)]

    def ready(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Inputs as the rule gets them, in the precision of norms and sums: the very same tuple where they have it."""
        dtype = self.dtype
        for i, value in enumerate(values):
            if isinstance(value, Tensor) and value.dtype is not dtype and value.is_floating_point():
                return self.ready((*values[:i], value.to(dtype), *values[i + 1 :]))
        return values


def _versions(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[int]:
    """How often each input tensor was changed in place (tensors made in inference mode do not count)."""
    found = []  # not a comprehension: it is one more call, of which a step has many
    for v in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(v, Tensor):
            if not v.is_inference():
                found.append(v._version)
        elif isinstance(v, (tuple, list, dict)):  # an LSTM's state, a packed sequence
            found += _versions(tuple(tree_flatten(v)[0]), {})
    return found


def _is_reshape(y: Tensor, base: Tensor) -> bool:
    return base.numel() == y.numel() and base.is_contiguous() and y.is_contiguous()


def _shares(value: Any, base: Tensor) -> bool:
    return isinstance(value, Tensor) and (value is base or value._base is base)


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b
