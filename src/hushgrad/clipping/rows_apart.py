"""With sharded parameters: whose are the rows of each layer? They are read as the examples', in their order, so they must be just that.

As many rows as examples prove nothing: they may be as many positions, or the examples sorted. So the gradient of each example's outputs is
multiplied by a power of two of its own. What belongs to row i alone is multiplied by exactly that; anything else is not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map

from hushgrad.clipping.as_it_was import as_it_was
from hushgrad.clipping.outputs import tensors_of, with_tensors
from hushgrad.clipping.proof.fixed_randomness import FixedRandomness
from hushgrad.clipping.runs import Batch, detached
from hushgrad.clipping.site import Site
from hushgrad.errors import NotIsolated

_DIGITS = 8  # different factors in one backward pass
_EQUAL = 1e-3  # relative: far above rounding, far below a factor of two
_FAINT = 1e-30  # below it, a smaller number loses bits

Rows = tuple[str, int, Tensor]  # a layer's path, the dimension of its examples, and what it returned


def require_own_rows(model: nn.Module, args: Any, kwargs: Any, batch: Batch, sites: Iterable[Site]) -> None:
    """Raise NotIsolated if, in some layer of this pass, row i gets a gradient that is not that of example i alone.

    It runs the model once, with four backward passes: as many in every process.
    """
    with as_it_was(model):
        outputs, rows = _run(model, args, kwargs, batch, [site for site in sites if site.module is not model])
        if not outputs or not rows:
            return
        first, *others = [_gradients(outputs, rows, batch, factors) for factors in _factors(batch.examples)]
    for factors, grads in others:
        for (path, _, _), once, scaled in zip(rows, first[1], grads, strict=True):
            if not _is_own(once, scaled, factors):
                raise NotIsolated(
                    f"{path} has as many rows as the batch has examples, but row i is not example i's, and with fully_shard it cannot be "
                    "told whose it is. Keep the examples in the first dimension of every layer, in their order: (B, T, d) rather than "
                    "(T, B, d), not sorted; or run data parallel without fully_shard."
                )


def _run(model: nn.Module, args: Any, kwargs: Any, batch: Batch, sites: list[Site]) -> tuple[list[Tensor], list[Rows]]:
    """The outputs with examples, and what each layer has returned for them."""
    rows: list[Rows] = []

    def kept(site: Site, output: Any) -> Any:
        made = tensors_of(output)
        dims = site.rule.dims(site.module, len(made))
        if isinstance(output, PackedSequence) or any(isinstance(part, PackedSequence) for part in _parts(output)):
            return output  # it tells whose its rows are
        roots = [y if y.requires_grad else y.detach().requires_grad_() for y in made]
        rows.extend((site.path, d, y) for d, y in zip(dims, roots, strict=True) if y.dim() > d and y.shape[d] == batch.examples)
        return with_tensors(output, iter([y.clone() for y in roots]))  # a model may change what it got in place

    handles = [site.module.register_forward_hook(lambda _, __, output, site=site: kept(site, output)) for site in sites]
    try:
        with FixedRandomness():
            made = model(*tree_map(detached, args), **tree_map(detached, kwargs))
    finally:
        for handle in handles:
            handle.remove()
    return [y for y in batch.of(made) if y.requires_grad], rows


def _parts(output: Any) -> tuple[Any, ...]:
    return tuple(output) if isinstance(output, (tuple, list)) else ()


def _factors(examples: int) -> list[Tensor]:
    """Powers of two for each example: 1, its last two digits, and drawn ones; two examples differ in some of them."""
    number = torch.arange(examples)
    drawn = torch.randint(_DIGITS, (examples,), generator=torch.Generator().manual_seed(0))
    digits = (torch.zeros_like(number), number % _DIGITS, number // _DIGITS % _DIGITS, drawn)
    return [torch.exp2(digit.double()) for digit in digits]


def _gradients(outputs: list[Tensor], rows: list[Rows], batch: Batch, factors: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    """The factors, and the gradient of each layer's rows, examples first, if each example's outputs are multiplied by its factor."""
    cotangents = []
    for number, y in enumerate(outputs):
        drawn = torch.rand(y.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64) + 0.5
        axis = batch.axis(y)
        assert axis is not None
        shape = [batch.examples if d == axis else 1 for d in range(y.dim())]
        cotangents.append((drawn * factors.view(shape)).to(y.device, y.dtype))
    found = torch.autograd.grad(outputs, [y for _, _, y in rows], cotangents, retain_graph=True, allow_unused=True)
    return factors, [
        None if g is None else g.movedim(d, 0).reshape(g.shape[d], -1) for g, (_, d, _) in zip(found, rows, strict=True)
    ]


def _is_own(once: Tensor | None, scaled: Tensor | None, factors: Tensor) -> bool:
    """Whether each row was multiplied by its example's factor. Rows that are not finite say nothing."""
    if once is None or scaled is None or not once.numel():
        return True
    before, after = once.double(), scaled.double()
    by = factors.to(before.device).unsqueeze(1)
    size = before.abs().amax(1).maximum(after.abs().amax(1) / by.squeeze(1))
    off = (after / by - before).abs().amax(1)
    return not bool((off > _EQUAL * size)[size.isfinite() & (size > _FAINT)].any())
