"""More readers for ``make fuzz``: what lies in the folders of runs, searches, servers and ledgers, and what a client sends."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Array, ArrayRecord, RecordDict
from safetensors import safe_open

from hushgrad.accounting import epsilon
from hushgrad.budget import Ledger as Budget
from hushgrad.budget.file_digests import with_digests
from hushgrad.budget.folder import finding, reservation_of
from hushgrad.budget.rows import START, Stored, checked, digest
from hushgrad.budget.watch import noted_heads
from hushgrad.errors import HushgradError
from hushgrad.events import Gaussian, Poisson, Sampled
from hushgrad.federated.aggregate import Aggregator
from hushgrad.federated.layout import Layout
from hushgrad.federated.wire import Unusable
from hushgrad.guarantee import Guarantee
from hushgrad.guarantee import Ledger as Books
from hushgrad.recipes.recipe import Recipe
from hushgrad.recipes.recipe_file import DEMO
from hushgrad.release.encryption import seal, unseal
from hushgrad.release.journal import JOURNAL, Journal
from hushgrad.release.journal_history import shown
from hushgrad.release.keys import RunKey, read_key, write_key
from hushgrad.release.owner import Owner
from hushgrad.release.placement.world import World
from hushgrad.report.card import privacy_card
from hushgrad.report.signature import _canonical, plain, verify
from hushgrad.serve.rules import Rules
from hushgrad.serve.runs import Shelf
from hushgrad.train import Checkpoint, Plan, make_private
from hushgrad.train.shard_files import Piece, ShardFiles
from hushgrad.train.tree import _digest, understood, write_tree
from hushgrad.tuning.winner import found

_STEP = Sampled(Poisson(0.01), Gaussian(1.0))
_PLAN = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, max_grad_norm=0.5, batch_size=8, dataset_size=64, steps=10)
_SHAPE = (2, 3)
Mutate = Callable[[bytes, random.Random], bytes]


def _npy(*arrays: Any) -> Iterator[bytes]:
    for array in arrays:
        with io.BytesIO() as file:
            np.save(file, array)
            yield file.getvalue()
    with io.BytesIO() as file:
        np.savez(file, a=np.zeros(3))
        yield file.getvalue()


def read_client(data: bytes) -> None:
    """A client's array, added to a sum that must never move by more than the clip norm; else it counts as zero."""
    aggregator = Aggregator(_PLAN, RunKey.make(seed=0))
    aggregator.begin(0, Layout(("w",), (_SHAPE,), ("float64",)), np.zeros(6))
    try:
        aggregator.add(RecordDict({"a": ArrayRecord({"w": Array("float64", _SHAPE, "numpy.ndarray", data)})}))
    except Unusable:
        assert not aggregator._sum.any()
    assert np.linalg.norm(aggregator._sum) <= 0.5


def read_guarantee(data: bytes) -> None:
    """One that is understood says the same when it is written and read again, and prints."""
    found = Guarantee.from_json(data)
    assert Guarantee.from_json(found.to_json()) == found and str(found)


def read_row(data: bytes) -> None:
    """A row of a budget ledger whose hash fits: a forger's."""
    text = data.decode("utf-8", "replace")
    list(checked([Stored(1, text, digest(text.encode("utf-8", "replace").decode()))], previous=START))


def read_key_file(data: bytes) -> None:
    """The key of a run, for its own plan."""
    path = _PLACE / "key.json"
    path.write_bytes(data)
    path.chmod(0o600)
    read_key(path, plan=_PLAN.digest)


def read_sealed(data: bytes) -> None:
    """A state that was encrypted: what comes out was put in, or nothing does."""
    assert unseal(data, "state", bytes(32)) == _SEALED


def read_forged(data: bytes) -> None:
    """A state that a forger wrote, with a digest that fits, beside the run's own key and journal."""
    folder = _PLACE / "forged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(_PLACE / "run", folder)
    with safe_open(_PLACE / "run" / "state.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    header = data.decode("utf-8", "replace")
    facts = {"hushgrad": header, "digest": _digest(header, tensors)}
    safetensors.torch.save_file(tensors, folder / "state.safetensors", metadata=facts)
    private = _private()
    try:
        Checkpoint(folder, private)
    finally:
        private.detach()


def _private() -> Any:
    model = torch.nn.Linear(3, 1)
    return make_private(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), _PLAN, key=bytes(range(32)))


