"""Where the noise of a tensor is computed, and how it gets from there to the tensor."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from hushgrad import _check
from hushgrad.noise import _memory
from hushgrad.noise._kernel import Piece

_DTENSOR = "torch.distributed.tensor"
_PLAIN = (Tensor, type(None))


def _refuse_dtensor(**tensors: Tensor | None) -> None:
    if _DTENSOR not in sys.modules:  # slow to import, and no DTensor exists before it is
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, sys.modules[_DTENSOR].DTensor):
            _check.fail(name, type(tensor), "to be a local tensor", "Draw on tensor.to_local() with the shard's offset=.")


def pieces_of(
    likes: Sequence[Tensor],
    indices: Sequence[int] | None,
    offsets: Sequence[int] | None,
    out: Sequence[Tensor] | None,
    *,
    exact: bool,
) -> list[Piece]:
    """Where the noise of every tensor is computed: new memory, or ``out`` itself wherever it is contiguous and in main memory.

    Tensor number k from its first element on, where nothing else is said. ``exact``: in float64 throughout, rounded once at the end.
    """
    for name, values in (("indices", indices), ("offsets", offsets), ("out", out)):
        if values is not None and len(values) != len(likes):
            _check.fail(f"len({name})", len(values), f"to be len(likes)={len(likes)}")
    indices = range(len(likes)) if indices is None else indices
    offsets = (0,) * len(likes) if offsets is None else offsets
    added = (None,) * len(likes) if out is None else out
    pieces = []
    for index, offset, like, to in zip(indices, offsets, likes, added, strict=True):
        usual = to is like and type(like) is Tensor and like.dtype is torch.float32 and like.is_cpu and like.is_contiguous()
        if usual and not exact and type(index) is type(offset) is int and index >= 0 <= offset:
            pieces.append(Piece(index, offset, like, 0, like.numel()))
        else:
            pieces.append(_piece(index, offset, like, to, exact))
    return pieces


def _piece(index: int, offset: int, like: Tensor, out: Tensor | None, exact: bool) -> Piece:
    if type(like) is not Tensor or type(out) not in _PLAIN:
        _refuse_dtensor(like=like, out=out)
    given = like.dtype
    if not given.is_floating_point:
        _check.fail("like.dtype", given, "to be a floating-point type")
    dtype = torch.float64 if exact or given is torch.float64 else torch.float32
    if type(index) is not int or index < 0 or type(offset) is not int or offset < 0:
        index, offset = _check.integer(0, index=index), _check.integer(0, offset=offset)
    if out is None:
        target = _memory.empty(like.shape, dtype)
    elif out is not like and (out.shape != like.shape or out.dtype != given or out.device != like.device):
        _check.fail("out", tuple(out.shape), f"to have like's shape {tuple(like.shape)}, dtype and device")
    elif given is dtype and out.is_contiguous() and out.is_cpu:
        target = out
    elif exact:
        target = out.detach().to(device="cpu", dtype=dtype).contiguous()
    else:
        target = _memory.zeros(like.shape, dtype)
    return Piece(index, offset, target, 0, target.numel())


def delivered(pieces: Sequence[Piece], likes: Sequence[Tensor], out: Sequence[Tensor] | None, *, exact: bool) -> list[Tensor]:
    """What the pieces hold, in the dtype and on the device of ``likes``: fresh tensors, or ``out`` with it added."""
    if out is None:
        return [piece.target.to(device=like.device, dtype=like.dtype) for piece, like in zip(pieces, likes, strict=True)]
    for piece, to in zip(pieces, out, strict=True):
        if piece.target is not to:
            with torch.no_grad():
                if exact:
                    to.copy_(piece.target)
                else:
                    to.add_(piece.target.to(device=to.device))
    return list(out)
