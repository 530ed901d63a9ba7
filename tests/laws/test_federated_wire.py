"""Whatever bytes a client sends count as zero, or as an update of the layout's shape that is clipped; and take no more memory than that."""

from __future__ import annotations

import io
import logging
import resource
import zipfile

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the wire format is Flower's")
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from hushgrad import noise
from hushgrad.federated import DPFTRL, LocalGrid, MinSeparation, ServerSGD
from hushgrad.federated.aggregate import Aggregator
from hushgrad.federated.layout import Layout
from hushgrad.federated.wire import Unusable, read_array
from hushgrad.release.keys import RunKey
from hushgrad.train import Plan

SHAPE, CLIP = (2, 3), 0.5
PLAN = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, max_grad_norm=CLIP, batch_size=4, dataset_size=20, steps=4, unit="user")


def npy(values, version=None):
    with io.BytesIO() as file:
        np.lib.format.write_array(file, np.asarray(values), version=version, allow_pickle=True)
        return file.getvalue()


def header(text, version=1):
    width = 2 if version == 1 else 4
    return b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(width, "little") + text


def archive():
    with io.BytesIO() as file:
        np.savez_compressed(file, a=np.zeros((1000, 1000)))
        return file.getvalue()


def bomb():
    with io.BytesIO() as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as zipped:
            zipped.writestr(
                "a.npy", header(b"{'descr': '<f8', 'fortran_order': False, 'shape': (100000000,), }\n") + bytes(10**6)
            )
        return file.getvalue()


GOOD = [npy(np.arange(6, dtype=kind).reshape(SHAPE)) for kind in ("<f8", "<f4", ">f8", "<f2", "i1", "<u8")]
SEEDS = [
    *GOOD,
    npy(np.asfortranarray(np.ones(SHAPE))),
    npy(np.ones(SHAPE), version=(2, 0)),
    npy(np.ones(SHAPE), version=(3, 0)),
    npy(np.full(SHAPE, np.nan)),
    npy(np.full(SHAPE, 1e300)),
    npy(np.zeros(SHAPE, complex)),
    npy(np.zeros(SHAPE, object)),
    npy(np.zeros(SHAPE, "datetime64[s]")),
    npy(np.zeros(SHAPE, [("a", "f8")])),
    npy(np.full(SHAPE, np.longdouble("1e4000"))),
    npy(np.zeros((7,))),
    npy(np.zeros(())),
    npy(np.zeros((0, 3))),
    archive(),
    bomb(),
    b"",
    b"PK\x03\x04",
    b"\x80\x04\x95",
    b"\x93NUMPY",
    header(b"(" * 9000),
    header(b"{'descr': '<f8', 'fortran_order': False, 'shape': (" + b"9" * 3000 + b",), }\n"),
    header(b"{'descr': '<f8', 'fortran_order': False, 'shape': (10000000000000,), }\n") + bytes(48),
    header(b"{'descr': '<f8', 'fortran_order': False, 'shape': (-2, -3), }\n") + bytes(48),
    header(b"{'descr': '<f8', 'fortran_order': False, 'shape': (2, 3), }" + b" " * 60000 + b"\n") + bytes(48),
    header(b"{'descr': '<f8', 'fortran_order': False, 'shape': (2, 3" + b" " * 200, 3),
    b"\x93NUMPY\x02\x00\xff\xff\xff\xff{",
]


def mutated(rng, data):
    """One of the seeds with bytes flipped, cut, doubled, inserted, exchanged with another one's, or its lengths overwritten."""
    data = bytearray(data[:4000])
    for _ in range(int(rng.integers(1, 4))):
        at, kind = int(rng.integers(0, len(data) + 1)), int(rng.integers(0, 7))
        if kind == 0 and at < len(data):
            data[at] = int(rng.integers(0, 256))
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            data[at:at] = data[at : at + 40]
        elif kind == 3:
            data[at:at] = rng.bytes(int(rng.integers(1, 9)))
        elif kind == 4:
            other = SEEDS[int(rng.integers(len(SEEDS)))]
            data[at:] = other[at : at + 4000]
        elif kind == 5 and len(data) > 12:
            data[8:12] = int(rng.choice([0, 1, 118, 65535, 2**31, 2**32 - 1])).to_bytes(4, "little")
        else:
            data = bytearray(bytes(data).replace(b"2, 3", str(tuple(rng.integers(-9, 10**9, 2).tolist()))[1:-1].encode(), 1))
    return bytes(data)


def searched(count, seed):
    """(usable, refused) of ``count`` mutations, each added to a sum that must never move by more than the clip norm."""
    rng, layout = np.random.default_rng(seed), Layout(("w",), (SHAPE,), ("float64",))
    aggregator, usable = Aggregator(PLAN, RunKey.make(seed=0)), 0
    for _ in range(count):
        data = mutated(rng, SEEDS[int(rng.integers(len(SEEDS)))])
        aggregator.begin(0, layout, np.zeros(6))
        try:
            aggregator.add(RecordDict({"a": ArrayRecord({"w": Array("float64", SHAPE, "numpy.ndarray", data)})}))
            usable += 1
        except Unusable:
            assert not aggregator._sum.any()
        assert np.linalg.norm(aggregator._sum) <= CLIP
    return usable, count - usable