def _forged() -> bytes:
    """The header of a real state after two steps."""
    private = _private()
    checkpoint = Checkpoint(_PLACE / "run", private)
    rows = torch.utils.data.TensorDataset(torch.ones(64, 3), torch.ones(64, 1), torch.arange(64))
    for x, y, *_ in itertools.islice(private.loader(rows), 2):
        private.optimizer.zero_grad()
        (private.model(x) - y).square().mean().backward()
        private.optimizer.step()
    checkpoint.save()
    private.detach()
    with safe_open(_PLACE / "run" / "state.safetensors", framework="pt") as file:
        return file.metadata()["hushgrad"].encode()


def read_journal(data: bytes) -> None:
    """A run's journal: opened by its owner, who goes on from where it says; a look from outside; whatever was cut is not a release."""
    path = _PLACE / "journal" / JOURNAL
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    with contextlib.suppress(HushgradError):
        assert len(shown(path).digests) >= 0 and shown(path).is_begun in (True, False)
    owner = Owner(path.parent, newest=True)
    try:
        journal = Journal.open(path, _KEY, owner)
        try:
            journal.seek(0, Journal(_KEY).chain)
            assert journal.position == 0 and journal.ahead >= 0
        finally:
            journal.close()
    finally:
        owner.release()


def read_shard(data: bytes) -> None:
    """One process's file of a sharded run, with a digest that fits: what is read has the length that was asked for."""
    folder = _PLACE / "shards"
    folder.mkdir(exist_ok=True)
    path = folder / "shard-1-0.safetensors"
    path.write_bytes(data)
    files, shards = [[path.name, hashlib.blake2b(data, digest_size=32).hexdigest()]], ShardFiles(folder, World())
    with understood(path):
        shards.verify(files)
        assert shards.reader(files)("tensor.0", 1, 3).shape[1] == 3
        shards.rng(files)


def _shard() -> bytes:
    folder = _PLACE / "whole-shards"
    folder.mkdir()
    pieces = {"tensor.0": Piece(0, torch.arange(6.0).reshape(1, 6)), "noise.0.buffer": Piece(2, torch.zeros(2, 4))}
    ((name, _),) = ShardFiles(folder, World()).write(pieces, 1)
    return (folder / name).read_bytes()


def read_card(data: bytes) -> None:
    """A privacy card: as it comes, and once more as a forger would sign it."""
    path = _PLACE / "card.json"
    path.write_bytes(data)
    with contextlib.suppress(HushgradError):
        assert verify(path).guarantee.epsilon >= 0
    try:
        body = {name: value for name, value in json.loads(data).items() if name != "signature"}
        signed = _SIGNER.sign(_canonical(body))
    except (AttributeError, RecursionError, ValueError):  # nothing that anybody could sign
        return
    path.write_text(json.dumps({**body, "signature": base64.b64encode(signed).decode()}))
    verify(path)


def _cards() -> tuple[bytes, ...]:
    """A signed card, by the forger's key, and one that claims no signature."""
    folder = _PLACE / "carded"
    folder.mkdir()
    event = _PLAN.event(10)
    spent = epsilon(event, delta=_PLAN.delta)
    claim = Guarantee(epsilon=spent * 1.001, delta=_PLAN.delta, event=event, accountant="pld")
    ledger = Books()
    ledger.record(_PLAN.event(1), times=10)
    for name, said in {"plan": _PLAN.to_json(), "ledger": ledger.to_json(), "guarantee": claim.to_json()}.items():
        (folder / f"{name}.json").write_text(json.dumps(said))
    (folder / "recipe.json").write_text(json.dumps(DEMO))
    (folder / "report.json").write_text(json.dumps(with_digests(folder, {"reservation": reservation_of(folder)}, {})))
    card = plain(privacy_card(folder).to_json())
    public = _SIGNER.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    body = {**card, "signed_by": "a forger", "signer": base64.b64encode(public).decode()}
    signature = base64.b64encode(_SIGNER.sign(_canonical(body))).decode()
    return json.dumps({**body, "signature": signature}).encode(), json.dumps(card).encode()


def read_search_file(data: bytes) -> None:
    """A file in the folder of an interrupted search."""
    path = _PLACE / "score.json"
    path.write_bytes(data)
    for read in (lambda content: float(content["score"]), lambda content: bytes.fromhex(content["key"]), Recipe.from_tables):
        with contextlib.suppress(HushgradError):
            found(path, read)


def read_notes(data: bytes) -> None:
    """The heads of a ledger that were noted elsewhere."""
    path = _PLACE / "heads.txt"
    path.write_bytes(data)
    noted_heads(path)


