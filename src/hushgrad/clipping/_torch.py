"""Every private name of torch that the capture relies on, here and in _torch_compile.py. Tested with torch 2.13.

This file: graphs, hooks and modes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, saved_tensors_hooks
from torch.nn.modules import module as _module
from torch.utils import checkpoint as _checkpoint
from torch.utils.checkpoint import CheckpointFunction

_by_hand: list[Any] = []  # nodes that are being called by hand
Holder = tuple[dict[str, nn.Parameter | None], str]
Node = Any  # torch.autograd.graph.Node; custom functions' nodes are not instances of it

# The number of the backward pass running in this thread; -1 outside of one.
backward_task: Callable[[], int] = torch._C._current_graph_task_id

# How many graph nodes this thread has created: the difference over a forward is a cheap fingerprint of it.
nodes_made: Callable[[], int] = torch._C._autograd._get_sequence_nr

# Inside, function modes see nothing: our hooks read a dozen attributes of each output.
unwatched: Callable[[], Any] = torch._C.DisableTorchFunction

# What torch.autograd.graph.saved_tensors_hooks does; a pass begins in one hook and ends in another.
push_packing: Callable[[Callable[[Tensor], Any], Callable[[Any], Tensor]], None]
push_packing = torch._C._autograd._push_saved_tensors_default_hooks
pop_packing: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks

# What torch.set_grad_enabled does, without an object for it.
set_grad: Callable[[bool], None] = torch._C._set_grad_enabled

# What entering and leaving a torch.overrides.TorchFunctionMode comes to, for the same reason.
push_mode: Callable[[Any], None] = torch._C._push_on_torch_function_stack
pop_mode: Callable[[], Any] = torch._C._pop_torch_function_stack

# How many modes of functions, and of dispatch, are active in this thread.
function_modes: Callable[[], int] = torch._C._len_torch_function_stack
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
# The saved-tensor hooks that are active now, if any, even where they are switched off for a moment.
packing: Callable[[bool], tuple[Any, Any] | None] = torch._C._autograd._top_saved_tensors_default_hooks


def dict_of(kind: type) -> dict[str, Any]:
    """The dict of a class, which it shows through a proxy."""
    (table,) = gc.get_referents(vars(kind))
    return table  # type: ignore[no-any-return]


def _counting() -> Callable[[dict[Any, Any]], int] | None:
    """A number for a dict's content, which every write changes; None where this interpreter does not show one, or not for all writes."""
    version: Any = getattr(getattr(torch._C._dynamo, "guards", None), "dict_version", None)

    class Held:
        name: Any = None

    held = Held()
    tables = vars(held), dict_of(Held)
    try:
        for k in range(100):  # an interpreter comes to write in other ways to what it often writes to
            before = [*map(version, tables)]
            held.name = Held.name = k
            after = [*map(version, tables)]
            if before[0] == after[0] or before[1] == after[1] or after != [*map(version, tables)]:
                return None
    except (TypeError, RuntimeError):
        return None
    return version  # type: ignore[no-any-return]


# Guards of torch.compile compare dicts with their earlier state in this way.
dict_version = _counting()


def retains() -> bool:
    """Whether a node is needed later: it was called by hand, or the running backward pass was asked to keep the graph."""
    return bool(_by_hand) or torch._C._autograd._get_current_graph_task_keep_graph()


def packing_on() -> tuple[Any, Any] | None:
    """The saved-tensor hooks that are active now, if any."""
    return packing(True)


def accumulated(node: Node) -> Tensor | None:
    """The leaf whose gradient this node accumulates; None for all other nodes."""
    return getattr(node, "variable", None) if node.name() == "torch::autograd::AccumulateGrad" else None


