"""Signatures on privacy cards: who signed a card, and for which model file.

A signed card is the card's JSON with one more entry, ``signature``: an Ed25519 signature (RFC 8032) over everything else in it,
written in one fixed way (sorted keys, no spaces, ASCII). The card holds the SHA-256 of the model file, so the signature ties claim
and model together.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.exceptions import InternalError, InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from hushgrad import _check
from hushgrad._printed import plain
from hushgrad.budget import Policy
from hushgrad.budget.file_digests import file_sha256
from hushgrad.errors import ArgumentError
from hushgrad.guarantee import Guarantee, questions
from hushgrad.report.folder import read_object, require_earned

if TYPE_CHECKING:
    from hushgrad.report.card import Card

_RAW = serialization.Encoding.Raw, serialization.PublicFormat.Raw
_PEM = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The result of verifying a card. ``signer`` is the fingerprint of the key that signed it, empty for an unsigned card.

    ``trusted`` says that the signer is the requested one, ``model`` that a model file was compared and is the card's.
    """

    guarantee: Guarantee
    by: str
    signer: str
    trusted: bool
    model: bool

    def __str__(self) -> str:
        if not self.signer:
            found = "The card's parts agree with each other, but it is not signed: anybody can have written it."
        else:
            trust = "that is the key you gave" if self.trusted else "whose key that is, you must know: give --signer"
            found = f"The card is as {self.by or 'somebody'} signed it with the key {self.signer} ({trust})."
        model = "The model file is the one it is about." if self.model else "No model file was compared."
        asked = "".join(f"\nQuestion: {sentence}" for sentence in questions(self.guarantee.epsilon, self.guarantee.delta))
        return f"{self.guarantee}\n{found} {model}{asked}"


def new_signing_key(path: str | Path) -> str:
    """Create a key to sign cards with: a secret file at ``path`` (mode 0600) and the public half next to it as ``path.pub``.

    Args:
        path: where; a file that is there already is never overwritten.

    Returns:
        The fingerprint by which others know the key.

    >>> import os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fingerprint = new_signing_key(f"{folder}/mine")
    ...     sorted(os.listdir(folder))
    ['mine', 'mine.pub']
    """
    key, path = Ed25519PrivateKey.generate(), Path(path)
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    public = path.with_name(path.name + ".pub")
    for place in (path, public):
        if place.exists():
            _check.fail("key", str(place), "to be a new file", "A key that is there is never overwritten.")
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
    public.write_bytes(key.public_key().public_bytes(*_PEM))
    return _fingerprint(key.public_key())


def sign(card: Card, key: str | Path, *, by: str = "") -> dict[str, Any]:
    """The card as a JSON object with a signature.

    **Formal guarantee.** :func:`verify` accepts the result, and no other content, as signed by this key, unless the secret half is known
    to somebody else (Ed25519 is unforgeable under chosen messages).

    Args:
        card: from :func:`~hushgrad.report.privacy_card`.
        key: the secret file that :func:`new_signing_key` made.
        by: the name of whoever signs; it is part of what is signed.

        >>> import tempfile
        >>> place = tempfile.mkdtemp()
        >>> len(new_signing_key(place + "/officer.key"))
        16
    """
    secret = _secret_key(Path(key))
    public = secret.public_key()
    content = {**plain(card.to_json()), "signed_by": by, "signer": base64.b64encode(public.public_bytes(*_RAW)).decode()}
    return {**content, "signature": base64.b64encode(secret.sign(_canonical(content))).decode()}


def verify(
    card: str | Path, *, model: str | Path | None = None, signer: str | Path | None = None, policy: Policy | None = None
) -> Verified:
    """Check a card file: its signature, its epsilon, its plan, and the model file that it is about.

    Epsilon is computed again from the event in the card, so even a signature cannot make a number smaller than it is.

    Args:
        card: the JSON file that ``hushgrad report --save`` wrote.
        model: the model file, or the folder of its run; its SHA-256 must be the card's.
        signer: the public file (``.pub``) of whoever must have signed.
        policy: the one that the card must have been made under, and must obey.

    Raises:
        ArgumentError: with what is wrong, in one sentence.
        PolicyRefused: where the policy does not allow the claim.
    """
    content = read_object(Path(card))
    if content.get("privacy_card") != 1:
        _check.fail("card", str(card), "to be a privacy card", "Write one with hushgrad report RUN --save FILE.")
    public = _signed(content)
    wanted = None if signer is None else _public_key(Path(signer))
    if wanted is not None and (public is None or _fingerprint(public) != _fingerprint(wanted)):
        by = "by nobody" if public is None else f"by another key ({_fingerprint(public)})"
        raise ArgumentError(f"Expected the card to be signed with the key of {signer}; it is signed {by}.")
    guarantee = _recomputed(content)
    if policy is not None:
        _require_policy(content, policy, guarantee)
    if model is not None:
        _require_model(content, Path(model))
    return Verified(
        guarantee=guarantee,
        by=str(content.get("signed_by", "")) if public else "",
        signer="" if public is None else _fingerprint(public),
        trusted=wanted is not None,
        model=model is not None,
    )


