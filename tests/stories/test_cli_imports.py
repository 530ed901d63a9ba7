"""A command imports what it needs and no more: torch alone takes two seconds, so what is arithmetic answers without it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import HANGS

from hushgrad import Plan, denoise
from hushgrad.cli.main import COMMANDS
from hushgrad.recipes import Recipe, train

# A program in which these cannot be imported runs the commands one after the other.
_PROGRAM = """
import sys
for heavy in ("torch", "matplotlib", "sklearn", "transformers", "pandas", "scipy.stats", "scipy.signal", "scipy.optimize"):
    sys.modules[heavy] = None
from hushgrad.cli.main import main
for line in sys.stdin.read().splitlines():
    try:
        code = main(line.split())
    except SystemExit as end:  # of a command's help
        code = end.code
    if code:
        sys.exit(f"{line}: exit code {code}")
    print("answered:", line)
"""
_BUDGET = "--epsilon 3 --delta 1e-5"
_LIGHT = (
    "--help",
    "--version",
    "epsilon --noise-multiplier 1.1 --rate 0.01 --steps 1000 --delta 1e-5",
    f"calibrate {_BUDGET} --rate 0.01 --steps 100",
    f"plan {_BUDGET} --dataset-size 6000 --batch-size 600 --epochs 2 --save plan.json",
    "plan --model gpt2 --processes 1",
    "ledger init budget.db",
    "ledger add budget.db patients --epsilon 3 --delta 1e-6",
    "ledger status budget.db",
    "ledger verify budget.db",
    "report run --save card.json",
    "report run --html card.html",
    "report --verify card.json run/model.safetensors",
    "compare run run",
    "key status run",
    "completion bash",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one finished run."""
    place = tmp_path_factory.mktemp("light")
    plan = {"noise_multiplier": 2.0, "delta": 1e-5, "batch_size": 64, "steps": 2}
    train(
        Recipe.from_tables({"model": {"name": "logistic"}, "data": {"name": "digits"}, "plan": plan}),
        place / "run",
        progress=False,
    )
    return place


SOURCES = Path(__file__).parents[2] / "src"


@pytest.mark.parametrize("lines", [_LIGHT, tuple(f"{name} --help" for name in COMMANDS)], ids=["answers", "help"])
def test_what_is_arithmetic_answers_without_torch(place, lines):
    text = "\n".join(lines)
    environment = {**os.environ, "COLUMNS": "100"}
    program = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(
        program, input=text, cwd=place, env=environment, capture_output=True, text=True, timeout=HANGS, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line for line in done.stdout.splitlines() if line.startswith("answered: ")] == [f"answered: {line}" for line in lines]


def test_a_plan_with_a_denoiser_is_read_by_whoever_has_imported_plans_only():
    program = (
        "from hushgrad.train.plan import Plan; import sys; assert 'torch' not in sys.modules; "
        "text = sys.stdin.read(); plan = Plan.from_json(text); print(type(plan.denoise).__name__, type(plan.clip).__name__)"
    )
    options = {"noise_multiplier": 1.0, "delta": 1e-5, "batch_size": 10, "dataset_size": 100, "steps": 3}
    text = json.dumps(Plan.dpsgd(**options, denoise=denoise.Laplacian(1.0)).to_json())
    done = subprocess.run([sys.executable, "-c", program], input=text, capture_output=True, text=True, timeout=HANGS, check=True)
    assert done.stdout.split() == ["Laplacian", "Flat"]


