"""A signed card: whatever is changed in it, exchanged or cut, is refused by name."""

from __future__ import annotations

import base64
import copy
import dataclasses
import json
import random
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hushgrad.cli.main import main
from hushgrad.errors import ArgumentError
from hushgrad.recipes import Recipe, train
from hushgrad.report import new_signing_key, privacy_card, sign, verify

TABLES = {
    "model": {"name": "logistic"},
    "data": {"name": "digits"},
    "plan": {"noise_multiplier": 2.0, "delta": 1e-4, "batch_size": 128, "steps": 6},
    "run": {"threads": 1},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "digits"
    train(Recipe.from_tables(TABLES), out, progress=False)
    return out


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "officer.key"
    new_signing_key(path)
    return path


@pytest.fixture(scope="module")
def signed(run: Path, key: Path) -> dict[str, Any]:
    return sign(privacy_card(run), key, by="P. Officer")


def written(content: Any, folder: Path) -> Path:
    path = folder / "card.json"
    path.write_text(json.dumps(content, indent=1))
    return path


def leaves(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    found = False
    for name, value in items:
        found = True
        yield from leaves(value, (*path, name))
    if not found:
        yield path


def changed(content: dict[str, Any], path: tuple[Any, ...], drop: bool) -> dict[str, Any]:
    other = copy.deepcopy(content)
    place = other
    for name in path[:-1]:
        place = place[name]
    if drop:
        del place[path[-1]]
    else:
        old = place[path[-1]]
        place[path[-1]] = old + 1 if isinstance(old, (int, float)) and not isinstance(old, bool) else f"{old}x"
    return other


def test_a_signed_card_is_verified_with_its_model(run, key, signed, tmp_path):
    found = verify(written(signed, tmp_path), model=run / "model.safetensors", signer=f"{key}.pub")
    assert found.trusted and found.model and found.by == "P. Officer" and found.guarantee == privacy_card(run).guarantee
    assert "P. Officer" in str(found)
    assert signed["provenance"]["data"] == "digits" and signed["provenance"]["records"].startswith("about")


def test_every_change_of_a_signed_card_is_refused(signed, tmp_path):
    paths = list(leaves(signed))
    picked = random.Random(5).sample(paths, 60)
    for path in [*picked, ("guarantee", "epsilon"), ("provenance", "model_sha256"), ("signed_by",), ("signer",), ("signature",)]:
        for drop in (False, True):
            with pytest.raises(ArgumentError):
                verify(written(changed(signed, path, drop), tmp_path))


def test_an_unsigned_card_must_still_add_up(run, tmp_path):
    path = tmp_path / "card.json"
    assert main(["report", str(run), "--save", str(path)]) == 0
    content = json.loads(path.read_text())
    assert verify(path).signer == "" and "anybody can have written it" in str(verify(path))
    content["guarantee"]["epsilon"] /= 2
    with pytest.raises(ArgumentError, match="its claim or its plan was changed"):
        verify(written(content, tmp_path))
    from hushgrad.guarantee import Guarantee

    content["claim"] = str(Guarantee.from_json(content["guarantee"]))
    with pytest.raises(ArgumentError, match="its event's cost"):
        verify(written(content, tmp_path))


def test_another_model_another_signer_and_no_signature_are_told_apart(run, key, signed, tmp_path):
    path, other = written(signed, tmp_path), tmp_path / "model.safetensors"
    content = bytearray((run / "model.safetensors").read_bytes())
    content[-1] ^= 1
    other.write_bytes(content)
    with pytest.raises(ArgumentError, match="its SHA-256 is another one"):
        verify(path, model=other)
    new_signing_key(tmp_path / "stranger.key")
    with pytest.raises(ArgumentError, match="by another key"):
        verify(path, signer=tmp_path / "stranger.key.pub")
    bare = {name: value for name, value in signed.items() if name not in ("signature", "signer", "signed_by")}
    with pytest.raises(ArgumentError, match="by nobody"):
        verify(written(bare, tmp_path), signer=f"{key}.pub")
    resigned = sign(privacy_card(run), tmp_path / "stranger.key", by="P. Officer")  # the name can be copied, the key not
    with pytest.raises(ArgumentError, match="by another key"):
        verify(written(resigned, tmp_path), signer=f"{key}.pub")


def test_keys_are_secret_and_never_overwritten(key, tmp_path, capsys):
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    with pytest.raises(ArgumentError, match="never overwritten"):
        new_signing_key(key)
    (tmp_path / "torn.key").write_text(key.read_text()[:60])
    for broken in ("torn.key", "missing.key"):
        assert main(["report", str(tmp_path), "--verify", "x", "--signer", str(tmp_path / broken)]) == 1
        assert "NOT VERIFIED" in capsys.readouterr().out


def test_the_command_from_key_to_verdict(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, "run")
    assert main(["report", "--new-signer", "me.key"]) == 0
    assert main(["report", "run", "--sign", "me.key", "--by", "me", "--save", "card.json"]) == 0
    assert main(["report", "--verify", "card.json", "run/model.safetensors", "--signer", "me.key.pub", "--json"]) == 0
    assert '"trusted": true' in capsys.readouterr().out
    assert main(["report", "--verify", "card.json", "me.key"]) == 1
    assert main(["report", "run", "--sign", "me.key"]) == 2 and "--save" in capsys.readouterr().err
    assert main(["report"]) == 2 and "Which run?" in capsys.readouterr().err


def test_a_card_names_its_data_who_ran_it_and_what_it_rests_on(tmp_path):
    tables = {**TABLES, "data": {**TABLES["data"], "identity": "digits, 1998"}, "run": {"threads": 1, "by": "R. O'Hara"}}
    tables["plan"] = {**TABLES["plan"], "certified": True, "dataset_size": 1500}
    train(Recipe.from_tables(tables), tmp_path / "run", progress=False)
    card = privacy_card(tmp_path / "run")
    known = card.provenance
    assert (known["data"], known["identity"], known["records"], known["by"]) == ("digits", "digits, 1998", "1500", "R. O'Hara")
    assert card.to_json()["kappa"] == 1e-4 and "kappa = 0.0001, counted" in card.to_markdown()
    vouched = dataclasses.replace(card.guarantee, notes=("The loss is vouched for by the user",))
    assert "| The loss is vouched for by the user. |" in dataclasses.replace(card, guarantee=vouched).to_markdown()


def test_nobody_signs_for_a_model_that_was_exchanged(run, key, tmp_path):
    copy_of = shutil.copytree(run, tmp_path / "run")
    model = copy_of / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"x")
    words = ["report", str(copy_of), "--sign", str(key), "--save", str(tmp_path / "c.json")]
    assert main(words) == 2 and not (tmp_path / "c.json").exists()


def test_a_card_that_says_a_thing_twice_is_refused(signed, tmp_path):
    text = json.dumps(signed)
    (tmp_path / "twice.json").write_text('{"claim": "(0.1, 1e-9)-DP", ' + text[1:])  # whoever reads the first one is deceived
    with pytest.raises(ArgumentError, match="twice"):
        verify(tmp_path / "twice.json")


@pytest.mark.parametrize(
    "file, change",
    [
        ("guarantee.json", lambda content: {**content, "notes": ["Nobody vouches for anything"]}),
        ("recipe.json", lambda content: {**content, "data": {"name": "digits", "identity": "public data"}}),
        ("recipe.json", lambda content: {**content, "plan": {**content["plan"], "dataset_size": 10**9}}),
        ("report.json", lambda content: {**content, "model_sha256": "0" * 64}),
    ],
    ids=["notes", "identity", "records", "model"],
)
def test_nobody_signs_for_a_folder_in_which_one_file_was_changed(run, tmp_path, file, change):
    folder = shutil.copytree(run, tmp_path / "run")
    privacy_card(folder)
    (folder / file).write_text(json.dumps(change(json.loads((folder / file).read_text()))))
    with pytest.raises(ArgumentError, match=r"changed|another one"):
        privacy_card(folder)


def test_the_folder_of_a_run_names_its_model(run, key, signed, tmp_path):
    assert verify(written(signed, tmp_path), model=run).model
    with pytest.raises(ArgumentError, match="or the run's folder"):
        verify(written(signed, tmp_path), model=tmp_path)


def test_keys_of_every_other_kind_are_refused_in_a_sentence(tmp_path):
    """The last byte of the algorithm's number says which curve it is; a key of Ed25519's length is too short for some."""
    path = tmp_path / "officer.key"
    new_signing_key(path)
    lines = path.read_text().splitlines()
    content = base64.b64decode("".join(lines[1:-1]))
    at = content.index(bytes.fromhex("06032b6570")) + 4
    for kind in set(range(256)) - {0x70}:
        other = base64.b64encode(content[:at] + bytes([kind]) + content[at + 1 :]).decode()
        path.write_text("\n".join([lines[0], other, lines[-1], ""]))
        with pytest.raises(ArgumentError, match="key"):
            sign(None, path)


def test_a_key_file_with_a_flipped_bit_never_signs(run, key, tmp_path):
    """Most flipped bits make another key that signs as well as any: the public half beside it tells."""
    bad = Path(shutil.copyfile(key, tmp_path / "officer.key"))
    shutil.copyfile(f"{key}.pub", f"{bad}.pub")
    card, whole, halves = privacy_card(run), key.read_bytes(), 0
    for place in range(0, len(whole), 3):
        bad.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            content = sign(card, bad)
        except ArgumentError as error:
            assert "officer.key" in str(error) and "changed" in str(error)
            halves += "halves of one key" in str(error)
        else:  # a bit that PEM does not read, such as its last one
            assert verify(written(content, tmp_path), signer=f"{key}.pub").trusted
    assert halves >= 5
