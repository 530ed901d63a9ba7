"""Readers of a federated server for ``make fuzz``: a client's whole numbers, and the files of its folder, forged with digests that fit."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from safetensors import safe_open

from hushgrad.federated import DPFTRL, LocalGrid, MinSeparation, Shares
from hushgrad.federated.layout import Layout
from hushgrad.federated.shares import ShareSum
from hushgrad.federated.wire import Unusable
from hushgrad.noise import BLT
from hushgrad.release.keys import RunKey
from hushgrad.train import Plan
from hushgrad.train.tree import _digest

_FILES = ("state.safetensors", "cohorts.safetensors")
_SHAPE = (2, 3)
_SAMPLING = MinSeparation(cohort=3, gap=1, times=2, steps=2)
_COMMON: dict[str, Any] = {"delta": 1e-5, "batch_size": 3, "dataset_size": 3, "unit": "user", "relation": "zero_out"}
_SHARED = Plan.dpsgd(noise_multiplier=1.0, sampling=_SAMPLING, noise=Shares(least=2), **_COMMON)
_CORRELATED = Plan.dpftrl(noise_multiplier=1.0, sampling=_SAMPLING, noise=BLT(buffers=2), **_COMMON)
Mutate = Callable[[bytes, random.Random], bytes]


def read_numbers(data: bytes) -> None:
    """A client's whole numbers: added as they are, or nothing."""
    found = ShareSum(_SHARED, RunKey.make(seed=0))
    found.begin(0, Layout(("w",), (_SHAPE,), ("float64",)), np.zeros(6))
    try:
        found.add(RecordDict({"a": ArrayRecord({"w": Array("int64", _SHAPE, "numpy.ndarray", data)})}))
    except Unusable:
        assert not found._sum.any()
    assert found.release(0).isfinite().all()


def _server(folder: Path) -> DPFTRL:
    return DPFTRL(FedAvg(), _CORRELATED, directory=folder)


def targets(scratch: Path, by_bytes: Mutate, by_json: Mutate) -> list[tuple[Any, ...]]:
    """(name, reader, valid inputs, mutation) of each."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    home, forged = scratch / "server", scratch / "forged server"
    server, grid = _server(home), LocalGrid(ClientApp(), clients=3)
    server.configure_train(1, ArrayRecord({"w": Array(np.zeros(_SHAPE))}), ConfigRecord(), grid)
    server.aggregate_train(1, [])
    home = home.rename(scratch / "server that was moved")  # beside its original no copy goes on
    parts = {name: _opened(home / name) for name in _FILES}

    def read_folder(data: bytes) -> None:
        name, _, header = data.decode("utf-8", "replace").partition("\n")
        shutil.rmtree(forged, ignore_errors=True)
        shutil.copytree(home, forged)
        if name in parts:
            tensors = parts[name][1]
            facts = {"hushgrad": header, "digest": _digest(header, tensors)}
            safetensors.torch.save_file(tensors, forged / name, metadata=facts)
        again = _server(forged)
        if again.rounds < 2:
            again.configure_train(2, ArrayRecord({"w": Array(np.zeros(_SHAPE))}), ConfigRecord(), grid)

    def by_header(content: bytes, rng: random.Random) -> bytes:
        name = rng.choice(_FILES)
        return name.encode() + b"\n" + by_json(parts[name][0].encode(), rng)

    arrays = tuple(Array(np.full(_SHAPE, 7, kind)).data for kind in ("i8", "f8", "u8"))
    return [
        ("a client's whole numbers", read_numbers, arrays, by_bytes),
        ("forged folders of servers", read_folder, (b"",), by_header),
    ]


def _opened(path: Path) -> tuple[str, dict[str, Any]]:
    with safe_open(path, framework="pt") as file:
        return file.metadata()["hushgrad"], {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
