"""The fallback for layers without a rule: each example's gradient by running the layer again on that example alone.

The layer's forward is repeated inside ``torch.func.vmap(vjp)``; what these do not support (a custom autograd function, a checkpoint)
is repeated example by example with ordinary autograd. In both cases the layer must be a pure function of its inputs and parameters:
one that draws random numbers would draw others the second time, so it is refused.

Inputs whose first dimension is the number of examples are read as holding the examples. A causal mask (T, T) looks like one if T equals
that number; if both readings are possible, the one counts whose gradients add up to the gradient of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from hushgrad.clipping.base import Record, Rule
from hushgrad.clipping.outputs import tensors_of
from hushgrad.clipping.runs import UNCALLABLE
from hushgrad.errors import CaptureError

_SAME = 1e-3  # relative: far above rounding, far below what a mask's row in the place of the mask does

Gradients = dict[str, Tensor]


class Vmap(Rule):
    """Any layer: tensors with the examples first, alone or in tuples, lists, dicts and (as outputs) dataclasses."""

    hot = False  # it runs autograd itself, which is better done outside of a running backward

    def per_example(self, record: Record) -> Gradients:
        """Map, over the examples, the vector-Jacobian product with this example's output gradient."""
        layer = _Layer.of(record, tied=self.subtree)
        B = layer.examples
        if B == 0:
            return {name: p.new_zeros((0, *p.shape)) for name, p in layer.trained.items()}
        before, versions = torch.get_rng_state(), _versions(record.module)
        with _attributes_restored(record.module) as written:
            made = _resolved(layer)
            if written():
                _require_nothing_lost(layer, written)
        if not torch.equal(before, torch.get_rng_state()):
            raise _random(record.module)
        if versions != _versions(record.module):
            raise CaptureError(
                f"{type(record.module).__name__} changes its buffers in forward, so it cannot be repeated for single examples. Put "
                "the part that changes them into evaluation mode (spectral norm: module.parametrizations.eval() after "
                "model.train()), or register a rule for the layer."
            )
        return made

    def select(self, record: Record, index: Tensor, examples: int) -> Record:
        """Inputs may be nested."""

        def pick(value: Any) -> Any:
            return value.index_select(0, index) if _has_rows(value, examples) else value

        chosen = Record(record.module, record.names, *tree_map(pick, (record.args, dict(record.kwargs), record.grads)))
        chosen.kept = {name: G.index_select(0, index) for name, G in record.kept.items()}
        return chosen


class VmapTree(Vmap):
    """The same for a layer together with its children (a parametrised layer computes its weight in one)."""

    subtree = True


class _Layer(NamedTuple):
    """One call of the layer as a function of its trained parameters and its inputs' leaves."""

    module: nn.Module
    trained: Gradients
    others: Gradients  # parameters in a lower precision than the inputs have here
    leaves: list[Any]
    structure: TreeSpec
    grads: tuple[Tensor | None, ...]
    tied: bool  # also through children that hold the same parameter; one of its own site would count its use twice

    @classmethod
    def of(cls, record: Record, *, tied: bool) -> _Layer:
        leaves, structure = tree_flatten((record.args, dict(record.kwargs)))
        given = [g for g in record.grads if g is not None]
        sizes = {g.shape[:1] for g in given}
        if len(sizes) != 1 or not next(iter(sizes)):
            raise CaptureError(
                f"{type(record.module).__name__} owns parameters and has no rule of its own, so all its outputs that the loss "
                f"uses need the examples first. They have the shapes {', '.join(str(tuple(g.shape)) for g in given)}."
            )
        dtype = given[0].dtype
        named = {name: p.detach() for name, p in record.module.named_parameters()}
        low = {name: p.to(dtype) for name, p in named.items() if p.dtype in (torch.float16, torch.bfloat16)}
        trained = {name: low.get(name, named[name]) for name in record.names}
        others = {name: p for name, p in low.items() if name not in trained}
        return cls(record.module, trained, others, leaves, structure, record.grads, tied)

    @property
    def examples(self) -> int:
        """The number of examples, B."""
        return next(len(g) for g in self.grads if g is not None)

    def outputs(self, trained: Gradients, leaves: list[Any]) -> list[Tensor]:
        """The outputs that have a gradient."""
        args, kwargs = tree_unflatten(leaves, self.structure)
        made = functional_call(self.module, {**self.others, **trained}, args, kwargs, tie_weights=self.tied)
        return [y for y, g in zip(tensors_of(made), self.grads, strict=True) if g is not None]

    def row(self, leaves: list[Any], batched: list[bool], i: int) -> list[Any]:
        """The inputs of example i, a batch of one."""
        return [v[i : i + 1] if b else v for v, b in zip(leaves, batched, strict=True)]


