"""Private names of torch that the capture needs, beside _torch.py: to compile, trace and shard, and signatures. Tested with torch 2.13."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from inspect import Parameter, signature
from types import FunctionType
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from hushgrad.errors import CaptureError

Function = TypeVar("Function", bound=Callable[..., Any])

is_compiling: Callable[[], bool] = torch.compiler.is_compiling  # the compiler traces this line and evaluates it
is_tracing: Callable[[], bool] = torch._C._is_tracing  # inside of ``torch.jit.trace``
is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)  # since torch 2.7


def refuse_tracing() -> NoReturn:
    """Refuse to be traced: the trace would contain the capture instead of the model.

    Raises:
        CaptureError: always.
    """
    raise CaptureError(
        "This model belongs to a private run, whose hooks would be traced too. Call private.detach() first, then trace or "
        "export the model; make_private attaches it again."
    )


# Packages whose functions run inside a step.
_OURS = (
    "clipping",
    "denoise",
    "noise",
    "release",
    "sampling",
    "train",
    "events",
    "guarantee",
    "native",
    "_check",
    "_universal_hash",
    "_precision",
)


# Parameters of the functions that are written in Python, and their defaults.
SIGNATURES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {}


def _sign() -> None:
    for name, function in vars(nn.functional).items():
        if isinstance(function, FunctionType) and function.__module__ == nn.functional.__name__ and not name.startswith("_"):
            parameters = signature(function).parameters.values()
            given = {p.name: p.default for p in parameters if p.default is not Parameter.empty}
            SIGNATURES[name] = tuple(p.name for p in parameters), given


_sign()


@cache
def _leave_alone() -> None:
    rules = import_module("torch._dynamo.trace_rules")
    for room in _OURS:
        rules.add(f"hushgrad.{room}")
    # Compiled backward passes free their tensors at the first call; a proof uses the same graph several times.
    config: Any = import_module("torch._functorch.config")
    config.donated_buffer = False


def eagerly(function: Function) -> Function:
    """Nothing inside is compiled, however the caller was compiled (torch decorates its optimizers with this)."""
    return torch._disable_dynamo(function)  # type: ignore[return-value]


def left_alone() -> None:
    """Keep ``torch.compile`` out of hooks and proofs: it would compile them piece by piece and gain nothing.

    A compiled graph ends where the capture begins, and continues after it. Nothing is done unless the compiler is loaded; optimizers load
    it.
    """
    if "torch._dynamo" in sys.modules:
        _leave_alone()


def returned_to_shards(model: nn.Module) -> None:
    """Return every unit of ``fully_shard`` to its shards, also one whose pass was interrupted.

    FSDP takes such a unit for one that still runs its forward, and keeps its gathered weights: they would be used in the next pass.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            for each in (state, *_groups_of(state)):
                each._training_state = type(each._training_state).IDLE
            module.reshard()


def _groups_of(state: Any) -> list[Any]:
    """A unit's groups of parameters: several in later versions of torch."""
    several = vars(state).get("_fsdp_param_groups")
    return [group for group in (several if several is not None else [state._fsdp_param_group]) if group is not None]
