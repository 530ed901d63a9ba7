"""Readers of what a user brings along, for ``make fuzz``: models, pictures, arrays, encoders, signers' keys, policies, ledger files."""

from __future__ import annotations

import contextlib
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
from PIL import Image
from safetensors import safe_open

from hushgrad.budget import Ledger
from hushgrad.budget.policy import read_policy
from hushgrad.errors import HushgradError
from hushgrad.events import Event
from hushgrad.planner.model_shapes import NAMES, shape_of
from hushgrad.recipes import DATA, MODELS
from hushgrad.recipes.encoders import ByteEncoder, Encoder, TableEncoder, TensorEncoder
from hushgrad.recipes.images import ImageEncoder
from hushgrad.recipes.saved import describe, load_model, put_weights, read_description, save_model
from hushgrad.recipes.saved_plans import read_plan
from hushgrad.release.owner import LOCK, Owner
from hushgrad.report.signature import _public_key, _secret_key, new_signing_key
from hushgrad.train import Plan

Mutate = Callable[[bytes, random.Random], bytes]
_PLACE = Path()
_PICTURE = ImageEncoder(channels=3, height=4, width=4)
_POLICY = b'max_epsilon = 3.0\nmax_delta = 1e-5\nunits = ["user"]\naccountants = ["pld"]\n'
_PLAN = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=8, dataset_size=64, steps=10)


def _file(name: str, data: bytes) -> Path:
    path = _PLACE / name
    path.write_bytes(data)
    return path


def read_model(data: bytes) -> None:
    """A model file: as it comes, and once more with the input as its description and weights that are whole."""
    path = _file("model.safetensors", data)
    with contextlib.suppress(HushgradError):
        load_model(path)
    with contextlib.suppress(HushgradError):
        put_weights(MODELS["logistic"](DATA["digits"]()), path)
    header = data[8:].partition(b"\0")[0].decode("utf-8", "replace") if data[:1] != b"{" else data.decode("utf-8", "replace")
    path = _PLACE / "described.safetensors"
    safetensors.torch.save_file(_WEIGHTS, path, metadata={"hushgrad": header})
    read_description(path)
    load_model(path)


def read_picture(data: bytes) -> None:
    """A picture of one of the kinds that are known by their names; what comes out has the size that was asked for."""
    for suffix in (".png", ".jpg", ".gif", ".bmp", ".webp"):
        path = _file(f"picture{suffix}", data)
        with contextlib.suppress(HushgradError):
            assert _PICTURE(_PICTURE.read(path).rows).shape == (1, 3, 4, 4)


def read_arrays(data: bytes) -> None:
    """An array or several: as records, and as images."""
    for encoder, suffix in ((TensorEncoder(shape=(3,)), ".npy"), (TensorEncoder(shape=(3,)), ".npz"), (_PICTURE, ".npy")):
        path = _file(f"records{suffix}", data)
        with contextlib.suppress(HushgradError):
            encoder(encoder.read(path).rows)


def read_encoder(data: bytes) -> None:
    """What was learned about the columns: understood, it says the same when it is written and read again."""
    encoder = Encoder.from_json(data)
    assert Encoder.from_json(encoder.to_json()) == encoder


def read_signer(data: bytes) -> None:
    """Either half of a signer's key."""
    path = _file("signer.pem", data)
    for read in (_secret_key, _public_key):
        with contextlib.suppress(HushgradError):
            read(path)


def read_policy_file(data: bytes) -> None:
    """A policy that is understood has limits that can be compared with."""
    assert read_policy(_file("policy.toml", data)) is not None


def read_ledger_file(data: bytes) -> None:
    """The file of a budget ledger: its rows are those that were written, or it is refused."""
    for leftover in _PLACE.glob("read.db*"):
        leftover.unlink()
    ledger = Ledger(_file("read.db", data))
    try:
        assert [row.text for row in ledger.entries()] == _ROWS[: len(ledger.entries())]
        ledger.verify()
    finally:
        ledger.close()


