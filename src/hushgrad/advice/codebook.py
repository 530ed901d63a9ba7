"""Codebooks: what is publicly known about a data set. Advice reads nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hushgrad import _check
from hushgrad._value import LATER, Value
from hushgrad.recipes.column import Column, columns_of
from hushgrad.recipes.columns import Columns, crossed
from hushgrad.recipes.encoders import Encoder
from hushgrad.recipes.image_features import ImageFeatures
from hushgrad.recipes.images import ImageEncoder
from hushgrad.recipes.patches import SMALLEST
from hushgrad.recipes.recipe_file import read_toml
from hushgrad.recipes.table_file import require_form
from hushgrad.recipes.text_features import TextFeatures

_KINDS = ("table", "text", "images")


class _Facts(Value, family="codebook"):
    """The family of codebooks."""


@dataclass(frozen=True, kw_only=True)
class Codebook(_Facts):
    """Public facts about a data set: the kind of its records, the names of its classes, its columns, about how many records there are.

    | key | |
    |---|---|
    | ``kind`` | "table" (a CSV file), "text" (lines ``label<TAB>text``, or .txt files in folders of their classes), "images" |
    | ``classes`` | the names of the classes |
    | ``records`` | a number of records that may be known; it sets rates, the real number stays private |
    | ``label``, ``columns``, ``header``, ``delimiter``, ``user`` | of a table; columns as in :mod:`hushgrad.recipes.column` |
    | ``crosses`` | pairs of a table's columns that count together: ``[["day", "month"]]`` |
    | ``channels``, ``height``, ``width`` | of images |
    | ``mirrored`` | true where an image and its mirror image are always of one class |

        >>> from hushgrad.recipes.column import Number
        >>> book = Codebook(kind="table", classes=("no", "yes"), label="y", columns=(Number(name="age", cuts=(20, 40)),))
        >>> book.width
        3
    """

    kind: str
    classes: tuple[str, ...]
    records: int | None = None
    label: str | None = None
    user: str | None = None
    columns: tuple[Column, ...] = ()
    header: bool = True
    delimiter: str = ","
    channels: int = 1
    height: int = 28
    width_of_image: int = 28
    mirrored: bool = False
    crosses: tuple[tuple[str, str], ...] = field(default=(), metadata=LATER)

    def __post_init__(self) -> None:
        _check.one_of(_KINDS, kind=self.kind)
        _check.instance(bool, mirrored=self.mirrored)
        classes = tuple(str(name) for name in self.classes)
        if len(classes) < 2 or len(set(classes)) < len(classes):
            _check.fail("classes", self.classes, "to be the names of at least two classes")
        object.__setattr__(self, "classes", classes)
        require_form(header=self.header, delimiter=self.delimiter, label=self.label, user=self.user)
        if self.records is not None:
            _check.positive_int(records=self.records)
        if self.kind == "table" and (self.label is None or not self.columns):
            remedy = "Declare low and high, cuts or values for each column."
            _check.fail("codebook", self.kind, "to name its label and its columns", remedy)
        if self.kind == "images" and (self.height != self.width_of_image or self.height % 4 or self.height < SMALLEST):
            size, remedy = (
                (self.height, self.width_of_image),
                "Pictures of another size are scaled to it; arrays have to be of it.",
            )
            _check.fail("codebook", size, "to have images as high as wide, 8, 12, 16, ... pixels", remedy)
        if self.kind != "table" and (self.user is not None or self.columns or self.crosses):
            _check.fail("codebook", self.kind, "to name neither user nor columns", "Only the records of a table have them.")
        object.__setattr__(self, "crosses", crossed(self.crosses, self.columns))

    def encoder(self, *, buckets: int, weight: float, noise_multiplier: float) -> Encoder:
        """The encoder that turns records into rows.

        Args:
            buckets: buckets for hashed words.
            weight: of the words relative to the character statistics of a text.
            noise_multiplier: of what is learned before the run, if anything is.
        """
        if self.kind == "table":
            about = {name: vars(self)[name] for name in ("columns", "header", "delimiter", "label", "user", "crosses")}
            return Columns(noise_multiplier=noise_multiplier, **about)
        if self.kind == "text":
            return TextFeatures(buckets=buckets, weight=weight, noise_multiplier=noise_multiplier)
        pixels = ImageEncoder(channels=self.channels, height=self.height, width=self.width_of_image)
        return ImageFeatures(images=pixels, mirrored=self.mirrored, noise_multiplier=noise_multiplier)

    @property
    def width(self) -> int:
        """The number of features in a table's row."""
        places = {column.name: column.places for column in self.columns}
        return sum(places.values()) + sum(places[one] * places[other] for one, other in self.crosses)


def read_codebook(path: str | Path) -> Codebook:
    """The codebook in a .toml file; every key is one of those in :class:`Codebook`.

    Raises:
        ArgumentError: for anything that is not understood.
    """
    return _codebook(read_toml(Path(path)))


def _codebook(table: Mapping[str, Any]) -> Codebook:
    known = ["width" if fact.name == "width_of_image" else fact.name for fact in fields(Codebook)]
    for key in table:
        _check.one_of(known, **{"key of the codebook": key})
    for key in ("kind", "classes"):
        if key not in table:
            _check.fail("codebook", sorted(table), f"to have a key {key!r}")
    facts = {key: value for key, value in table.items() if key not in ("columns", "width", "classes")}
    if "width" in table:
        facts["width_of_image"] = _check.positive_int(width=table["width"])
    columns = columns_of(_check.instance(dict, columns=table.get("columns", {})))
    return Codebook(**facts, classes=tuple(_check.instance(list, classes=table["classes"])), columns=columns)