def test_mutated_bytes_count_as_zero_or_are_clipped():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    usable, refused = searched(10_000, seed=1)
    assert usable > 100 and refused > 5_000  # both ends are reached
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB: no header is believed


@pytest.mark.slow
def test_a_hundred_thousand_more():
    usable, refused = searched(150_000, seed=2)
    assert usable > 1000 and refused > 50_000


def test_what_numpy_writes_for_the_layout_is_read():
    for data in GOOD + SEEDS[6:9]:
        found = read_array(Array("float64", SHAPE, "numpy.ndarray", data), SHAPE)
        np.testing.assert_array_equal(found, np.load(io.BytesIO(data)))
    for shape in ((), (0,), (3, 0, 2), (1,) * 20):
        np.testing.assert_array_equal(read_array(Array(np.ones(shape)), shape), np.ones(shape))
    with pytest.raises(Unusable, match="cannot be read"):
        read_array(Array("float64", SHAPE, "torch", GOOD[0]), SHAPE)


# A server's whole round --------------------------------------------------------------------------------------------------------------


def app(reply=None):
    client = ClientApp()

    @client.train()
    def train(message, context):
        array = message.content["arrays"]["w"].numpy() + 1
        record = Array(array) if reply is None or context.node_config["partition-id"] % 2 else reply
        return Message(RecordDict({"arrays": ArrayRecord({"w": record})}), reply_to=message)

    return client


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.ERROR, "flwr")


def strategy(**options):
    sampler = MinSeparation(cohort=3, gap=3, times=1, steps=6)
    plan = Plan.dpftrl(
        noise_multiplier=1.0, delta=1e-5, max_grad_norm=CLIP, batch_size=3, dataset_size=6, steps=6, sampling=sampler, unit="user",
        noise=noise.BLT(buffers=2),
    )  # fmt: skip
    return DPFTRL(FedAvg(), plan, server=ServerSGD(), seed=0, **options)


@pytest.mark.parametrize("data", SEEDS, ids=range(len(SEEDS)))
def test_no_seed_of_the_search_ends_a_server(data):
    server = strategy()
    found = server.start(LocalGrid(app(Array("float64", SHAPE, "numpy.ndarray", data)), clients=6), initial(), num_rounds=1)
    assert np.isfinite(found.arrays["w"].numpy()).all()
    assert server.raw_round.accepted + len(server.raw_round.rejected) == 3


def initial():
    return ArrayRecord({"w": Array(np.zeros(SHAPE))})


def test_an_empty_cohort_is_a_noisy_round_with_a_directory_too(tmp_path):
    """Six users, three a round, once each: from the third round on there is nobody."""
    found = [
        strategy(**options).start(LocalGrid(app(), clients=6), initial()).arrays["w"].numpy()
        for options in ({}, {"directory": tmp_path / "run"})
    ]
    np.testing.assert_array_equal(*found)
    again = strategy(directory=tmp_path / "run")
    assert again.rounds == 6


class Unpackable(LocalGrid):
    """As Flower's grid over HTTP: replies that were asked for are gone when one of them cannot be unpacked."""

    def pull_messages(self, message_ids):
        found = list(super().pull_messages(message_ids))
        if any(reply.metadata.src_node_id % 2 for reply in found):
            raise KeyError("no such child")
        return found


def test_a_reply_that_flower_cannot_unpack_counts_as_zero_and_is_counted():
    server, bare = strategy(), strategy()
    found = server.start(Unpackable(app(), clients=6), initial(), num_rounds=1).arrays["w"].numpy()
    odd = 3 - server.raw_round.accepted
    assert odd and len(server.raw_round.rejected) == odd and "cannot be unpacked (KeyError)" in server.raw_round.rejected[0]
    client = ClientApp()

    @client.train()
    def train(message, context):
        if context.node_config["partition-id"] % 2 == 0:  # nodes are numbered from 1
            raise RuntimeError("gone")
        return Message(RecordDict({"arrays": ArrayRecord({"w": Array(np.ones(SHAPE))})}), reply_to=message)

    np.testing.assert_array_equal(
        found, bare.start(LocalGrid(client, clients=6), initial(), num_rounds=1).arrays["w"].numpy()
    )  # as if those nodes had not answered


def test_what_the_network_raises_is_raised():
    class Down(LocalGrid):
        def pull_messages(self, message_ids):
            raise ConnectionError("no route")

    with pytest.raises(ConnectionError):
        strategy().start(Down(app(), clients=6), initial(), num_rounds=1)
