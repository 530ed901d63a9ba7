"""What was built, installed as a user would, into fresh environments: does every command answer? ``make dist`` and ``make installs``.

An environment is a Python, a file (a wheel or a source archive) and an extra; it is removed when it has been tried. A command answers if
it does what it was asked, or, where a package is missing, if it says so in one sentence that names what to install; a traceback never is
an answer. A wheel is installed without a compiler.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BARE = "without torch"
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
steps = 10
"""
CODEBOOK = """
kind = "table"
classes = ["no", "yes"]
label = "y"
[columns]
x0 = { low = -3.0, high = 3.0, bins = 4 }
x1 = { low = -3.0, high = 3.0, bins = 4 }
"""
_PATIENCE = 600  # seconds for one command
PICTURE = "P2 8 8 255 " + "7 " * 64  # a portable grey map


class Call(NamedTuple):
    """A line of a shell (or a program, for what has no command), and the packages or extras without which it is refused."""

    line: str
    needs: tuple[str, ...] = ()
    long: bool = False  # left out by --short


COMMANDS = (
    Call("hushgrad --version"),
    Call("hushgrad epsilon --noise-multiplier 1.1 --rate 0.01 --steps 100 --delta 1e-5"),
    Call("hushgrad epsilon --noise-multiplier 1 --delta 1e-5 --plot curve.png", ("report",)),
    Call("hushgrad crosscheck --noise-multiplier 1.1 --rate 0.01 --steps 100 --delta 1e-5"),
    Call("hushgrad calibrate --epsilon 3 --delta 1e-5 --rate 0.01 --steps 100"),
    Call("hushgrad plan --epsilon 3 --delta 1e-4 --dataset-size 320 --batch-size 64 --steps 20 --save plan.json"),
    Call("hushgrad advise codebook.toml --records 320 --epsilon 3 --delta 1e-4", ("torch",), long=True),
    Call("hushgrad ledger init budget.db"),
    Call("hushgrad ledger add budget.db people --epsilon 9 --delta 1e-3 --records 320"),
    Call("hushgrad train recipe.toml --out run --quiet", ("torch",)),
    Call("hushgrad ledger status budget.db"),
    Call("hushgrad predict run new.csv --out predictions.csv", ("run",)),
    Call("hushgrad evaluate run people.csv", ("run",), long=True),
    Call("hushgrad export run model.pt2", ("run",), long=True),
    Call("hushgrad export run model.onnx", ("run", "onnx")),
    Call("hushgrad tune recipe.toml --over optimizer.lr=0.5,1 --mean 2 --out best", ("torch",), long=True),
    Call("hushgrad audit run --quiet", ("run",), long=True),
    Call("hushgrad report run", ("run",)),
    Call("hushgrad report run --html card.html", ("run",)),  # jinja2 comes with torch
    Call("hushgrad compare run run", ("run",)),
    Call("hushgrad train recipe.toml --out paid --quiet --ledger budget.db --dataset people", ("torch",), long=True),
    Call("hushgrad release paid --ledger budget.db", ("run",), long=True),
    Call("hushgrad key status run", ("run",)),
    Call("hushgrad doctor --seconds 0.5", ("torch",), long=True),
    Call("hushgrad serve . --port 0", ("serve",)),
    Call("hushgrad completion bash"),
    Call("hushgrad reproduce --list"),
)
IMPORTS = {
    "sklearn": "import hushgrad; hushgrad.estimators.DPLogisticRegression(epsilon=1.0, delta=1e-6, data_norm=4.0).fit([[1.0]], [1])",
    "ledger-postgresql": "from hushgrad.budget import Ledger; Ledger('postgresql://me@127.0.0.1:1/x')",
    "hf": "from hushgrad.integrations.huggingface import PrivateTrainer",
    "trl": "from hushgrad.integrations.trl import PrivateSFTTrainer",
    "lightning": "from hushgrad.integrations.lightning import PrivateFit",
    "federated": "import hushgrad.federated",
    "tensorboard": "from hushgrad.train.callbacks import TensorBoard; TensorBoard('logs')",
    "images": "from hushgrad.recipes.images import _opened; _opened('x.pgm')",
}


