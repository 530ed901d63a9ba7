"""Recipes: five tables that say what to train, on which data, and how privately; :mod:`hushgrad.recipes.recipe_file` reads them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn

from hushgrad import _check
from hushgrad.clipping.clipper import Clipper
from hushgrad.denoise.base import Denoiser
from hushgrad.errors import ArgumentError
from hushgrad.events import Gaussian, Relation
from hushgrad.guarantee import questions
from hushgrad.noise.base import Mechanism
from hushgrad.recipes.calls import call, require_known
from hushgrad.recipes.data import DATA
from hushgrad.recipes.dataset import Data, Learn
from hushgrad.recipes.models import MODELS
from hushgrad.recipes.saved_plans import from_table, relation_of, workload_of
from hushgrad.train.plan import Plan

_LARGEST = torch.finfo(torch.float32).max
_METHODS: dict[str, Callable[..., Plan]] = {"dpsgd": Plan.dpsgd, "dpftrl": Plan.dpftrl, "dpgd": Plan.dpgd}
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
}
# Tables and words of a recipe that stand for values of the house: {"name": "BLT", "buffers": 4} becomes BLT(buffers=4).
_FAMILIES: dict[str, tuple[str, type]] = {
    "noise": ("mechanism", Mechanism),
    "denoise": ("denoiser", Denoiser),
    "clip": ("clipper", Clipper),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """The table ``[run]``: everything that changes neither what is learned nor how privately."""

    seed: int | None = None
    evaluate_every: int = 0
    checkpoint_every: int = 100
    max_physical_batch: int | None = None
    max_epsilon: float | None = None
    device: str = "cpu"
    threads: int | None = None
    workers: int = 0
    raw_metrics: bool = False
    by: str = ""

    def __post_init__(self) -> None:
        _check.integer(0, evaluate_every=self.evaluate_every)
        _check.positive_int(checkpoint_every=self.checkpoint_every)
        _check.integer(0, workers=self.workers)
        _check.instance(bool, raw_metrics=self.raw_metrics)  # a word such as "no" would count as yes, and store raw metrics
        for name in ("max_physical_batch", "threads"):
            if vars(self)[name] is not None:
                _check.positive_int(**{name: vars(self)[name]})
        if self.seed is not None:
            _check.integer(seed=self.seed)
        if self.max_epsilon is not None:
            _check.positive(max_epsilon=self.max_epsilon)
        _check.instance(str, device=self.device)
        _check.instance(str, by=self.by)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The description of one training run: a file of five tables, ``[model] [data] [plan] [optimizer] [run]``, and two optional ones.

    ``[ledger]`` names the budget ledger that pays (``place``, ``dataset``); ``[tune]`` what ``hushgrad tune`` searches over.
    A recipe is data: where it names code as ``module:function``, that is run only if ``allow_code`` says so.

    >>> recipe = Recipe.from_tables({"model": {"name": "logistic"}, "data": {"name": "digits"}, "plan": {"epsilon": 3.0}})
    Traceback (most recent call last):
    ...
    hushgrad.errors.ArgumentError: Expected [plan] to have a key 'delta'.
    """

    model: Mapping[str, Any]
    data: Mapping[str, Any]
    plan: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    run: Run
    ledger: Mapping[str, Any] = field(default_factory=dict)
    tune: Mapping[str, Any] = field(default_factory=dict)
    allow_code: bool = field(default=False, compare=False)

    @classmethod
    def from_tables(cls, tables: Mapping[str, Any], *, allow_code: bool = False) -> Recipe:
        """The recipe in a dict of tables; unknown keys are refused with the closest known one."""
        require_known(tables, [f.name for f in fields(cls) if f.name != "allow_code"], "the recipe")
        for name, table in tables.items():
            _check.instance(dict, **{name: table})
        optimizer = {"name": "sgd", "lr": 0.5, **tables.get("optimizer", {})}
        plan = {"method": "dpsgd", **tables.get("plan", {})}
        run = tables.get("run", {})
        require_known(run, [f.name for f in fields(Run)], "[run]")
        for table, key in (("model", "name"), ("data", "name"), ("plan", "delta")):
            if key not in tables.get(table, {}):
                raise ArgumentError(f"Expected [{table}] to have a key {key!r}.")
        _check.instance(str, identity=tables["data"].get("identity", ""))
        _check.one_of(_METHODS, method=plan["method"])
        _check.one_of(_OPTIMIZERS, optimizer=optimizer["name"])
        ledger = _ledger_table(tables["ledger"]) if tables.get("ledger") else {}
        tune = dict(tables.get("tune", {}))
        given = {"model": tables["model"], "data": tables["data"], "plan": plan, "optimizer": optimizer}
        return cls(**given, run=Run(**run), ledger=ledger, tune=tune, allow_code=allow_code)

    @classmethod
    def given(cls, recipe: object) -> Recipe:
        """A recipe, or an error if the argument is none."""
        remedy = "Recipe.from_tables makes one of a dict of tables, load_recipe of a file."
        return _check.instance(Recipe, remedy, recipe=recipe)

    def paid_by(self, place: str, dataset: str) -> Recipe:
        """This recipe with the run charged to the budget of ``dataset`` in the ledger at ``place``."""
        return replace(self, ledger=_ledger_table({"place": place, "dataset": dataset}))

    def tables(self) -> dict[str, Any]:
        """This recipe as plain tables again."""
        run = {f.name: getattr(self.run, f.name) for f in fields(Run)}
        tables = {"model": self.model, "data": self.data, "plan": self.plan, "optimizer": self.optimizer}
        optional = {name: dict(table) for name, table in (("ledger", self.ledger), ("tune", self.tune)) if table}
        return {**{name: dict(table) for name, table in tables.items()}, "run": run, **optional}

    def questions(self) -> tuple[str, ...]:
        """Questions that a reader should ask about the plan's (epsilon, delta); none if they are not numbers."""
        stated = [self.plan.get(key) for key in ("epsilon", "delta")]
        known = [float(x) if isinstance(x, (int, float)) and not isinstance(x, bool) else None for x in stated]
        return questions(*known)

    @property
    def relation(self) -> Relation:
        """Which data sets are neighbours for its plan; the choice of test records depends on it."""
        return relation_of(self.plan, _METHODS[self.plan["method"]])

    def make_data(self, learn: Learn | None = None) -> Data:
        """Read the data; ``learn`` is how an encoder learns, if it has something to learn."""
        own = {"learn": learn, "placed": self.relation is not Relation.ADD_REMOVE}
        for key in own.keys() & self.data.keys():
            raise ArgumentError(f"Expected {key!r} not to be a key of [data]: it follows from the encoder, or from the plan.")
        make = DATA.get(str(self.data["name"]))
        known = {key: value for key, value in own.items() if make and key in inspect.signature(make).parameters}
        # Its identity is its name for readers, who read it on the card.
        table = {key: value for key, value in self.data.items() if key != "identity"} | known
        return _check.instance(Data, data=call(table, DATA, "data", allow_code=self.allow_code))

    def make_model(self, data: Data) -> nn.Module:
        """A fresh model; its initial weights follow from ``run.seed`` if there is one."""
        if self.run.seed is not None:
            torch.manual_seed(_check.integer(seed=self.run.seed) % 2**63)  # torch takes no larger one
        model = call(self.model, MODELS, "model", data, allow_code=self.allow_code)
        try:
            return _check.instance(nn.Module, model=model).to(self.run.device)
        except (RuntimeError, AssertionError) as error:  # torch's ways to say that a device is unknown, or not there
            raise ArgumentError(f"Expected device={self.run.device!r} to be there: {error}.") from None

    def make_plan(self, data: Data) -> Plan:
        """The plan, calibrated. ``dataset_size`` is that of the training set unless the recipe states a public one."""
        if "saved" in self.plan:
            return from_table(self.plan, learned=data.learned)
        options = {key: value for key, value in self.plan.items() if key not in ("method", "noise", "denoise", "clip")}
        for key, (family, kind) in _FAMILIES.items():
            if key in self.plan:
                options[key] = _value(self.plan[key], key, family, kind)
        size = len(data.train) if data.groups is None else len(set(data.groups))
        options.setdefault("dataset_size", size)
        if data.groups is not None:
            options.setdefault("unit", "user")
        if self.plan["method"] == "dpftrl":
            options.setdefault("workload", workload_of(self.optimizer, options))
        make = _METHODS[self.plan["method"]]
        # What is released before the run follows from the encoder: a table's own word would be lost beside it.
        require_known(options, [name for name in inspect.signature(make).parameters if name != "before"], "[plan]")
        if data.learned is not None:
            options["before"] = Gaussian(data.learned)
        try:
            return make(**options)
        except TypeError as error:
            raise ArgumentError(f"Expected a complete [plan]: {error}.") from None

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer over all trainable parameters."""
        options = {key: value for key, value in self.optimizer.items() if key not in ("name", "schedule")}
        for key, value in options.items():
            if isinstance(value, (int, float, str)) and not isinstance(value, bool):
                number = _check.number("", **{key: value})  # torch would train with nan, and spend the budget on it
                if abs(number) > _LARGEST:
                    _check.fail(key, value, f"to be a number of single precision, at most {_LARGEST:.3g}")
        kind = _OPTIMIZERS[self.optimizer["name"]]
        require_known(options, list(inspect.signature(kind).parameters)[1:], "[optimizer]")
        try:
            return kind([p for p in model.parameters() if p.requires_grad], **options)
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"Expected a valid [optimizer]: {error}.") from None

    def make_schedule(self, optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler | None:
        """The learning-rate schedule: "constant", "linear" (to 0) or "cosine" (to 0) over all steps."""
        name = _check.one_of(("constant", "linear", "cosine"), schedule=self.optimizer.get("schedule", "constant"))
        if name == "cosine":
            return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        if name == "linear":
            return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 1.0 / steps, steps)
        return None


def _ledger_table(table: Mapping[str, Any]) -> dict[str, Any]:
    require_known(table, ["place", "dataset"], "[ledger]")
    for key in ("place", "dataset"):
        if not isinstance(table.get(key), str) or not table[key]:
            raise ArgumentError(f"Expected [ledger] to have a key {key!r} with a word.")
    if "://" in table["place"] and ":" in table["place"].partition("://")[2].rpartition("@")[0]:
        raise ArgumentError("Expected [ledger] place without a password: recipes are copied. Use a .pgpass file or PGPASSWORD.")
    return dict(table)


def _value(described: Any, key: str, family: str, kind: type) -> Any:
    """A word such as "BLT", or a table with a name and fields, as the value that it describes."""
    if isinstance(described, str):
        described = {"name": described}
    if not isinstance(described, dict) or "name" not in described:
        _check.fail(key, described, "to be a name, or a table with a name")
    importlib.import_module(kind.__module__.rpartition(".")[0])  # the room registers its classes
    content = {name: value for name, value in described.items() if name != "name"}
    return kind.from_json({family: described["name"], **content})  # type: ignore[attr-defined]
