"""Plans of recipes: a plan saved by ``hushgrad plan --save`` in place of a ``[plan]`` table, and what an ``[optimizer]`` adds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hushgrad import _check
from hushgrad._printed import reason
from hushgrad.errors import ArgumentError
from hushgrad.events import Gaussian, Relation
from hushgrad.noise.base import Mechanism
from hushgrad.noise.error import LONGEST_SCHEDULE
from hushgrad.noise.workload import SGDWorkload
from hushgrad.train.plan import Plan

_LARGEST = 1 << 26  # bytes; mechanisms with many coefficients are long
_KEYS = ("saved", "method", "delta", "noise_multiplier", "epsilon", "unit")


def read_plan(path: str | Path) -> Plan:
    """The plan in a file.

    Args:
        path: of the JSON that ``hushgrad plan --save``, or ``plan.to_json()``, wrote; a run's ``plan.json`` is one.

    >>> import json, tempfile
    >>> from hushgrad import Plan
    >>> plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=64, dataset_size=1000, steps=10)
    >>> with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
    ...     print(json.dumps(plan.to_json()), file=file, flush=True)
    ...     read_plan(file.name) == plan
    True

    Raises:
        ArgumentError: where there is no such file, or it holds no plan.
    """
    file = Path(path)
    if not file.is_file():
        _check.fail("--plan", str(path), "to be a file", "hushgrad plan --save PATH writes one.")
    if file.stat().st_size > _LARGEST:
        _check.fail("--plan", str(path), f"to have at most {_LARGEST} bytes")
    try:
        return Plan.from_json(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ArgumentError(f"Expected {file.name} to be a plan: {reason(error)}.") from None
    except ArgumentError as error:
        raise ArgumentError(f"Expected {file.name} to be a plan. hushgrad plan --save PATH writes one. {error}") from None


def table_of(path: str | Path) -> dict[str, Any]:
    """A ``[plan]`` table that is the plan in a file."""
    plan = read_plan(path)
    if plan.noise_multiplier is None:
        _check.fail("--plan", str(path), "to be calibrated", "Write it with hushgrad plan --epsilon ... --save PATH.")
    return {"saved": plan.to_json(), "noise_multiplier": plan.noise_multiplier, "delta": plan.delta, "unit": plan.unit}


def from_table(table: Mapping[str, Any], *, learned: float | None = None) -> Plan:
    """The plan of such a table: as it was saved, or with the noise (or the epsilon) that the table also states.

    ``learned`` is the noise multiplier of what the encoder learns from the records first; the plan must account for it.
    """
    for key in table:
        if key not in _KEYS:
            raise ArgumentError(
                f"Expected no {key!r} beside a saved plan: it says everything. Make another plan with hushgrad plan."
            )
    plan = replace(Plan.from_json(table["saved"]), delta=table["delta"], unit=table.get("unit", "example"))
    if learned is not None and plan.before != Gaussian(learned):
        raise ArgumentError(
            f"Expected a saved plan that counts what the encoder learns first, before={Gaussian(learned)}; it has before={plan.before}. "
            "Leave --plan out: the recipe's [plan] counts it. Or declare the cut points, so that nothing is learned."
        )
    if "epsilon" in table:
        return plan.calibrated(epsilon=table["epsilon"])
    return replace(plan, noise_multiplier=table["noise_multiplier"])


def relation_of(table: Mapping[str, Any], make: Callable[..., Plan]) -> Relation:
    """Which data sets are neighbours for the plan of a table: as stated, or by the default of its method."""
    if "saved" in table:
        return Plan.from_json(table["saved"]).relation
    return Relation.of(table.get("relation", inspect.signature(make).parameters["relation"].default))


def workload_of(optimizer: Mapping[str, Any], options: Mapping[str, Any]) -> SGDWorkload | None:
    """The workload of an ``[optimizer]``, if it is known and the noise can be optimised for it; None for prefix sums.

    Args:
        optimizer: the table.
        options: of the plan; how long it is, and its noise.
    """
    kept = {key: optimizer[key] for key in ("momentum", "weight_decay", "schedule") if key in optimizer}
    if optimizer["name"] != "sgd" or not kept or optimizer.keys() - {"name", "lr", *kept}:
        return None
    size = max(1, _check.number(batch_size=options.get("batch_size", 1)))
    steps = options.get("steps") or _check.number(epochs=options.get("epochs", 1)) * options["dataset_size"] / size
    if steps > LONGEST_SCHEDULE:
        kept.pop("schedule", None)
    workload, noise = SGDWorkload(**kept), options.get("noise")
    return workload if not isinstance(noise, Mechanism) or noise.following(workload) is not None else None
