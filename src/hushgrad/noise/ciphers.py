"""What noise may be drawn from, by name."""

from __future__ import annotations

from hushgrad import _check

CIPHERS = ("aes256", "chacha20")  # the first is what processors have instructions for, the second what devices compute fast


def require_cipher(cipher: str, *, secure: bool) -> str:
    """Refuse a cipher that there is not, and one that secure noise does not draw from."""
    _check.one_of(CIPHERS, cipher=cipher)
    if secure and cipher != CIPHERS[0]:
        _check.fail("cipher", cipher, f"to be {CIPHERS[0]!r} with secure=True, whose noise is rounded in main memory")
    return cipher
