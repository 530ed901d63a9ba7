"""Inputs that nobody would write on purpose, fed to everything that reads a file or a command line: ``make fuzz``.

Each target is a function of bytes with a corpus of valid inputs. Mutations of them (bits, cuts, splices, extreme numbers, deep
nesting, other types in the place of a JSON value) go in; what may come out is an answer or one of the house's own errors,
in bounded time and memory. Anything else (a traceback, a hang, a NaN, a file outside its folder) is printed with its input.

    python faults/fuzz.py --seconds 120 --seed 7 --docs docs/reliability.md
    python faults/fuzz.py --engine atheris --only idx        # coverage-guided, where atheris is installed
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import gzip
import io
import json
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import command
import inputs
import readers
import safetensors.torch
import servers
import torch
from table import Row

from hushgrad.cli.main import COMMANDS
from hushgrad.cli.main import main as hushgrad
from hushgrad.errors import HushgradError
from hushgrad.events import Compose, Event, Gaussian, Laplace, Poisson, PureDP, Repeat, Sampled
from hushgrad.guarantee import Guarantee, Ledger
from hushgrad.recipes.data import DATA
from hushgrad.recipes.recipe import Recipe
from hushgrad.recipes.recipe_file import DEMO, load_recipe
from hushgrad.train import Plan
from hushgrad.train.tree import _digest, read_tree, write_tree

_PATIENCE = 30  # seconds of work for one input: far more than any of them needs; ten times that by the clock, for who waits
_MEMORY = 6 << 30
_SCRATCH = Path(tempfile.mkdtemp(prefix="fuzz-"))
atexit.register(shutil.rmtree, _SCRATCH, ignore_errors=True)


@dataclass(frozen=True)
class Target:
    """Something that reads: ``read`` takes the bytes of one input, ``corpus`` are valid ones, ``mutate`` makes others."""

    name: str
    read: Callable[[bytes], Any]
    corpus: tuple[bytes, ...]
    mutate: Callable[[bytes, random.Random], bytes]


class Hang(BaseException):
    """An input took longer than it may."""


# Mutations -----------------------------------------------------------------------------------------------------------------

_NUMBERS: list[Any] = [0, -1, 1, 2**31, 2**63, 10**400, -(10**30), 0.0, -0.0, 1e-320, 1e308, float("inf"), float("nan"), True]
_OTHERS: list[Any] = [None, "", "x", "../../etc/passwd", "\0", "é" * 300, [], {}, [[]], {"event": "Gaussian"}, {"float": "nan"}]


def mutated_bytes(content: bytes, rng: random.Random) -> bytes:
    """Flip, cut, repeat, insert or overwrite with a large number, once or a few times."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        place = rng.randrange(len(data) + 1)
        kind = rng.randrange(5)
        if kind == 0 and data:
            data[min(place, len(data) - 1)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[place : place + rng.choice((1, 4, 100, len(data)))]
        elif kind == 2:
            data[place:place] = rng.randbytes(rng.choice((1, 4, 64)))
        elif kind == 3:
            data[place : place + 4] = struct.pack(">I", rng.choice((0, 1, 2**31, 2**32 - 1)))
        else:
            data[place:place] = data[place : place + 200]
    return bytes(data)


def mutated_json(content: bytes, rng: random.Random) -> bytes:
    """Put another value, or another's value, in the place of one; rename, drop or nest. Sometimes the bytes themselves."""
    if rng.random() < 0.1:
        return mutated_bytes(content, rng)
    try:
        return json.dumps(_mutated_tree(json.loads(content), rng)).encode()
    except RecursionError:
        return b"[" * 100_000


def _mutated_tree(tree: Any, rng: random.Random) -> Any:
    for _ in range(rng.choice((1, 1, 2, 5))):
        places = list(_places(tree))
        holder, key = rng.choice(places) if places else ([tree], 0)
        kind = rng.randrange(5)
        if kind == 0 and isinstance(holder, dict):
            holder[rng.choice(["", "event", "family", "steps", "x" * 1000])] = holder.pop(key)
        elif kind == 1:
            del holder[key]
        elif kind == 2 and places:
            other, name = rng.choice(places)
            with contextlib.suppress(KeyError, IndexError):  # it may just have been removed
                holder[key] = copy.deepcopy(other[name])
        elif kind == 3:
            for _ in range(rng.choice((1, 300))):
                holder[key] = [holder[key]] if rng.random() < 0.5 else {"of": holder[key]}
        else:
            holder[key] = copy.deepcopy(rng.choice(_NUMBERS + _OTHERS))
    return tree


def _places(tree: Any) -> Any:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield tree, key
        yield from _places(value)


def mutated_lines(content: bytes, rng: random.Random) -> bytes:
    """Mix words and lines: for TOML, CSV and command lines."""
    if rng.random() < 0.3:
        return mutated_bytes(content, rng)
    lines = content.decode("utf-8", "replace").split("\n")
    words = [str(x) for x in (*_NUMBERS, *_OTHERS)] + [word for line in lines for word in line.split()]
    for _ in range(rng.choice((1, 2, 3))):
        place = rng.randrange(len(lines))
        parts = lines[place].split(" ")
        parts[rng.randrange(len(parts))] = rng.choice(words)
        lines[place] = " ".join(parts)
        if rng.random() < 0.2:
            lines.insert(rng.randrange(len(lines)), rng.choice(lines))
    return "\n".join(lines).encode("utf-8", "replace")


# Targets -------------------------------------------------------------------------------------------------------------------

_STEP = Sampled(Poisson(0.01), Gaussian(1.0))
_PLAN = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=8, dataset_size=64, steps=10)


