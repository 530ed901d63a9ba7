"""Readers of data files: what they read is exact, and crafted files are refused before memory is taken."""

from __future__ import annotations

import gzip
import lzma
import struct
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hushgrad.errors import ArgumentError
from hushgrad.recipes.data import DATA
from hushgrad.recipes.encoders import text_ids
from hushgrad.recipes.files import read_cifar10, read_idx


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3), seed=st.integers(0, 99), packed=st.sampled_from(["", ".gz", ".xz"])
)
@settings(max_examples=30, deadline=None)
def test_idx_round_trip(tmp_path_factory, shape, seed, packed):
    array = np.random.default_rng(seed).integers(256, size=shape, dtype=np.uint8)
    path = tmp_path_factory.mktemp("idx") / f"file{packed}"
    path.write_bytes({"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[packed](idx(array)))
    assert np.array_equal(read_idx(path, dims=len(shape)), array)


GOOD = idx(np.zeros((2, 3, 3), np.uint8))


@pytest.mark.parametrize(
    "content, match",
    [
        (b"", "idx file"),
        (GOOD[:9], "idx file"),
        (b"\x00\x00\x0d\x03" + GOOD[4:], "idx file"),  # floats
        (GOOD[:-1], "1 are missing"),
        (GOOD + b"x", "to end after 18"),
        (GOOD[:4] + struct.pack(">3I", 2**32 - 1, 2**32 - 1, 2**32 - 1), "header says"),
        (GOOD[:4] + struct.pack(">3I", 0, 3, 3), "header says"),
        (GOOD[:4] + struct.pack(">3I", 2**20, 2**5, 2**5) + b"abc", "are missing"),
    ],
)
def test_crafted_idx_files_are_refused(tmp_path, content, match):
    path = tmp_path / "crafted"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(ArgumentError, match=match):
        read_idx(path, dims=3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20  # what a header promises is not allocated


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_damaged_archives_are_one_sentence(tmp_path, suffix):
    path = tmp_path / f"file{suffix}"
    packed = {".gz": gzip.compress, ".xz": lzma.compress}[suffix](GOOD * 50)
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ArgumentError):
        read_idx(path, dims=3)


def test_cifar_records(tmp_path):
    rng = np.random.default_rng(0)
    records = rng.integers(256, size=(7, 3073), dtype=np.uint8)
    records[:, 0] %= 10
    (tmp_path / "data_batch_1.bin").write_bytes(records.tobytes())
    (tmp_path / "test_batch.bin.xz").write_bytes(lzma.compress(records[:3].tobytes()))
    data = DATA["cifar10"](path=str(tmp_path))
    assert len(data.train) == 7 and len(data.test) == 3 and data.shape == (3, 32, 32)
    assert float(data.train.tensors[0][4, 2, 31, 31]) == pytest.approx(records[4, -1] / 255)
    records[2, 0] = 10
    (tmp_path / "bad.bin").write_bytes(records.tobytes())
    with pytest.raises(ArgumentError, match=r"labels 0\.\.9"):
        read_cifar10(tmp_path / "bad.bin")
    (tmp_path / "cut.bin").write_bytes(records.tobytes()[:-1])
    with pytest.raises(ArgumentError, match="records of 3073"):
        read_cifar10(tmp_path / "cut.bin")


def test_mnist_folder(tmp_path):
    images = np.arange(2 * 28 * 28, dtype=np.uint32).astype(np.uint8).reshape(2, 28, 28)
    for prefix in ("train", "t10k"):
        (tmp_path / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (tmp_path / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(np.array([3, 9], np.uint8)))
    data = DATA["mnist"](path=str(tmp_path))
    assert data.train.tensors[0].shape == (2, 1, 28, 28) and data.test.tensors[1].tolist() == [3, 9]
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.array([3], np.uint8)))
    with pytest.raises(ArgumentError, match="as many as the images"):
        DATA["mnist"](path=str(tmp_path))
    with pytest.raises(ArgumentError, match="to hold a file"):
        DATA["mnist"](path=str(tmp_path / "nowhere"))


def test_digits_are_scikit_learns():
    datasets = pytest.importorskip("sklearn.datasets")
    data = DATA["digits"]()
    ours = torch.cat([data.train.tensors[0], data.test.tensors[0]]).reshape(-1, 64)
    theirs = torch.tensor(datasets.load_digits().data, dtype=torch.float32) / 16
    assert len(data.train) == 1438 and torch.equal(ours.sort(dim=0).values, theirs.sort(dim=0).values)


CSV = "age,job,y,who\n30,clerk,no,a\n-2.5,none,yes,b\n1e3,clerk,no,a\nnan,clerk,no,c\n"


def test_csv_rows_are_encoded_one_by_one(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(CSV)
    options = {"label": "y", "classes": ["no", "yes"], "user": "who", "buckets": 8}
    data = DATA["csv"](path=str(path), test_path=str(path), **options)
    inputs, labels = data.train.tensors
    assert labels.tolist() == [0, 1, 0, 0] and data.groups == ("a", "b", "a", "c")
    assert torch.allclose(inputs.norm(dim=1), torch.ones(4))
    assert inputs[0, 0] > 0 > inputs[1, 0] and inputs[3, 0] == 0  # NaN is a word, not a number
    # The encoding of a row does not depend on the other rows: without them it is the same.
    path.write_text("\n".join(CSV.splitlines()[:2]) + "\n")
    alone = DATA["csv"](path=str(path), test_path=str(path), **options)
    assert torch.equal(alone.train.tensors[0][0], inputs[0])


@pytest.mark.parametrize(
    "change, match",
    [
        ({"label": "Y"}, "one of the columns age, job, y, who"),
        ({"classes": ["no"]}, "data.classes"),
        ({"text": CSV + "1,2\n"}, "to have 4 cells"),
        ({"text": "age,job,y,who\n"}, "at least one row"),
    ],
)
def test_bad_csv_is_one_sentence(tmp_path, change, match):
    path = tmp_path / "table.csv"
    path.write_text(change.pop("text", CSV))
    with pytest.raises(ArgumentError, match=match):
        DATA["csv"](path=str(path), **{"label": "y", "classes": ["no", "yes"], **change})


def test_text_readers(tmp_path):
    path = tmp_path / "texts"
    path.write_text("ham\thello there\nspam\tWIN now now\n" * 5)
    data = DATA["labelled-text"](path=str(path), classes=["ham", "spam"], length=4)
    assert data.shape == (4,) and len(data.train) + len(data.test) == 10 and len(data.test)
    assert text_ids("Now now", 3) == [*text_ids("now", 1) * 2, 0]
    path.write_text("no tab here\n")
    with pytest.raises(ArgumentError, match="line=1"):
        DATA["labelled-text"](path=str(path), classes=["ham"])
    path.write_text("to be or not to be " * 40)
    data = DATA["text"](path=str(path), length=16)
    x, y = data.train.tensors
    assert torch.equal(x[:, 1:], y[:, :-1]) and data.classes == 256


def test_a_row_of_another_length_is_named_by_its_line(tmp_path):
    """As an editor counts them: the header and empty lines are lines, and a cell may hold some."""
    from hushgrad.recipes.table_file import read_table

    file = tmp_path / "people.csv"
    for text, told in [
        ("x,y\n1,2\n\n3\n", r"file='.*people.csv' to have 2 cells in every row; that of line 4 has 1\.$"),
        ('x,y\n"a\nb",2\n3,4,5\n', r"that of line 4 has 3\.$"),
        ('x,y\n1,2\n"3,4\n5,6\n', r"line 4: unexpected end of data\)\. Is a quotation mark left open, or not doubled\?$"),
        (
            'x,y\n1,2\n3,"4\n5,6\n7,8\n',
            r"line 5: unexpected end of data\)\. Is a quotation mark",
        ),  # else one row would hold all others
        ('x,y\n1,2\n3,"4\n5,"6"\n7,8\n', r"line 4: ',' expected after '\"'\)\. Is a quotation mark"),
    ]:
        file.write_text(text)
        with pytest.raises(ArgumentError, match=told):
            read_table(file, header=True, delimiter=",")
