"""Files of a run that somebody else wrote, or a killed process left: refused in one sentence, or swept."""

from __future__ import annotations

import ast
import hashlib
import os
import runpy
import shutil
import sqlite3
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import mpmath
import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import safe_open

import hushgrad
from hushgrad import _check
from hushgrad.budget import Ledger as Budget
from hushgrad.budget.policy import read_policy
from hushgrad.errors import ArgumentError, HushgradError
from hushgrad.events import Event
from hushgrad.guarantee import Ledger
from hushgrad.noise import secure
from hushgrad.recipes.encoders import Encoder, TensorEncoder
from hushgrad.recipes.images import ImageEncoder
from hushgrad.release.atomic import replacing
from hushgrad.release.placement.world import World
from hushgrad.train import Checkpoint, Plan, make_private
from hushgrad.train.shard_files import Piece, ShardFiles
from hushgrad.train.tree import understood

DEEP = [
    "[" * 100_000,
    "{" * 9,
    '{"a":' * 50_000 + "1" + "}" * 50_000,
    "[" * 50_000 + "]" * 50_000,
    "1" * 100_000,
    "nul",
    "\ud800",
    "",
]


@pytest.mark.parametrize("text", DEEP, ids=range(len(DEEP)))
@pytest.mark.parametrize("reader", [Event.from_json, Plan.from_json, Ledger.from_json], ids=["event", "plan", "ledger"])
def test_text_that_cannot_be_json_is_refused(reader, text):
    with pytest.raises(HushgradError):
        reader(text)


def test_parsed_is_json_or_a_refusal():
    assert _check.parsed('{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}
    for text in DEEP[:2] + DEEP[4:]:
        with pytest.raises(ArgumentError, match="Expected JSON text"):
            _check.parsed(text)


def test_what_a_killed_process_left_half_written_is_swept(tmp_path):
    path = tmp_path / "key.json"
    program = f"""
import os, signal
from pathlib import Path
from hushgrad.release.atomic import replacing
with replacing(Path({str(path)!r})) as new:
    new.write_text("a secret")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program], check=False)
    (left,) = tmp_path.iterdir()
    assert left.read_text() == "a secret"
    others = [tmp_path / f".key.json.{os.getppid()}", tmp_path / ".key.json.x", tmp_path / ".other.json.999999999"]
    for other in others:  # a process that lives, and names that are none of ours
        other.write_text("not ours")
    with replacing(path) as new:
        new.write_text("whole")
    assert {p.name for p in tmp_path.iterdir()} == {"key.json", *(other.name for other in others)}
    assert path.read_text() == "whole"


def test_threads_that_replace_one_file_never_meet_in_it(tmp_path):
    """Each fills a file of its own, and sweeps nobody's: who reads sees one of them, whole."""
    path, wrong, size = tmp_path / "state", [], 100_000
    start = threading.Barrier(4)

    def write(letter):
        start.wait()
        for _ in range(20):
            try:
                with replacing(path) as new:
                    new.write_text(letter * size)
            except OSError as error:
                wrong.append(error)
            found = path.read_text()
            if len(found) != size or len(set(found)) != 1:
                wrong.append(found[:10])

    threads = [threading.Thread(target=write, args=(letter,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and [file.name for file in tmp_path.iterdir()] == ["state"]


def test_exact_roundings_have_a_precision_of_their_own(monkeypatch):
    """The global precision of mpmath neither matters nor moves, so other threads may use it at the same time."""
    monkeypatch.setattr(mpmath, "workprec", lambda prec: pytest.fail("a global precision"))
    monkeypatch.setattr(mpmath, "workdps", lambda dps: pytest.fail("a global precision"))
    words = (0x01234567, 0x89ABCDEF, 0x76543210, bytes(range(64)))
    fine = [secure.exact_pair(*words)]
    before = mpmath.mp.prec
    try:
        mpmath.mp.prec = 20
        fine.append(secure.exact_pair(*words))
        assert mpmath.mp.prec == 20
    finally:
        mpmath.mp.prec = before
    assert fine[0] == fine[1] and all(x != float(x) for x in fine[0])


def test_a_forged_shard_file_is_refused(tmp_path):
    """Its digest fits, and what it says about its tensors does not."""
    shards = ShardFiles(tmp_path, World())
    ((name, _),) = shards.write({"tensor.0": Piece(0, torch.arange(6.0).reshape(1, 6))}, 1)
    path = tmp_path / name
    with safe_open(path, framework="pt") as file:
        tensors, header = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118  (not a dict)
    (label,) = header
    for forged in (
        {label: header[label].replace('"tensor.0": 0', '"tensor.0": 0, "tensor.1": 0')},  # a tensor that is not there
        {label: header[label].replace('"offsets"', '"other"')},
        {label: "[]"},
        {"other": "1"},
    ):
        safetensors.torch.save_file(tensors, path, metadata=forged)
        files = [[name, hashlib.blake2b(path.read_bytes(), digest_size=32).hexdigest()]]
        with pytest.raises(HushgradError), understood(path):
            shards.verify(files)
            shards.reader(files)("tensor.0", 0, 6)
            shards.rng(files)


ODD = {
    "folder": Path.mkdir,
    "pipe": os.mkfifo,  # whoever opened it would wait for ever
    "nothing": lambda path: path.symlink_to("/dev/null"),
    "circle": lambda path: path.symlink_to(path),
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_file_in_a_run_folder_is_refused_at_once(tmp_path, kind):
    """In the place of each file of a run: one of the house's errors, and never an answer from something else."""

    def run(folder):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=4, dataset_size=16, steps=2)
        return Checkpoint(folder, make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), plan))

    run(tmp_path / "run")._owner.release()
    for name in ("key.json", "journal", "state.safetensors", ".lock"):
        folder = tmp_path / name
        shutil.copytree(tmp_path / "run", folder)
        (folder / name).unlink(missing_ok=True)
        ODD[kind](folder / name)
        try:
            found = run(folder)
        except HushgradError:
            continue
        assert kind == "circle" and not found.resumed  # a file that is lost; nothing was released yet


READING = {
    *("open", "fdopen", "read_text", "read_bytes", "parsed", "parsed_object", "loads", "load", "fromfile", "reader", "connect"),
    *("safe_open", "load_model", "load_weights", "load_file", "read_header"),
}


def _reads(path: Path) -> bool:
    calls = (node.func for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))
    return any((f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "")) in READING for f in calls)