def extras() -> list[str]:
    """Those of pyproject.toml that users install."""
    text = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("[project.scripts]")[0]
    return [name for name in re.findall(r"^([a-z-]+) = \[", text, re.MULTILINE) if name not in ("docs", "dev")]


def install(place: Path, python: str, file: Path, extra: str, bounds: list[str]) -> str:
    """Make the environment; what went wrong, if anything did."""
    uv, compiler = [sys.executable, "-m", "uv"], {} if file.name.endswith(".gz") else {"CC": "/bin/false"}
    target = [*uv, "pip", "install", "-q", "--compile-bytecode", "-p", place / "bin" / "python"]
    wanted = f"{file}[{extra}]" if extra and extra != BARE else str(file)
    steps = [[*uv, "venv", "-q", "--clear", "-p", python, place]]
    if extra == BARE:
        text = (ROOT / "pyproject.toml").read_text().partition("\ndependencies = [")[2].partition("\n]")[0]
        others = [word for word in re.findall(r'"([^"]+)"', text) if not word.startswith("torch")]
        steps += [[*target, *others], [*target, "--no-deps", wanted]]
    else:
        steps += [[*target, *bounds, wanted]]
    for step in steps:
        done = subprocess.run([str(word) for word in step], env={**os.environ, **compiler}, capture_output=True, text=True)
        if done.returncode:
            return done.stderr.strip()[-400:]
    return ""


def prepare(folder: Path) -> None:
    """The files that the commands read."""
    rows = [f"{(i * 37 % 61) / 20 - 1.5:.2f},{(i * 53 % 47) / 15 - 1.5:.2f}" for i in range(320)]
    people = "\n".join(f"{row},{'yes' if float(row.split(',')[0]) > 0 else 'no'}" for row in rows)
    (folder / "people.csv").write_text(f"x0,x1,y\n{people}\n")
    (folder / "new.csv").write_text("\n".join(["x0,x1", *rows[:20]]) + "\n")
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "codebook.toml").write_text(CODEBOOK)
    (folder / "x.pgm").write_text(PICTURE)


