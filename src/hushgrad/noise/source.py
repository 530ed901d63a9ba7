"""The source of all noise: a keyed, random-access stream of standard Gaussians."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

from torch import Tensor

from hushgrad import _check
from hushgrad.errors import ArgumentError
from hushgrad.noise._aes_ctr import KeyStream
from hushgrad.noise._chacha import ChaChaStream
from hushgrad.noise.ciphers import CIPHERS, require_cipher
from hushgrad.noise.device_noise import DeviceKernel, Target, Turn, kernel_for
from hushgrad.noise.noise_rows import Drawing, delivered, pieces_of


class Source(Drawing):
    """z(step, index, offset): independent standard Gaussians as a pure function of a 256-bit key.

    A ``cipher`` (AES-256 in counter mode, or ChaCha20) over the counter (step, tensor index, block) gives random words, and
    Box-Muller turns them into Gaussians. There is no state: any part of any tensor at any step can be drawn anywhere, in any
    order, on any number of threads, with the same bits. ``key`` defaults to 32 bytes of operating-system entropy. ``seed`` makes
    a run reproducible and therefore not private against whoever knows the seed; ``reproducible`` says so.

    | dtype of ``like`` | number |
    |---|---|
    | float64 | computed in double precision from 93 random bits for each pair |
    | float32 | the same point of the plane computed in single precision (relative difference below 1e-6) |
    | bfloat16, float16 | the float32 number, rounded |

    **Formal guarantee.** If AES-256 is a pseudorandom permutation (ChaCha20 a pseudorandom function), N numbers are
    indistinguishable from independent draws of the Box-Muller map up to N² 2⁻¹³⁰; its radius has 2⁻⁶³ resolution in probability,
    tails end at 9.42 standard deviations (mass 2⁻⁶⁴), no number is 0. Floating-point attacks are outside this promise; with
    ``secure=True`` noise and sum live on a public grid and the promise of :mod:`hushgrad.noise.secure` holds, for independent
    noise that is added to ``out``.

        >>> import torch
        >>> source = Source(seed=1)
        >>> whole = source.z(0, 3, torch.empty(1000))
        >>> torch.equal(whole[700:], source.z(0, 3, torch.empty(300), offset=700))
        True

    Reference: NIST SP 800-38A, section 6.5 (counter mode); RFC 8439 (ChaCha20); Box and Muller (1958).
    """

    def __init__(
        self, key: bytes | None = None, *, seed: int | None = None, secure: bool = False, cipher: str = CIPHERS[0]
    ) -> None:
        if key is not None and seed is not None:
            _check.fail("seed", seed, "to be absent when a key is given", "Give either key= or seed=.")
        _check.instance(bool, secure=secure)
        self.reproducible, self.secure, self.cipher = seed is not None, secure, require_cipher(cipher, secure=secure)
        master = _master(key, seed)
        self._stream = ChaChaStream(master, b"hushgrad chacha") if cipher == "chacha20" else KeyStream(master, b"hushgrad noise")
        self.hashed, self.seen, self._grid = None, None, None
        if secure:
            from hushgrad.noise.secure import SecureNoise  # brings mpmath, which plain noise does not need

            self._grid = SecureNoise(master)

    @property
    def chacha(self) -> ChaChaStream:
        """The key stream that devices draw from."""
        assert isinstance(self._stream, ChaChaStream)
        return self._stream

    def __repr__(self) -> str:
        return f"Source({'seed=…' if self.reproducible else 'key=…'}{', secure=True' if self.secure else ''})"

    def __reduce__(self) -> str:
        raise TypeError("A Source holds a secret key and is not pickled; make a new one from the key where it is needed.")

    def z(self, step: int, index: int, like: Tensor, *, offset: int = 0, out: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """``scale`` times the Gaussians of tensor ``index`` at ``step``, in the shape, dtype and device of ``like``.

        Args:
            step: which row.
            index: which tensor of the model.
            like: shape, dtype and device of the result.
            offset: position of ``like``'s first element in the full flattened tensor, so that a shard is drawn where it lives.
            out: a tensor to add the numbers to, in place; a fresh one is returned without it.
            scale: what the numbers are multiplied by.
        """
        return self.z_all(step, (like,), indices=(index,), offsets=(offset,), out=None if out is None else (out,), scale=scale)[0]

    def z_all(
        self,
        step: int,
        likes: Sequence[Tensor],
        *,
        indices: Sequence[int] | None = None,
        offsets: Sequence[int] | None = None,
        out: Sequence[Tensor] | None = None,
        scale: float = 1.0,
    ) -> list[Tensor]:
        """``z`` for several tensors in one call, with the same bits: many small tensors cost one call, not one each.

        Args:
            step: which row.
            likes: shapes, dtypes and devices of the results.
            indices: which tensors of the model; 0, 1, ... by default.
            offsets: positions of their first elements in the full flattened tensors; 0 by default.
            out: tensors to add the numbers to, in place.
            scale: what the numbers are multiplied by.
        """
        there = self._there(likes)
        if there is not None and out is not None and all(t.is_contiguous() for t in out):
            targets = zip(out, indices or range(len(out)), offsets or [0] * len(out), strict=True)
            there.row(self.chacha, Turn(step), [Target(t, None, i, o) for t, i, o in targets], scale, fresh=False)
            return list(out)
        pieces = pieces_of(likes, indices, offsets, out, exact=self.secure)
        self.draw(_check.integer(0, step=step), pieces, _check.number(scale=scale), fresh=out is None)
        return delivered(pieces, likes, out, exact=self.secure)

    def _there(self, likes: Sequence[Tensor]) -> DeviceKernel | None:
        """The kernel of these tensors' device, if all are on one device that has a kernel; else None."""
        if not likes or likes[0].is_cpu or self.cipher != "chacha20" or self.secure:
            return None
        return kernel_for(likes[0].device) if len({like.device for like in likes}) == 1 else None


def _master(key: bytes | None, seed: int | None) -> bytes:
    if seed is not None:
        return hashlib.blake2b(str(_check.integer(seed=seed)).encode(), digest_size=32, person=b"hushgrad seed").digest()
    if key is None:
        return secrets.token_bytes(32)
    if not isinstance(key, bytes) or len(key) != 32:
        # Never through _check.fail: its message would show the key.
        raise ArgumentError("Expected key to be 32 bytes. secrets.token_bytes(32) makes one.")
    return key