def read_settled(data: bytes) -> None:
    """A killed run's folder, as ``hushgrad ledger settle`` sees it: never less than nothing, at most the reservation."""
    folder = _PLACE / "settled"
    _fill(folder, data)
    with contextlib.suppress(HushgradError):
        reservation_of(folder)
    found = finding(folder, _STEP * 10)
    assert found.why and found.event is not None


def read_page(data: bytes) -> None:
    """The same folder as the web page lists it."""
    folder = _PLACE / "shelf" / "run"
    _fill(folder, data)
    for run in Shelf(_PLACE / "shelf", raw=True, rules=Rules(None)).all()[0]:
        assert run.name and run.state


def _fill(folder: Path, data: bytes) -> None:
    """The files of a run; the first line of the input names the one that is replaced by the rest."""
    (folder / "checkpoint").mkdir(parents=True, exist_ok=True)
    for name, content in _FILES.items():
        (folder / name).write_bytes(content)
    first, _, rest = data.partition(b"\n")
    if first.decode("utf-8", "replace") in _FILES:
        (folder / first.decode()).write_bytes(rest)


def _files() -> dict[str, bytes]:
    path = _PLACE / "state.safetensors"
    write_tree(path, {"private": {"books": {"issued": 4, "foreign": 0, "declared": None}}, "model": {"w": torch.zeros(3)}})
    reservation = {"reservation": "0123456789abcdef", "dataset": "d", "state": "begun", "ledger": "budget.db"}
    return {
        "plan.json": json.dumps(_PLAN.to_json()).encode(),
        "recipe.json": json.dumps({**DEMO, "run": {"checkpoint_every": 2}}).encode(),
        "reservation.json": json.dumps(reservation).encode(),
        "metrics.jsonl": b'{"step": 1, "epsilon": 0.1}\n{"step": 2, "epsilon": 0.2}\n',
        "checkpoint/state.safetensors": path.read_bytes(),
    }


def targets(scratch: Path, by_bytes: Mutate, by_json: Mutate, by_lines: Mutate) -> list[tuple[Any, ...]]:
    """(name, reader, valid inputs, mutation) of each."""
    global _PLACE, _FILES
    _PLACE = scratch / "readers"
    _PLACE.mkdir()
    _FILES = _files()
    ledger = Budget.create(_PLACE / "budget.db")
    ledger.add("d", epsilon=2.0, delta=1e-6)
    rows = tuple(row.text.encode() for row in ledger.entries())
    head = ledger.head
    ledger.close()
    claim = Guarantee(epsilon=1.0, delta=1e-5, event=_STEP * 3, accountant="pld", notes=("a", "b"))

    def by_folder(content: bytes, rng: random.Random) -> bytes:
        name = rng.choice(list(_FILES))
        return name.encode() + b"\n" + (by_json if name.endswith(".json") else by_bytes)(_FILES[name], rng)

    write_key(_PLACE / "key.json", RunKey(bytes(range(32))), plan=_PLAN.digest)
    key = (_PLACE / "key.json").read_bytes()
    searched = (b'{"score": 0.5}', b'{"key": "' + b"0f" * 32 + b'"}', json.dumps(Recipe.from_tables(DEMO).tables()).encode())
    return [
        ("guarantee JSON", read_guarantee, (json.dumps(claim.to_json()).encode(),), by_json),
        ("a client's arrays", read_client, tuple(_npy(np.ones(_SHAPE), np.ones(_SHAPE, "f4"), np.zeros(_SHAPE, "i8"))), by_bytes),
        ("rows of a budget ledger", read_row, rows, by_json),
        ("noted heads", read_notes, (f"{head} 2\n".encode() * 3,), by_lines),
        ("keys", read_key_file, (key,), by_json),
        ("encrypted states", read_sealed, (seal(_SEALED, bytes(32)),), by_bytes),
        ("forged checkpoints", read_forged, (_forged(),), by_json),
        ("journals", read_journal, (_journal(),), by_bytes),
        ("shard files", read_shard, (_shard(),), by_bytes),
        ("signed cards", read_card, _cards(), by_json),
        ("folders of searches", read_search_file, searched, by_json),
        ("folders to be settled", read_settled, (b"",), by_folder),
        ("folders on the page", read_page, (b"",), by_folder),
    ]


def _journal() -> bytes:
    """That of two steps; ``_forged`` took them."""
    return (_PLACE / "run" / JOURNAL).read_bytes()


_PLACE = Path()
_KEY = RunKey(bytes(range(32)))
_SIGNER = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
_FILES: dict[str, bytes] = {}
_SEALED = bytes(300)