def ask(words: list[str], folder: Path, environment: dict[str, str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr; a server is interrupted as soon as it has named its address."""
    if "serve" not in words or "--help" in words:
        try:
            done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            return 124, "", f"no answer within {_PATIENCE} s"
        return done.returncode, done.stdout, done.stderr
    with subprocess.Popen(words, cwd=folder, env=environment, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        told = next((line for line in process.stdout if "http://" in line), "")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    return (0 if told else process.returncode), told + out, err


def wrong(answer: tuple[int, str, str], missing: list[str]) -> str:
    """What is wrong with an answer, "" if nothing is."""
    code, out, err = answer
    if "Traceback" in out + err:
        return "traceback: " + err.strip().splitlines()[-1]
    if not missing:
        return "" if code == 0 else f"exit code {code}: {err.strip()[-300:]}"
    named = ["pip install torch" if name == "torch" else f"pip install 'hushgrad[{name}]'" for name in missing]
    named = ["Expected", "holds no", "no model file"] if "run" in missing else named  # a folder that no command here could write
    said = code == 2 and len(err.strip().splitlines()) == 1 and any(name in err for name in named)
    return "" if said else f"exit code {code}, not one sentence with {' or '.join(named)}: {err.strip()[-300:]}"


def asked(call: Call, extra: str, short: bool) -> bool:
    """Without an extra everything is; with one every --help, and what the extra is for, after a run that it may need."""
    if extra in ("", BARE):
        return not (short and call.long)
    used = {name for other in COMMANDS if extra in other.needs for name in other.needs}
    return (
        "--help" in call.line
        or extra in call.needs
        or ("run" in used and "hushgrad train" in call.line and "--ledger" not in call.line)
    )


def programs(place: Path, extra: str, folder: Path, environment: dict[str, str], server: str) -> list[str]:
    """What has no command: the extra is used as its page says, or, in the core, each one that is missing is answered by name."""
    from uses import SERVER, USES

    found = []
    used = {**USES, **({"ledger-postgresql": SERVER.format(url=server)} if server else {})}
    if extra in used:
        code, _, err = ask([str(place / "bin" / "python"), "-c", used[extra]], folder, environment)
        found += [f"{extra}: {err.strip()[-300:]}"] if code else []
    for name, program in IMPORTS.items() if not extra else ():
        _, _, err = ask([str(place / "bin" / "python"), "-c", program], folder, environment)
        if f"pip install 'hushgrad[{name}]'" not in err:
            found.append(f"{name}: not answered by its name: {err.strip()[-300:]}")
    return found


def tried(place: Path, extra: str, short: bool, server: str = "") -> list[str]:
    """Every command in this environment; what was wrong."""
    here = {"torch", "run"} if extra != BARE else set()
    here |= {extra} | ({"report"} if extra == "serve" else set()) | ({"hf"} if extra == "trl" else set())
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "HUSHGRAD"))}
    environment |= {"PATH": f"{place / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "CC": "/bin/false"}
    listed = subprocess.run([place / "bin" / "hushgrad"], capture_output=True, text=True).stdout
    names = re.findall(r"^  ([a-z]+) ", listed.partition("commands:")[2].partition("options:")[0], re.MULTILINE)
    calls = [Call(f"hushgrad {name} --help") for name in names] + list(COMMANDS)
    found = [] if len(names) >= 20 else ["hushgrad --help lists no commands"]
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for line, needs, _ in (call for call in calls if asked(call, extra, short)):
            missing = [name for name in needs if name not in here]
            trouble = wrong(ask([str(place / "bin" / "hushgrad"), *line.split()[1:]], Path(folder), environment), missing)
            found += [f"{line}: {trouble}"] if trouble else []
        found += programs(place, extra, Path(folder), environment, server)
    return found


def kernels(place: Path) -> list[str]:
    """The compiled kernels are there, whatever the Python."""
    program = "import sys; from hushgrad import native; sys.exit(not (native.EXACT and native.CONTRACTED))"
    done = subprocess.run([place / "bin" / "python", "-c", program], capture_output=True, text=True, cwd=place)
    return [] if done.returncode == 0 else [f"no kernels: {done.stderr.strip()[-200:]}"]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="wheels and source archives")
    parser.add_argument("--python", nargs="*", default=[sys.executable], help="versions or paths")
    parser.add_argument("--extra", nargs="*", default=[""], help=f"'' for none, '{BARE}', names, or 'all' of these")
    parser.add_argument("--newest", action="store_true", help="the newest packages, not those of constraints.txt")
    parser.add_argument("--short", action="store_true", help="leave out what takes long: doctor, audit, tune, export")
    parser.add_argument("--postgresql", default="", help="the URL of an empty server that the ledger is tried on")
    options = parser.parse_args()
    bounds = [] if options.newest else ["-c", str(ROOT / "constraints.txt")]
    wanted = [*extras()] if options.extra == ["all"] else options.extra
    table, place = [], ROOT / "build" / f"installed-{os.getpid()}"
    for python in options.python:
        for file, extra in ((file.resolve(), extra) for file in options.files for extra in wanted):
            trouble = install(place, python, file, extra, bounds)
            found = (
                [f"not installed: {trouble}"]
                if trouble
                else kernels(place) + tried(place, extra, options.short, options.postgresql)
            )
            shutil.rmtree(place, ignore_errors=True)
            table.append(
                f"| {python} | {file.name} | {extra or 'core'} | {'; '.join(found).replace(chr(10), ' ') or 'every command answers'} |"
            )
            print(table[-1], flush=True)
    return 0 if all("every command answers" in row for row in table) else 1


if __name__ == "__main__":
    sys.exit(main())
