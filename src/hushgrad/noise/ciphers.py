"""The ciphers that noise can be drawn from, by name."""

from __future__ import annotations

from hushgrad import _check

CIPHERS = ("aes256", "chacha20")  # processors have instructions for the first; the second is fast on devices


def require_cipher(cipher: str, *, secure: bool) -> str:
    """Return ``cipher``; raises if it is unknown, or does not support secure noise."""
    _check.one_of(CIPHERS, cipher=cipher)
    if secure and cipher != CIPHERS[0]:
        _check.fail("cipher", cipher, f"to be {CIPHERS[0]!r} with secure=True, whose noise is rounded in main memory")
    return cipher
