"""A package that is not installed is answered by the name of its extra, and every command answers without any extra."""

from __future__ import annotations

import ast
import importlib.util
import io
import os
import runpy
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
from patience import HANGS, wait_until

from hushgrad.cli import _waiting
from hushgrad.cli._parser import table
from hushgrad.cli.completion import SHELLS, words_of
from hushgrad.cli.main import COMMANDS, main

# What needs a package, the packages that are hidden, and the extra that the answer names.
NEEDS = [
    ("import hushgrad.estimators", ["sklearn"], "hushgrad[sklearn]"),
    ("import hushgrad.federated", ["flwr"], "hushgrad[federated]"),
    ("import hushgrad.integrations.huggingface", ["transformers"], "hushgrad[hf]"),
    ("import hushgrad.integrations.lightning", ["lightning"], "hushgrad[lightning]"),
    ("import hushgrad.integrations.trl", ["trl"], "hushgrad[trl]"),
    ("from hushgrad.serve import Settings, create_app; create_app(Settings())", ["fastapi"], "hushgrad[serve]"),
    ("from hushgrad.cli.main import main; sys.exit(main(['serve']))", ["uvicorn"], "hushgrad[serve]"),
    ("from hushgrad.budget import Ledger; Ledger('postgresql://me@nowhere/x')", ["sqlalchemy"], "hushgrad[ledger-postgresql]"),
    ("from hushgrad.recipes.images import _opened; _opened('x.png')", ["PIL"], "hushgrad[images]"),
    (
        "from hushgrad.cli.main import main; sys.exit(main(['epsilon', '--noise-multiplier', '1', '--delta', '1e-5', '--plot', 'x.png']))",
        ["matplotlib"],
        "hushgrad[report]",
    ),
    (
        "from hushgrad.train.callbacks import TensorBoard; TensorBoard('x')",
        ["tensorboard"],
        "hushgrad[tensorboard]",
    ),
]
PROGRAM = """
import importlib.abc, sys
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in HIDDEN or name.split(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None
sys.meta_path.insert(0, Hidden())
CODES = {codes!r}
for HIDDEN, code in CODES:
    for name in [n for n in sys.modules if n in HIDDEN or n.split(".")[0] in HIDDEN]:
        del sys.modules[name]
    try:
        exec(code)
        print("NOTHING")
    except SystemExit:
        sys.stderr.flush()
    except Exception as error:
        print(str(error).replace("\\n", " "), file=sys.stderr)
"""


def test_a_missing_package_is_answered_by_its_extra():
    wanted = [(hidden, code) for code, hidden, _ in NEEDS]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM.replace("{codes!r}", repr(wanted))],
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    answers = done.stderr.strip().splitlines()
    assert "NOTHING" not in done.stdout and len(answers) == len(NEEDS), done.stderr
    for (code, _, extra), answer in zip(NEEDS, answers, strict=True):
        assert f"pip install '{extra}'" in answer, (code, answer)


def test_shells_complete_every_command_and_option(capsys):
    for shell in SHELLS:
        assert main(["completion", shell]) == 0
        script = capsys.readouterr().out
        for command in COMMANDS:
            assert command in script
            for word in chain(*words_of(command)):
                assert word.removeprefix("--") in script


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("predict --pr", "--probabilities"),
        ("ledger ap", "approve"),
        ("ledger add budget.db people --eps", "--epsilon"),
        ("key d", "destroy"),
        ("completion ''", "bash fish zsh"),
        ("train ''", ""),  # files, as anywhere in a shell
        ("ledger add ''", ""),
    ],
)
def test_a_shell_completes_what_was_typed(typed, offered, capsys):
    main(["completion", "bash"])
    asked = f"COMP_WORDS=(hushgrad {typed}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _hushgrad; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", capsys.readouterr().out + asked], capture_output=True, text=True)
    assert done.stdout.strip() == offered


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command, capsys):
    try:
        code = main([command, "--help"])
    except SystemExit as ended:
        code = ended.code
    out = capsys.readouterr().out
    assert code == 0 and "example:" in out and f"hushgrad {command}" in out


