"""What Python and C agree on is written once, and a library that does not agree is refused before it is called."""

from __future__ import annotations

import ctypes
import ctypes.util
import re
import runpy
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushgrad import native
from hushgrad.native import _abi, _generate, load

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src" / "hushgrad" / "native"
HEADER = (SOURCES / "abi.h").read_text()
needs_c = pytest.mark.skipif(native.EXACT is None or native.CONTRACTED is None, reason="the C libraries are not built here")


def test_the_written_files_are_current():
    for name, text in _generate.files(HEADER).items():
        assert (SOURCES / name).read_text() == text, f"{name}: run `make abi`"


BARE = re.sub(r"/\*.*?\*/|#define HUSHGRAD_ABI \d+", lambda found: " " * len(found[0]), HEADER, flags=re.S)
CODE = [match.span() for match in re.finditer(r"\b\w+\b", BARE)]


@given(st.sampled_from(CODE))
def test_any_other_word_is_another_number(span):
    """A type, a field, an argument, a constant: whatever changes, a library built before does not fit any more."""
    changed = f"{HEADER[: span[0]]}other{HEADER[span[1] :]}"
    try:
        number = _generate.Header.of(changed).checksum
    except ValueError as error:
        assert "abi.h" in str(error)
    else:
        assert number != _abi.ABI


@given(st.text("abc \n", max_size=9))
def test_comments_and_blanks_change_nothing(words):
    assert _generate.Header.of(f"/* {words} */\n{HEADER}\n{' ' * len(words)}").checksum == _abi.ABI


def test_a_kernel_without_a_reference_is_refused():
    with pytest.raises(ValueError, match="hushgrad_lonely names no reference"):
        _generate.files(HEADER.replace("#endif", "/* Alone. */\nvoid hushgrad_lonely(int n);\n#endif"))


@needs_c
@pytest.mark.parametrize("name", ["exact", "contracted"])
def test_everything_declared_is_there(name):
    found = load.library(name)
    assert found is not None
    cipher = name == "contracted" or found.cipher()
    for function in _abi.SIGNATURES[name]:
        if cipher or not function.startswith(("draw", "expand", "rounded")):
            assert callable(getattr(found, function))
    with pytest.raises(AttributeError):
        getattr(found, "no_such_function")  # noqa: B009


class Longer(ctypes.Structure):
    """``signal`` with one field more."""

    _fields_: ClassVar = [*_abi.Signal._fields_, ("more", ctypes.c_int)]


@needs_c
@pytest.mark.parametrize(
    ("name", "value"), [("ABI", _abi.ABI + 1), ("STRUCTS", (*_abi.STRUCTS[:-1], Longer)), ("STRUCTS", _abi.STRUCTS[::-1])]
)
def test_a_library_of_other_declarations_is_an_error(name, value, monkeypatch):
    monkeypatch.setattr(_abi, name, value)
    with pytest.raises(ImportError, match="does not fit this Python code"):
        load.library("exact")


def test_a_library_that_says_nothing_is_an_error(tmp_path):
    other = Path(ctypes.util.find_library("m") or "")
    at = next(
        (folder / other for folder in map(Path, ("/lib/x86_64-linux-gnu", "/usr/lib64", "/lib")) if (folder / other).is_file()),
        None,
    )
    if at is None:
        pytest.skip("no other library is at hand")
    (tmp_path / "_exact.abi3.so").symlink_to(at)
    with pytest.raises(ImportError, match=r"ABI 0, expected \d+"):
        load.library("exact", tmp_path)


def test_without_a_library_there_is_none(tmp_path, monkeypatch, recwarn):
    assert load.library("exact", tmp_path) is None and not recwarn.list  # nobody could build it: as documented
    (tmp_path / "abi.h").touch()
    with pytest.warns(UserWarning, match="is not built"):
        assert load.library("exact", tmp_path) is None
    monkeypatch.setenv("HUSHGRAD_KERNEL", "numpy")
    assert load.library("exact") is None


def test_a_library_of_another_machine_is_a_warning(tmp_path):
    (tmp_path / "_exact.abi3.so").write_bytes(b"not a library")
    with pytest.warns(UserWarning, match="could not be loaded"):
        assert load.library("exact", tmp_path) is None


def test_editing_any_source_rebuilds(monkeypatch):
    made: dict[str, Any] = {}
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("setuptools.setup", lambda **options: made.update(options))
    runpy.run_path("setup.py")
    every = {kind: {file.relative_to(ROOT).as_posix() for file in SOURCES.rglob(f"*.{kind}")} for kind in "ch"}
    sources = [set(library.sources) for library in made["ext_modules"]]
    assert sources[0] | sources[1] == every["c"]
    assert {Path(file).name for file in sources[0] & sources[1]} == {"abi.c", "widths.c"}
    assert all(set(library.depends) == every["h"] and library.optional for library in made["ext_modules"])
    patterns = re.findall(r"(src/\S+?\.\[ch\])", (ROOT / "Makefile").read_text())
    seen = {file.relative_to(ROOT).as_posix() for pattern in patterns for file in ROOT.glob(pattern)}
    assert seen == every["c"] | every["h"]
