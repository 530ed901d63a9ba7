"""Tests on a mutant, quickly: they are collected once, and each mutant runs in a forked child on the tests that reach its statement.

The mutant's functions take the place of the real ones by their code objects, so that nothing is imported again. What cannot be put in so (a
class's own lines, a module's) is tried the slow way: imported afresh, with all tests of the file. What tests computed while they were
collected is the real functions' work: a mutant that only this would show counts as a survivor.
"""

from __future__ import annotations

import ast
import gc
import importlib.machinery
import json
import os
import resource
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType

import pytest
from _pytest.runner import runtestprotocol
from mutants import Mutant

__all__ = ["caught_quickly", "caught_slowly"]

_OPTIONS = ["-q", "-s", "-p", "no:cacheprovider", "--no-header", "--tb=no", "-m", "not slow", "-W", "ignore"]


def _forked(work: Callable[[], int], cpu_seconds: float) -> bool:
    """Whether ``work`` ends with 0 in a child; one that takes too long does not."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            limit = int(cpu_seconds) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
                os.dup2(nowhere.fileno(), 2)
            code = work()
        finally:
            os._exit(code)
    end = time.monotonic() + 60 + 20 * cpu_seconds  # for one that waits; on a busy machine, too
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.005)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False


def caught_slowly(mutant: Mutant, path: Path, tests: list[str], cpu_seconds: float) -> bool:
    """Whether the file's tests fail when they import the mutant."""

    def work() -> int:
        real, code = importlib.machinery.SourceFileLoader.get_code, compile(mutant.tree, str(path), "exec")

        def get_code(self: importlib.machinery.SourceFileLoader, name: str) -> object:
            return code if self.path == str(path) else real(self, name)

        importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[assignment, method-assign]
        return int(pytest.main(["-x", *_OPTIONS, *tests]))

    return not _forked(work, cpu_seconds)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _codes(part)


class _Reached:
    """Which lines of some files each test reaches, and what it costs; a shared fixture's lines count for all who use it."""

    def __init__(self, files: Iterable[str]) -> None:
        self.files, self.now = frozenset(files), set[tuple[str, int]]()
        self.fixtures: dict[str, set[tuple[str, int]]] = {}

    def trace(self, frame: FrameType, event: str, arg: object) -> object:
        return self._line if frame.f_code.co_filename in self.files else None

    def _line(self, frame: FrameType, event: str, arg: object) -> object:
        self.now.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef, request):
        before, self.now = self.now, set()
        try:
            return (yield)
        finally:
            self.fixtures.setdefault(fixturedef.argname, set()).update(self.now)
            self.now |= before

    def of(self, item: pytest.Item, following: pytest.Item | None) -> tuple[bool, set[tuple[str, int]], float]:
        """Run one test: whether it passed, what it reached, CPU seconds."""
        self.now, start = set(), time.process_time()
        threading.settrace(self.trace)  # type: ignore[arg-type]
        sys.settrace(self.trace)  # type: ignore[arg-type]
        try:
            passed = _passes(item, following)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
        for name in getattr(item, "fixturenames", ()):
            self.now |= self.fixtures.get(name, set())
        return passed, self.now, time.process_time() - start


def _passes(item: pytest.Item, following: pytest.Item | None) -> bool:
    return not any(report.failed for report in runtestprotocol(item, log=False, nextitem=following))


class _Trials:
    """A plugin: in place of the tests, the mutants."""

    def __init__(self, chosen: list[tuple[Mutant, Path]], deadline: float, said: Callable[[int, str], None]) -> None:
        self.chosen, self.deadline, self.said = chosen, deadline, said

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = session.items
        self.map = self._mapped({str(path) for _, path in self.chosen})
        print(
            f"{len(self.items)} tests in {sum(seconds for seconds, _ in self.map):.0f} s; {len(self.chosen)} mutants", flush=True
        )
        self.live = defaultdict[CodeType, list[FunctionType]](list)
        gc.unfreeze()
        for thing in gc.get_objects():
            if type(thing) is FunctionType:
                self.live[thing.__code__].append(thing)
        for index, (mutant, path) in enumerate(self.chosen):
            if time.monotonic() > self.deadline:
                break
            self.said(index, self._tried(mutant, path))
        return True

    def _mapped(self, files: set[str]) -> list[tuple[float, dict[str, set[int]]]]:
        """For each test its seconds and the lines of each file that it reaches, seen in a child so that nothing is left here."""
        with tempfile.NamedTemporaryFile("r+") as file:

            def work() -> int:
                reached, failed = _Reached(files), list[str]()
                self.items[0].session.config.pluginmanager.register(reached)
                for index, item in enumerate(self.items):
                    passed, lines, seconds = reached.of(item, (*self.items, None)[index + 1])
                    json.dump([seconds, sorted(lines)], file)
                    file.write("\n")
                    failed += [] if passed else [item.nodeid]
                file.write(json.dumps(failed))
                file.flush()
                return 0

            if not _forked(work, 3600):
                raise pytest.UsageError("The tests did not end while their lines were recorded.")
            file.seek(0)
            *rows, failed = (json.loads(line) for line in file)
        if failed:
            raise pytest.UsageError(f"Tests fail on the files as they are: {', '.join(failed)}.")
        found: list[tuple[float, dict[str, set[int]]]] = []
        for seconds, lines in rows:
            by_file = defaultdict[str, set[int]](set)
            for name, line in lines:
                by_file[name].add(line)
            found.append((seconds, by_file))
        return found

    def _tried(self, mutant: Mutant, path: Path) -> str:
        """``caught``, ``survived`` or ``unknown``: its code cannot be put in the place of the real one."""
        swaps = self._swaps(mutant.tree, path)
        if not swaps:
            return "unknown"
        reach = set(mutant.lines)
        chosen = [index for index, (_, lines) in enumerate(self.map) if lines.get(str(path), set()) & reach]
        chosen.sort(key=lambda index: self.map[index][0])

        def work() -> int:
            for function, code in swaps:
                function.__code__ = code
            return 0 if all(_passes(self.items[index], None) for index in chosen) else 1

        cost = sum(self.map[index][0] for index in chosen)
        return "survived" if _forked(work, 10 + 5 * cost) else "caught"

    def _swaps(self, tree: ast.Module, path: Path) -> list[tuple[FunctionType, CodeType]]:
        """The living functions whose code the mutant changes, each with its new code."""
        real, wrong = (list(_codes(compile(source, str(path), "exec"))) for source in (path.read_text(), tree))
        if [(a.co_name, a.co_firstlineno, a.co_freevars) for a in real] != [
            (b.co_name, b.co_firstlineno, b.co_freevars) for b in wrong
        ]:
            return []
        return [(one, new) for old, new in zip(real, wrong, strict=True) if old != new for one in self.live.get(old, ())]


def caught_quickly(
    chosen: list[tuple[Mutant, Path]], tests: list[str], deadline: float, said: Callable[[int, str], None]
) -> None:
    """Tell ``said`` of each mutant in turn what became of it; runs in a child, so that this process imports nothing of the package."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with os.fdopen(writing, "w") as out, tempfile.TemporaryDirectory() as folder:

            def tell(index: int, word: str) -> None:
                print(index, word, file=out, flush=True)

            code = pytest.main([*_OPTIONS, f"--basetemp={folder}/tests", *tests], plugins=[_Trials(chosen, deadline, tell)])
        os._exit(int(code))
    os.close(writing)
    with os.fdopen(reading) as lines:
        for line in lines:
            index, word = line.split()
            said(int(index), word)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise SystemExit("No verdict: the lines above say why.")
