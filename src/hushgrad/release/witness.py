"""What the journal remembers a release by: bytes that another release would not have, for a small part of a step's time.

A digest of all released numbers would take as long as a pass over the model. Two parts of it are enough. *Every contribution's
norm*, exactly: whoever is changed, added or left out changes a norm, and other weights, another learning rate, other
augmentation or other arithmetic change nearly all of them. And *a block of every released tensor*, at a place that follows
from the digests so far, so that nobody can know it: this notices a difference that comes after the norms, such as the sum of
several processes, a denoiser or another clip norm.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["digest_of", "witness"]

_BLOCK = 256  # numbers of a tensor


@torch.no_grad()
def witness(grads: Mapping[str, Tensor], norms: Tensor, place: bytes, more: bytes = b"") -> bytes:
    """A digest of ``norms``, of ``more`` and of a block of every tensor, at places that follow from ``place``."""
    digest = hashlib.blake2b(_bytes(norms), digest_size=32)
    digest.update(more)
    where = int.from_bytes(place[:8], "little")
    for grad in grads.values():
        digest.update(_block(grad, where))
    return digest.digest()


def _block(tensor: Tensor, where: int) -> Any:
    """At most ``_BLOCK`` neighbouring numbers; where memory is not in order, of one row."""
    if type(tensor) is not Tensor:  # sharded: what this process holds of it
        tensor = getattr(tensor, "to_local", lambda: tensor)()
    if not tensor.is_contiguous():
        tensor = tensor[where % tensor.shape[0]].contiguous()
    size = tensor.numel()
    first = where % (size - _BLOCK + 1) if size > _BLOCK else 0
    if tensor.dtype is torch.float32 and tensor.device.type == "cpu":
        return tensor.numpy().reshape(-1)[first : first + _BLOCK]  # the same bytes; a call into numpy is a fraction of torch's
    return _bytes(tensor.view(-1)[first : first + _BLOCK])


def _bytes(tensor: Tensor) -> Any:
    """The memory of a tensor, as something that a digest takes."""
    if tensor.dtype is torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.requires_grad:
        return tensor.numpy()
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """A digest of all numbers of ``tensors``, with their names, types and shapes: of the weights that a run starts from."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors.items():
        local = tensor if type(tensor) is Tensor else getattr(tensor, "to_local", lambda t=tensor: t)()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(_bytes(local.detach().reshape(-1)))
    return digest.hexdigest()
