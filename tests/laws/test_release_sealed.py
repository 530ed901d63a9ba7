"""With a wrapping key, a copied folder tells nothing that was not released."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from hushgrad.errors import ArgumentError
from hushgrad.noise import BLT
from hushgrad.release import encryption
from hushgrad.train import Checkpoint, Plan, make_private
from hushgrad.train.tree import read_tree

KEK = bytes(range(32))


@pytest.fixture
def kek(tmp_path, monkeypatch):
    path = tmp_path / "kek"
    path.write_bytes(KEK)
    monkeypatch.setenv("HUSHGRAD_KEK", str(path))
    return path


def _life(folder, steps):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(40, 40), torch.randint(2, (40,)))
    model = torch.nn.Linear(40, 2)
    plan = Plan.dpftrl(noise_multiplier=1.0, delta=1e-5, batch_size=4, dataset_size=40, epochs=3, noise=BLT(buffers=2))
    private = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    checkpoint = Checkpoint(folder, private)
    for x, y in islice(private.loader(data), steps):
        F.cross_entropy(model(x), y).backward()
        private.optimizer.step()
        checkpoint.save()
    secret = [private.key.secret, private.key.secret.hex().encode(), private.attendance_state()["last"].numpy().tobytes()]
    buffers = [value for lane in private.noise_state()["lanes"] for value in lane["state"].values() if value.numel() > 8]
    private.detach()
    return secret + [value.numpy().tobytes()[:64] for value in buffers], checkpoint, private


@pytest.mark.parametrize("piece", [1 << 28, 1000])
def test_neither_key_nor_noise_nor_who_took_part_lies_in_a_file(tmp_path, kek, monkeypatch, piece):
    monkeypatch.setattr(encryption, "_PIECE", piece)
    secrets, _, _ = _life(tmp_path / "run", 4)
    assert len(secrets) > 3
    for path in (tmp_path / "run").iterdir():
        content = path.read_bytes()
        assert not any(secret in content for secret in secrets), path.name
    _, checkpoint, private = _life(tmp_path / "run", 3)
    assert checkpoint.resumed and private.steps == 7


def test_without_it_such_secrets_are_there(tmp_path):
    secrets, _, _ = _life(tmp_path, 4)
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert sum(secret in content for secret in secrets) >= 3


def test_the_wrong_key_no_key_and_damage_are_one_sentence(tmp_path, kek, monkeypatch):
    _life(tmp_path / "run", 2)
    state = tmp_path / "run" / "state.safetensors"
    content = state.read_bytes()
    for damaged in (content[:-1], content[:30], content[:-9] + b"x" + content[-8:], content[:20] + b"\xff" * 8 + content[28:]):
        state.write_bytes(damaged)
        with pytest.raises(ArgumentError, match="as it was written"):
            read_tree(state)
    state.write_bytes(content)
    kek.write_bytes(bytes(32))
    with pytest.raises(ArgumentError, match="to be the wrapping key"):
        read_tree(state)
    monkeypatch.delenv("HUSHGRAD_KEK")
    with pytest.raises(ArgumentError, match="HUSHGRAD_KEK to be set"):
        read_tree(state)


def test_a_missing_keyring_is_one_sentence(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "keyring", None)
    monkeypatch.setenv("HUSHGRAD_KEK", "keyring:hushgrad")
    with pytest.raises(ArgumentError, match="pip install keyring"):
        encryption.wrapping_key()


def test_a_sealed_file_that_says_it_is_empty_shows_it():
    """Without a piece there was no tag, and whoever had no key could put it in the place of any other."""
    head = encryption.seal(b"", bytes(32))
    assert encryption.unseal(head, "state", bytes(32)) == b""
    for forged in (head[:-28], encryption.seal(b"content", bytes(32))[:18] + bytes(8), encryption.seal(b"", bytes([1]) * 32)):
        with pytest.raises(ArgumentError, match="wrapping key"):
            encryption.unseal(forged, "state", bytes(32))
