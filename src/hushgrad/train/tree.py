"""Trees of plain values and tensors as one safetensors file with JSON in its header: a checkpoint without pickle.

The format itself has no checksum, so a flipped bit in a weight, a step count or a ledger would go unnoticed. So the header
carries a digest of everything, and a file that does not match it is refused. This detects damage, not forgery: whoever can write the
file can write the digest.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hushgrad import _check
from hushgrad._printed import reason
from hushgrad.errors import ArgumentError, HushgradError
from hushgrad.release.encryption import is_sealed, seal, unseal, wrapping_key

_HEADER, _DIGEST = "hushgrad", "digest"
_DTYPES = {str(t).removeprefix("torch."): t for t in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}


def write_tree(path: Path, tree: Any) -> None:
    """Write ``tree`` (nested dicts, lists, tuples; tensors, numbers, strings, dtypes, None) to ``path``.

    :func:`read_tree` returns it bit for bit, including integer keys, tuples and dtypes. If there is a wrapping key, the file is encrypted
    with it.
    """
    tensors: dict[str, Tensor] = {}
    header = json.dumps(_encode(tree, tensors), separators=(",", ":"), allow_nan=False)
    metadata = {_HEADER: header, _DIGEST: _digest(header, tensors)}
    kek = wrapping_key()
    if kek is None:
        safetensors.torch.save_file(tensors, path, metadata=metadata)
    else:
        path.write_bytes(seal(safetensors.torch.save(tensors, metadata=metadata), kek))


def read_tree(path: Path) -> Any:
    """The tree in a file of :func:`write_tree`; an unknown or damaged file is refused."""
    try:
        metadata, tensors = _unsealed(path) if is_sealed(path) else _plain(path)
        if _HEADER not in metadata:
            _check.fail("path", str(path), "to be a checkpoint of a private run")
    except (SafetensorError, OSError) as error:  # the latter for a folder, or a file that may not be read
        raise ArgumentError(
            f"Expected path={str(path)!r} to be a whole safetensors file; it was cut short or damaged ({reason(error)}). "
            "Put a good copy back, or "
            "start a new run."
        ) from None
    if metadata.get(_DIGEST) != _digest(metadata[_HEADER], tensors):
        raise ArgumentError(
            f"Expected path={str(path)!r} to be as it was written; it was damaged. Use a copy, or start a new run."
        )
    try:
        return _decode(_check.parsed(metadata[_HEADER]), tensors)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArgumentError(f"Expected path={str(path)!r} to hold a tree of values ({type(error).__name__}).") from None


def _plain(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)


def _unsealed(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    content = unseal(path.read_bytes(), path.name, wrapping_key())
    tensors = safetensors.torch.load(content)
    header = _check.parsed(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return header.get("__metadata__", {}), tensors


_MISFITS = (ArithmeticError, AttributeError, IndexError, KeyError, RecursionError, RuntimeError, TypeError, ValueError)


@contextmanager
def understood(path: Path) -> Iterator[None]:
    """Inside, a tree read from ``path`` is used, which may not belong to this run: whatever does not fit is refused in one sentence.

    A digest detects a damaged file, but says nothing about who wrote it.
    """
    try:
        yield
    except (HushgradError, torch.distributed.DistError):  # refused already, or another process's fault
        raise
    except (*_MISFITS, SafetensorError) as error:
        # Without its message, which may quote the state, which holds noise.
        raise ArgumentError(
            f"Expected {path.name} to hold the state of this run; what is in it does not fit ({type(error).__name__}). "
            "Use a copy, or start a new run."
        ) from None


def _digest(header: str, tensors: dict[str, Tensor]) -> str:
    """BLAKE2b over the JSON header and each tensor's name, type, shape and bytes."""
    digest = hashlib.blake2b(header.encode(), digest_size=32)
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():  # an empty one has no bytes, and not always a stride that can be viewed
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # an array is a buffer
    return digest.hexdigest()


def _encode(x: Any, tensors: dict[str, Tensor]) -> Any:
    """Plain JSON for plain values; a one-key object with a tag for everything that JSON would change."""
    if isinstance(x, Tensor):
        name = str(len(tensors))
        tensors[name] = x.detach().cpu().contiguous().clone()  # a copy: tied tensors share storage, which the format refuses
        return {"tensor": name}
    if isinstance(x, dict):
        return {"dict": [[_encode_key(key), _encode(value, tensors)] for key, value in x.items()]}
    if isinstance(x, tuple):
        return {"tuple": [_encode(item, tensors) for item in x]}
    if isinstance(x, list):
        return [_encode(item, tensors) for item in x]
    if isinstance(x, float) and not math.isfinite(x):
        return {"float": repr(x)}
    if isinstance(x, torch.dtype):
        return {"dtype": str(x).removeprefix("torch.")}
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    remedy = "A checkpoint holds tensors, numbers, strings and containers of them; it never pickles."
    return _check.fail("state", type(x).__name__, "to have a form in a checkpoint", remedy)


def _encode_key(key: Any) -> str | int:
    if isinstance(key, bool) or not isinstance(key, (str, int)):
        _check.fail("key", key, "to be a string or an integer")
    return key


def _decode(x: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(x, list):
        return [_decode(item, tensors) for item in x]
    if not isinstance(x, dict):
        return x
    ((tag, content),) = x.items()
    if tag == "tensor":
        return tensors[content]
    if tag == "dict":
        return {key: _decode(value, tensors) for key, value in content}
    if tag == "tuple":
        return tuple(_decode(item, tensors) for item in content)
    if tag == "float":
        return float(content)
    if tag == "dtype":
        return _DTYPES[content]
    return _check.fail("tag", tag, "to be known to this version")


def rng_state() -> dict[str, Any]:
    """The global random states that layers and augmentations use (never the noise, which has none)."""
    import random

    import numpy as np

    _, words, position, has_gauss, gauss = np.random.get_state(legacy=True)
    words = np.asarray(words)
    return {
        "torch": torch.get_rng_state(),
        "cuda": list(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else [],
        "numpy": (torch.from_numpy(words.astype(np.int64)), int(position), int(has_gauss), float(gauss)),
        "python": _python_state(random.getstate()),
    }


def _python_state(state: tuple[Any, ...]) -> tuple[int, Tensor, float | None]:
    version, words, gauss = state
    return version, torch.tensor(words), gauss


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the global random states."""
    import random

    import numpy as np

    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    words, position, has_gauss, gauss = state["numpy"]
    np.random.set_state(("MT19937", words.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, python_words, python_gauss = state["python"]
    random.setstate((version, tuple(python_words.tolist()), python_gauss))