_WITHOUT = """
import importlib.abc, sys
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
import os
from hushgrad.cli.main import main
for line in sys.stdin.read().splitlines():
    reading, writing = os.pipe()
    child = os.fork()
    if not child:  # each command in a process of its own that has imported nothing else
        os.dup2(writing, 2)
        os._exit(main(line.split()))
    os.close(writing)
    with os.fdopen(reading) as errors:
        print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), errors.read()])
"""
_NO_TORCH = "Install it with pip install torch"
_ANSWERED = {
    "train --out other --quiet": _NO_TORCH,
    "tune --over optimizer.lr=0.1,0.3 --out best": _NO_TORCH,
    "doctor --seconds 1": _NO_TORCH,
    "audit run": _NO_TORCH,
    "predict run records.npy": _NO_TORCH,
    "evaluate run records.npy": _NO_TORCH,
    "export run model.pt2": _NO_TORCH,
    "predict nowhere records.csv": "Expected model='nowhere' to be a model file",
    "predict run nothing.csv": "Expected file='nothing.csv' to be there",
    "evaluate run nothing.csv": "Expected file='nothing.csv' to be there",
    "export . model.pt2": "Expected model='.' to be a model file",
}


def test_a_command_says_in_one_line_that_there_is_no_torch_and_a_wrong_path_before_it(place):
    (place / "records.npy").touch()
    program, text = [sys.executable, "-c", _WITHOUT], "\n".join(_ANSWERED)
    done = subprocess.run(program, input=text, cwd=place, capture_output=True, text=True, timeout=HANGS, check=True)
    answers = [ast.literal_eval(line) for line in done.stdout.splitlines()]
    for (line, said), (code, errors) in zip(_ANSWERED.items(), answers, strict=True):
        assert code == 2 and errors.count("\n") == 1 and said in errors, (line, code, errors)


def test_an_interrupt_while_the_command_itself_is_imported_is_one_word():
    program = """
import importlib.abc, sys
class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "argparse":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
import runpy
runpy.run_module("hushgrad", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANGS, check=False)
    assert (done.returncode, done.stderr) == (130, "Interrupted.\n")
    script = (Path(__file__).parents[2] / "pyproject.toml").read_text().partition("[project.scripts]")[2]
    assert 'hushgrad = "hushgrad.cli:entry"' in script


def test_little_is_imported_before_an_interrupt_is_one_word():
    """Until ``entry`` has begun, Ctrl-C is Python's traceback: what is imported by then takes a few milliseconds."""
    program = "import sys; from hushgrad.cli import entry; print(*sys.modules)"
    told = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, text=True, timeout=HANGS, check=True, cwd=SOURCES
    )
    assert not set(told.stdout.split()) & {
        "collections",
        "contextlib",
        "enum",
        "functools",
        "re",
        "signal",
        "threading",
        "typing",
    }


@pytest.mark.parametrize("heavy", ["torch", "numpy"])
def test_an_interrupt_within_the_import_of_a_c_library_is_one_word(tmp_path, heavy):
    (tmp_path / heavy).mkdir()
    (tmp_path / heavy / "__init__.py").write_text(f"import {heavy}.inner\n")
    (tmp_path / heavy / "inner.py").write_text(
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    while True: pass\n"
        "except KeyboardInterrupt:\n    raise ImportError('cannot load module more than once per process') from None\n"
    )
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from hushgrad.cli import entry; sys.exit(entry())"
    words = ["train", "--out", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=HANGS, check=False)
    assert (done.returncode, done.stderr) == (130, "Interrupted.\n")


def test_a_command_may_multiply_before_its_run_is_made():
    """MKL listens before its first product only, and encoders multiply before there is a run: it is asked when the command starts."""
    program = """
import os, sys
import torch
from hushgrad.cli import entry, main
from hushgrad.train.invariant_sizes import InvariantSizes
def command():
    torch.randn(64, 5) @ torch.randn(5, 1)
    print(os.environ["MKL_CBWR"], len(InvariantSizes.of(torch.nn.Linear(5, 1)).notes), flush=True)
    return 0
main.main = command
for own in (None, "COMPATIBLE"):  # nothing set, and the user's own; each in a process of its own that has not multiplied yet
    child = os.fork()
    if not child:
        if own:
            os.environ["MKL_CBWR"] = own
        os._exit(entry())
    os.waitpid(child, 0)
"""
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HANGS, check=True, env=environment
    )
    assert done.stdout.split() == ["AUTO,STRICT", "0", "COMPATIBLE", "0"]
