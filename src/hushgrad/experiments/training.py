"""What the experiments that train have in common: their data, one private run, accuracies, and means with errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from hushgrad import _check
from hushgrad.experiments.base import NOISE, Context
from hushgrad.recipes import DATA, Data
from hushgrad.sampling.units import Grouping
from hushgrad.train import Plan, make_private
from hushgrad.train.fitting import run_steps

MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
_SPLIT_SEED = 7  # of the validation split: public, and the same in every run


def image_data(context: Context, name: str) -> Data:
    """The image set ``name`` in the folder that ``--data`` names; the embedded digits for the quick form."""
    return DATA["digits"]() if context.quick else DATA[name](path=str(folder(context, name)))


def folder(context: Context, name: str) -> Path:
    """Where the data set ``name`` lies."""
    if context.data is None:
        _check.fail("--data", None, f"to name a folder that holds {name}", "The form with --quick needs no data.")
    return context.data / name


def held_out(data: TensorDataset, share: int = 6) -> tuple[TensorDataset, TensorDataset]:
    """(rest, validation): one ``share``-th of the *training* data set aside, to choose step sizes on."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    cut = len(data) // share
    return _rows(data, order[cut:]), _rows(data, order[:cut])


def _rows(data: TensorDataset, rows: Tensor) -> TensorDataset:
    return TensorDataset(*(tensor[rows] for tensor in data.tensors))


def trained(
    model: nn.Module,
    optimizer: MakeOptimizer,
    plan: Plan,
    data: TensorDataset,
    *,
    seed: int,
    groups: Grouping | None = None,
    part: int | None = None,
) -> nn.Module:
    """``model`` after the run of ``plan``, with the average of the iterates if the plan has one.

    ``part`` is the largest physical batch. The noise is drawn from the public ``seed``: these are measurements of accuracy on public
    data, not releases.
    """
    private = make_private(model, optimizer(model.parameters()), plan, seed=seed)
    try:
        run_steps(private, F.cross_entropy, data, max_physical_batch=part, groups=groups)
        if plan.average is not None:
            with private.averaged():
                kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    finally:
        private.detach()
    if plan.average is not None:
        model.load_state_dict(kept)
    return model


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset, *, part: int = 2000) -> float:
    """Share of right answers, in per cent."""
    inputs, labels = data.tensors
    hits = sum(int((model(x).argmax(1) == y).sum()) for x, y in zip(inputs.split(part), labels.split(part), strict=True))
    return 100.0 * hits / labels.numel()


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error (0 of a single value, which has none).

    >>> mean_and_error([1.0, 3.0])
    (2.0, 1.0)
    """
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, 0.0
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))


def gain(better: Sequence[float], worse: Sequence[float]) -> tuple[float, float]:
    """The mean difference of two methods and its standard error, seed by seed: a seed gives both the same batches and noise.

    >>> gain([81.0, 84.0], [80.0, 82.0])
    (1.5, 0.5)
    """
    return mean_and_error([x - y for x, y in zip(better, worse, strict=True)])


def gain_at(results: Mapping[tuple[str, float], Sequence[float]], better: str, worse: str, at: float) -> tuple[float, float]:
    """The :func:`gain` of one method over another at one epsilon, or step size."""
    return gain(results[better, at], results[worse, at])


def seeds_to_decide(difference: float, deviation: float) -> int:
    """How many fresh pairs of runs show a ``difference`` beyond two standard errors with a chance of 95 per cent.

    ``deviation`` is that of a single pair's difference; both come from earlier seeds, before the fresh ones are run.

    >>> seeds_to_decide(1.0, 2.0)
    54
    """
    return math.ceil(((NOISE + NormalDist().inv_cdf(0.95)) * deviation / difference) ** 2)


def plus_minus(values: Sequence[float], digits: int = 2) -> str:
    """``mean ± standard error`` for a table.

    >>> plus_minus([80.0, 82.0])
    '81.00 ± 1.00'
    """
    mean, error = mean_and_error(values)
    return f"{mean:.{digits}f}" + (f" ± {error:.{digits}f}" if len(values) > 1 else "")


def bars(axes: Any, x: Sequence[float], runs: Sequence[Sequence[float]], **look: Any) -> None:
    """A line through means, with two standard errors."""
    pairs = [mean_and_error(values) for values in runs]
    axes.errorbar(x, [m for m, _ in pairs], yerr=[2 * e for _, e in pairs], markersize=4, capsize=2, **look)
