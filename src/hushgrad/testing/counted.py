"""One private step on the pretend device, counted, beside an ordinary one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import TensorDataset

from hushgrad.testing.devices import Meter, pretend
from hushgrad.testing.models import Sample
from hushgrad.train import Plan, make_private

_STEPS = 3  # the third is counted: states and constants are there by then, and no value is compared (steps 1, 2, 4, 8, ...)


def private_step(
    sample: Callable[[int], Sample], *, batch: int = 8, users: bool = False, foreach: bool = True, **plan: Any
) -> Meter:
    """What the third step of a private run does on the pretend device.

    Args:
        sample: makes the model and records.
        batch: the expected batch size.
        users: protect users of four records each.
        foreach: the optimizer updates all tensors together, as torch chooses to on CUDA.
        plan: further options of ``Plan.dpsgd``, or of ``Plan.dpftrl`` if there is a mechanism among them.
    """
    torch.manual_seed(0)
    records = 4 * batch
    made = sample(records)
    recipe = Plan.dpftrl if "noise" in plan else Plan.dpsgd
    sizes = (
        {"batch_size": batch // 4, "dataset_size": records // 4, "unit": "user"}
        if users
        else {"batch_size": batch, "dataset_size": records}
    )
    chosen = recipe(noise_multiplier=1.0, delta=1e-5, steps=4 if "noise" in plan else _STEPS, **{**sizes, **plan})
    with pretend() as device:
        model = device.put(made.model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
        private = make_private(model, optimizer, chosen, seed=0, check_isolation=False)
        groups = [i // 4 for i in range(records)] if users else None
        batches: Any = private.loader(TensorDataset(made.x, made.y), groups=groups)
        for drawn in batches:
            x, y = (t.to("pretend") for t in drawn)  # the batch itself is not counted
            with device.counting() as meter:
                made.loss(model(x), y).backward()
                optimizer.step()
            if private.steps == _STEPS:
                break
        private.detach()
    return meter


def ordinary_step(sample: Callable[[int], Sample], *, batch: int = 8, foreach: bool = True) -> Meter:
    """What one step of an ordinary run does on the pretend device."""
    torch.manual_seed(0)
    made = sample(batch)
    with pretend() as device:
        model = device.put(made.model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
        x, y = made.x.to("pretend"), made.y.to("pretend")
        with device.counting() as meter:
            made.loss(model(x), y).backward()
            optimizer.step()
        return meter
