"""Isolation: does any example of a batch influence another one?

Per-example clipping bounds what an example adds to the gradient only if the other examples' gradients do not depend on it. Layers that
take statistics over the batch break this silently. They are found by what they do, not by a list of names:

1. d out[i] / d x[j] is exactly 0 for i != j (autograd, for the first and the last example);
2. out[0] stays the same when the other examples are replaced (this also finds mixing behind ``detach`` or in integer operations);
3. buffers end in the same state whatever the data (running means would carry data into the checkpoint, without noise).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from hushgrad import _check
from hushgrad.errors import ArgumentError, NotIsolated

__all__ = ["isolation", "isolation_at_first_call"]

_SAME = 1e-4  # relative: far above rounding, far below what a batch statistic does

Call = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], Any]


def isolation(model: nn.Module, *inputs: Any, named: Mapping[str, Any] | None = None, batch_dim: int = 0) -> None:
    """Raise :class:`~hushgrad.errors.NotIsolated`, with the path of the module, if an example influences another.

    ``model(*inputs, **named)`` is called a few times in the mode (training or not) that it is in; its buffers, ``requires_grad`` flags and
    the random state are as before afterwards. The inputs need two examples or more, in dimension ``batch_dim`` of the first tensor; other
    tensors have them there, or in the first or second dimension if it has that size, or are shared by all examples.

    **Formal guarantee.** None: the check is a test at one input. A model that passes may still mix examples elsewhere, for instance
    through an operation that only large batches reach. A model that fails does mix them.

        >>> isolation(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)), torch.randn(5, 4))
        >>> isolation(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), torch.randn(5, 4))
        Traceback (most recent call last):
        ...
        hushgrad.errors.NotIsolated: 1 (BatchNorm1d) lets the examples of a batch influence each other...

    Reference: the definition of a per-example gradient in Abadi et al., "Deep learning with differential privacy" (CCS 2016), section 3.1.
    """
    kwargs = dict(named or {})
    examples = _examples((inputs, kwargs), batch_dim) or 0
    batch = _Batch(examples, batch_dim)
    if examples < 2:
        _check.fail(
            "inputs", examples, "to hold two examples or more", "One example alone cannot show whether it influences another."
        )
    with _as_it_was(model):
        finding = _finding(model, inputs, kwargs, batch)
        if finding is None:
            return
        path, module, detail = _culprit(model, inputs, kwargs, batch) or ("", model, finding)
    where = f"{path} ({type(module).__name__})" if path else f"The model ({type(module).__name__})"
    raise NotIsolated(f"{where} lets the examples of a batch influence each other: {detail}. {_remedy(module)}")


def isolation_at_first_call(model: nn.Module, paused: Callable[[], AbstractContextManager[None]]) -> Any:
    """Run :func:`isolation` on the first batch of two or more that the model is trained on; returns the handle of the hook.

    ``paused`` is the capture's ``pause``: the check's own passes are not part of a step.
    """

    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not module.training or not torch.is_grad_enabled() or (_examples((args, kwargs), 0) or 0) < 2:
            return
        handle.remove()
        with paused():
            try:
                isolation(module, *args, named=kwargs)
            except ArgumentError:  # no output has as many rows as the first dimension: the inputs may have time first
                isolation(module, *args, named=kwargs, batch_dim=1)

    handle = model.register_forward_pre_hook(check, with_kwargs=True)
    return handle


# The three tests ---------------------------------------------------------------------------------------------------------


def _finding(module: nn.Module, args: Any, kwargs: Any, batch: _Batch) -> str | None:
    """What is wrong with this module on these inputs, in words; None if nothing is."""
    start, random = _buffers(module), _random_state()
    args, kwargs = tree_map(_detached, args), tree_map(_detached, kwargs)
    with _roots(module, batch) as roots:
        roots += [t for t in batch.of((args, kwargs)) if t.is_floating_point() and _rooted(t)]
        outputs = batch.of(module(*args, **kwargs))
    after = _buffers(module)
    if not outputs:
        remedy = "Return something with the examples first, or give the body of the model."
        _check.fail("model", type(module).__name__, "to return a tensor with one row for each example", remedy)
    if _gradient_crosses(outputs, roots, batch):
        return "the output of one depends on the input of others"
    for factor in (1.0, 10.0, -10.0):
        _restore(module, start)
        _set_random_state(random)
        again = _rows_with_others(module, args, kwargs, factor, batch)
        if not all(_same(batch.row(a, 0), batch.row(b, 0)) for a, b in zip(outputs, again, strict=True)):
            return "the output of the first changes when the others are replaced"
        changed = [name for name, value in _buffers(module).items() if not _same(value, after[name])]
        if changed:
            return f"its buffer {changed[0]} keeps something of the data, without noise"
    return None


@contextmanager
def _roots(module: nn.Module, batch: _Batch) -> Iterator[list[Tensor]]:
    """The first floating-point activations of integer inputs are differentiated instead of the inputs (embeddings)."""
    roots: list[Tensor] = []

    def hook(_: nn.Module, args: Any, output: Any) -> None:
        for y in batch.of(output):
            if y.is_floating_point() and not y.requires_grad and y.is_leaf:
                roots.append(y.requires_grad_())

    handles = [child.register_forward_hook(hook) for child in module.modules() if child is not module]
    try:
        yield roots
    finally:
        for handle in handles:
            handle.remove()


def _gradient_crosses(outputs: list[Tensor], roots: list[Tensor], batch: _Batch) -> bool:
    """A gradient from the first (or last) example's output that arrives at another example's input. NaN counts as arrived."""
    differentiable = [y for y in outputs if y.requires_grad]
    if not differentiable or not roots:
        return False
    for own in (0, batch.examples - 1):
        rows = [batch.row(y, own) for y in differentiable]
        loss = sum((row * torch.randn_like(row)).sum() for row in rows)
        grads = torch.autograd.grad(loss, roots, retain_graph=True, allow_unused=True)  # type: ignore[arg-type]
        if any(g is not None and bool((batch.without(g, own) != 0).any()) for g in grads):
            return True
    return False


def _rows_with_others(module: nn.Module, args: Any, kwargs: Any, factor: float, batch: _Batch) -> list[Tensor]:
    """The outputs where the examples after the first are in other places, and floats somewhat changed and times ``factor``."""
    order = torch.tensor([0, *range(2, batch.examples), 0])

    def replaced(t: Any) -> Any:
        axis = batch.axis(t)
        if axis is None:
            return t
        other = t.detach().index_select(axis, order.to(t.device))
        if other.is_floating_point() and other.numel():
            rest = other.narrow(axis, 1, batch.examples - 1)
            change = torch.linspace(0.05, 0.15, rest.numel(), device=rest.device).view(rest.shape).to(rest.dtype)
            rest.add_(change * (1 + rest.abs())).mul_(factor)
        return other

    with torch.no_grad():
        return batch.of(module(*tree_map(replaced, args), **tree_map(replaced, kwargs)))


def _same(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    a, b = a.detach().double(), b.detach().double()
    scale = a.nan_to_num(0, 0, 0).abs().max() if a.numel() else a.sum()
    return torch.allclose(a, b, rtol=_SAME, atol=_SAME * float(scale) + 1e-12, equal_nan=True)


# Which module ------------------------------------------------------------------------------------------------------------


class _Seen(NamedTuple):
    path: str
    module: nn.Module
    args: Any
    kwargs: Any


def _culprit(model: nn.Module, args: Any, kwargs: Any, batch: _Batch) -> tuple[str, nn.Module, str] | None:
    """The innermost module that mixes examples by itself: calls are tried in the order in which they finish."""
    seen: list[_Seen] = []
    handles = [
        module.register_forward_hook(
            lambda module, args, kwargs, _, path=path: seen.append(_Seen(path, module, args, kwargs)), with_kwargs=True
        )
        for path, module in model.named_modules()
        if module is not model
    ]
    with torch.no_grad():
        model(*args, **kwargs)
    for handle in handles:
        handle.remove()
    for path, module, its_args, its_kwargs in seen:
        if batch.of((its_args, its_kwargs)) and _returns_rows(module, its_args, its_kwargs, batch):
            detail = _finding(module, its_args, its_kwargs, batch)
            if detail is not None:
                return path, module, detail
    return None


def _returns_rows(module: nn.Module, args: Any, kwargs: Any, batch: _Batch) -> bool:
    with torch.no_grad():
        return bool(batch.of(module(*args, **kwargs)))


def _remedy(module: nn.Module) -> str:
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return (
            "Call hushgrad.replace_batchnorm(model) before the optimizer is built, or put the layer into evaluation mode so that its "
            "statistics stay fixed."
        )
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and not module.batch_first:
        return "It takes the first dimension for time: give it batch_first=True."
    return "Take its statistics within each example, over features or positions but not over the batch dimension, and keep none."


# The model as it was ------------------------------------------------------------------------------------------------------


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Parameters do not require gradients inside; buffers, flags and random state are put back."""
    start, random = _buffers(model), _random_state()
    trainable = [p for p in model.parameters() if p.requires_grad]
    for p in trainable:
        p.requires_grad = False
    try:
        with torch.enable_grad():
            yield
    finally:
        for p in trainable:
            p.requires_grad = True
        _restore(model, start)
        _set_random_state(random)


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def _restore(module: nn.Module, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(values[name])


def _random_state() -> tuple[Tensor, list[Tensor]]:
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def _set_random_state(state: tuple[Tensor, list[Tensor]]) -> None:
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])


