"""What a recipe says of its data is of the right type, and a table is read as the person meant who saved it."""

from __future__ import annotations

import inspect
import random
import re
from typing import get_type_hints

import pytest
import torch

from hushgrad.errors import ArgumentError
from hushgrad.recipes import DATA, MODELS
from hushgrad.recipes.calls import call
from hushgrad.recipes.encoders import TableEncoder
from hushgrad.recipes.files import lines
from hushgrad.recipes.table_file import read_table

_ALL = [("data", name, make) for name, make in DATA.items()] + [("model", name, make) for name, make in MODELS.items()]
_RIGHT = {str: "x", int: 3, float: 0.5, bool: True, list: ["a", "b"], dict: {}}


def _names(hint: object) -> str:
    """The types of an annotation without those of their contents: "list | None" of list[str] | None."""
    return re.sub(r"\[.*?\]", "", hint.__name__ if isinstance(hint, type) and "[" not in str(hint) else str(hint))


def _options(make) -> dict[str, object]:
    """A right value for every option that has no default."""
    found = {}
    for name, parameter in inspect.signature(make).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.default is inspect.Parameter.empty:
            hint = _names(get_type_hints(make)[name])
            found[name] = next(value for kind, value in _RIGHT.items() if kind.__name__ in hint)
    return found


@pytest.mark.parametrize("what, name, make", _ALL, ids=[f"{what}-{name}" for what, name, _ in _ALL])
def test_every_option_of_another_type_is_refused_by_name(what, name, make):
    known = DATA if what == "data" else MODELS
    first = () if what == "data" else (None,)
    for option, hint in get_type_hints(make).items():
        parameter = inspect.signature(make).parameters.get(option)
        if parameter is None or parameter.kind is not inspect.Parameter.KEYWORD_ONLY or option == "learn":
            continue
        for wrong in (5, 2.5, True, "x", ["a"], {"a": 1}):
            allowed = type(wrong).__name__ in _names(hint) or (
                isinstance(wrong, int) and not isinstance(wrong, bool) and "float" in _names(hint)
            )
            if not allowed:
                with pytest.raises(ArgumentError, match=f"Expected {option}="):
                    call({"name": name, **_options(make), option: wrong}, known, what, *first, allow_code=False)


def _csv(tmp_path, content: bytes):
    (tmp_path / "t.csv").write_bytes(content)
    return tmp_path / "t.csv"


def test_a_table_is_the_same_however_it_was_saved(tmp_path):
    rng = random.Random(7)
    cells = ["clerk", "Köchin 👩‍🍳", 'say "no", please', "two\nlines", "a\u2028b", "form\x0cfeed", "\x1d", "nel\x85", ""]
    rows = [["age", "job"]] + [[str(rng.randint(0, 99)), cell] for cell in cells * 3]
    quoted = [",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in rows]
    for mark in (b"", b"\xef\xbb\xbf"):
        for end in ("\n", "\r\n", "\r"):
            for last in ("", end):
                path = _csv(tmp_path, mark + (end.join(quoted) + last).encode())
                titles, body = read_table(path, header=True, delimiter=",")
                assert [titles, *body] == rows


@pytest.mark.parametrize(
    "content", ["age,job\n1,K\xf6chin\n".encode("latin-1"), "age,job\n1,a\n".encode("utf-16"), b"age,job\n1," + b"x" * 200_000]
)
def test_what_is_no_utf8_table_is_refused_in_one_sentence(tmp_path, content):
    with pytest.raises(ArgumentError, match="Expected file="):
        read_table(_csv(tmp_path, content), header=True, delimiter=",")


def test_free_text_keeps_its_lines(tmp_path):
    path = _csv(tmp_path, "\ufeffham\tone\u2028still one\r\nspam\ttwo \x85".encode() + b"\xff")
    assert lines(path) == ["ham\tone\u2028still one", "spam\ttwo \x85\ufffd"]


@pytest.mark.parametrize(
    "change, match",
    [
        ({"drop": ["nmae"]}, "Expected drop='nmae'"),
        ({"drop": ["age", "name"]}, "a column beside 'bought'"),
        ({"classes": ["no"]}, "two or more different names"),
        ({"classes": ["no", "yes", "no"]}, "two or more different names"),
        ({"delimiter": ";;"}, "one character"),
    ],
)
def test_a_misspelt_table_is_refused(tmp_path, change, match):
    path = _csv(tmp_path, b"age,name,bought\n" + b"1,a,no\n2,b,yes\n" * 10)
    options = {"path": str(path), "label": "bought", "classes": ["no", "yes"], **change}
    with pytest.raises(ArgumentError, match=match):
        DATA["csv"](**options)
    right = DATA["csv"](path=str(path), label="bought", classes=["no", "yes"], drop=["name"])
    assert isinstance(right.encoder, TableEncoder) and right.encoder.columns == ("age",)


def test_a_word_among_declared_numbers_counts_as_missing_and_is_told_by_its_row():
    encode = TableEncoder(columns=("age", "job"), buckets=8, numbers=("age",))
    rows = [("30", "a"), ("many", "b"), ("", "7"), ("inf", "c")]
    assert encode.undeclared(rows) == {"age": [2, 4]}
    inputs = encode(rows)
    assert not inputs[1, 0] and (inputs[1] != 0).sum() == 1
    assert torch.equal(inputs[0], TableEncoder(columns=("age", "job"), buckets=8)(rows[:1])[0])
    assert TableEncoder.from_json(encode.to_json()) == encode
    with pytest.raises(ArgumentError, match="numbers"):
        TableEncoder(columns=("age",), numbers=("town",))
