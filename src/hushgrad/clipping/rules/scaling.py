"""Norm layers of other libraries: y = a(x) * w + b(x), elementwise in a vector w of the last dimension.

LlamaRMSNorm, T5LayerNorm and similar layers in transformers (a is the normalised input; b is 0, or a in Gemma's). G_i = sum_t g[i,t]
a(x[i,t]), and a(x) is the module itself with w = 1 minus the same with w = 0, whatever its epsilon is and wherever it is stored.

A class counts as such a norm if its name says so, it owns one vector and nothing else, and one of its modules *is* affine and elementwise
in that vector, tested on random numbers. How it treats the examples is proved with the model, as for any other layer.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hushgrad.clipping.base import Record, Rule

_SAME = 1e-5  # relative: such norms compute in single precision, whatever they are given; anything else is far off
_tried: dict[type[nn.Module], Rule | None] = {}


class Scaling(Rule):
    """The gradient of one vector, formed and kept: no larger than a row of activations."""

    parameters = frozenset({"weight"})
    positions = True

    def per_example(self, record: Record) -> dict[str, Tensor]:
        """Evaluate the module with w = 1 and w = 0, then one pass over the difference and g."""
        x, g = record.x, record.g
        if not len(x):
            return {"weight": x.new_zeros(0, x.shape[-1])}
        return {"weight": (self.slope(record.module, x) * g).reshape(len(x), -1, x.shape[-1]).sum(1)}

    def slope(self, module: nn.Module, x: Tensor) -> Tensor:
        """a(x)."""
        return _with(module, 1.0, x) - _with(module, 0.0, x)


class _Proportional(Scaling):
    """The same with b = 0."""

    def slope(self, module: nn.Module, x: Tensor) -> Tensor:
        """a(x)."""
        return _with(module, 1.0, x)


def scaling_for(module: nn.Module, trainable: list[str]) -> Rule | None:
    """The rule, if ``module`` is such a norm."""
    kind = type(module)
    if trainable != ["weight"] or not kind.__name__.endswith("Norm") or list(module.children()):
        return None
    if len(list(module.parameters())) != 1 or module.weight.dim() != 1 or module.weight.is_meta:  # type: ignore[union-attr, operator]
        return None
    if kind not in _tried:
        _tried[kind] = _rule_of(copy.deepcopy(module))
    return _tried[kind]


def _with(module: nn.Module, weight: float, x: Tensor) -> Tensor:
    made: Tensor = functional_call(module, {"weight": torch.full(x.shape[-1:], weight, dtype=x.dtype, device=x.device)}, (x,))
    return made


@torch.no_grad()
def _rule_of(module: nn.Module) -> Rule | None:
    rng = torch.Generator().manual_seed(0)
    size = int(module.weight.numel())  # type: ignore[operator, union-attr, arg-type]
    x, w = (torch.randn(*shape, size, generator=rng, dtype=torch.float64) for shape in ((3, 2), ()))
    module = module.cpu().double()
    try:
        y, none = functional_call(module, {"weight": w}, (x,)), _with(module, 0.0, x)
        if not isinstance(y, Tensor) or y.shape != x.shape:
            return None
        far = (y - none - _SCALING.slope(module, x) * w).abs().max() / y.abs().max()
    except (RuntimeError, TypeError, ValueError):  # it takes something else
        return None
    if not far <= _SAME:
        return None
    return _SCALING if none.any() else _PROPORTIONAL


_SCALING, _PROPORTIONAL = Scaling(), _Proportional()