# Tensors with examples -------------------------------------------------------------------------------------------------------


def _examples(inputs: Any, dim: int) -> int | None:
    """The size of the batch dimension of the first tensor that has one."""
    return next((int(t.shape[dim]) for t in tree_flatten(inputs)[0] if isinstance(t, Tensor) and t.dim() > dim), None)


class _Batch(NamedTuple):
    """Where the examples are: in dimension ``dim``, else in the first or second dimension that has their number."""

    examples: int
    dim: int

    def axis(self, t: Any) -> int | None:
        """The dimension of the examples; None if the tensor has none."""
        if not isinstance(t, Tensor):
            return None
        for d in (self.dim, 0, 1):
            # A second dimension that happens to have their number, after a first one of 1, is broadcast: position ids, masks.
            if d < t.dim() and t.shape[d] == self.examples and (d == self.dim or t.shape[0] != 1):
                return d
        return None

    def of(self, value: Any) -> list[Tensor]:
        """All tensors in a nested value that hold examples."""
        return [t for t in tree_flatten(value)[0] if self.axis(t) is not None]

    def row(self, t: Tensor, i: int) -> Tensor:
        """One example."""
        axis = self.axis(t)
        assert axis is not None
        return t.select(axis, i)

    def without(self, t: Tensor, i: int) -> Tensor:
        """All examples but one."""
        axis = self.axis(t)
        assert axis is not None
        return t.index_select(axis, torch.tensor([j for j in range(self.examples) if j != i], device=t.device))


def _detached(value: Any) -> Any:
    """A copy; NaN and infinity, which would turn an exact 0 into NaN on the way back, are replaced."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach().clone()
    return value.nan_to_num_(0.0, 1e4, -1e4) if value.is_floating_point() else value


def _rooted(t: Tensor) -> bool:
    t.requires_grad_()
    return True
