"""What the experiments that train have in common: their data, one private run, accuracies, and means with errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from hushgrad import _check
from hushgrad._printed import at_most
from hushgrad.experiments.base import NOISE, Claim, Context, Experiment, Findings, Table
from hushgrad.experiments.picture import panel
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


# Another look at what was left undecided: pairs of runs on fresh seeds, as many as were fixed beforehand ------------------


class Run(NamedTuple):
    """What is trained: a method at an epsilon, with the step size that the first look chose."""

    method: str
    epsilon: float
    rate: float


class Look(NamedTuple):
    """Two runs to compare, the number of seeds that decides, and the name of the claim."""

    better: Run
    worse: Run
    seeds: int
    claim: str


Judge = Callable[[Look, Sequence[float], Sequence[float]], Claim]


def second_look(context: Context, again: Experiment, value: Callable[[Run, int], float], judge: Judge, unit: str) -> Findings:
    """Each run on fresh seeds alone, compared seed by seed; a run of two comparisons is made once.

    Args:
        context: the seed that fresh ones are counted from.
        again: what is compared, and the first seed, beyond those of earlier looks.
        value: what a run gives with a seed.
        judge: the claim from the values of both runs, seed by seed.
        unit: what this value is, for the page.
    """
    tables, fresh = (again.quick or again.looks) if context.quick else again.looks, again.fresh
    looks = [
        Look(Run(*t["better"]), Run(*t["worse"]), 2 if context.quick else seeds_to_decide(*t["seen"]), t["claim"]) for t in tables
    ]
    wanted: dict[Run, int] = {}
    for look in looks:
        for run in (look.better, look.worse):
            wanted[run] = max(wanted.get(run, 0), look.seeds)
    values: dict[Run, list[float]] = {run: [] for run in wanted}
    for run, seed in context.track([(run, seed) for run, count in wanted.items() for seed in range(count)], "fresh seeds"):
        values[run].append(value(run, context.seed + fresh + seed))
    pairs = [(values[look.better][: look.seeds], values[look.worse][: look.seeds]) for look in looks]
    differences = [[x - y for x, y in zip(*pair, strict=True)] for pair in pairs]
    return Findings(
        claims=tuple(judge(look, *pair) for look, pair in zip(looks, pairs, strict=True)),
        tables=(_table(looks, pairs, differences, unit),),
        draw=lambda figure: _draw(figure, looks, differences, unit, fresh),
        caption=f"Differences in {unit}, seed by seed; the line is their mean, the band two standard errors.",
        data={
            "values": {f"{r.method}, {at_most(r.epsilon, 6)}": v for r, v in values.items()},
            "first seed": context.seed + fresh,
        },
    )


def _table(
    looks: Sequence[Look], pairs: Sequence[tuple[list[float], list[float]]], differences: Sequence[list[float]], unit: str
) -> Table:
    rows: list[tuple[Any, ...]] = []
    for look, pair, difference in zip(looks, pairs, differences, strict=True):
        for run, values in zip(look[:2], pair, strict=True):
            rows.append((run.method, run.epsilon, run.rate, look.seeds, plus_minus(values, 3)))
        rows.append((f"{look.better.method} minus {look.worse.method}", "", "", look.seeds, plus_minus(difference, 3)))
    return Table(
        title=f"{unit[0].upper()}{unit[1:]}, mean ± standard error over fresh seeds; how many was fixed before the run, from the "
        "paired differences of the look before",
        columns=("method", "eps", "step size (the first look's choice)", "seeds", unit),
        rows=tuple(rows),
    )


def _draw(figure: Any, looks: Sequence[Look], differences: Sequence[list[float]], unit: str, fresh: int) -> None:
    places = figure.add_gridspec(1, len(looks))
    for place, look, values in zip(places, looks, differences, strict=True):
        one, other = (f"{run.method} (eps = {at_most(run.epsilon, 6)})" for run in look[:2])
        axes = panel(figure, place, title=f"{one}\nminus {other}", x="seed", y=unit, log="")
        mean, error = mean_and_error(values)
        axes.axhspan(mean - 2 * error, mean + 2 * error, color="0.9")
        axes.axhline(mean, color="0.4")
        axes.axhline(0.0, color="0.0", linewidth=0.8)
        axes.plot(range(fresh, fresh + len(values)), values, "o", markersize=4 if len(values) < 50 else 2)
