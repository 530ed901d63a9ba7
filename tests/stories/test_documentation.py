"""Everything public is documented, and what the documentation names exists."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import griffe
import pytest

import hushgrad
from hushgrad import estimators

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ROOMS = [name for name in hushgrad.__all__ if isinstance(getattr(hushgrad, name), ModuleType)]


def test_the_front_door_is_small_and_complete():
    assert len(hushgrad.__all__) <= 27
    for name in hushgrad.__all__:
        assert getattr(hushgrad, name) is not None
    assert set(hushgrad.__all__) <= set(dir(hushgrad))
    with pytest.raises(AttributeError, match="no attribute 'make_privat'"):
        hushgrad.make_privat  # noqa: B018
    for name, match in (
        ("make_privat", "Did you mean 'make_private'"),
        ("PrivacyEngine", "Opacus' PrivacyEngine is here: plan = Plan"),
    ):
        with pytest.raises(AttributeError, match=re.escape(match)):
            getattr(hushgrad, name)


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_has_a_docstring_and_a_reference_page(room):
    module = importlib.import_module(f"hushgrad.{room}")
    assert module.__all__ == sorted(module.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    for name in module.__all__:
        thing = getattr(module, name)
        if inspect.isclass(thing) or inspect.isroutine(thing) or inspect.ismodule(thing):
            assert inspect.getdoc(thing), f"hushgrad.{room}.{name} has no docstring"
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    assert f"::: hushgrad.{room}\n" in pages


def test_python_in_the_pages_is_python():
    for page in PAGES:
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
            code = "\n".join(line.removeprefix(">>> ") for line in block.splitlines()) if ">>>" in block else block
            if ">>>" not in block:
                ast.parse(code.replace("(...", "(*_").replace("...,", "*_,"))


def test_commands_in_the_pages_exist():
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        text = page.read_text()
        for file in re.findall(r"python ((?:benchmarks|examples)/\w+\.py)", text):
            assert (ROOT / file).is_file(), f"{page.name} names {file}"
        for target in re.findall(r"`make ([a-z-]+)`", text):
            assert f"\n{target}:" in makefile, f"{page.name} names make {target}"
        for name in re.findall(r"examples/(\w+\.(?:toml|py))", text):
            assert (ROOT / "examples" / name).is_file(), f"{page.name} names examples/{name}"


def test_no_address_of_a_machine_in_the_tree():
    suspicious = re.compile(r"(?<![\w.])/(?:root|home|work|opt|tmp)/[a-z]|index-url|https?://\S*/simple")
    for folder in ("src", "docs", "benchmarks", "examples", "tests"):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in {".py", ".md", ".toml", ".json", ".c"} and file.name != Path(__file__).name:
                assert not suspicious.search(file.read_text()), file


# The reference ----------------------------------------------------------------------------------------------------------

EVERY_ROOM = sorted({*ROOMS, "budget", "experiments", "federated", "guarantee", "serve", "tuning"})


def _listed() -> set[str]:
    """What the reference pages ask mkdocstrings for."""
    pages = (ROOT / "docs" / "reference").glob("*.md")
    return {name for page in pages for name in re.findall(r"^::: (\S+)", page.read_text(), flags=re.MULTILINE)}


def _shown(package: griffe.Module, name: str) -> set[str]:
    """The paths of all that a page shows for ``::: name``: the thing itself, or the documented members of a module."""
    thing = package[name.removeprefix("hushgrad.")]
    thing = thing.final_target if thing.is_alias else thing
    if not thing.is_module:
        return {thing.path}
    members = [thing.members[str(one)] for one in thing.exports or () if str(one) in thing.members]
    found = [one.final_target if one.is_alias else one for one in members]
    return {thing.path, *(one.path for one in found if one.docstring is not None and not one.is_module)}


def _path(package: griffe.Module, module: ModuleType, name: str) -> str:
    """Where a public name is really defined."""
    thing = getattr(module, name)
    if inspect.ismodule(thing):
        return thing.__name__
    if inspect.isclass(thing) or inspect.isfunction(thing):
        return f"{thing.__module__}.{thing.__qualname__}"
    member = package[f"{module.__name__}.{name}".removeprefix("hushgrad.")]  # a constant
    return str(member.final_target.path if member.is_alias else member.path)


def test_every_public_name_has_a_reference_entry():
    package = griffe.load("hushgrad", search_paths=[str(ROOT / "src")], resolve_aliases=True)
    shown = set().union(*(_shown(package, name) for name in _listed()))
    missing = []
    for room in ["", *EVERY_ROOM]:
        module = importlib.import_module(f"hushgrad.{room}".rstrip("."))
        for name in module.__all__:
            if _path(package, module, name) not in shown:
                missing.append(f"{module.__name__}.{name}")
    assert missing == [], missing


def _functions(room: str) -> dict[str, object]:
    """The functions that a room offers, and the methods of its classes, by name."""
    module = importlib.import_module(f"hushgrad.{room}")
    found: dict[str, object] = {}
    for name in module.__all__:
        thing = getattr(module, name)
        if inspect.isfunction(thing):
            found[f"{room}.{name}"] = thing
        elif inspect.isclass(thing) and thing.__module__.startswith("hushgrad"):
            for method, value in vars(thing).items():
                function = getattr(value, "__func__", value)
                if inspect.isfunction(function) and not method.startswith("_"):
                    above = [vars(base)[method] for base in thing.__mro__[1:] if method in vars(base)]
                    documented = [one for one in above if "Args:" in (inspect.getdoc(getattr(one, "__func__", one)) or "")]
                    if not documented:  # an override says no more than what it overrides
                        found[f"{room}.{name}.{method}"] = function
    return found


@pytest.mark.parametrize("room", EVERY_ROOM)
def test_every_public_function_with_three_arguments_explains_each(room):
    for name, function in _functions(room).items():
        taken = [p for p in inspect.signature(function).parameters if p not in ("self", "cls")]
        if len(taken) < 3:
            continue
        text = inspect.getdoc(function) or ""
        assert "\nArgs:\n" in text, f"{name} has {len(taken)} arguments and no Args section"
        section = text.partition("\nArgs:\n")[2].split("\n\n")[0]
        explained = re.findall(r"^    \*{0,2}(\w+):", section, flags=re.MULTILINE)
        assert explained == taken or sorted(explained) == sorted(taken), f"{name} explains {explained} of {taken}"


def test_every_estimator_explains_its_parameters():
    """In its own Args, or in those of the class that it names and in a word of its own."""
    for name in estimators.__all__:
        kind = getattr(estimators, name)
        if inspect.isclass(kind) and issubclass(kind, estimators.DPEstimator) and kind is not estimators.DPEstimator:
            text = inspect.getdoc(kind) or ""
            named = re.search(r"Arguments[^.]* are those of :class:`(\w+)`", text)
            whole = text + (inspect.getdoc(getattr(estimators, named[1])) or "" if named else "")
            unexplained = [
                p for p in inspect.signature(kind).parameters if not re.search(rf"^    {p}:|``{p}``:", whole, re.MULTILINE)
            ]
            assert not unexplained, (name, unexplained)


# Public names without an example that runs. A name leaves the list with its example; none is added.
WITHOUT_EXAMPLE = set(
    """
    audit.AuditReport audit.Bench audit.Canaries audit.DeepReport audit.LowerBound audit.MembershipReport audit.audit_run
    audit.likeness audit.sequence_losses budget.BrokenChain budget.Row clipping.Clipped clipping.ClippedSum clipping.Record
    clipping.Rule clipping.isolation_at_first_call clipping.rule errors.BudgetExceeded errors.CaptureError
    errors.Contradiction errors.NotIsolated errors.NumericalLimit errors.StorageError errors.WorkerLost experiments.Context
    experiments.Experiment experiments.Findings experiments.Outcome experiments.Table experiments.reproduce
    federated.ServerOptimizer federated.add_share federated.clip_update guarantee.Entry planner.Choice planner.DryRun
    planner.Law planner.Work recipes.Description recipes.Encoder recipes.Outcome recipes.Predictor recipes.evaluate
    recipes.export recipes.labelled recipes.load_predictor recipes.read_description recipes.save_model recipes.train
    report.Card report.Verified report.compare_runs report.privacy_card report.verify sampling.BatchLoader serve.serve
    testing.check_clipper testing.check_rule train.Private train.ProcessLost tuning.Priced tuning.Tuned tuning.tune
    """.split()
)


def test_every_new_public_name_shows_how_it_is_used():
    found, seen = set(), set[int]()
    for room in ["", *EVERY_ROOM]:
        module = importlib.import_module(f"hushgrad.{room}".rstrip("."))
        for name in module.__all__:
            thing = getattr(module, name)
            if not callable(thing) or id(thing) in seen:
                continue
            seen.add(id(thing))
            if ">>>" not in (inspect.getdoc(thing) or ""):
                found.add(f"{room}.{name}".lstrip("."))
    assert not found - WITHOUT_EXAMPLE, f"a new name without an example: {sorted(found - WITHOUT_EXAMPLE)}"
    assert not WITHOUT_EXAMPLE - found, f"these have one, take them off the list: {sorted(WITHOUT_EXAMPLE - found)}"