def test_every_file_that_reads_has_a_reader_in_the_fuzz_register():
    register = runpy.run_path(str(Path(__file__).parents[2] / "faults" / "register.py"))
    house = Path(hushgrad.__file__).parent
    reading = {path.relative_to(house).as_posix() for path in house.rglob("*.py") if _reads(path)}
    assert reading == register["READS"].keys() | register["NOTHING"].keys()


def _damaged_arrays(folder: Path) -> dict[str, bytes]:
    np.save(folder / "whole.npy", np.ones((4, 3)))
    np.savez(folder / "whole.npz", inputs=np.ones((4, 3)))
    np.savez(folder / "words.npz", inputs=np.array(["a", "b"]))
    np.savez(folder / "fewer.npz", inputs=np.ones((4, 3)), labels=np.zeros(3))
    np.save(folder / "one.npy", np.float64(3.0))
    whole, archive = (folder / "whole.npy").read_bytes(), (folder / "whole.npz").read_bytes()
    with zipfile.ZipFile(folder / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("inputs.npy", whole.replace(b"(4, 3), }          ", b"(400000000000, 3), }") + bytes(1 << 20))
    return {
        "cut.npz": archive[:60],
        "array.npz": whole,
        "packed.npz": archive.replace(b"\x00\x00\x00\x00!\x00", b"\x63\x00\x00\x00!\x00"),
        "open.npy": whole.replace(b"'descr': '", b"\0\0\0\0\0"),
        "huge.npy": whole.replace(b"(4, 3), }          ", b"(400000000000, 3), }"),
        **{name: (folder / name).read_bytes() for name in ("words.npz", "fewer.npz", "one.npy", "bomb.npz")},
    }


def _encoded(encoder: Encoder, path: Path) -> torch.Tensor:
    return encoder(encoder.read(path).rows)


def test_arrays_that_are_none_are_refused_and_nothing_is_allocated_on_their_word(tmp_path):
    for name, content in _damaged_arrays(tmp_path).items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ArgumentError):
            _encoded(TensorEncoder(shape=(3,)), path)
        if path.suffix == ".npy":
            with pytest.raises(ArgumentError):
                _encoded(ImageEncoder(channels=1, height=4, width=3), path)


def test_policies_and_ledgers_that_are_damaged_in_their_types_are_refused(tmp_path):
    (tmp_path / "policy.toml").write_text("units = -0.5")
    with pytest.raises(ArgumentError, match="list of words"):
        read_policy(tmp_path / "policy.toml")
    with sqlite3.connect(tmp_path / "b.db") as connection:
        connection.execute("CREATE TABLE hushgrad_ledger (number TEXT, text TEXT, hash TEXT)")
        connection.execute("INSERT INTO hushgrad_ledger VALUES ('x', 'y', 'z')")
    with pytest.raises(ArgumentError, match="no number"):
        Budget(tmp_path / "b.db").entries()
