"""Fingerprints of tensors, to notice changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hushgrad.clipping._torch import equal

_CHUNK = 1 << 16
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(value: Any) -> Any:
    """A number that distinguishes a tensor from any that a forward pass would turn it into; other values are returned as they are.

    >>> table = torch.ones(3)
    >>> before = fingerprint(table)
    >>> table[0] += 1
    >>> fingerprint(table) == before
    False
    """
    if not isinstance(value, Tensor):
        return value
    local = value.detach()
    if hasattr(local, "__tensor_flatten__"):  # a wrapper of other tensors (quantised weights): use those
        return (
            type(local).__name__,
            tuple(value.shape),
            [fingerprint(getattr(local, name)) for name in local.__tensor_flatten__()[0]],
        )
    if type(local) is not Tensor or local.layout is not torch.strided:
        return _Copy(local.clone())
    if local.is_complex():
        local = torch.view_as_real(local.resolve_conj())
    bits = local.contiguous().view(_INTEGERS[local.element_size()]).flatten()
    if bits.dtype is torch.int32 and bits.numel() % 2 == 0:
        bits = bits.view(torch.int64)  # half as many to multiply
    factors = torch.arange(1, 2 * min(_CHUNK, max(1, bits.numel())), 2, device=bits.device)  # odd: no bit is lost
    total = bits.new_zeros((), dtype=torch.int64)
    for i, part in enumerate(bits.split(_CHUNK)):
        total += (part * factors[: len(part)]).sum() * (2 * i + 1)
    return tuple(value.shape), value.dtype, int(total)


class _Copy:
    """A tensor that is compared by its values."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Copy) and self._tensor.shape == other._tensor.shape and equal(self._tensor, other._tensor)

    __hash__ = None  # type: ignore[assignment]