def test_the_install_page_names_every_extra():
    root = Path(__file__).parents[2]
    page = (root / "docs" / "install.md").read_text()
    declared = (
        (root / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("[project.scripts]")[0]
    )
    names = [line.partition(" = ")[0] for line in declared.splitlines() if " = [" in line and not line.startswith(" ")]
    assert [name for name in names if name not in ("docs", "dev") and f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    "words",
    [
        ["export", "run", "no/such/m.pt2"],
        ["doctor", "--out", "no/such/d.json"],
        ["doctor", "--seconds", "-1"],
        ["predict", "run", "x.csv", "--out", "no/such/p.csv"],
        ["plan", "--epsilon", "3", "--delta", "1e-5", "--dataset-size", "100", "--epochs", "1", "--save", "no/such/p.json"],
        ["release", "run", "--ledger", "b.db", "--out", "no/such/m.safetensors"],
        ["epsilon", "--noise-multiplier", "1", "--delta", "1e-5", "--plot", "no/such/x.png"],
        ["audit", "run", "--plot", "no/such/x.png"],
        ["export", "run", "folder.pt2"],
        ["predict", "run", "x.csv", "--out", "folder.pt2"],
        ["doctor", "--out", "read-only.json"],
        ["export", "run", "read-only.pt2"],
    ],
    ids=lambda words: f"{words[0]} {words[-2]}",
)
def test_what_cannot_be_written_is_said_before_the_work(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder.pt2").mkdir()
    monkeypatch.setattr(
        os, "access", lambda path, _: path != tmp_path
    )  # the folder itself is read-only, which root would not notice
    for command in ("doctor", "plan"):  # no machine is examined, no mechanism ranked
        monkeypatch.setattr(f"hushgrad.cli.{command}.waiting", None)
    assert main(words) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "words, match",
    [
        (["train", "r.toml", "--out", "o", "--set", "optimizer.lr=fast"], "Expected lr='fast' to be a number"),
        (["train", "semi.toml", "--out", "o"], "Is it separated otherwise"),
        (["train", "r.toml", "--out", "o", "--plan", "r.toml"], "Expected r.toml to be a plan. hushgrad plan --save"),
        (["audit", "r.toml"], "r.toml holds no plan. Give the --out of hushgrad train"),
        (["train", "semi.csv", "--out", "o"], "A recipe is a small file that names the data"),
    ],
    ids=["word", "delimiter", "plan", "audit", "csv"],
)
def test_a_mistake_is_one_sentence_with_a_remedy(words, match, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = "plan = {noise_multiplier = 1.0, delta = 1e-4, batch_size = 2, steps = 2}\n"
    Path("r.toml").write_text('model = {name = "logistic"}\ndata = {name = "digits"}\n' + plan)
    Path("semi.toml").write_text(
        'model = {name = "logistic"}\ndata = {name = "csv", path = "semi.csv", label = "y", classes = ["a", "b"]}\n' + plan
    )
    Path("semi.csv").write_text("x;y\n1;a\n2;b\n")
    assert main(words) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and match in told[0]


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_what_takes_longer_than_a_second_says_so_on_a_terminal_and_nowhere_else(monkeypatch):
    monkeypatch.setattr(_waiting, "_PATIENCE", 0.01)
    for stream in (_Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        with pytest.raises(KeyboardInterrupt), _waiting.waiting("Ranking"):
            wait_until(lambda stream=stream: not stream.isatty() or "Ranking ... 0 s" in stream.getvalue())
            raise KeyboardInterrupt  # Ctrl-C leaves a clean line, too
        assert stream.getvalue().endswith("\r\x1b[K") if stream.isatty() else stream.getvalue() == ""


def test_no_message_shows_the_number_of_an_error():
    """Whoever words an error of the operating system takes :func:`hushgrad._printed.reason`: no ``[Errno 2]``."""
    found, src = [], Path(__file__).parents[2] / "src" / "hushgrad"
    for file in sorted(set(src.rglob("*.py")) - set((src / "native").rglob("*.py"))):  # native imports nothing
        for handler in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ExceptHandler)):
            caught = (
                {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(handler.type)} if handler.type else set()
            )
            if caught & {"OSError", "FileNotFoundError", "PermissionError", "IsADirectoryError", "NotADirectoryError"}:
                shown = [node.value for node in ast.walk(handler) if isinstance(node, ast.FormattedValue)]
                found += [
                    f"{file.name}:{node.lineno}" for node in shown if isinstance(node, ast.Name) and node.id == handler.name
                ]
    assert found == []


def test_a_file_that_is_not_there_is_named_without_a_number(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("r.toml").write_text(
        'model = {name = "logistic"}\ndata = {name = "csv", label = "y", classes = ["a", "b"]}\n'
        "plan = {noise_multiplier = 1.0, delta = 1e-4, batch_size = 2, steps = 2}\n"
    )
    assert main(["train", "r.toml", "--data", "nope.csv", "--out", "o"]) == 2
    told = capsys.readouterr().err
    assert "nope.csv" in told and "No such file or directory" in told and "Errno" not in told


ROWS = [("", "first run", "second run"), ("protected", "one example, add/remove one", "one user"), ("steps", "120", "")]


def test_a_table_fits_a_narrow_terminal_and_names_its_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert table(ROWS).splitlines()[2].split() == ["steps", "120"]
    for columns in (20, 30, 40):
        monkeypatch.setenv("COLUMNS", str(columns))
        told = table(ROWS)
        assert max(map(len, told.splitlines())) <= columns
        assert "\n  second run: one" in told and told.endswith("steps\n  first run: 120")
    assert table([("ok", "noise", "as it should be, in many words")], headed=False).startswith("ok\n  noise\n")


def test_the_tool_that_tries_installations_asks_every_command_and_believes_no_traceback():
    place = Path(__file__).parents[2] / "docs" / "installed.py"
    spec = importlib.util.spec_from_file_location("installed", place)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert {call.line.split()[1] for call in tool.COMMANDS} >= set(COMMANDS)
    by_command = {name for call in tool.COMMANDS for name in call.needs} - {"torch", "run"}
    by_program = set(runpy.run_path(str(place.with_name("uses.py")))["USES"]) | {"ledger", "ledger-postgresql"}
    assert set(tool.extras()) == by_command | by_program >= set(tool.IMPORTS)
    one = "hushgrad: ONNX files need onnx. Install it with pip install 'hushgrad[onnx]'.\n"
    assert tool.wrong((0, "done", ""), []) == "" and tool.wrong((2, "", one), ["onnx"]) == ""
    for answer, missing in [
        ((0, "", "Traceback (most recent call last):\n  x\nValueError: y"), []),
        ((1, "", "hushgrad: no."), []),
        ((0, "done", ""), ["onnx"]),  # something else than the extra did it
        ((2, "", one), ["serve"]),
        ((2, "", one + one), ["onnx"]),
    ]:
        assert tool.wrong(answer, missing)