# Which inputs hold the examples ------------------------------------------------------------------------------------------


def _resolved(layer: _Layer) -> Gradients:
    """The gradients under the one reading of the inputs that reproduces what the layer did."""
    rows = [_has_rows(v, layer.examples) for v in layer.leaves]
    readings = [rows] if layer.examples == 1 or sum(rows) < 2 else [r for r in _readings(rows) if _fits(layer, r)]
    if len(readings) == 1:
        return _mapped(layer, readings[0])
    sane = _finite(layer)
    whole = _by_autograd(sane, sane.leaves, sane.grads) if readings else {}
    for batched in readings:
        made = _mapped(sane, batched)
        if all(_adds_up(made[name], total) for name, total in whole.items()):
            return _mapped(layer, batched)
    raise CaptureError(
        f"{type(layer.module).__name__} owns parameters, has no rule of its own, and does something else with single examples than with "
        "the batch. Give inputs that all examples share a first dimension of 1 (mask[None]), or register a rule for the layer."
    )


def _finite(layer: _Layer) -> _Layer:
    """The same call with finite numbers only, so that one non-finite record does not decide for all."""

    def clean(value: Any) -> Any:
        return value.nan_to_num(0.0, 0.0, 0.0) if isinstance(value, Tensor) and value.is_floating_point() else value

    return layer._replace(leaves=[clean(v) for v in layer.leaves], grads=tuple(clean(g) for g in layer.grads))


def _readings(rows: list[bool]) -> Iterator[list[bool]]:
    """All inputs of B rows hold the examples; or one of them, or all but the first, are shared."""
    yield rows
    later = [k for k, b in enumerate(rows) if b][1:]
    for shared in [[k] for k in later] + ([later] if len(later) > 1 else []):
        yield [b and k not in shared for k, b in enumerate(rows)]


def _fits(layer: _Layer, batched: list[bool]) -> bool:
    """Whether one example's inputs, read in this way, give outputs of one example's shapes."""
    expected = [(1, *g.shape[1:]) for g in layer.grads if g is not None]
    try:
        with torch.no_grad():
            return [y.shape for y in layer.outputs(layer.trained, layer.row(layer.leaves, batched, 0))] == expected
    except UNCALLABLE:  # of inputs that it was not made for
        return False


def _adds_up(G: Tensor, total: Tensor) -> bool:
    scale = torch.linalg.vector_norm(G.reshape(len(G), -1), dim=1).sum()
    return bool(torch.linalg.vector_norm(G.sum(0) - total) <= _SAME * scale)


# The gradients -----------------------------------------------------------------------------------------------------------


def _mapped(layer: _Layer, batched: list[bool]) -> Gradients:
    """All examples at once, where functorch can; else one by one."""
    tensors = [v for v, b in zip(layer.leaves, batched, strict=True) if b]
    grads = [g for g in layer.grads if g is not None]

    def one(tensors: list[Tensor], grads: list[Tensor]) -> Gradients:
        rows = iter(tensors)
        leaves = [next(rows).unsqueeze(0) if b else v for v, b in zip(layer.leaves, batched, strict=True)]
        pull: Callable[..., Any] = vjp(lambda trained: layer.outputs(trained, leaves), layer.trained)[1]
        return pull([g.unsqueeze(0) for g in grads])[0]  # type: ignore[no-any-return]

    try:
        return vmap(one)(tensors, grads)  # type: ignore[no-any-return]
    except RuntimeError as error:
        if "randomness" in str(error):
            raise _random(layer.module) from error
    return _one_by_one(layer, batched)


