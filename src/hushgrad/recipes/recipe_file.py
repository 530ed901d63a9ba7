"""Recipe files: TOML or Python, the demo, and single values changed on the command line."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hushgrad import _check
from hushgrad._printed import reason
from hushgrad.errors import ArgumentError
from hushgrad.recipes.recipe import Recipe
from hushgrad.recipes.saved_plans import table_of

DEMO: dict[str, Any] = {
    "model": {"name": "small-cnn"},
    "data": {"name": "digits"},
    "plan": {"epsilon": 3.0, "delta": 1e-4, "max_grad_norm": 1.0, "batch_size": 256, "steps": 120, "average": "ema"},
    "optimizer": {"name": "sgd", "lr": 0.2, "momentum": 0.9},
    "run": {"threads": 1},  # a model this small gains nothing from more
}
"""The recipe of ``hushgrad train`` without a recipe."""


def load_recipe(
    path: str | Path | None, *, changes: Iterable[str] = (), allow_code: bool = False, plan: str | Path | None = None
) -> Recipe:
    """The recipe in a .toml file, or in the variable ``recipe`` (a dict of tables) of a .py file; None is the demo.

    A Python recipe is a program and is run: use only your own. A .toml file is data. If code is allowed, the recipe's folder is
    importable, so ``module:function`` can name functions in it.

    Args:
        path: the file; None for the demo.
        changes: words such as ``"plan.epsilon=8"``, each of which replaces a single value.
        allow_code: whether a .toml file may name code as ``module:function``. A .py file always may.
        plan: a file that ``hushgrad plan --save`` wrote, instead of the table ``[plan]``.

        >>> load_recipe(None, changes=["plan.epsilon=8", "model.name=mlp"]).plan["epsilon"]
        8
    """
    allow_code = allow_code or (path is not None and Path(path).suffix == ".py")
    tables = dict(DEMO if path is None else _tables(path, allow_code))
    if plan is not None:
        tables["plan"] = table_of(plan)
    return Recipe.from_tables(changed(tables, changes), allow_code=allow_code)


def changed(tables: Mapping[str, Any], changes: Iterable[str]) -> dict[str, Any]:
    """The tables of a recipe with single values replaced, by words such as ``"plan.epsilon=8"``."""
    new = dict(tables)
    for change in changes:
        table, key, value = _change(change)
        new[table] = {**new.get(table, {}), key: value}
    return new


def _change(text: str) -> tuple[str, str, Any]:
    """``table.key=value``; a value that is not TOML is a word."""
    place, equals, value = text.partition("=")
    table, dot, key = place.strip().partition(".")
    if not (equals and dot and table and key):
        _check.fail("--set", text, "to have the form table.key=value", "For example --set plan.epsilon=8.")
    return table, key, parse_value(value)


def parse_value(text: str) -> Any:
    """A TOML value; anything else is a word. ``True`` and ``False`` have their Python meaning.

    >>> parse_value("[1, 0.5]"), parse_value("adam"), parse_value("False")
    ([1, 0.5], 'adam', False)
    """
    text = text.strip()
    if text in ("True", "False"):
        text = text.lower()
    try:
        return _check.toml(f"value = {text}")["value"]
    except ValueError:
        return text


def _tables(path: str | Path, allow_code: bool) -> dict[str, Any]:
    path = Path(path)
    if not path.is_file():
        _check.fail("recipe", str(path), "to be a file", "Write a .toml or .py recipe, or give none for the demo.")
    folder = str(path.resolve().parent)
    if allow_code and folder not in sys.path:
        sys.path.insert(0, folder)
    if path.suffix == ".py":
        found: dict[str, Any] = _check.instance(dict, recipe=runpy.run_path(str(path)).get("recipe"))
        return found
    if path.suffix != ".toml":
        _check.fail(
            "recipe", str(path), "to end in .toml or .py", "A recipe is a small file that names the data: [data] path = ..."
        )
    return read_toml(path)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a .toml file."""
    try:
        return _check.toml(path.read_text(encoding="utf-8-sig"))  # some editors begin a file with a byte-order mark
    except ValueError as error:
        raise ArgumentError(f"Expected {path.name} to be TOML: {reason(error)}.") from None
