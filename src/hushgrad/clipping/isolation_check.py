"""Isolation: does any example of a batch influence another one?

Per-example clipping bounds what an example adds to the gradient only if the other examples' gradients do not depend on it. Layers that
take statistics over the batch break this silently. They are found by what they do, not by a list of names:

1. d out[i] / d x[j] is exactly 0 for i != j (autograd, for the first and the last example);
2. out[0] stays the same when the other examples are replaced (this also finds mixing behind ``detach`` or in integer operations);
3. buffers end in the same state whatever the data (running means would carry data into the checkpoint, without noise);
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_map

from hushgrad import _check
from hushgrad.clipping.as_it_was import as_it_was, buffers_of, random_state, restore, set_random_state
from hushgrad.clipping.runs import UNCALLABLE, Batch, detached, run_turned, run_with_others, same, traced_run, with_squares_shared
from hushgrad.errors import ArgumentError, NotIsolated

# Which example stays while all others change, and by what factor. The first one may be immune, so the last is tried, too; and a capacity
# that is filled in order overflows if all others equal one of the last (None).
_TRIED = ((0, 1.0), (0, 10.0), (0, -10.0), (-1, 1.0), (-1, 10.0), (-1, -10.0), (-1, None), (-2, None), (-3, None), (-5, None))


def isolation(
    model: nn.Module,
    *inputs: Any,
    named: Mapping[str, Any] | None = None,
    batch_dim: int = 0,
    apart: bool = False,
    agreed: Callable[[bool], bool] | None = None,
) -> None:
    """Raise :class:`~hushgrad.errors.NotIsolated`, with the path of the module, if an example influences another.

    ``model(*inputs, **named)`` is called a few times in its present mode (training or not); its buffers, ``requires_grad`` flags and the
    random state are restored. The inputs need two examples or more, in dimension ``batch_dim`` of the first tensor; other tensors have them
    there, or in the first or second dimension if it has that size, or are shared by all examples. (A square tensor may be
    a mask over as many positions as there are examples; it counts as shared if that explains what the model does.)

    **Formal guarantee.** None: the check is a test at one input. A model that passes may still mix examples elsewhere, for instance
    through an operation that only large batches reach. A model that fails does mix them, or changes their order inside.

    Args:
        model: the module to test.
        inputs: positional inputs with two examples or more.
        named: inputs by name.
        batch_dim: the dimension of the first tensor that holds the examples.
        apart: also refuse what trained layers compute for all examples together, if it has as many rows as there are examples.
        agreed: for processes that can only run the model together: whether any of them says yes. All make the same passes then, whatever
            they find, and none looks for the module inside.

        >>> isolation(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)), torch.randn(5, 4))
        >>> isolation(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), torch.randn(5, 4))
        Traceback (most recent call last):
        ...
        hushgrad.errors.NotIsolated: 1 (BatchNorm1d) lets the examples of a batch influence each other...

    Reference: the definition of a per-example gradient in Abadi et al., "Deep learning with differential privacy" (CCS 2016), section 3.1.
    """
    kwargs = dict(named or {})
    examples = _examples((inputs, kwargs), batch_dim) or 0
    batch = Batch(examples, batch_dim)
    if examples < 2:
        _check.fail(
            "inputs", examples, "to hold two examples or more", "One example alone cannot show whether it influences another."
        )
    trained = {m: path for path, m in model.named_modules() if any(p.requires_grad for p in m.parameters(recurse=False))}
    owners = trained if apart else {}
    with as_it_was(model):
        finding = _finding(model, inputs, kwargs, batch, owners, agreed)
        shared = None if finding is None else with_squares_shared(inputs, kwargs, examples)
        if _any(shared is not None, agreed):
            args, named = (inputs, kwargs) if shared is None else shared
            again = _finding(model, args, named, batch, owners, agreed)
            finding = finding if shared is None else again
        if finding is None:
            return
        if isinstance(finding, _Whole):
            raise NotIsolated(finding)
        culprit = _statistics(model) if agreed else _culprit(model, inputs, kwargs, batch)
    path, module, detail = culprit or ("", model, finding)
    raise NotIsolated(_sentence(path, module, detail or finding))


def _any(found: bool, agreed: Callable[[bool], bool] | None) -> bool:
    return found if agreed is None else agreed(found)


def _statistics(model: nn.Module) -> tuple[str, nn.Module, str] | None:
    """A layer that takes statistics over the batch, known by its kind."""
    return next(((path, m, "") for path, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training), None)


def culprit(model: nn.Module, args: Any, kwargs: Any, examples: int) -> str | None:
    """A sentence, with the remedy, about the module that lets examples influence each other; None if no single module does."""
    with as_it_was(model):
        first = _examples((args, kwargs), 0)
        for dim in (0,) if first == examples else (0, 1):  # otherwise a width equal to the batch size would be read as examples
            try:
                found = _culprit(model, args, kwargs, Batch(examples, dim))
            except UNCALLABLE:  # it cannot be called once more
                continue
            if found is not None:
                return _sentence(*found)
    return None


def _sentence(path: str, module: nn.Module, detail: str) -> str:
    return f"{_where(path, module)} lets the examples of a batch influence each other: {detail}. {_remedy(module)}"


def isolation_at_first_call(model: nn.Module, paused: Callable[[], AbstractContextManager[None]]) -> Any:
    """Run :func:`isolation` on the first batch of two or more that the model is trained on; returns the handle of the hook.

    ``paused`` is the capture's ``pause``, so that the check's own passes are not part of a step.
    """

    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is not model or not module.training or not torch.is_grad_enabled() or (_examples((args, kwargs), 0) or 0) < 2:
            return  # a copy of the model has the hook as well
        handle.remove()
        with paused():
            try:
                isolation(module, *args, named=kwargs)
            except ArgumentError:  # no output has as many rows as the first dimension: the inputs may have time first
                isolation(module, *args, named=kwargs, batch_dim=1)

    # Before a capture's own hook, whose proof calls the model, too.
    handle = model.register_forward_pre_hook(check, with_kwargs=True, prepend=True)
    return handle


class _Whole(str):
    """A finding that is a sentence of its own."""


_OF_ALL = (
    "{} computes as many rows as the batch has examples, but all examples use them, and with fully_shard it cannot be told whose their "
    "gradients are. Compute them for each example, from positions as (B, T), or run data parallel without fully_shard."
)

# Influence ---------------------------------------------------------------------------------------------------------------


def _finding(
    module: nn.Module,
    args: Any,
    kwargs: Any,
    batch: Batch,
    owners: Mapping[nn.Module, str],
    agreed: Callable[[bool], bool] | None = None,
) -> str | None:
    """A sentence about what is wrong with this module on these inputs; None if nothing is."""
    findings = _findings(module, args, kwargs, batch, owners, agreed)
    return next(findings, None) if agreed is None else next(iter([*findings]), None)


def _findings(
    module: nn.Module,
    args: Any,
    kwargs: Any,
    batch: Batch,
    owners: Mapping[nn.Module, str],
    agreed: Callable[[bool], bool] | None,
) -> Iterator[str]:
    """All such sentences, each after the passes that show it."""
    start, random = buffers_of(module), random_state()
    args, kwargs = tree_map(detached, args), tree_map(detached, kwargs)
    run = traced_run(module, args, kwargs, batch)
    after, crossed = buffers_of(module), _crossed(run.outputs, run.roots(), batch)
    if _any(not run.outputs, agreed):
        remedy = "Return something with the examples first, or give the body of the model."
        _check.fail("model", type(module).__name__, "to return a tensor with one row for each example", remedy)
    for at, factor in _TRIED:
        restore(module, start)
        set_random_state(random)
        own = at % batch.examples
        again = run_with_others(module, args, kwargs, batch, factor=factor, own=own, inner=run.inner if crossed else ())
        if own == 0 and crossed & set(map(id, run.roots(again, batch))):
            yield "the output of one depends on the input of others"
        if not all(same(batch.row(a, own), batch.row(b, own)) for a, b in zip(run.outputs, again.outputs, strict=True)):
            yield "the output of one changes when the others are replaced"
        changed = [name for name, value in buffers_of(module).items() if not same(value, after[name])]
        if changed:
            yield f"its buffer {changed[0]} keeps something of the data, without noise"
    if not _keeps_its_order(module, args, kwargs, batch):
        yield "the output of one changes when the others come in another order"
    shared = [
        path for (inner, _), made in run.inner.items() if not crossed.isdisjoint(map(id, made)) for path in [owners.get(inner)]
    ]
    yield from (_Whole(_OF_ALL.format(path or "The model")) for path in shared if path is not None)


def _keeps_its_order(module: nn.Module, args: Any, kwargs: Any, batch: Batch) -> bool:
    try:
        return all(same(a, b) for a, b in run_turned(module, args, kwargs, batch))
    except UNCALLABLE:  # it accepts one order only, such as sequences sorted by length
        return True


def _crossed(outputs: list[Tensor], roots: list[Tensor], batch: Batch) -> set[int]:
    """The roots (by id) where a gradient from the first or last example's output arrives at another example. NaN counts as arrived."""
    differentiable, crossed = [y for y in outputs if y.requires_grad], set()
    for own in (0, batch.examples - 1):
        owners = _owners([batch.row(y, own) for y in differentiable], roots, batch)
        crossed |= {id(root) for root, examples in zip(roots, owners, strict=True) if examples - {own}}
    return crossed


