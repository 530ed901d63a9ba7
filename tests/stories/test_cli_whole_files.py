"""What a command was asked to write is whole, or what was there before is untouched; and no full disk ends in a traceback."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forks import ended, forked
from patience import HANGS

from hushgrad.cli.main import COMMANDS, main
from hushgrad.errors import StorageError
from hushgrad.release.atomic import written

PEOPLE = "x0,x1,y\n" + "".join(f"{i % 7 - 3},{i % 5 - 2},{'yes' if i % 7 > 3 else 'no'}\n" for i in range(200))
RECIPE = """
[model]
name = "logistic"
[data]
name = "csv"
path = "people.csv"
label = "y"
classes = ["no", "yes"]
[plan]
noise_multiplier = 2.0
delta = 1e-4
batch_size = 64
steps = 3
"""
WRITERS = {
    "plan": "plan --epsilon 3 --delta 1e-4 --dataset-size 320 --batch-size 64 --steps 5 --save {}",
    "predict": "predict run people.csv --out {}",
    "report": "report run --markdown {}",
    "export": "export run {}.pt2",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run and its data."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "people.csv").write_text(PEOPLE)
    (folder / "recipe.toml").write_text(RECIPE)
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert main(["train", "recipe.toml", "--out", "run", "--quiet"]) == 0
    finally:
        os.chdir(before)
    return folder


def _full_disk() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_cannot_be_finished_leaves_the_old_one(name, folder):
    """No file may grow beyond 100 bytes, as on a disk that is full: one sentence, and nothing but the old files."""
    line = WRITERS[name].format(folder / f"{name}-out")
    Path(line.split()[-1]).write_text("precious")
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    reading, errors = os.pipe()  # which no disk limits
    child = forked(line.split(), Path(f"/dev/fd/{errors}"), folder=folder, before=_full_disk)
    os.close(errors)
    with os.fdopen(reading) as pipe:
        told = pipe.read()
    assert ended(child) == 2, told
    assert told.count("\n") == 1 and "Make room" in told, told
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_what_cannot_be_replaced_is_filled(tmp_path):
    file, link, pipe = tmp_path / "file", tmp_path / "link", tmp_path / "pipe"
    file.write_text("old")
    file.chmod(0o640)
    written(file, "newer")
    assert file.read_text() == "newer" and file.stat().st_mode & 0o777 == 0o640
    link.symlink_to(file)
    written(link, lambda buffer: buffer.write(b"newest"))
    assert link.is_symlink() and file.read_text() == "newest"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True)
    written(pipe, "through")
    assert reader.communicate(timeout=HANGS)[0] == "through" and pipe.is_fifo()
    written("/dev/null", "gone")
    with pytest.raises(StorageError, match=r"Expected to be able to write '/dev/full': No space left on device.*Make room"):
        written("/dev/full", "x" * 10)


def test_no_command_writes_a_user_s_file_in_place():
    """Sources of the commands, and of what they hand a path to: only ``written`` and ``replacing`` open it."""
    source = Path(__file__).parents[2] / "src" / "hushgrad"
    files = [*(source / "cli").glob("*.py"), source / "recipes" / "predict.py", source / "audit" / "report.py"]
    for file in files:
        for line in file.read_text().splitlines():
            direct = any(word in line for word in (".write_text(", ".write_bytes(", " open(", "copyfile(", "savefig("))
            assert not direct or "new" in line or "buffer" in line or '"rb"' in line, (file, line)


@pytest.mark.parametrize("ending", ["foo", "txt", "pn"])
def test_the_form_of_a_picture_is_asked_for_before_anything_long(ending, tmp_path, capsys):
    place = str(tmp_path / f"curve.{ending}")
    assert main(["epsilon", "--noise-multiplier", "1", "--delta", "1e-5", "--plot", place]) == 2
    assert main(["audit", str(tmp_path), "--plot", place]) == 2
    told = capsys.readouterr().err
    assert told.count(f"A picture is not saved as .{ending}: let {place} end in .png, .svg or .pdf.") == 2


def test_help_names_its_command_in_either_order(capsys):
    for name in COMMANDS:
        told = []
        for words in (["help", name], [name, "--help"]):
            try:
                code = main(words)
            except SystemExit as end:  # argparse ends so
                code = end.code or 0
            assert code == 0
            told.append(capsys.readouterr().out)
        assert told[0] == told[1] and f"hushgrad {name}" in told[0]
    assert main(["help", "trian"]) == 2 and "Did you mean train?" in capsys.readouterr().err


def test_a_path_that_the_locale_cannot_spell_is_one_sentence(folder):
    recipe = folder / "umlaut.toml"
    recipe.write_text(RECIPE.replace("people.csv", "süß.csv"), encoding="utf-8")
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    program = "import sys; from hushgrad.cli.main import main; sys.exit(main(['train', 'umlaut.toml', '--out', 'umlaut']))"
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and not (folder / "umlaut").exists()
    assert done.stderr == (
        "hushgrad: The locale's encoding, ascii, has no '\\xfc\\xdf', which is in a path. Set PYTHONUTF8=1, or rename it.\n"
    )
