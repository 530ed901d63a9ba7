"""Heuristics cost time or width, never correctness: with policies drawn at random every interval still holds the truth."""

from __future__ import annotations

import random
import sys
from dataclasses import fields, replace

import pytest

from hushgrad.accounting import epsilon_interval, for_group
from hushgrad.accounting.heuristics import HEURISTICS, Heuristics
from hushgrad.events import BallsInBins, Compose, Event, Exponential, Gaussian, Laplace, Sampled, TruncatedPoisson


def _drawn(rng: random.Random) -> Heuristics:
    """Every number up to three times smaller or larger; what bounds memory, work, shares or the fineness of a proof only smaller."""
    only_smaller = {
        "cells",
        "endless",
        "choice_work",
        "allocation_fineness",
        "exchange_fineness",
        "finer",
        "merged_ratio",
        "short",
        "tilts",
        "slacks",
    }
    changed = {}
    for each in fields(Heuristics):
        value = getattr(HEURISTICS, each.name)
        factor = 3 ** rng.uniform(-1, 0 if each.name in only_smaller else 0.7)
        if isinstance(value, tuple):
            changed[each.name] = tuple(factor * v for v in value)
        elif isinstance(value, int):
            changed[each.name] = max(2, round(factor * value))
        else:
            changed[each.name] = factor * value
    return replace(HEURISTICS, **changed)


def _runs(rng: random.Random) -> list[tuple[Event, str]]:
    """Not the same twice: some laws are remembered."""
    sigma, rate = rng.uniform(0.8, 1.2), rng.uniform(0.01, 0.02)
    steps = [Gaussian(sigma + 1e-3 * k).sampled(rate=rate) for k in range(12)]
    return [
        (Gaussian(sigma).sampled(rate=rate) * 300, "add_remove"),
        (Gaussian(sigma).sampled(rate=rate) * 300, "replace_one"),
        (Laplace(3 * sigma).sampled(rate=rate) * 20 + Gaussian(sigma), "add_remove"),
        (Compose(steps), "zero_out"),
        (Sampled(BallsInBins(bins=20), Gaussian(sigma)), "add_remove"),
        (Exponential(sigma) * 5, "add_remove"),
        (Sampled(TruncatedPoisson(rate=rate, dataset_size=1000, size=round(1000 * rate)), Gaussian(sigma)) * 50, "add_remove"),
        (for_group(Gaussian(300 * sigma).sampled(rate=rate), 10_000), "add_remove"),
    ]


@pytest.mark.parametrize("seed", range(4))
def test_any_policy_gives_valid_ends(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    runs = _runs(rng)
    usual = [epsilon_interval(event, delta=1e-6, relation=relation) for event, relation in runs]
    drawn = _drawn(rng)
    for name, module in list(sys.modules.items()):
        if name.startswith("hushgrad.accounting") and getattr(module, "HEURISTICS", None) is HEURISTICS:
            monkeypatch.setattr(module, "HEURISTICS", drawn)
    for (event, relation), (low, high) in zip(runs, usual, strict=True):
        other_low, other_high = epsilon_interval(event, delta=1e-6, relation=relation)
        assert other_low <= high * (1 + 1e-9), (seed, event, relation)
        assert low <= other_high * (1 + 1e-9), (seed, event, relation)
