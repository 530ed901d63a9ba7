"""Encryption at rest: with ``HUSHGRAD_KEK`` in the environment, secrets are encrypted on disk under that wrapping key.

It names a file with 32 bytes, or ``keyring:SERVICE`` for the operating system's keyring. Keys and states (noise buffers, who took part)
are encrypted and authenticated with AES-256-GCM, large ones in pieces that can be neither swapped nor dropped.
"""

from __future__ import annotations

import os
import secrets
import struct
from collections.abc import Iterator
from pathlib import Path

from hushgrad.errors import ArgumentError

_BYTES, _NONCE, _TAG = 32, 12, 16
_MAGIC = b"hushgrad sealed 1\n"
_PIECE = 1 << 28  # bytes: the cipher takes less than 2 GiB at once


def wrapping_key() -> bytes | None:
    """The key that HUSHGRAD_KEK names; None if it is not set.

    Raises:
        ArgumentError: if it names something else.
    """
    place = os.environ.get("HUSHGRAD_KEK", "")
    if not place:
        return None
    if place.startswith("keyring:"):
        content = _from_keyring(place.removeprefix("keyring:"))
    else:
        content = Path(place).read_bytes() if Path(place).is_file() else b""
    if len(content) != _BYTES:
        raise ArgumentError(
            f"Expected HUSHGRAD_KEK to name a file of {_BYTES} bytes, or keyring:SERVICE with {2 * _BYTES} hex digits. "
            f"Make one with: head -c {_BYTES} /dev/urandom > FILE."
        )
    return content


def _from_keyring(service: str) -> bytes:
    try:
        import keyring  # type: ignore[import-not-found, import-untyped, unused-ignore]  # only for those who ask for it
    except ImportError:
        raise ArgumentError("Expected the package keyring for HUSHGRAD_KEK=keyring:SERVICE. pip install keyring.") from None
    text = keyring.get_password(service, "hushgrad") or ""
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def is_sealed(path: Path) -> bool:
    """Whether the file in ``path`` was written by :func:`seal`."""
    with open(path, "rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def seal(content: bytes, kek: bytes) -> bytes:
    """``content`` encrypted under ``kek``.

    >>> unseal(seal(b"who took part", bytes(32)), "state", bytes(32))
    b'who took part'
    """
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    cipher, parts = AESGCM(kek), [_MAGIC, struct.pack("<Q", len(content))]
    # Even empty content has a piece: its tag authenticates it.
    for number, at in enumerate(range(0, max(1, len(content)), _PIECE)):
        nonce = secrets.token_bytes(_NONCE)
        parts += [nonce, cipher.encrypt(nonce, content[at : at + _PIECE], _place(number, len(content)))]
    return b"".join(parts)


def unseal(content: bytes, name: str, kek: bytes | None) -> bytes:
    """The decrypted content; ``name`` is the file's, for error messages.

    Raises:
        ArgumentError: without the wrapping key, or if the file was changed.
    """
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    if kek is None:
        raise ArgumentError(f"Expected HUSHGRAD_KEK to be set: {name} was encrypted with a wrapping key.")
    try:
        (size,) = struct.unpack_from("<Q", content, len(_MAGIC))
        pieces = list(_pieces(content[len(_MAGIC) + 8 :], size))
        return b"".join(
            AESGCM(kek).decrypt(piece[:_NONCE], piece[_NONCE:], _place(number, size)) for number, piece in enumerate(pieces)
        )
    except (InvalidTag, ValueError, struct.error):
        raise ArgumentError(f"Expected HUSHGRAD_KEK to be the wrapping key of {name}, and the file as it was written.") from None


def _pieces(sealed: bytes, size: int) -> Iterator[bytes]:
    """The encrypted pieces of a content of ``size`` bytes."""
    more = _NONCE + _TAG
    count = max(1, -(-size // _PIECE))
    if len(sealed) != size + count * more:
        raise ValueError("another length")
    for number in range(count):
        yield sealed[number * (_PIECE + more) : (number + 1) * (_PIECE + more)]


def _place(number: int, size: int) -> bytes:
    """What a piece is authenticated with: its number, and the total length."""
    return b"hushgrad state" + struct.pack("<QQ", number, size)
