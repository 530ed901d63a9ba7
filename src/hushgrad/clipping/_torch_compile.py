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
from torch import Tensor, nn

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


def group_store() -> Any:
    """The store by which the processes of the default group have found each other."""
    return torch.distributed.distributed_c10d._get_default_store()


class Gathering:
    """Lets ``wait`` wait whenever FSDP gathers weights in main memory, until removed. Nothing before torch 2.9.

    A unit with a way of its own to gather keeps it.
    """

    def __init__(self, model: nn.Module, wait: Callable[[Any], None]) -> None:
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives

        usual: Any = getattr(_fsdp_collectives, "DefaultAllGather", None)

        class Waiting(usual or object):  # type: ignore[misc]
            def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
                if async_op or output_tensor.device.type != "cpu":
                    return super().__call__(output_tensor, input_tensor, group, async_op)
                wait(super().__call__(output_tensor, input_tensor, group, True))
                return None

        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        groups = [group for unit in units for group in _groups_of(unit._get_fsdp_state())]
        self._changed = [(group, comm) for group in groups if type(comm := vars(group).get("_all_gather_comm")) is usual]
        for group, _ in self._changed:
            group._all_gather_comm = Waiting()

    def remove(self) -> None:
        """Gather as before."""
        for group, before in self._changed:
            group._all_gather_comm = before


def _groups_of(state: Any) -> list[Any]:
    """A unit's groups of parameters: several in later versions of torch."""
    several = vars(state).get("_fsdp_param_groups")
    return [group for group in (several if several is not None else [state._fsdp_param_group]) if group is not None]
