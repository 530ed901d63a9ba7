"""The source of all noise: a keyed, random-access stream of standard Gaussians."""

from __future__ import annotations

import hashlib
import secrets
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hushgrad import _check
from hushgrad.errors import ArgumentError
from hushgrad.noise import _kernel
from hushgrad.noise._keystream import KeyStream, check_address
from hushgrad.noise._threads import CHUNK, SHARE, over_chunks
from hushgrad.noise._transform import GROUP, GROUP_BYTES

if TYPE_CHECKING:
    from hushgrad.noise.secure import SecureNoise

__all__ = ["Source"]

_BLOCKS = GROUP_BYTES // 16  # cipher blocks for one group of numbers


class Source:
    """z(step, index, offset): independent standard Gaussians as a pure function of a 256-bit key.

    AES-256 in counter mode over the counter (step, tensor index, block) gives random words, and Box-Muller turns them into
    Gaussians. There is no state: any part of any tensor at any step can be drawn anywhere, in any order, on any number of
    threads, with the same bits. ``key`` defaults to 32 bytes of operating-system entropy. ``seed`` makes a run reproducible
    and therefore not private against whoever knows the seed; ``reproducible`` says so.

    | dtype of ``like`` | number |
    |---|---|
    | float64 | computed in double precision from 93 random bits for each pair |
    | float32 | the same point of the plane computed in single precision (relative difference below 1e-6) |
    | bfloat16, float16 | the float32 number, rounded |

    **Formal guarantee.** If AES-256 is a pseudorandom permutation, N numbers are indistinguishable from independent draws of
    the Box-Muller map up to N² 2⁻¹³⁰; its radius has 2⁻⁶³ resolution in probability, tails end at 9.42 standard deviations
    (mass 2⁻⁶⁴), no number is 0. Floating-point attacks are outside this promise; with ``secure=True`` noise and sum live on
    a public grid and the promise of :mod:`hushgrad.noise.secure` holds, for independent noise that is added to ``out``.

        >>> import torch
        >>> source = Source(seed=1)
        >>> whole = source.z(0, 3, torch.empty(1000))
        >>> torch.equal(whole[700:], source.z(0, 3, torch.empty(300), offset=700))
        True

    Reference: NIST SP 800-38A, section 6.5 (counter mode); Box and Muller (1958).
    """

    def __init__(self, key: bytes | None = None, *, seed: int | None = None, secure: bool = False) -> None:
        if key is not None and seed is not None:
            _check.fail("seed", seed, "to be absent when a key is given", "Give either key= or seed=.")
        self.reproducible, self.secure = seed is not None, secure
        master = _master(key, seed)
        self._stream = KeyStream(master, b"hushgrad noise")
        self._grid: SecureNoise | None = None
        if secure:
            from hushgrad.noise.secure import SecureNoise  # brings mpmath, which plain noise does not need

            self._grid = SecureNoise(master)

    def __repr__(self) -> str:
        return f"Source({'seed=…' if self.reproducible else 'key=…'}{', secure=True' if self.secure else ''})"

    def __reduce__(self) -> str:
        raise TypeError("A Source holds a secret key and is not pickled; make a new one from the key where it is needed.")

    def z(self, step: int, index: int, like: Tensor, *, offset: int = 0, out: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """``scale`` times the Gaussians of tensor ``index`` at ``step``, in the shape, dtype and device of ``like``.

        ``offset`` is the position of ``like``'s first element in the full flattened tensor. With ``out`` the numbers are
        added to it in place, in one pass, and it is returned; otherwise the result is a fresh tensor.
        """
        place = Destination.of(like, out, exact=self.secure)
        flat, fresh = place.flat, place.fresh
        scale, start = _check.number(scale=scale), _check.integer(0, offset=offset)
        check_address(step, index, (start + flat.size) // GROUP * _BLOCKS)
        over_chunks(flat.size, lambda low, high: self.write(step, index, start + low, flat[low:high], scale, fresh), SHARE)
        return place.deliver(like, out)

    def fill(self, step: int, index: int, start: int, out: np.ndarray) -> None:
        """Write the Gaussians at ``start``, ``start + 1``, ... to the float32 or float64 array ``out``, on one thread."""
        _kernel.KERNEL.draw(self._stream, step, index, start, 1.0, out, fresh=True)

    def write(self, step: int, index: int, start: int, out: np.ndarray, scale: float, fresh: bool) -> None:
        """A share of ``z``, on one thread: ``out = scale * z`` if fresh, else ``out += scale * z``."""
        if self._grid is None:
            _kernel.KERNEL.draw(self._stream, step, index, start, scale, out, fresh)
            return
        for low in range(0, out.size, CHUNK):
            self._grid.write(step, index, start + low, out[low : low + CHUNK], scale, fresh)


def _master(key: bytes | None, seed: int | None) -> bytes:
    if seed is not None:
        return hashlib.blake2b(str(_check.integer(seed=seed)).encode(), digest_size=32, person=b"hushgrad seed").digest()
    if key is None:
        return secrets.token_bytes(32)
    if not isinstance(key, bytes) or len(key) != 32:
        # Never through _check.fail: its message would show the key.
        raise ArgumentError("Expected key to be 32 bytes. secrets.token_bytes(32) makes one.")
    return key


def _is_dtensor(tensor: Tensor | None) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # slow to import, and no DTensor exists before it is
    return module is not None and isinstance(tensor, module.DTensor)


@dataclass
class Destination:
    """Where noise is computed: a contiguous tensor in main memory, its flat view, and whether to write rather than add."""

    target: Tensor
    flat: np.ndarray
    fresh: bool

    @staticmethod
    def of(like: Tensor, out: Tensor | None, *, exact: bool = False) -> Destination:
        """For a result like ``like``, or to be added to ``out``; ``exact``: in float64 throughout, rounded once at the end."""
        if _is_dtensor(like) or _is_dtensor(out):
            name, tensor = ("like", like) if _is_dtensor(like) else ("out", out)
            _check.fail(name, type(tensor), "to be a local tensor", "Draw on tensor.to_local() with the shard's offset=.")
        if not like.dtype.is_floating_point:
            _check.fail("like.dtype", like.dtype, "to be a floating-point type")
        if out is not None and (out.shape != like.shape or out.dtype != like.dtype or out.device != like.device):
            _check.fail("out", tuple(out.shape), f"to have like's shape {tuple(like.shape)}, dtype and device")
        dtype = torch.float64 if exact or like.dtype == torch.float64 else torch.float32
        if out is not None and out.dtype == dtype and out.is_contiguous() and out.device.type == "cpu":
            target = out
        elif out is not None and exact:
            target = out.detach().to(device="cpu", dtype=dtype).contiguous()
        else:
            target = torch.empty(like.shape, dtype=dtype)
        plain = target.detach() if target.requires_grad else target
        return Destination(target, plain.numpy().reshape(-1), fresh=out is None or not (exact or target is out))

    def deliver(self, like: Tensor, out: Tensor | None) -> Tensor:
        """The result in the dtype and on the device of ``like``: a fresh tensor, or ``out``."""
        if out is None:
            same = self.target.dtype == like.dtype and like.is_cpu
            return self.target if same else self.target.to(device=like.device, dtype=like.dtype)
        if self.target is not out:
            with torch.no_grad():
                if self.fresh:
                    out.add_(self.target.to(device=out.device))
                else:
                    out.copy_(self.target)
        return out