def _text(value: Any) -> bytes:
    return json.dumps(value.to_json()).encode()


def _ledger() -> bytes:
    ledger = Ledger()
    ledger.record(_STEP, times=100)
    ledger.record(Gaussian(3.0), times=2, stream="0123456789abcdef")
    return _text(ledger)


def read_event(data: bytes) -> None:
    """What is understood must also print, and say the same when it is written and read again."""
    event = Event.from_json(data)
    assert Event.from_json(event.to_json()) == event and str(event)


def read_plan(data: bytes) -> None:
    """A plan that is understood has a digest and an event."""
    plan = Plan.from_json(data)
    assert plan.digest and plan.event(1)


def _ledger_and_guarantee(data: bytes) -> None:
    ledger = Ledger.from_json(data)
    assert ledger.event() is not None


def _file(name: str, data: bytes) -> Path:
    path = _SCRATCH / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def read_recipe(data: bytes) -> None:
    """The five tables, then everything that they describe short of training."""
    recipe = load_recipe(_file("recipe.toml", data))
    if recipe.data["name"] == "digits" and recipe.run.device == "cpu":
        _small(recipe)


def _small(recipe: Recipe) -> None:
    data = recipe.make_data()
    model = recipe.make_model(data)
    recipe.make_optimizer(model)
    if "noise_multiplier" in recipe.plan:  # a calibration for extreme numbers is the accountant's test, not the reader's
        recipe.make_plan(data)


def _reader(name: str, suffix: str, **options: Any) -> Callable[[bytes], Any]:
    return lambda data: DATA[name](path=str(_file(f"{name}{suffix}", data)), **options)


def read_idx_folder(data: bytes) -> None:
    """Four idx files, of which the labels are valid."""
    for prefix in ("train", "t10k"):
        _file(f"idx/{prefix}-images-idx3-ubyte", data)
        _file(f"idx/{prefix}-labels-idx1-ubyte", struct.pack(">4BI", 0, 0, 8, 1, 3) + bytes([0, 1, 2]))
    DATA["mnist"](path=str(_SCRATCH / "idx"))


def read_idx_packed(data: bytes) -> None:
    """The same, packed: a small file may unpack to a large one."""
    for prefix in ("train", "t10k"):
        _file(f"gz/{prefix}-images-idx3-ubyte.gz", data)
        _file(f"gz/{prefix}-labels-idx1-ubyte", struct.pack(">4BI", 0, 0, 8, 1, 3) + bytes([0, 1, 2]))
    DATA["mnist"](path=str(_SCRATCH / "gz"))


def read_cifar_folder(data: bytes) -> None:
    """A training and a test file."""
    for name in ("data_batch_1.bin", "test_batch.bin"):
        _file(f"cifar/{name}", data)
    DATA["cifar10"](path=str(_SCRATCH / "cifar"))


def read_checkpoint(data: bytes) -> None:
    """As it comes, and once more as a forger would write it, with a digest that fits."""
    with contextlib.suppress(HushgradError):
        read_tree(_file("state.safetensors", data))
    header = data[8:].decode("utf-8", "replace")
    tensors = {"0": torch.zeros(3)}
    path = _SCRATCH / "forged.safetensors"
    safetensors.torch.save_file(tensors, path, metadata={"hushgrad": header, "digest": _digest(header, tensors)})
    read_tree(path)


def _checkpoint() -> bytes:
    path = _SCRATCH / "valid.safetensors"
    write_tree(path, {"model": {"w": torch.zeros(3)}, "steps": 3, "pair": (1, float("inf")), "dtype": torch.float32})
    return path.read_bytes()