def read_lock(data: bytes) -> None:
    """A lock that is held by nobody is taken, whatever is in it; a lease of another host is respected."""
    folder = _PLACE / "locked"
    folder.mkdir(exist_ok=True)
    (folder / LOCK).write_bytes(data)
    with contextlib.suppress(HushgradError):
        Owner(folder, newest=True).release()


def read_plan_file(data: bytes) -> None:
    """A plan that was saved for later."""
    assert read_plan(_file("plan.json", data)).digest


def read_foreign(data: bytes) -> None:
    """An accountant's history of another library, as JSON."""
    with contextlib.suppress(ValueError, RecursionError):  # what is no JSON is no history
        assert Event.from_json(json.loads(data)) is not None


def read_config(data: bytes) -> None:
    """The shape of a model, from its configuration."""
    assert shape_of(str(_file("config.json", data))).parameters >= 0


def _models() -> tuple[bytes, ...]:
    """A model file, and the description in one."""
    global _WEIGHTS
    data, path = DATA["digits"](), _PLACE / "valid.safetensors"
    save_model(MODELS["logistic"](data), path, describe({"name": "logistic"}, data))
    with safe_open(path, framework="pt") as file:
        _WEIGHTS = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
        return path.read_bytes(), file.metadata()["hushgrad"].encode()


def _pictures() -> tuple[bytes, ...]:
    image = Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3))
    found = []
    for kind in ("PNG", "JPEG", "GIF", "BMP", "WEBP"):
        with io.BytesIO() as file:
            image.save(file, kind)
            found.append(file.getvalue())
    return tuple(found)


def _arrays() -> tuple[bytes, ...]:
    with io.BytesIO() as one, io.BytesIO() as several:
        np.save(one, np.ones((4, 3), np.float32))
        np.savez(several, inputs=np.ones((4, 3)), labels=np.zeros(4, int))
        return one.getvalue(), several.getvalue()


def _ledger() -> bytes:
    global _ROWS
    ledger = Ledger.create(_PLACE / "whole.db")
    ledger.add("d", epsilon=9.0, delta=1e-6)
    ledger.commit(ledger.reserve("d", _PLAN.event(1)), _PLAN.event(1))
    _ROWS = [row.text for row in ledger.entries()]
    ledger.close()
    return (_PLACE / "whole.db").read_bytes()


def targets(scratch: Path, by_bytes: Mutate, by_json: Mutate, by_lines: Mutate) -> list[tuple[Any, ...]]:
    """(name, reader, valid inputs, mutation) of each."""
    global _PLACE
    _PLACE = scratch / "inputs"
    _PLACE.mkdir()
    encoders = (TableEncoder(columns=("age", "job"), label="y"), ByteEncoder(length=4), _PICTURE)
    new_signing_key(_PLACE / "valid.pem")
    keys = tuple((_PLACE / name).read_bytes() for name in ("valid.pem", "valid.pem.pub"))
    words = json.dumps({"host": "elsewhere", "pid": 7, "token": "0f" * 8, "lease": False}).encode()

    def by_either(content: bytes, rng: random.Random) -> bytes:
        return (by_json if content[:1] == b"{" else by_bytes)(content, rng)

    return [
        ("model files", read_model, _models(), by_either),
        ("pictures", read_picture, _pictures(), by_bytes),
        ("arrays of records", read_arrays, _arrays(), by_bytes),
        ("encoders", read_encoder, tuple(json.dumps(one.to_json()).encode() for one in encoders), by_json),
        ("signers' keys", read_signer, keys, by_bytes),
        ("policies", read_policy_file, (_POLICY,), by_lines),
        ("files of budget ledgers", read_ledger_file, (_ledger(),), by_bytes),
        ("locks", read_lock, (words,), by_json),
        ("saved plans", read_plan_file, (json.dumps(_PLAN.to_json()).encode(),), by_json),
        ("configurations of models", read_config, (json.dumps(NAMES["smollm2-135m"]).encode(),), by_json),
        ("histories of other libraries", read_foreign, (b"[[1.0, 0.01, 100], [2.0, 0.1, 3]]",), by_json),
    ]


_WEIGHTS: dict[str, Any] = {}
_ROWS: list[str] = []