def _owners(rows: list[Tensor], roots: list[Tensor], batch: Batch) -> list[set[int]]:
    """For each root the examples in it that these rows depend on."""
    if not rows or not roots:
        return [set() for _ in roots]
    loss = sum((row * torch.randn_like(row)).sum() for row in rows)
    grads = torch.autograd.grad(loss, roots, retain_graph=True, allow_unused=True)  # type: ignore[arg-type]
    return [set() if g is None else set(batch.rows(g).ne(0).any(1).nonzero().flatten().tolist()) for g in grads]


# Which module ------------------------------------------------------------------------------------------------------------


class _Seen(NamedTuple):
    path: str
    module: nn.Module
    args: Any
    kwargs: Any


def _culprit(model: nn.Module, args: Any, kwargs: Any, batch: Batch) -> tuple[str, nn.Module, str] | None:
    """The innermost module that mixes examples by itself: calls are tested in the order in which they finish."""
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
        try:
            rows = _keeps_rows(module, its_args, its_kwargs, batch)
            detail = _finding(module, its_args, its_kwargs, batch, {}) if rows else None
        except UNCALLABLE:  # not callable alone; a later module may be to blame
            continue
        if detail is not None:
            return path, module, detail
    return None


def _keeps_rows(module: nn.Module, args: Any, kwargs: Any, batch: Batch) -> bool:
    """Whether it returns examples, and takes some in front of their features, of which there may be as many."""
    taken = batch.of((args, kwargs))
    rows = any(not t.is_floating_point() or t.dim() < 2 or batch.axis(t) != t.dim() - 1 for t in taken)
    with torch.no_grad():
        return rows and bool(batch.of(module(*args, **kwargs)))


def _where(path: str, module: nn.Module) -> str:
    return f"{path} ({type(module).__name__})" if path else f"The model ({type(module).__name__})"


def _remedy(module: nn.Module) -> str:
    if isinstance(module, _BatchNorm):
        return (
            "Call hushgrad.replace_batchnorm(model) before the optimizer is built, or put the layer into evaluation mode so that its "
            "statistics stay fixed."
        )
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and not module.batch_first:
        return "It takes the first dimension for time: give it batch_first=True."
    return (
        "Take its statistics within each example, over features or positions but not over the batch dimension, and keep none. If the model "
        "is not yours, look for a setting that switches them off (a capacity of experts, quantization), or replace the layer."
    )


def _examples(inputs: Any, dim: int) -> int | None:
    """The size of the batch dimension of the first tensor that has one."""
    return next((int(t.shape[dim]) for t in tree_flatten(inputs)[0] if isinstance(t, Tensor) and t.dim() > dim), None)