def run_command(data: bytes) -> None:
    """A command line, word by word; the answer is an exit code and, with --json, one JSON object without NaN."""
    words = data.decode("utf-8", "replace").replace("\n", " ").split(" ")
    words = [word for word in words if word and "\0" not in word]
    if not words or words[0] not in _COMMANDS or "--help" in words or "-h" in words:
        return
    if any(word.startswith("--out") for word in words):
        return
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = hushgrad(words)
    assert code in (0, 1, 2, 3), code
    assert "Traceback" not in err.getvalue()
    if code == 0 and "--json" in words:
        answer = json.loads(out.getvalue(), parse_constant=lambda word: _fail(word))
        for name in ("epsilon", "delta"):
            assert not isinstance(answer.get(name), float) or answer[name] >= 0, answer


def _fail(word: str) -> None:
    raise AssertionError(f"{word} in an answer")


def read_run_folder(data: bytes) -> None:
    """``hushgrad report`` on a folder in which one file is not as the run wrote it."""
    name, _, content = data.partition(b"\n")
    folder = _SCRATCH / "run"
    for file, valid in _RUN.items():
        _file(f"run/{file}", valid)
    file = name.decode("utf-8", "replace")
    if file not in _RUN:
        return
    (folder / file).write_bytes(content)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = hushgrad(["report", str(folder), "--json"])
    assert code in (0, 2), (code, err.getvalue())


def _run_files() -> dict[str, bytes]:
    ledger = Ledger()
    ledger.record(_PLAN.event(1), times=10)
    claim = Guarantee(epsilon=50.0, delta=1e-5, event=ledger.event(), accountant="pld")
    return {
        "plan.json": _text(_PLAN),
        "ledger.json": _text(ledger),
        "guarantee.json": _text(claim),
        "recipe.json": json.dumps(DEMO).encode(),
        "metrics.jsonl": b'{"step": 1, "epsilon": 0.1, "raw_loss": 2.3}\n{"step": 2, "epsilon": 0.2, "raw_loss": 2.1}\n',
    }


def mutated_folder(content: bytes, rng: random.Random) -> bytes:
    """One of the run's files, mutated as JSON."""
    name = rng.choice(list(_RUN))
    mutate = mutated_bytes if name == "metrics.jsonl" else mutated_json
    return name.encode() + b"\n" + mutate(_RUN[name], rng)


_RUN = _run_files()
_COMMANDS = [name for name in COMMANDS if name in ("epsilon", "calibrate", "report", "key", "ledger")]
_RECIPE = b"""[model]
name = "mlp"
[data]
name = "digits"
[plan]
noise_multiplier = 1.0
delta = 1e-5
max_grad_norm = 1.0
batch_size = 64
steps = 20
noise = "Independent"
[optimizer]
name = "sgd"
lr = 0.2
[run]
seed = 1
"""
_LINES = (
    b"epsilon --noise-multiplier 1.1 --rate 0.01 --steps 1000 --delta 1e-5 --json",
    b"epsilon --noise-multiplier 0.5 --steps 3 --delta 1e-9 --accountant rdp --json",
    b"calibrate --epsilon 3 --delta 1e-5 --rate 0.01 --steps 100 --json",
    b"report /nowhere --json",
    b"key status /nowhere --json",
)
_IDX = struct.pack(">4B3I", 0, 0, 8, 3, 3, 2, 2) + bytes(range(12))

TARGETS = [
    Target(
        "event JSON", read_event, (_text(_STEP * 7), _text(Compose((Laplace(1.0), PureDP(0.1), Repeat(_STEP, 3))))), mutated_json
    ),
    Target("plan JSON", read_plan, (_text(_PLAN),), mutated_json),
    Target("ledger JSON", _ledger_and_guarantee, (_ledger(),), mutated_json),
    Target("recipe TOML", read_recipe, (_RECIPE,), mutated_lines),
    Target("command line", run_command, _LINES, mutated_lines),
    Target("idx files", read_idx_folder, (_IDX,), mutated_bytes),
    Target("idx files, packed", read_idx_packed, (gzip.compress(_IDX),), mutated_bytes),
    Target("CIFAR-10 files", read_cifar_folder, (bytes([3]) + bytes(3072),), mutated_bytes),
    Target(
        "CSV files",
        _reader("csv", ".csv", label="y", classes=["0", "1"]),
        (b"a,b,y\n1,x,0\n2.5,z,1\n3,x,0\n4,y,1\n",),
        mutated_lines,
    ),
    Target(
        "labelled text",
        _reader("labelled-text", ".tsv", classes=["ham", "spam"]),
        (b"ham\thello you\nspam\tbuy now\n" * 3,),
        mutated_lines,
    ),
    Target("checkpoints", read_checkpoint, (_checkpoint(),), mutated_bytes),
    Target("run folders", read_run_folder, (b"",), mutated_folder),
]

TARGETS += [Target(*parts) for parts in readers.targets(_SCRATCH, mutated_bytes, mutated_json, mutated_lines)]
TARGETS += [Target(*parts) for parts in inputs.targets(_SCRATCH, mutated_bytes, mutated_json, mutated_lines)]
TARGETS += [Target(*parts) for parts in servers.targets(_SCRATCH, mutated_bytes, mutated_json)]


