"""Small defects in the privacy-critical files, one at a time: does a test see each? ``make mutate``.

A mutant is one file with one change: a comparison, sum or product turned into its neighbour, a condition negated, `and` for `or`, `max` for
`min`, a number made larger, a truth turned round, a statement left out. The file's own tests run on it in a forked child of a process that
has already imported torch, so that a mutant costs a second or two. A mutant that no test sees is a *survivor*: a test is missing, or the
change changes nothing (EQUIVALENT says why).

    python faults/mutate.py --only sampling/poisson.py --limit 50
    python faults/mutate.py --seconds 3000 --docs docs/reliability.md
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.machinery
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from table import Row, write_table

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "hushgrad"
LAWS, GOLDEN = "tests/laws/test_", "tests/golden/test_"

ARGUMENTS = f"{LAWS}values_arguments.py"
SAMPLERS = [ARGUMENTS, f"{GOLDEN}sampling_batches.py", f"{LAWS}sampling_loader.py", "tests/statistics/test_sampling_promises.py"]
CLIPPERS = [ARGUMENTS, f"{GOLDEN}clipping_clippers.py", f"{LAWS}clipping_clippers.py"]

# The privacy-critical files, and the quick tests that hold them; tests that start processes would run them on the file as it is.
TESTS = {
    "guarantee.py": [f"{LAWS}guarantee.py", f"{LAWS}printed.py"],
    "release/core.py": [f"{LAWS}train_step.py", f"{LAWS}train_released.py"],
    "noise/sensitivity.py": [f"{LAWS}noise_mechanisms.py"],
    "noise/participation.py": [f"{LAWS}noise_mechanisms.py"],
    "accounting/participation.py": [f"{LAWS}accounting_laws.py", f"{GOLDEN}accounting_values.py"],
    "accounting/calibration.py": [f"{LAWS}accounting_limits.py", f"{LAWS}accounting_answers.py"],
    "accounting/filters.py": [f"{LAWS}accounting_answers.py", f"{LAWS}accounting_pool.py"],
    "accounting/filter_rules.py": [f"{LAWS}accounting_answers.py", f"{LAWS}accounting_pool.py"],
    "sampling/poisson.py": SAMPLERS,
    "sampling/fixed_size.py": SAMPLERS,
    "sampling/cyclic.py": SAMPLERS,
    "sampling/balls_in_bins.py": SAMPLERS,
    "sampling/round_robin.py": SAMPLERS,
    "sampling/full_batch.py": SAMPLERS,
    "clipping/flat.py": CLIPPERS,
    "clipping/automatic.py": CLIPPERS,
    "clipping/adaptive.py": CLIPPERS,
    "clipping/per_layer.py": CLIPPERS,
    "estimators/objective.py": [f"{GOLDEN}estimators_objective.py"],
    "train/books.py": [f"{LAWS}train_step.py", f"{LAWS}train_before.py"],
}
# (file, line of code, change) -> why no test can see it.
EQUIVALENT: dict[tuple[str, str, str], str] = {
    ("guarantee.py", "costs.append((_FORKED, 1))", "number"): "an event that nobody analysed is as infinite twice as once",
}

_FOR_OTHERS = {
    "examples",
    "suggestions",
    "__repr__",
    "__str__",
}  # read by tests, the planner and people; no guarantee rests on them

_COMPARED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
_COMPUTED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult, ast.FloorDiv: ast.Mult}
_CALLED = {"min": "max", "max": "min", "ceil": "floor", "floor": "ceil", "any": "all", "all": "any"}


class Mutant(NamedTuple):
    """One change of one file."""

    file: str
    line: int
    change: str
    source: str

    def key(self, text: str) -> tuple[str, str, str]:
        """What EQUIVALENT knows it by, wherever the line moves to."""
        return self.file, text.splitlines()[self.line - 1].strip(), self.change


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The ways in which one node can be wrong."""
    new = copy.deepcopy(node)
    if isinstance(new, ast.Compare) and type(new.ops[0]) in _COMPARED:
        new.ops[0] = _COMPARED[type(new.ops[0])]()
        yield "comparison", new
    elif isinstance(new, ast.BinOp) and type(new.op) in _COMPUTED and not isinstance(new.right, ast.JoinedStr):
        new.op = _COMPUTED[type(new.op)]()
        yield "arithmetic", new
    elif isinstance(new, ast.BoolOp):
        new.op = ast.Or() if isinstance(new.op, ast.And) else ast.And()
        yield "and/or", new
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not | ast.USub):
        yield "sign", new.operand
    elif isinstance(new, ast.If | ast.IfExp | ast.While):
        new.test = ast.UnaryOp(ast.Not(), new.test)
        yield "condition", new
    elif isinstance(new, ast.Constant) and isinstance(new.value, bool):
        yield "truth", ast.Constant(not new.value)
    elif isinstance(new, ast.Constant) and isinstance(new.value, int | float):
        yield "number", ast.Constant(new.value + 1)
    elif isinstance(new, ast.Call) and isinstance(new.func, ast.Name | ast.Attribute):
        name = new.func.id if isinstance(new.func, ast.Name) else new.func.attr
        if name in _CALLED:
            new.func = ast.copy_location(_renamed(new.func, _CALLED[name]), new.func)
            yield "function", new
    elif isinstance(new, ast.Raise | ast.Expr) and not (isinstance(new, ast.Expr) and isinstance(new.value, ast.Constant)):
        yield "left out", ast.Pass()