# What a card says ------------------------------------------------------------------------------------------------------


def _signed(content: dict[str, Any]) -> Ed25519PublicKey | None:
    """The key that signed it; None for a card that claims no signature."""
    if "signature" not in content:
        if {"signer", "signed_by"} & content.keys():
            raise ArgumentError("Expected the card to have its signature: it names a signer, but the signature was taken out.")
        return None
    body = {name: value for name, value in content.items() if name != "signature"}
    try:
        public = Ed25519PublicKey.from_public_bytes(base64.b64decode(str(content.get("signer")), validate=True))
        public.verify(base64.b64decode(str(content["signature"]), validate=True), _canonical(body))
    except (InvalidSignature, ValueError):
        raise ArgumentError("Expected the card to be as it was signed: its signature does not fit its content.") from None
    return public


def _recomputed(content: dict[str, Any]) -> Guarantee:
    """The guarantee in a card, if the plan and the event in it bear it out."""
    from hushgrad.train.plan import Plan

    guarantee, plan = Guarantee.from_json(content.get("guarantee")), Plan.from_json(content.get("plan"))
    if content.get("claim") != str(guarantee) or content.get("plan_digest") != plan.digest:
        raise ArgumentError("Expected the card's parts to belong together: its claim or its plan was changed.")
    require_earned(guarantee, plan, "the card's guarantee", "its plan")
    return guarantee


def _require_policy(content: dict[str, Any], policy: Policy, guarantee: Guarantee) -> None:
    """The card names the policy it was made under by its hash; that policy, and no other, has to allow what it claims."""
    from hushgrad.recipes.spending import require_allowed
    from hushgrad.train.plan import Plan

    require_allowed(policy, Plan.from_json(content["plan"]), paid=_looked_up(content), guarantee=guarantee)
    made, given = _named(content, "policy_sha256"), policy.digest
    if made != given:
        under = f"{made[:16]}..." if made else "none"
        raise ArgumentError(f"Expected the card to be made under this policy ({given[:16]}...); it was made under {under}.")


def _looked_up(content: dict[str, Any]) -> bool:
    """Whether the card's run was looked up in a ledger when the card was made."""
    budget = content.get("budget")
    return isinstance(budget, dict) and budget.get("looked_up") is True


def _named(content: dict[str, Any], fact: str) -> str:
    known = content.get("provenance")
    return str(known.get(fact, "")) if isinstance(known, dict) else ""


def _require_model(content: dict[str, Any], path: Path) -> None:
    known = _named(content, "model_sha256")
    if not known:
        raise ArgumentError("Expected the card to name its model file: this one holds no hash of it.")
    path = path / "model.safetensors" if path.is_dir() else path
    if not path.is_file():
        _check.fail("model", str(path), "to be a file", "Give the model file, or the run's folder.")
    if file_sha256(path) != known:
        raise ArgumentError(f"Expected {path.name} to be the model that the card is about: its SHA-256 is another one.")


# Bytes -----------------------------------------------------------------------------------------------------------------


def _canonical(content: dict[str, Any]) -> bytes:
    """The canonical text: floats as their shortest decimal, which every JSON reader turns back into the same number."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def _fingerprint(key: Ed25519PublicKey) -> str:
    return hashlib.sha256(key.public_bytes(*_RAW)).hexdigest()[:16]


def _secret_key(path: Path) -> Ed25519PrivateKey:
    key = _loaded(
        path, lambda content: serialization.load_pem_private_key(content, None), "hushgrad report --new-signer makes one."
    )
    if not isinstance(key, Ed25519PrivateKey):
        _check.fail("key", str(path), "to be an Ed25519 key", "hushgrad report --new-signer makes one.")
    public = path.with_name(path.name + ".pub")  # a changed bit makes another key, which is as good as any: its other half tells
    if public.is_file() and _fingerprint(_public_key(public)) != _fingerprint(key.public_key()):
        raise ArgumentError(
            f"Expected {path.name} and {public.name} to be the halves of one key: one of them was changed. Use a copy."
        )
    return key


def _public_key(path: Path) -> Ed25519PublicKey:
    key = _loaded(path, serialization.load_pem_public_key, "Give the .pub file beside the signer's key.")
    if not isinstance(key, Ed25519PublicKey):
        _check.fail("signer", str(path), "to be the public half of an Ed25519 key", "Give the .pub file beside the signer's key.")
    return key


def _loaded(path: Path, load: Any, remedy: str) -> Any:
    try:
        return load(path.read_bytes())
    except OSError as error:
        raise ArgumentError(f"Expected a readable key file {str(path)!r}: {error.strerror}. {remedy}") from None
    # Not PEM, one with a password, or a key that OpenSSL itself cannot make; what is in it is not shown.
    except (ValueError, TypeError, UnsupportedAlgorithm, InternalError):
        raise ArgumentError(
            f"Expected {str(path)!r} to be a key as it was written, without a password: it was changed or is none. {remedy}"
        ) from None
