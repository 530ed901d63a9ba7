"""The planner's form: one table of names, bounds and defaults, for the page, the API and its description.

The bounds keep a question answerable: no request can ask for unbounded work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hushgrad import _check
from hushgrad.errors import ArgumentError

STEPS = 300_000  # of one plan: longer ones are for `hushgrad plan`, which has all the time that its user grants


@dataclass(frozen=True, kw_only=True)
class Number:
    """A number field; ``slider`` are the ends of its logarithmic slider, ``whole`` means integer."""

    label: str
    hint: str
    low: float
    high: float
    default: float | None
    slider: tuple[float, float]
    whole: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """Its values, as OpenAPI describes them."""
        kind = "integer" if self.whole else "number"
        return {"type": kind, "minimum": self.low, "maximum": self.high, "default": self.default}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A choice field: values and their labels; the first one is the default."""

    label: str
    hint: str
    options: dict[str, str]

    @property
    def schema(self) -> dict[str, Any]:
        """Its values, as OpenAPI describes them."""
        return {"type": "string", "enum": list(self.options), "default": next(iter(self.options))}


NUMBERS = {
    "epsilon": Number(
        label="Epsilon", hint="The budget: smaller protects more.", low=1e-3, high=1e3, default=2, slider=(0.1, 20)
    ),
    "delta": Number(
        label="Delta", hint="Left out of the promise; below 1 / records.", low=1e-15, high=0.1, default=1e-6, slider=(1e-9, 1e-3)
    ),
    "dataset_size": Number(
        label="Records", hint="Public size of the data set.", low=10, high=1e9, default=60_000, slider=(500, 1e7), whole=True
    ),
    "batch_size": Number(
        label="Batch size", hint="Records in an average step.", low=1, high=1e7, default=600, slider=(16, 16384), whole=True
    ),
    "epochs": Number(label="Epochs", hint="Passes over the data.", low=1e-3, high=1e4, default=20, slider=(1, 200)),
    "parameters": Number(
        label="Parameters",
        hint="Of the model; says what noise state takes.",
        low=1,
        high=1e12,
        default=1e6,
        slider=(1e3, 1e9),
        whole=True,
    ),
}
CHOICES = {
    "sampling": Choice(
        label="Batches",
        hint="Random batches that nobody sees amplify privacy; a fixed order needs no such assumption.",
        options={"random": "may be random and secret", "fixed": "come in a fixed order"},
    ),
    "relation": Choice(
        label="Neighbours",
        hint="What two data sets that must look alike have different.",
        options={"add_remove": "one record more or less", "replace_one": "one record replaced", "zero_out": "one record blanked"},
    ),
}
_LONGEST = 32  # characters of one value


def split(pairs: Iterable[tuple[str, str]]) -> tuple[list[tuple[str, str]], str]:
    """The fields of the question, and which plan's curves are wanted."""
    listed = list(pairs)
    show = next((value for name, value in listed if name == "show"), "")
    return [pair for pair in listed if pair[0] != "show"], show


def asked(pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """The question in a query string, complete and within bounds.

    >>> asked([("epsilon", "8"), ("sampling", "fixed")])["batch_size"]
    600

    Raises:
        ArgumentError: one sentence that names what is wrong.
    """
    given: dict[str, str] = {}
    for name, text in pairs:
        if name not in NUMBERS and name not in CHOICES:
            raise ArgumentError(f"Expected no field {name[:40]!r}. The fields are {', '.join([*NUMBERS, *CHOICES])}.")
        if name in given:
            raise ArgumentError(f"Expected {name} to be given once.")
        if len(text) > _LONGEST:
            raise ArgumentError(f"Expected {name} to have at most {_LONGEST} characters.")
        given[name] = text.strip()
    found: dict[str, Any] = {name: _number(name, given.get(name, "")) for name in NUMBERS}
    for name, choice in CHOICES.items():
        found[name] = _check.one_of(list(choice.options), **{name: given.get(name) or next(iter(choice.options))})
    _require_answerable(found)
    return found


def _number(name: str, text: str) -> float | int | None:
    field = NUMBERS[name]
    if not text:
        return int(field.default) if field.whole and field.default is not None else field.default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not field.low <= value <= field.high or (field.whole and not value.is_integer()):
        kind = "a whole number" if field.whole else "a number"
        raise ArgumentError(f"Expected {name}={text!r} to be {kind} from {field.low:g} to {field.high:g}.")
    return int(value) if field.whole else value


def _require_answerable(found: dict[str, Any]) -> None:
    if found["batch_size"] > found["dataset_size"]:
        _check.fail("batch_size", found["batch_size"], f"to be at most the number of records, {found['dataset_size']}")
    steps = found["epochs"] * found["dataset_size"] / found["batch_size"]
    if steps > STEPS:
        remedy = "Use larger batches or fewer epochs here; `hushgrad plan` answers for longer runs."
        _check.fail("steps", math.ceil(steps), f"to be at most {STEPS}", remedy)


def parameters() -> list[dict[str, Any]]:
    """The fields as OpenAPI describes the parameters of a query."""
    shown: dict[str, Number | Choice] = {**NUMBERS, **CHOICES}
    return [
        {"name": name, "in": "query", "description": f"{field.label}. {field.hint}", "schema": field.schema}
        for name, field in shown.items()
    ]
