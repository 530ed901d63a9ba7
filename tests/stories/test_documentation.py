"""Everything public is documented, and what the documentation names exists."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import hushgrad

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ROOMS = [name for name in hushgrad.__all__ if isinstance(getattr(hushgrad, name), ModuleType)]


def test_the_front_door_is_small_and_complete():
    assert len(hushgrad.__all__) <= 25
    for name in hushgrad.__all__:
        assert getattr(hushgrad, name) is not None
    assert set(hushgrad.__all__) <= set(dir(hushgrad))
    with pytest.raises(AttributeError, match="no attribute 'make_privat'"):
        hushgrad.make_privat  # noqa: B018


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