def called(node: Node, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Apply the node's own formula: a gradient for each of its ``next_functions``; broadcast gradients are not summed yet.

    A custom function's node is not callable, but has ``apply``, which returns something for arguments that are no tensors, too.
    """
    _by_hand.append(node)
    try:
        made = node(*grads) if callable(node) else node.apply(*grads)
    finally:
        _by_hand.pop()
    made = made if isinstance(made, tuple) else (made,)
    if callable(node) or len(made) == len(node.next_functions):
        return made
    wanted = iter([g for g, needed in zip(made, node.needs_input_grad, strict=False) if needed])
    return tuple(None if below is None else next(wanted, None) for below, _ in node.next_functions)


class _Handles(dict[Any, Any]):
    """Where a checkpoint finds a tensor that it computed again: what is read by hand is still there for the backward pass."""

    def __setitem__(self, task: Any, handle: Any) -> None:
        if handle is not None or not _by_hand:
            super().__setitem__(task, handle)


def _reread(pack: Callable[[Tensor], Any], t: Tensor) -> Any:
    holder = pack(t)
    holder.handles = _Handles()
    return holder


AS_TORCH = saved_tensors_hooks.__enter__


class SavedHooks:
    """Counts how often a forward has saved tensors under hooks of its own, but for checkpoints, which a proof does without."""

    count = 0


def entering(handed: Callable[[Tensor], Tensor]) -> Callable[[saved_tensors_hooks], None]:
    """In the place of ``saved_tensors_hooks.__enter__``: what is saved under hooks of the model's own (checkpoints, ``save_on_cpu``) is
    handed out as ``handed`` makes it.

    Nodes inside of a checkpoint can then be called by hand, too: torch lets each of its tensors be read once in a backward pass.
    """

    def enter(hooks: saved_tensors_hooks) -> None:
        pack, unpack = hooks.pack_hook, hooks.unpack_hook
        if isinstance(hooks, _checkpoint._checkpoint_hook):
            pack = partial(_reread, pack)
        else:
            SavedHooks.count += 1
        push_packing(pack, lambda kept: handed(unpack(kept)))

    return enter


@contextmanager
def checkpoints_off() -> Iterator[None]:
    """Inside, reentrant checkpoints just call their function: they reject ``autograd.grad``, and hide the calls that they make."""
    kept = CheckpointFunction.apply
    CheckpointFunction.apply = staticmethod(lambda run, preserve, *args: run(*args))  # type: ignore[method-assign]
    try:
        yield
    finally:
        CheckpointFunction.apply = kept  # type: ignore[method-assign]


def global_hooks() -> list[dict[Any, Any]]:
    """Hooks that apply to all modules."""
    return [_module._global_forward_pre_hooks, _module._global_forward_hooks, _module._global_backward_hooks]


def input_metadata(node: Node) -> Sequence[Any]:
    """Shape, dtype and device of each cotangent that arrives at a node."""
    return node._input_metadata  # type: ignore[no-any-return]


def input_shape(edge: GradientEdge) -> torch.Size:
    """The shape of the gradient that arrives along this edge."""
    leaf = accumulated(edge.node)
    if leaf is not None:
        return leaf.shape
    metadata: Any = edge.node
    return torch.Size(metadata._input_metadata[edge.output_nr].shape)


transform: Callable[[], int | None] = torch._C._functorch.maybe_current_level  # the one of torch.func that is under way, if any


def is_wrapped(tensor: Tensor) -> bool:
    """Whether it was made under ``vmap`` or ``grad``: it has no values to read, afterwards neither."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_transformed() -> bool:
    """Whether ``vmap`` or ``grad`` is active: tensors have no values to read then."""
    return transform() is not None


is_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled  # on whatever device


def holders(module: nn.Module, names: Sequence[str]) -> list[Holder]:
    """The modules and names under which a module finds these parameters; ``functional_call`` replaces them there for a call."""
    return [(module.get_submodule(path)._parameters, leaf) for path, _, leaf in (name.rpartition(".") for name in names)]


def memory_of(tensor: Tensor) -> int:
    """Identifies a tensor's memory while it lives, also for tensors without an address: sharded, quantised or fake ones."""
    return (
        tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)
    )  # a sparse one has no memory of its own


def equal(a: Tensor, b: Tensor) -> bool:
    """``torch.equal``, for sparse tensors as well."""
    return torch.equal(a, b) if a.layout is b.layout is torch.strided else torch.equal(a.to_dense(), b.to_dense())


def rows_listed(node: Node) -> tuple[Tensor, Sequence[int]] | None:
    """Of ``x[index]`` with one list of whole rows: the list, counted from the first row on, and the shape of x."""
    indices: Any = saved(node, "indices") if node.name() == "IndexBackward0" else None
    rows = indices[0] if indices is not None and len(indices) == 1 else None
    if rows is None or rows.dtype is not torch.int64 or rows.dim() != 1:
        return None
    shape = node._saved_self_sym_sizes
    return rows % shape[0] if shape[0] else rows, shape


def saved(node: Node, name: str) -> Tensor | None:
    """A tensor that the forward saved with this node; None if it did not, or if it is freed."""
    _by_hand.append(node)
    try:
        return getattr(node, f"_saved_{name}")  # type: ignore[no-any-return]
    except (AttributeError, RuntimeError):
        return None
    finally:
        _by_hand.pop()


class NodeHooks:
    """Counts the hooks that are put on nodes of a graph (``grad_fn.register_hook``, ``register_prehook``): no node tells of its own."""

    count = 0

    @classmethod
    def watch(cls) -> None:
        """From now on count all but hushgrad's own; once in a process."""
        from torch.autograd import function

        register = function._HookMixin._register_hook
        if getattr(register, "is_counted", False):
            return

        def counted(hooks: Any, hook: Any) -> Any:
            cls.count += not str(getattr(hook, "__module__", "")).startswith("hushgrad.")
            return register(hooks, hook)

        counted.is_counted = True  # type: ignore[attr-defined]
        function._HookMixin._register_hook = staticmethod(counted)  # type: ignore[method-assign]
