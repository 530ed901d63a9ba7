"""Several processes: were all of them given the same plan, options, model, optimizer and data?

They take one step together. Batches are dealt by the numbers of records, so with two orders of the data one record may be number 3 here
and number 7 there, and count twice; with two clip norms the larger one bounds the sum. So the processes compare digests where a run begins.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hushgrad.clipping.proof.fixed_randomness import draw_from, host_draws
from hushgrad.errors import ArgumentError
from hushgrad.release.placement.world import World
from hushgrad.sampling.data_digest import Content
from hushgrad.train.plan import Plan

DRAWN = (
    "Records of several processes: that all of them read the same ones under the same number is vouched for; read twice, a record was not "
    "the same, or could not be read"
)
_BYTES = 16
_READ = 8  # records that are compared


def require_same_run(
    world: World, key: bytes, plan: Plan, model: nn.Module, optimizer: Optimizer, options: Mapping[str, Any]
) -> None:
    """Refuse, in all processes, a run that is not the same in each of them.

    Raises:
        ArgumentError: the same one everywhere; it names what differs.
    """
    if world.size == 1:
        return
    settings = plan.to_json()
    given: dict[str, Any] = {f"plan.{f.name}": settings.get(f.name) for f in dataclasses.fields(plan)}
    given |= {"model": _model(model), "optimizer": _optimizer(optimizer, model), **options}
    _require_same(
        world, key, given, "each does its part of one step, whose bound is that of one plan. Give all the same arguments."
    )


def require_same_data(world: World, key: bytes, dataset: Any, about: Mapping[str, Any], steps: int) -> bool:
    """The same for the data, of which ``about`` is what the data contract knows, and for the number of ``steps`` taken.

    Returns whether records could be compared; data that the user names are not read.

    Raises:
        ArgumentError: the same one everywhere.
    """
    records = [] if about["identity"] else _records(dataset, key)
    comparable = world.least(records is not None) == 1
    groups = {name: value for name, value in about.items() if name in ("groups", "cap")}
    content = (about["examples"], about["digest"], about["seen"], records if comparable else None)
    given: dict[str, Any] = {"data": content, "groups": groups}
    given |= {"identity": about["identity"], "number of steps taken": steps}
    why = (
        "batches are dealt by the numbers of records, and in another order one record counts twice. Seed what makes or shuffles them "
        "(generator=torch.Generator().manual_seed(0) for random_split); if copies of the same files differ in path or time alone, give "
        'identity="name, version".'
    )
    _require_same(world, key, given, why)
    return comparable


def _records(dataset: Any, key: bytes) -> list[str] | None:
    """Digests of a few records, the same numbers in every process; None if they change from one reading to the next, or cannot be read.

    Their order may follow from what no digest of a data set shows: a number in it, the code that reads it, this process's rank.
    """
    numbers = random.Random(key).sample(range(len(dataset)), min(len(dataset), _READ))
    host = host_draws()
    try:
        with torch.random.fork_rng(devices=[]):
            once, again = (_read(dataset, numbers, key) for _ in range(2))
    except Exception:  # noqa: BLE001 (only workers may be able to read: a foreign data set may raise anything; the guarantee says so)
        return None
    finally:
        draw_from(host)
    return once if once == again else None


def _read(dataset: Any, numbers: list[int], key: bytes) -> list[str]:
    """Digests of these records, with all global generators at a fixed point: augmentations are then the same in every process."""
    torch.default_generator.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    made = []
    for number in numbers:
        content = Content(key)
        content.add(dataset[number], record=True)
        made.append(content.hex())
    return made


def _require_same(world: World, key: bytes, given: Mapping[str, Any], why: str) -> None:
    """``given`` must have the same names in all processes; its values are compared by digests under ``key``."""
    found = world.compared(b"".join(_digest(value, key) for value in given.values()))
    parts = [{one[at : at + _BYTES] for one in found} for at in range(0, _BYTES * len(given), _BYTES)]
    others = [name for name, digests in zip(given, parts, strict=True) if len(digests) > 1]
    if others:
        refused = ArgumentError(f"Expected the same {', '.join(others[:3])} in every process: {why}")
        refused.agreed = True
        raise refused


def _digest(value: Any, key: bytes) -> bytes:
    return hashlib.blake2b(repr(_plain(value)).encode(), digest_size=_BYTES, key=key).digest()


def _plain(value: Any) -> Any:
    """The value as built-in types, alike in all processes; of an object that is none, its class."""
    if isinstance(value, Tensor):
        return value.tolist()  # a learning rate
    if isinstance(value, Mapping):
        return sorted((str(name), _plain(item)) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else type(value).__qualname__


def _model(model: nn.Module) -> Any:
    parameters = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    buffers = [(name, tuple(b.shape), str(b.dtype)) for name, b in model.named_buffers()]
    return parameters, buffers, [(name, type(module).__qualname__) for name, module in model.named_modules()]


def _optimizer(optimizer: Optimizer, model: nn.Module) -> Any:
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [{**group, "params": [names.get(id(p)) for p in group["params"]]} for group in optimizer.param_groups]
    return type(optimizer).__qualname__, groups
