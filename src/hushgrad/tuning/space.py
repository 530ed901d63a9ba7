"""The candidates of a search: a grid over single values of a recipe."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hushgrad import _check
from hushgrad.errors import ArgumentError
from hushgrad.recipes.recipe import Recipe
from hushgrad.recipes.recipe_file import parse_value
from hushgrad.tuning.cost import Stopping

_TABLES = ("model", "plan", "optimizer")
_KEYS = ("over", "mean", "shape", "score", "metric", "score_noise", "holdout")
_MOST = 100_000


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The table ``[tune]``, checked.

    | key | meaning |
    |---|---|
    | ``over`` | ``{"optimizer.lr": [0.1, 0.3, 1.0], ...}``: every combination is a candidate |
    | ``mean``, ``shape`` | the distribution of the number of trials; see :class:`Stopping` |
    | ``score`` | ``"public"``: on the test set, which must be public; ``"private"``: on held-out private records, with noise |
    | ``metric`` | ``"accuracy"`` or, on public data only, ``"loss"`` |
    | ``score_noise`` | noise multiplier of the private score: a Gaussian on the number of hits |
    | ``holdout`` | the probability with which a record is held out for a private score |

        >>> from hushgrad.tuning import Stopping
        >>> settings = Settings(over={"optimizer.lr": (0.1, 0.3)}, stopping=Stopping(mean=5.0))
        >>> settings.score, settings.metric
        ('public', 'accuracy')
    """

    over: Mapping[str, tuple[Any, ...]]
    stopping: Stopping
    score: str = "public"
    metric: str = "accuracy"
    score_noise: float = 10.0
    holdout: float = 0.1

    @property
    def candidates(self) -> list[dict[str, Any]]:
        """All combinations, in a fixed order."""
        return [dict(zip(self.over, values, strict=True)) for values in itertools.product(*self.over.values())]


def settings_of(recipe: Recipe, *, over: Iterable[str] = (), changes: Mapping[str, Any] | None = None) -> Settings:
    """The settings in a recipe's ``[tune]`` table; ``over`` adds words such as ``"optimizer.lr=0.1,0.3"``.

    Args:
        recipe: whose table ``[tune]`` is read.
        over: more values to try.
        changes: keys of the table that are replaced.

    >>> from hushgrad.recipes import Recipe
    >>> plan = {"epsilon": 3.0, "delta": 1e-5, "batch_size": 64, "epochs": 1}
    >>> recipe = Recipe.from_tables({"model": {"name": "logistic"}, "data": {"name": "digits"}, "plan": plan})
    >>> settings_of(recipe, over=["optimizer.lr=0.1,0.3"]).over
    {'optimizer.lr': (0.1, 0.3)}

    Raises:
        ArgumentError: for anything that is not understood, before anything is trained.
    """
    table = {**recipe.tune, **{key: value for key, value in (changes or {}).items() if value is not None}}
    for key in table:
        _check.one_of(_KEYS, **{"[tune] key": key})
    grid = {place: _values(place, values) for place, values in _check.instance(dict, over=table.get("over", {})).items()}
    grid |= dict(_parsed(word) for word in over)
    if not grid:
        raise ArgumentError(
            'Expected something to tune. Add [tune.over] "optimizer.lr" = [0.1, 0.3], or --over optimizer.lr=0.1,0.3.'
        )
    options = {key: table[key] for key in ("score", "metric", "score_noise", "holdout") if key in table}
    stopping = Stopping(**{key: _number(key, table[key]) for key in ("mean", "shape") if key in table})
    for place, values in grid.items():
        _require_numbers(recipe, place, values)
    settings = Settings(over=grid, stopping=stopping, **options)
    _require_sane(settings)
    return settings


def _require_sane(settings: Settings) -> None:
    _check.one_of(("public", "private"), score=settings.score)
    _check.one_of(("accuracy", "loss"), metric=settings.metric)
    if settings.score == "private" and settings.metric == "loss":
        _check.fail("metric", "loss", "to be 'accuracy' for a private score", "One record can change a loss without bound.")
    _check.positive(score_noise=settings.score_noise)
    _check.between(0, 1, holdout=settings.holdout)
    count = 1
    for values in settings.over.values():
        count *= len(values)
    if count > _MOST:
        _check.fail("over", count, f"to have at most {_MOST} combinations")


def _number(key: str, value: Any) -> float:
    if isinstance(value, str) and value in ("inf", "poisson"):
        return float("inf")
    return (
        float(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool)
        else _check.fail(key, value, "to be a number")
    )


def _values(place: str, values: Any) -> tuple[Any, ...]:
    table, dot, key = place.partition(".")
    if not (dot and key) or table not in _TABLES:
        _check.fail("over", place, f"to name a value as table.key, the table one of {', '.join(_TABLES)}")
    if place in ("plan.delta", "plan.relation", "plan.unit", "plan.epsilon", "plan.noise_multiplier"):
        _check.fail("over", place, "to be something that does not change what is promised")
    if not isinstance(values, (list, tuple)) or not values:
        _check.fail("over", values, f"to be a list of values for {place}")
    return tuple(values)


def _require_numbers(recipe: Recipe, place: str, values: tuple[Any, ...]) -> None:
    """Require finite numbers where the recipe has a number or any value is one: a trial that cannot run is paid for all the same."""
    table, _, key = place.partition(".")
    known = recipe.tables()[table].get(key)
    if any(_is_number(value) for value in (known, *values)):
        for value in values:
            if not _is_number(value) or not math.isfinite(value):
                _check.fail("over", value, f"to be a finite number, as {place} is one")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def edges(over: Mapping[str, tuple[Any, ...]], chosen: Mapping[str, Any]) -> list[str]:
    """A sentence for each number that was chosen at the end of its grid: a better one may lie beyond it.

    It follows from the released winner and the public grid, so it costs nothing.

        >>> edges({"optimizer.lr": (0.1, 0.3, 1.0)}, {"optimizer.lr": 1.0})
        ['optimizer.lr = 1.0 is the largest value that was tried; a better one may lie beyond it.']
    """
    found = []
    for place, values in over.items():
        if len(values) < 2 or not all(_is_number(value) for value in values):
            continue
        for name, end in (("smallest", min(values)), ("largest", max(values))):
            if chosen[place] == end:
                found.append(f"{place} = {end} is the {name} value that was tried; a better one may lie beyond it.")
    return found


def _parsed(word: str) -> tuple[str, tuple[Any, ...]]:
    place, equals, values = word.partition("=")
    if not equals or not values:
        _check.fail("--over", word, "to have the form table.key=value,value,...", "For example --over optimizer.lr=0.1,0.3,1.")
    found = parse_value(f"[{values}]")
    listed = found if isinstance(found, list) else [parse_value(value) for value in values.split(",")]
    return place.strip(), _values(place.strip(), listed)


def with_candidate(recipe: Recipe, candidate: Mapping[str, Any]) -> Recipe:
    """The recipe with one candidate's values and without ``[tune]`` and ``[ledger]``, because a trial pays for nothing itself."""
    tables = replace(recipe, tune={}, ledger={}).tables()
    for place, value in candidate.items():
        table, _, key = place.partition(".")
        tables[table] = {**tables[table], key: value}
    return Recipe.from_tables(tables, allow_code=recipe.allow_code)
