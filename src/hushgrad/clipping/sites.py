"""Finds the modules to capture: those whose layer has a rule. All other parameters are read at the frontier."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from hushgrad.clipping.base import rule_for
from hushgrad.clipping.rules.scaling import scaling_for
from hushgrad.clipping.rules.vmap import Vmap, VmapTree
from hushgrad.clipping.site import Site
from hushgrad.clipping.tape import Tape
from hushgrad.errors import CaptureError

_CONTAINERS = (nn.ParameterList, nn.ParameterDict)


def sites_of(tape: Tape, model: nn.Module, *, all_modules: bool = False) -> Iterator[Site]:
    """One site for every module that owns trainable parameters and has a rule; ``all_modules``: others get the fallback rule."""
    inside_subtree: set[int] = set()
    full = {id(p): name for name, p in model.named_parameters()}
    for path, module in model.named_modules():
        own = {name: p for name, p in module.named_parameters(recurse=False) if p.requires_grad}
        if any(p.is_complex() for p in own.values()):
            remedy = "Train real ones, and use torch.view_as_complex"
            raise CaptureError(
                f"{path or type(module).__name__} cannot be clipped per example: its parameters are complex. {remedy}."
            )
        if id(module) in inside_subtree or isinstance(module, _CONTAINERS):
            continue
        rule = None if is_parametrized(module) else rule_for(module, list(own)) or scaling_for(module, list(own))
        if rule is None:
            if not all_modules:
                continue
            rule = VmapTree() if is_parametrized(module) else Vmap()
            own |= {name: p for name, p in _listed(module) if p.requires_grad}
        if rule.subtree:
            inside_subtree.update(id(child) for child in module.modules() if child is not module)
        params = {name: p for name, p in module.named_parameters() if p.requires_grad} if rule.subtree else own
        if params:
            problem = rule.check(module)
            if problem:
                raise CaptureError(f"{path or type(module).__name__} cannot be clipped per example: {problem}.")
            yield Site(tape, path, module, rule, params, {name: full[id(p)] for name, p in params.items()})


def _listed(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of its parameter lists, which are never called themselves."""
    for name, child in module.named_children():
        if isinstance(child, _CONTAINERS):
            yield from child.named_parameters(prefix=name)


def sum_dtype(p: Tensor) -> torch.dtype:
    """The precision of a parameter's norms and sums; half precision has too few bits."""
    return torch.float32 if p.dtype in (torch.float16, torch.bfloat16) else p.dtype
