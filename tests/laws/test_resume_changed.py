"""A killed run that is resumed with one thing changed is stopped before it releases a row of noise with another value.

For every mechanism, sampler, denoiser and clipper; what is changed is drawn once, from a fixed seed. A release is the gradient that the
optimizer is given. The run itself, unchanged, then goes on to the very same end as one that was never killed.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from hushgrad import clipping, denoise, noise, sampling
from hushgrad.clipping import Flat
from hushgrad.clipping.clipper import Clipper
from hushgrad.errors import ArgumentError, HushgradError
from hushgrad.events import Relation
from hushgrad.noise import Independent
from hushgrad.sampling import Poisson
from hushgrad.testing import members
from hushgrad.train import Checkpoint, Plan, make_private
from hushgrad.train.fitting import run_steps

F = nn.functional
STEPS, RECORDS = 12, 30  # what the examples of mechanisms and samplers are for
SAVED, DIED, LAST = 2, 4, 5  # steps


class Augmented(Dataset):
    """Examples that are read with some noise."""

    def __init__(self, data: TensorDataset, scale: float) -> None:
        self.data, self.scale = data, scale

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self.data[i]
        return x + self.scale * torch.rand(6), y


def _data(record: float | None = None, order: bool = False, scale: float = 0.1) -> Augmented:
    g = torch.Generator().manual_seed(5)
    x, y = torch.randn(RECORDS, 6, generator=g), torch.randint(2, (RECORDS,), generator=g)
    if record is not None:
        x[:, 3] += record
    if order:
        x, y = x.flip(0), y.flip(0)
    return Augmented(TensorDataset(x, y), scale)


def _smooth(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target, label_smoothing=0.1)


WAYS_ON = "Put this run's files back as they were, or start a new run with a new key"
OTHER_PLAN = "A key serves one plan"
USERS = torch.arange(RECORDS)

# What the second life does otherwise: its plan, what it is called with, and what it is told.
CHANGES: dict[str, tuple[Callable[[Plan], Plan], dict[str, Any], str]] = {
    "a record": (lambda plan: plan, {"data": lambda: _data(record=0.5)}, WAYS_ON),
    "the order": (lambda plan: plan, {"data": lambda: _data(order=True)}, WAYS_ON),
    "the augmentation": (lambda plan: plan, {"data": lambda: _data(scale=0.2)}, WAYS_ON),
    "the learning rate": (lambda plan: plan, {"rate": 0.5}, WAYS_ON),
    "the loss": (lambda plan: plan, {"loss": _smooth}, WAYS_ON),
    "the groups": (lambda plan: plan, {"groups": USERS.roll(1)}, WAYS_ON),
    "the noise": (lambda plan: replace(plan, noise_multiplier=2 * (plan.noise_multiplier or 1.0)), {}, OTHER_PLAN),
    "the cipher": (lambda plan: replace(plan, cipher="chacha20"), {}, OTHER_PLAN),
    "the world": (lambda plan: plan, {}, WAYS_ON),
}


class Life:
    """One life of the run in ``folder``, up to a step; ``given`` is what the optimizer was given at each."""

    def __init__(self) -> None:
        self.given = dict[int, torch.Tensor]()

    def live(
        self,
        folder: Path,
        plan: Plan,
        to: int,
        *,
        data: Callable[[], Augmented] = _data,
        rate: float = 0.1,
        loss: Callable[..., torch.Tensor] = F.cross_entropy,
        groups: torch.Tensor | None = None,
    ) -> Life:
        """Begin or resume it, and go as far as ``to``."""
        torch.manual_seed(to)  # the first weights of a second life are the saved ones
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        self.private = make_private(model, optimizer, plan)
        checkpoint = Checkpoint(folder, self.private)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.register_step_pre_hook(lambda *_: self.note(model))

        def look(metrics: dict[str, Any]) -> None:
            if metrics["step"] == SAVED:
                checkpoint.save()
            if metrics["step"] == to:
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            run_steps(self.private, loss, data(), callbacks=[look], groups=groups)
        return self

    def note(self, model: nn.Module) -> None:
        """What a step is about to be taken with."""
        self.given[self.private.steps] = torch.cat([p.grad.flatten().clone() for p in model.parameters() if p.grad is not None])


def _plan(**parts: Any) -> Plan:
    usual = {
        "sampler": Poisson(rate=0.3, steps=STEPS),
        "clip": Flat(max_grad_norm=1.0),
        "noise": Independent(),
        "noise_multiplier": 1.0,
        "delta": 1e-5,
    }
    parts = {**usual, **parts}
    return Plan(steps=parts["sampler"].steps, batch_size=10, **parts)


@functools.cache
def _plans() -> dict[str, Plan]:
    """A plan with every example of a mechanism, a sampler, a denoiser and a clipper: with the first partner that a theorem knows."""
    found = {"usual": _plan()}
    samplers = [s for kind in members(sampling, sampling.Sampler).values() for s in kind.examples()]
    mechanisms = [m for kind in members(noise, noise.Mechanism).values() for m in kind.examples()]
    for mechanism in mechanisms:
        found[f"noise {mechanism}"] = _first([{"noise": mechanism, "sampler": s} for s in samplers])
    for sampler in samplers:
        found[f"sampler {sampler}"] = _first(
            [{"noise": m, "sampler": sampler, "relation": r} for m in (Independent(), *mechanisms) for r in Relation]
        )
    for kind in members(denoise, denoise.Denoiser).values():
        found |= {f"denoise {d}": _plan(denoise=d) for d in kind.examples()}
    for clipper in members(clipping, Clipper).values():
        found |= {f"clip {c}": _plan(clip=c, noise_multiplier=0.5) for c in clipper.examples()}
    return found


def _first(choices: list[dict[str, Any]]) -> Plan:
    for parts in choices:
        with contextlib.suppress(HushgradError):
            return _plan(**parts)
    raise AssertionError(f"no plan with {choices[0]}")


def _cases() -> list[tuple[str, str]]:
    rng = random.Random(20261117)
    every = [("usual", change) for change in CHANGES]
    return every + [(name, rng.choice(list(CHANGES))) for name in _plans() if name != "usual"]


def _without_two_values(*lives: Life) -> None:
    """No row of noise with two values, in any two lives."""
    for one in lives:
        for other in lives:
            assert all(torch.equal(one.given[step], other.given[step]) for step in one.given.keys() & other.given.keys())


@pytest.mark.parametrize(("name", "change"), _cases(), ids=str)
def test_resumed_with_one_thing_changed_a_run_is_stopped(tmp_path, name, change):
    plan, (other, options, told) = _plans()[name], CHANGES[change]
    usual = {}
    if change == "the groups":
        plan, usual = replace(plan, unit="user"), {"groups": USERS}
    first = Life().live(tmp_path, plan, DIED, **usual)
    if change == "the world":
        first.private.journal.rebind("world", 2)  # as if it had been two processes
    first.private.detach()
    second = Life()
    with pytest.raises(ArgumentError, match=told):
        second.live(tmp_path, other(plan), LAST, **options)
    lives = [first, second]
    if change != "the world":
        lives.append(Life().live(tmp_path, plan, LAST, **usual))
        assert sorted(lives[-1].given) == list(range(SAVED + 1, LAST + 1))
    _without_two_values(*lives)