# The command ---------------------------------------------------------------------------------------------------------------


def verdict(target: Target, data: bytes) -> str:
    """An empty string, or what went wrong."""
    signal.setitimer(signal.ITIMER_PROF, _PATIENCE)
    signal.alarm(10 * _PATIENCE)
    try:
        target.read(data)
    except HushgradError as error:
        if "\n" in str(error) and len(str(error)) > 2000:
            return f"a refusal of {len(str(error))} characters"
    except Hang:
        return f"no answer in {_PATIENCE} s of work"
    except Exception as error:  # noqa: BLE001  (any other error is what is looked for)
        return f"{type(error).__name__}: {error}"[:300]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
    return ""


class Reading:
    """One reader while it is tried: its row of the table, and one input of every kind that it failed on."""

    def __init__(self, target: Target, seed: int) -> None:
        self.target, self.row, self._problems = target, Row(target.name), dict[str, bytes]()
        self._rng = random.Random(f"{seed}/{target.name}")
        for valid in target.corpus:  # first, so that what is imported on first use is not counted as time
            if problem := verdict(target, valid):
                self._problems[f"valid input: {problem}"] = valid

    def spend(self, *, seconds: float = 0.0, count: int = 0) -> None:
        """Try for so long, or so many."""
        deadline = time.monotonic() + seconds
        while self.row.tried < count if count else time.monotonic() < deadline:
            data = self.target.mutate(self._rng.choice(self.target.corpus), self._rng)
            problem = verdict(self.target, data)
            self.row = self.row.counted(not problem, "answers and refusals only")
            if problem and problem.split(":")[0] not in self._problems:  # one of a kind is enough to look at
                self._problems[problem.split(":")[0]] = data
                print(f"FAILED  {self.target.name}: {problem}\n        input {data[:400]!r}", flush=True)

    def ended(self) -> Row:
        """The row, printed."""
        row = self.row
        if self._problems:
            row = Row(row.name, row.tried, min(row.survived, row.tried - 1), "; ".join(self._problems))
        print(f"{row.survived:>8,} of {row.tried:,}  {row.name}", flush=True)
        return row


def run(seconds: float, seed: int, *, only: str = "", count: int = 0) -> list[Row]:
    """All targets; half of the time in equal shares, and the other half for whichever has had the fewest inputs so far.

    With ``count``, so many inputs each, which are always the same for one seed.
    """
    signal.signal(signal.SIGALRM, _raise_hang)
    signal.signal(signal.SIGPROF, _raise_hang)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, resource.RLIM_INFINITY))
    readings = [Reading(target, seed) for target in TARGETS if command.is_chosen(target.name, only)]
    half = time.monotonic() + seconds / 2
    for number, reading in enumerate(readings):
        reading.spend(seconds=max(0.0, half - time.monotonic()) / (len(readings) - number), count=count)
    while not count and time.monotonic() < half + seconds / 2:
        min(readings, key=lambda reading: reading.row.tried).spend(seconds=min(1.0, seconds / 100))
    return [reading.ended() for reading in readings]


def _raise_hang(*_: Any) -> None:
    raise Hang


def run_atheris(seconds: float, seed: int, only: str) -> int:
    """One target under the coverage-guided fuzzer; it ends the process itself."""
    import atheris

    (target,) = [target for target in TARGETS if only in target.name]
    corpus = _SCRATCH / "corpus"
    corpus.mkdir()
    for number, valid in enumerate(target.corpus):
        (corpus / str(number)).write_bytes(valid)

    def one(data: bytes) -> None:
        with contextlib.suppress(HushgradError):
            target.read(data)

    for name, module in list(sys.modules.items()):  # all of torch as well would take minutes
        if name.startswith("hushgrad."):
            for function in [f for f in vars(module).values() if isinstance(f, types.FunctionType) and f.__module__ == name]:
                atheris.instrument_func(function)
    atheris.Setup([sys.argv[0], f"-max_total_time={int(seconds)}", f"-seed={seed}", "-rss_limit_mb=6000", str(corpus)], one)
    atheris.Fuzz()
    return 0


def main() -> int:
    """See the module's docstring."""
    words = command.parser(__doc__, seconds=120.0)
    words.add_argument("--engine", choices=("own", "atheris"), default="own")
    words.add_argument("--count", type=int, default=0, help="inputs for each reader, instead of a time")
    options = words.parse_args()
    seed = command.seed_of(options)
    torch.set_num_threads(1)
    if options.engine == "atheris":
        return run_atheris(options.seconds, seed, options.only)
    return command.report("fuzz", options, seed, functools.partial(run, count=options.count), good="nothing found")


if __name__ == "__main__":
    sys.exit(main())