def _renamed(func: ast.Name | ast.Attribute, name: str) -> ast.expr:
    return ast.Name(name, ast.Load()) if isinstance(func, ast.Name) else ast.Attribute(func.value, name, ast.Load())


class _Replace(ast.NodeTransformer):
    def __init__(self, at: int, new: ast.AST) -> None:
        self.at, self.new, self.count = at, new, -1

    def visit(self, node: ast.AST) -> ast.AST:
        self.count += 1
        if self.count == self.at:
            return ast.copy_location(self.new, node)
        return self.generic_visit(node)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """In the order in which a transformer visits."""
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _walk(child)


def _messages(tree: ast.AST) -> set[int]:
    """Nodes of sentences, annotations, decorators, citations and examples for tests: to change them harms nobody."""
    aside = [node.annotation for node in ast.walk(tree) if isinstance(node, ast.AnnAssign | ast.arg) and node.annotation]
    aside += [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr | ast.Assert)]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            aside += node.decorator_list
        if isinstance(node, ast.FunctionDef):
            aside += node.body if node.name in _FOR_OTHERS else [node.returns] if node.returns else []
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "papers":
            aside.append(node.value)
        if isinstance(node, ast.Raise) and node.exc:
            aside.append(node.exc)
    return {id(part) for node in aside for part in ast.walk(node)}


def mutants(file: str) -> list[Mutant]:
    """All of one file."""
    text = (PACKAGE / file).read_text()
    tree = ast.parse(text)
    aside, found = _messages(tree), []
    for at, node in enumerate(_walk(tree)):
        if id(node) in aside:
            continue
        for change, new in changes(node):
            changed = _Replace(at, new).visit(ast.parse(text))
            found.append(Mutant(file, getattr(node, "lineno", 1), change, ast.unparse(ast.fix_missing_locations(changed))))
    return found


def _child(path: str, source: str | None, tests: list[str]) -> None:
    """Run the tests with ``source`` in place of the file; ends the process with 0 if they pass."""
    import pytest

    real = importlib.machinery.SourceFileLoader.get_code

    def get_code(self: importlib.machinery.SourceFileLoader, name: str) -> object:
        return compile(source, path, "exec") if source is not None and self.path == path else real(self, name)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[assignment, method-assign]
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no", "-m", "not slow", *tests])
    os._exit(0 if code == 0 else 1)


def passes(file: str, source: str | None, limit: float) -> bool:
    """Whether the file's tests pass on ``source`` (None: as it is); one that does not end in time does not."""
    child = os.fork()
    if child == 0:
        _child(str(PACKAGE / file), source, TESTS[file])
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def examine(file: str, limit: int, deadline: float, rng: random.Random) -> tuple[Row, list[Mutant]]:
    """Some mutants of one file: how many were caught, and who survived."""
    start = time.monotonic()
    if not passes(file, None, 600.0):
        raise SystemExit(f"The tests of {file} fail on the file as it is.")
    patience = 10 + 5 * (time.monotonic() - start)
    text, all_of_it = (PACKAGE / file).read_text(), mutants(file)
    row, survivors = Row(file), list[Mutant]()
    for mutant in rng.sample(all_of_it, min(limit, len(all_of_it))):
        if time.monotonic() > deadline:
            break
        if mutant.key(text) in EQUIVALENT:
            continue
        caught = not passes(file, mutant.source, patience)
        row = row.counted(caught, f"of {len(all_of_it)}")
        if not caught:
            survivors.append(mutant)
            print(f"survived: {file}:{mutant.line} {mutant.change}: {mutant.key(text)[1]}", flush=True)
    return row, survivors


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=TESTS, help="these files")
    parser.add_argument("--limit", type=int, default=10_000, help="mutants of a file, drawn at random")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--docs", type=Path, help="the page whose table is written")
    options = parser.parse_args()
    os.chdir(ROOT)
    import hypothesis  # noqa: F401 (imported once, here, for all children)
    import scipy.stats  # noqa: F401
    import torch  # noqa: F401

    start, rows, survivors = time.monotonic(), list[Row](), list[Mutant]()
    for file in options.only or TESTS:
        row, alive = examine(file, options.limit, start + options.seconds, random.Random(options.seed))
        lines = ", ".join(sorted({f"{mutant.line} ({mutant.change})" for mutant in alive}))
        row = row.__class__(row.name, row.tried, row.survived, row.seen + (f"; lines {lines}" if lines else ""))
        print(f"{file}: {row.survived} of {row.tried} caught", flush=True)
        rows.append(row)
        survivors += alive
    if options.docs:
        command = f"python faults/mutate.py --limit {options.limit} --seed {options.seed}"
        write_table(
            options.docs, "mutate", [r for r in rows if r.tried], command, time.monotonic() - start, part=bool(options.only)
        )
    tried, caught = sum(row.tried for row in rows), sum(row.survived for row in rows)
    print(
        f"{caught} of {tried} mutants caught ({caught / max(1, tried):.1%}); {len(EQUIVALENT)} known to change nothing were not tried."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
