"""One word for each thing: what the glossary rules out stands in no public name, docstring or page."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src" / "hushgrad").rglob("*.py"))
# Words of others: papers that are quoted, other libraries that people come from, generated tables.
QUOTES = ("docs/migration.md", "docs/glossary.md", "docs/results", "docs/licences.md", "src/hushgrad/experiments")
EMPTY = re.compile(r"\bas always\b|^See (the )?[A-Z]\w*\.?$", re.I)  # a stranger learns nothing from them


def ruled_out() -> dict[str, str]:
    """What is not said -> what is said instead."""
    rows = re.findall(r"(?m)^\| ([^|]+) \|[^|]*\|([^|]*)\|$", (ROOT / "docs" / "glossary.md").read_text())
    return {wrong.strip(): word for word, wrongs in rows if word != "word" for wrong in wrongs.split(",") if wrong.strip(" -")}


WRONG = ruled_out()
PATTERN = re.compile(r"\b(" + "|".join(sorted(map(re.escape, WRONG), key=len, reverse=True)) + r")s?\b", re.I)


def said(text: str) -> list[str]:
    """What is ruled out and stands in this text, beside what should stand there."""
    return [f"{found!r}: say {WRONG[found.lower()]!r}" for found in PATTERN.findall(" ".join(text.split()))]


def ours(files: Iterator[Path] | list[Path]) -> list[Path]:
    return [file for file in files if not file.relative_to(ROOT).as_posix().startswith(QUOTES)]


def names(tree: ast.Module) -> Iterator[str]:
    """The names of public classes and functions and of their parameters, as words."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name
            if isinstance(node, ast.FunctionDef):
                yield from (one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))


def words(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_+", " ", name).lower()


def docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def test_the_table_is_read_and_the_search_has_power():
    assert len(WRONG) > 20 and WRONG["noise scale"] == "noise multiplier"
    assert said("The noise\nscale and a Data Point.") == ["'noise scale': say 'noise multiplier'", "'Data Point': say 'example'"]
    assert said(words("makeNoiseScale")) and said(words("clip_threshold")) and not said("Clipping bounds what one example adds.")
    assert (
        EMPTY.search("See Kernel.")
        and EMPTY.search("As always, but faster.")
        and not EMPTY.search("See :class:`Kernel` for why.")
    )


@pytest.mark.parametrize("room", sorted({file.relative_to(ROOT / "src" / "hushgrad").parts[0] for file in ours(SOURCES)}))
def test_names_and_docstrings(room):
    found = []
    for file in ours(SOURCES):
        if file.relative_to(ROOT / "src" / "hushgrad").parts[0] == room:
            tree = ast.parse(file.read_text())
            found += [(file.name, name, wrong) for name in names(tree) for wrong in said(words(name))]
            found += [(file.name, wrong) for text in docstrings(tree) for wrong in said(text)]
            found += [(file.name, text) for text in docstrings(tree) if EMPTY.search(text)]
    assert not found


def test_pages():
    pages = ours([*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"])
    texts = {page.name: re.sub(r"(?s)```.*?```|`[^`\n]*`", " ", page.read_text()) for page in pages}
    assert not [(name, wrong) for name, text in texts.items() for wrong in said(text)]


# Words that still name several classes; the list may only become shorter.
SEVERAL = {"batch": 3, "layout": 2, "ledger": 2, "release": 2}


def test_a_word_of_the_glossary_names_one_class():
    text = (ROOT / "docs" / "glossary.md").read_text()
    known = {word.partition(" (")[0] for word in re.findall(r"(?m)^\| ([^|]+) \|", text)} - {"word"}
    named = Counter(
        words(node.name).strip()
        for file in ours(SOURCES)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert len(known) > 30 and {word: n for word, n in named.items() if word in known and n > 1} == SEVERAL
