"""Tensors of the simulated device: every operation on them is checked, counted by the line that caused it, and computed in main memory."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

from hushgrad.errors import HushgradError

_HERE = str(Path(__file__).parent)  # as frames spell it: a link is not followed
_ROOT = str(Path(__file__).parents[2])
_TORCH = str(Path(torch.__file__).parent)


@dataclass
class Meter:
    """What happened, by the line that caused it: ``launches``, ``syncs`` (the host waits), ``copies`` and ``bytes`` from or to the host.

    ``trace`` has every launch and copy in its order, with the shapes and numbers that it was given: two steps with one trace are one graph.
    """

    launches: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    syncs: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    trace: list[tuple[str, ...]] = field(default_factory=list)

    def copied(self, what: str, tensors: list[Tensor]) -> None:
        """A copy between host and device."""
        place = f"{what} {caller()}"
        self.trace.append((what, *_described(tensors)))
        self.copies[place] += 1
        self.bytes[place] += sum(t.numel() * t.element_size() for t in tensors)

    def launched(self, name: str, given: Sequence[Any]) -> None:
        """An operation on the device, and the tensors and numbers that it is given."""
        self.launches[caller()] += 1
        self.operations[name] += 1
        self.trace.append((name, *_described(given)))

    def waited(self, what: str) -> None:
        """The host waits for the device."""
        self.syncs[f"{what} {caller()}"] += 1

    def __str__(self) -> str:
        names = ("launches", "syncs", "copies", "bytes")
        return ", ".join(f"{name} {sum(vars(self)[name].values())}" for name in names)


def _described(given: Sequence[Any]) -> list[str]:
    """Shapes and types of tensors, everything else as it is written."""
    return [f"{t.dtype}{list(t.shape)}" if isinstance(t, Tensor) else repr(t) for t in given]


meters: list[Meter] = []  # the innermost block that counts is the last


def caller() -> str:
    """The innermost line of hushgrad that is running, or else of whoever called torch."""
    frame, outside = sys._getframe(1), "torch"
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_ROOT) and not name.startswith(_HERE):
            return f"{name[len(_ROOT) + 1 :]}:{frame.f_lineno}"
        if outside == "torch" and not name.startswith(_TORCH) and not name.startswith(_HERE) and not name.startswith("<"):
            outside = f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return outside


def _lstm_cell(x: Tensor, h: Tensor, cell: Tensor, of_x: Tensor | None = None, of_h: Tensor | None = None) -> tuple[Tensor, ...]:
    gates = sum((bias for bias in (of_x, of_h) if bias is not None), x + h)
    i, f, g, o = gates.chunk(4, 1)
    after = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * after.tanh(), after, gates


def _lstm_cell_backward(
    to_h: Tensor | None, to_cell: Tensor | None, cell: Tensor, after: Tensor, gates: Tensor, has_bias: bool
) -> tuple[Tensor | None, ...]:
    made = torch.ops.aten._thnn_differentiable_lstm_cell_backward(
        to_h, to_cell, gates, torch.zeros_like(gates), None, None, cell, after
    )
    return made[0], made[4], made[0].sum(0) if has_bias else None


def _gru_cell(
    x: Tensor, h: Tensor, state: Tensor, of_x: Tensor | None = None, of_h: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    x, h = x if of_x is None else x + of_x, h if of_h is None else h + of_h
    (r, z, n), (hr, hz, hn) = x.chunk(3, 1), h.chunk(3, 1)
    z, n = (z + hz).sigmoid(), (n + (r + hr).sigmoid() * hn).tanh()
    return n + z * (state - n), torch.cat([x, h, state], 1)


def _gru_cell_backward(to_h: Tensor, kept: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    size = kept.shape[1] // 7
    x, h, state = kept.split([3 * size, 3 * size, size], 1)
    of_x, of_h, of_state = torch.ops.aten._thnn_differentiable_gru_cell_backward(to_h, x, h, state, None, None)[:3]
    return of_x, of_h, of_state, of_x.sum(0) if has_bias else None, of_h.sum(0) if has_bias else None


KERNELS = {
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
}


NAME = "pretend"

double = [True]  # whether the device of the innermost block has double precision

_VIEWS = frozenset(
    "view _unsafe_view t transpose permute expand slice select unsqueeze squeeze as_strided detach alias split split_with_sizes unbind "
    "reshape _reshape_alias diagonal narrow unfold lift_fresh view_as_real empty empty_like new_empty empty_strided new_empty_strided "
    "sym_size is_same_size chunk set resize is_pinned _pin_memory record_stream _sparse_coo_tensor_with_dims_and_tensors".split()
)
# The size of the result, or the answer itself, is needed by the host.
_WAITS = frozenset(
    "_local_scalar_dense nonzero equal unique_consecutive _unique2 unique_dim masked_select is_nonzero bincount repeat_interleave".split()
)
_INDEXING = frozenset(["index", "index_put", "index_put_", "_index_put_impl_"])


class WrongDevice(HushgradError, RuntimeError):
    """Tensors of two devices met in one operation."""


class OnDevice(Tensor):
    """A tensor of the simulated device; its numbers are in ``host``."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> OnDevice:
        """Share the memory of ``host``."""
        dense = host.layout is torch.strided
        memory = {"strides": host.stride(), "storage_offset": host.storage_offset()} if dense else {}
        options: Any = {"dtype": host.dtype, "device": torch.device(NAME, 0), "layout": host.layout, **memory}
        made = Tensor._make_wrapper_subclass(cls, host.size(), requires_grad=False, **options)  # type: ignore[attr-defined]
        made.host = host
        return made  # type: ignore[no-any-return]

    def __init__(self, host: Tensor) -> None:
        pass

    def tolist(self) -> Any:
        """Read by the host, which waits."""
        for meter in meters[-1:]:
            meter.waited("tolist")
        return self.host.tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"pretend({self.host!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})


