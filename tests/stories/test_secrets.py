"""What must not get out does not: no key in anything that a run writes or says, and no word to the network."""

from __future__ import annotations

import base64
import json
import os
import stat
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest
from patience import HANGS

import hushgrad.recipes.session as session
from hushgrad.cli.main import COMMANDS, main
from hushgrad.release.keys import RunKey

KEY = bytes(range(100, 132))


def _spellings(secret: bytes) -> list[bytes]:
    """The ways in which 32 bytes get into a file or a log."""
    text = [
        secret.hex(),
        secret.hex().upper(),
        base64.b64encode(secret).decode().rstrip("="),
        repr(secret)[2:-1],
        str([*secret])[1:-1],
    ]
    return [secret, secret[::-1], *(spelling.encode() for spelling in text), str([*secret])[1:-1].replace(" ", "").encode()]


def _leaks(content: bytes) -> list[str]:
    key = RunKey(KEY)
    secrets = {"key": key.secret, "sampling key": key.sampling}
    return [name for name, secret in secrets.items() if any(spelling in content for spelling in _spellings(secret))]


def _train(folder: Path, *more: str) -> int:
    options = ["--set", "plan.steps=12", "--set", "run.checkpoint_every=3", "--set", "run.evaluate_every=4", *more]
    return main(["train", "--out", str(folder), *options])


@pytest.fixture
def known_key(monkeypatch):
    monkeypatch.setattr(RunKey, "make", classmethod(lambda cls, key=None, seed=None: cls(KEY, fresh=True)))


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_no_artefact_of_a_run_holds_its_key(tmp_path, known_key, capfd, monkeypatch):
    held: dict[str, bytes] = {}
    destroy = session.destroy

    def look_first(path):  # the checkpoint just before a finished run erases it
        held.update(_files(Path(path) / "checkpoint"))
        assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in (Path(path) / "checkpoint").iterdir())
        destroy(path)

    monkeypatch.setattr(session, "destroy", look_first)
    table = {"model": {"name": "logistic"}, "data": {"name": "digits"}, "plan": {"method": "dpftrl", "noise": "BLT", "epochs": 2}}
    table["run"] = {"checkpoint_every": 4}
    table["plan"] |= {"epsilon": 8.0, "delta": 1e-4, "batch_size": 200}
    recipe = tmp_path / "recipe.py"
    recipe.write_text(f"recipe = {table!r}")
    folder = tmp_path / "run"
    assert main(["train", str(recipe), "--out", str(folder)]) == 0
    assert main(["report", str(folder), "--raw"]) == 0 and main(["report", str(folder), "--json"]) == 0
    said = "".join(capfd.readouterr()).encode()

    assert _leaks(held.pop("key.json")) == ["key"]  # the search finds it where it is
    everything = {
        **_files(folder),
        **_files(tmp_path),
        **{f"checkpoint/{name}": data for name, data in held.items()},
        "said": said,
    }
    assert "checkpoint/state.safetensors" in everything and len(everything) > 8
    assert {name: _leaks(content) for name, content in everything.items() if _leaks(content)} == {}


def test_errors_and_representations_do_not_show_the_key(tmp_path, known_key, monkeypatch, capfd):
    monkeypatch.setattr(session, "run_steps", lambda private, *_, **__: (_ for _ in ()).throw(RuntimeError(repr(private))))
    with pytest.raises(RuntimeError) as failure:
        _train(tmp_path / "run", "--quiet")
    import traceback

    shown = "".join(traceback.TracebackException.from_exception(failure.value, capture_locals=True).format())
    assert not _leaks((shown + "".join(capfd.readouterr())).encode())


def test_no_command_takes_a_key_as_an_argument(capsys):
    """What stands in a command line is seen by every user of the machine."""
    for name in COMMANDS:
        with suppress(SystemExit):  # argparse ends a command's help so
            main([name, "--help"])
        text = capsys.readouterr().out
        assert "--help" in text and f"hushgrad {name}" in text
        options = [word.strip(",[]") for word in text.split() if word.startswith(("--", "[--"))]
        assert not [option for option in options if "key" in option or "secret" in option], name


OFFLINE = textwrap.dedent(
    """
    import socket, sys
    def refuse(*args, **options):
        raise SystemExit(f"network access: {args[1:] or args}")
    socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = socket.create_connection = refuse
    import json
    from hushgrad.cli.main import main
    for words in json.loads(sys.argv[1]):
        code = main(words)
        assert code == 0, (words, code)
    """
)


def _offline(commands: list[list[str]]) -> None:
    words = [sys.executable, "-c", OFFLINE, json.dumps(commands)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANGS, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]


def test_commands_need_no_network(tmp_path):
    _offline(
        [
            ["epsilon", "--noise-multiplier", "1.1", "--rate", "0.01", "--steps", "1000", "--delta", "1e-5"],
            ["train", "--out", str(tmp_path / "run"), "--quiet", "--set", "plan.steps=5"],
            ["report", str(tmp_path / "run")],
            ["reproduce", "tree", "--quick", "--out", str(tmp_path / "tree")],
        ]
    )


@pytest.mark.slow
def test_the_whole_quick_set_needs_no_network(tmp_path):
    _offline([["reproduce", "--all", "--quick", "--out", str(tmp_path)]])
