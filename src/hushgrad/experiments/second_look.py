"""Another look at what an experiment left undecided: pairs of runs on fresh seeds, as many as were fixed beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hushgrad._printed import at_most
from hushgrad.experiments.base import Claim, Context, Experiment, Findings, Table
from hushgrad.experiments.picture import panel
from hushgrad.experiments.training import mean_and_error, plus_minus, seeds_to_decide


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
