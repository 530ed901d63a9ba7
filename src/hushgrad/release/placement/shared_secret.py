"""Gives a secret of one process to all, encrypted on the network.

The processes of a run may be on several machines, and what the group sends can be read on the way. So each process makes an
ephemeral X25519 key pair; process 0 encrypts the secret once for every other, under the key that the two agree on.

**What is promised.** A listener learns nothing about the secret (RFC 7748, the Diffie-Hellman assumption on the curve; every
agreed key encrypts one message, by AES-256-GCM). Somebody who can *change* messages of the group could take part in it: a process group
does not authenticate its members. In that case give every process the same key file instead.
"""

from __future__ import annotations

from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

_NONCE = bytes(12)  # every key encrypts one message


def shared_secret(secret: bytes, rank: int, gathered: Callable[[bytes], list[bytes]]) -> bytes:
    """Process 0's ``secret``, in every process. ``gathered`` returns what all processes hand in, of equal length, by rank."""
    own = X25519PrivateKey.generate()
    publics = gathered(own.public_key().public_bytes_raw())
    size = len(secret) + 16  # with the tag
    sealed = b"".join(_cipher(own, publics[0], p, p).encrypt(_NONCE, secret, None) for p in publics) if rank == 0 else b""
    first = gathered(sealed.ljust(size * len(publics), b"\0"))[0]
    return _cipher(own, publics[0], publics[rank], publics[0]).decrypt(_NONCE, first[rank * size : (rank + 1) * size], None)


def _cipher(own: X25519PrivateKey, sender: bytes, receiver: bytes, other: bytes) -> AESGCM:
    """The cipher for the one message from ``sender`` to ``receiver``, one of whom is ``own`` and the other ``other``."""
    agreed = own.exchange(X25519PublicKey.from_public_bytes(other))
    derived = HKDF(algorithm=SHA256(), length=32, salt=sender + receiver, info=b"hushgrad run key").derive(agreed)
    return AESGCM(derived)
