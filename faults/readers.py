"""More readers for ``make fuzz``: what lies in the folders of runs, searches, servers and ledgers, and what a client sends."""

from __future__ import annotations

import contextlib
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
from flwr.app import Array, ArrayRecord, RecordDict
from safetensors import safe_open

from hushgrad.budget import Ledger as Budget
from hushgrad.budget.folder import finding, reservation_of
from hushgrad.budget.rows import START, Stored, checked, digest
from hushgrad.budget.watch import noted_heads
from hushgrad.errors import HushgradError
from hushgrad.events import Gaussian, Poisson, Sampled
from hushgrad.federated.aggregate import Aggregator
from hushgrad.federated.layout import Layout, Unusable
from hushgrad.guarantee import Guarantee
from hushgrad.recipes.recipe import DEMO, Recipe
from hushgrad.release.keys import RunKey, read_key, write_key
from hushgrad.serve.runs import Shelf
from hushgrad.train import Checkpoint, Plan, make_private
from hushgrad.train.tree import _digest, write_tree
from hushgrad.tuning.search import _found

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
    aggregator.begin(Layout(("w",), (_SHAPE,), ("float64",)), np.zeros(6))
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


def read_search_file(data: bytes) -> None:
    """A file in the folder of an interrupted search."""
    path = _PLACE / "score.json"
    path.write_bytes(data)
    for read in (lambda content: float(content["score"]), lambda content: bytes.fromhex(content["key"]), Recipe.from_tables):
        with contextlib.suppress(HushgradError):
            _found(path, read)


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
    for run in Shelf(_PLACE / "shelf", raw=True).all()[0]:
        assert run.name and run.state


def _fill(folder: Path, data: bytes) -> None:
    """The files of a run; the first line of the input names the one that is replaced by the rest."""
    (folder / "checkpoint").mkdir(parents=True, exist_ok=True)
    for name, content in _FILES.items():
        (folder / name).write_bytes(content)
    name, _, content = data.partition(b"\n")
    if name.decode("utf-8", "replace") in _FILES:
        (folder / name.decode()).write_bytes(content)


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
        ("forged checkpoints", read_forged, (_forged(),), by_json),
        ("folders of searches", read_search_file, searched, by_json),
        ("folders to be settled", read_settled, (b"",), by_folder),
        ("folders on the page", read_page, (b"",), by_folder),
    ]


_PLACE = Path()
_FILES: dict[str, bytes] = {}