def on_host(tensor: Tensor) -> Tensor:
    """The memory of a tensor of the simulated device, shared; any other tensor unchanged. For tests, which may inspect it."""
    return tensor.host if isinstance(tensor, OnDevice) else tensor


def _is_ours(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _run(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    name = func._schema.name.partition("::")[2]
    flat = tree_flatten((args, kwargs))[0]
    ours = [t for t in flat if isinstance(t, OnDevice)]
    theirs = [t for t in flat if isinstance(t, Tensor) and not isinstance(t, OnDevice)]
    options, there = dict(kwargs), bool(ours)
    if options.get("device") is not None:
        there, options["device"] = _is_ours(options["device"]), torch.device("cpu")
    elif name == "copy_":
        there = isinstance(args[0], OnDevice)
    _count(name, ours, theirs, there, flat, options)
    result = KERNELS.get(name, func)(*tree_map(on_host, args), **tree_map(on_host, options))
    if not there:
        return result
    if not double[-1] and any(isinstance(t, Tensor) and t.dtype is torch.float64 for t in tree_flatten(result)[0]):
        raise TypeError(f"Cannot make a tensor of float64: the pretend device has no such numbers, at {caller()}.")
    result = tree_map(lambda t: OnDevice(t) if isinstance(t, Tensor) else t, result)
    return return_and_correct_aliasing(func, args, kwargs, result) if ours else result


def _count(
    name: str, ours: list[OnDevice], theirs: list[Tensor], there: bool, flat: list[Any], options: Mapping[str, Any]
) -> None:
    if not meters:
        _refuse_mixed(name, ours, theirs)
        return
    meter = meters[-1]
    large = [t for t in theirs if t.dim() > 0]
    if name in ("_to_copy", "copy_") and (bool(ours) != there or (name == "copy_" and large)):
        _count_copy(meter, ours, theirs, there, options, flat)
        return
    _refuse_mixed(name, ours, theirs)
    if ours and large:
        meter.waited(f"{name} with ids of the host")
    if not (ours or there):
        return
    if name not in _VIEWS and name.rstrip("_") not in _VIEWS and name != "_local_scalar_dense":
        meter.launched(name, flat)
    if name in _WAITS or (name in _INDEXING and any(isinstance(t, Tensor) and t.dtype is torch.bool for t in flat[1:])):
        meter.waited(name)


def _refuse_mixed(name: str, ours: list[OnDevice], theirs: list[Tensor]) -> None:
    shapes = [tuple(t.shape) for t in theirs if t.dim() > 0]
    if ours and shapes and name not in _INDEXING and name not in ("_to_copy", "copy_"):
        raise WrongDevice(f"Expected all tensors of {name} on one device, got {shapes} in main memory, at {caller()}.")


def _count_copy(
    meter: Meter, ours: list[OnDevice], theirs: list[Tensor], there: bool, options: Mapping[str, Any], flat: list[Any]
) -> None:
    if there:
        meter.copied("host to device", theirs)
        return
    meter.copied("device to host", list(ours))
    asynchronous = options.get("non_blocking") or any(value is True for value in flat)
    if not asynchronous:
        meter.waited("copy to the host")


class Dispatch(TorchDispatchMode):
    """Intercepts the creation of tensors on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class Functions(TorchFunctionMode):
    """Intercepts ``torch.tensor``, which creates its tensor without the dispatcher."""

    _FROM_NUMBERS: ClassVar = {torch.tensor, torch.as_tensor, Tensor.new_tensor}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func in self._FROM_NUMBERS:
            device = options.get("device") or (args[0].device if func is Tensor.new_tensor else None)
            if _is_ours(device):
                options["device"] = "cpu"
                if func is Tensor.new_tensor:
                    options.setdefault("dtype", args[0].dtype)
                    return torch.tensor(*args[1:], **options).to(device)
                return func(*args, **options).to(device)
        return func(*args, **options)