def _one_by_one(layer: _Layer, batched: list[bool]) -> Gradients:
    def row(g: Tensor | None, i: int) -> Tensor | None:
        return None if g is None else g[i : i + 1]

    try:
        made = [
            _by_autograd(layer, layer.row(layer.leaves, batched, i), tuple(row(g, i) for g in layer.grads))
            for i in range(layer.examples)
        ]
    except CaptureError:
        raise
    except RuntimeError as error:
        raise CaptureError(
            f"{type(layer.module).__name__} owns parameters, has no rule of its own, and cannot be repeated for single examples: {error} "
            "Register a rule for the layer, or move its parameters to modules of their own."
        ) from error
    return {name: torch.stack([row[name] for row in made]) for name in layer.trained}


def _by_autograd(layer: _Layer, leaves: list[Any], grads: tuple[Tensor | None, ...]) -> Gradients:
    """The gradient of all examples in ``leaves`` together."""
    # Of what fully_shard has gathered, the end of a backward pass inside would free it.
    if any(hasattr(part, "unshard") for part in layer.module.modules()):
        raise CaptureError(
            f"{type(layer.module).__name__} owns parameters, is sharded by fully_shard itself, and cannot be repeated for all examples at "
            "once. Move these parameters into a module of their own, or leave out what asks for values in its forward (.item(), if)."
        )
    with torch.enable_grad():
        trained = {name: p.clone().requires_grad_() for name, p in layer.trained.items()}
        made = [(y, g) for y, g in zip(layer.outputs(trained, leaves), (g for g in grads if g is not None), strict=True)]
        found = torch.autograd.grad([y for y, _ in made], list(trained.values()), [g for _, g in made], allow_unused=True)
    return {
        name: torch.zeros_like(p) if g is None else g.detach()
        for (name, p), g in zip(layer.trained.items(), found, strict=True)
    }  # fmt: skip


# What a forward writes down ----------------------------------------------------------------------------------------------


@contextmanager
def _attributes_restored(module: nn.Module) -> Iterator[Callable[[], dict[str, list[Tensor]]]]:
    """Restore tensors that the forward stores as attributes; the yielded function returns those that were written inside, by name."""
    before = {child: dict(vars(child)) for child in module.modules()}

    def written() -> dict[str, list[Tensor]]:
        return {
            name: tensors_of(value)
            for child, values in before.items()
            for name, value in vars(child).items()
            if value is not values.get(name) and tensors_of(value)
        }

    try:
        yield written
    finally:
        for child, values in before.items():
            vars(child).clear()
            vars(child).update(values)


def _require_nothing_lost(layer: _Layer, written: Callable[[], dict[str, list[Tensor]]]) -> None:
    """Require that everything which depends on the parameters leaves the layer as an output, so that its gradient is seen."""
    with torch.enable_grad():
        outputs = layer.outputs({name: p.clone().requires_grad_() for name, p in layer.trained.items()}, layer.leaves)
    only = outputs if len(layer.grads) == 1 else []  # one that is returned alone is watched whoever holds it
    for name, tensors in written().items():
        if any(t.requires_grad and not any(t is y for y in (*only, *layer.leaves)) for t in tensors):
            raise CaptureError(
                f"{type(layer.module).__name__} owns parameters, has no rule of its own, and keeps {name} as an attribute: the gradient "
                f"of a loss that uses it would be lost. Return it beside the output, or keep {name}.detach()."
            )


# Inputs, outputs and state -----------------------------------------------------------------------------------------------


def _has_rows(value: Any, examples: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == examples


def _versions(module: nn.Module) -> list[int]:
    return [buffer._version for buffer in module.buffers()]


def _random(module: nn.Module) -> CaptureError:
    return CaptureError(
        f"{type(module).__name__} owns parameters, has no rule of its own and draws random numbers, so its forward cannot be "
        "repeated for single examples. Move the dropout into a submodule of its parent, or register a rule for the layer."
    )
