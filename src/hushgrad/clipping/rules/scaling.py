"""Norms that somebody else wrote: y = a(x) * w + b(x), elementwise in a vector w of the last dimension.

LlamaRMSNorm, T5LayerNorm and their like in transformers (a is the normalised input; in Gemma's b = a). G_i = sum_t g[i,t] * a(x[i,t]), and
a(x) is the module itself with w = 1 minus the same with w = 0, whatever its epsilon is and wherever it is kept.

A class is taken for such a norm if it is called one, owns one vector and nothing else, and one of its modules *is* affine and elementwise
in that vector, tried on random numbers. What it does with the examples is proved with the model, as of any other layer.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hushgrad.clipping.base import Record, Rule

__all__ = ["Scaling", "scaling_for"]

_SAME = 1e-5  # relative: such norms compute in single precision, whatever they are given; anything else is far off
_tried: dict[type[nn.Module], bool] = {}


class Scaling(Rule):
    """One vector, kept as it is made: no larger than a row of activations."""

    parameters = frozenset({"weight"})
    positions = True

    def per_example(self, record: Record) -> dict[str, Tensor]:
        """The module twice, then one pass over what it gives and g."""
        x, g = record.x, record.g
        if not len(x):
            return {"weight": x.new_zeros(0, x.shape[-1])}
        return {"weight": (_slope(record.module, x) * g).reshape(len(x), -1, x.shape[-1]).sum(1)}


def scaling_for(module: nn.Module, trainable: list[str]) -> Rule | None:
    """The rule, if ``module`` is such a norm."""
    kind = type(module)
    if trainable != ["weight"] or not kind.__name__.endswith("Norm") or list(module.children()):
        return None
    if len(list(module.parameters())) != 1 or module.weight.dim() != 1 or module.weight.is_meta:  # type: ignore[union-attr, operator]
        return None
    if kind not in _tried:
        _tried[kind] = _is_scaling(copy.deepcopy(module))
    return _RULE if _tried[kind] else None


def _slope(module: nn.Module, x: Tensor) -> Tensor:
    """a(x)."""
    one, none = (torch.full(x.shape[-1:], value, dtype=x.dtype, device=x.device) for value in (1.0, 0.0))
    a: Tensor = functional_call(module, {"weight": one}, (x,)) - functional_call(module, {"weight": none}, (x,))
    return a


@torch.no_grad()
def _is_scaling(module: nn.Module) -> bool:
    rng = torch.Generator().manual_seed(0)
    size = int(module.weight.numel())  # type: ignore[operator, union-attr, arg-type]
    x, w = (torch.randn(*shape, size, generator=rng, dtype=torch.float64) for shape in ((3, 2), ()))
    module = module.cpu().double()
    try:
        y, none = (functional_call(module, {"weight": weight}, (x,)) for weight in (w, torch.zeros_like(w)))
        if not isinstance(y, Tensor) or y.shape != x.shape:
            return False
        far = (y - none - _slope(module, x) * w).abs().max() / y.abs().max()
    except (RuntimeError, TypeError, ValueError):  # it takes something else
        return False
    return bool(far <= _SAME)


_RULE = Scaling()
