"""Figures 5 and 7 of DP-LSSGD: a small convolutional net under six private methods, over epsilon and over the step size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hushgrad import denoise, noise
from hushgrad._printed import at_most
from hushgrad.experiments.base import Claim, Context, Experiment, Findings, Stated, Table
from hushgrad.experiments.picture import MARKS, panel
from hushgrad.experiments.training import (
    Look,
    Run,
    accuracy,
    bars,
    gain,
    gain_at,
    held_out,
    image_data,
    mean_and_error,
    plus_minus,
    second_look,
    trained,
)
from hushgrad.recipes import MODELS, Data
from hushgrad.train import Plan

claim = Stated("mnist-cnn")
DELTA = 1e-5


class _Method(NamedTuple):
    mark: str
    adaptive: bool = False
    denoise: denoise.Denoiser | None = None
    noise: noise.Mechanism | None = None


METHODS = {
    "DP-SGD": _Method("independent"),
    "DP-LSSGD": _Method("anti", denoise=denoise.Laplacian(1.0)),
    "DP-Adam": _Method("nu", adaptive=True),
    "DP-LSAdam": _Method("more", adaptive=True, denoise=denoise.Laplacian(1.0)),
    "DP-FTRL (BLT)": _Method("other", noise=noise.BLT(buffers=4)),
    "DiSK": _Method("best", denoise=denoise.Kalman.one_probe(0.7)),
}


class _Size(NamedTuple):
    epsilons: tuple[float, ...]
    batch: int
    model: str
    seeds: int
    rates: tuple[float, ...]  # of SGD, tried first; Adam takes a two-hundredth
    large_rates: tuple[float, ...]
    large_seeds: int


_FULL = _Size((0.2, 0.4, 2.0), 1000, "cnn", 3, (1.5, 3.0, 6.0), (6.0, 9.0, 12.0), 2)
_QUICK = _Size((2.0, 8.0), 120, "small-cnn", 2, (0.5, 1.0, 2.0), (2.0, 8.0), 2)
_ADAM = 1 / 200
_LARGEST, _SMALLEST = 50.0, 0.05  # where the search for a step size gives up

Results = dict[Any, list[float]]


def run(context: Context) -> Findings:
    """One pass over the data for every method: step sizes from a validation split, then accuracy over epsilon."""
    data, size = image_data(context, "mnist"), _QUICK if context.quick else _FULL
    rest, validation = held_out(data.train)
    tried: dict[tuple[str, float], float] = {}
    for method in context.track(list(METHODS), "validation"):
        tried |= _tried(data, rest, validation, size, method, context.seed)
    rates = _chosen(tried)
    results: Results = {(m, e): [] for m in METHODS for e in size.epsilons}
    for (method, epsilon), seed in context.track([(k, s) for k in results for s in range(size.seeds)], "over epsilon"):
        net = _trained(data, data.train, size, method, epsilon, rates[method], context.seed + 1 + seed)
        results[method, epsilon].append(accuracy(net, data.test))
    known = {(m, rates[m]): results[m, size.epsilons[0]] for m in METHODS}
    unstable = _large_rates(context, data, size, known)
    return Findings(
        claims=(_same_budget(data, size), *_claims(context, size, results, unstable)),
        tables=_tables(size, results, unstable, _rows(size, tried), len(data.train)),
        draw=lambda figure: _draw(figure, size, results, unstable),
        caption=f"Test accuracy in per cent of a small convolutional net on {'digits' if context.quick else 'MNIST'} after one pass, "
        f"delta = 1e-5, mean of {size.seeds} seeds with two standard errors: (a) over epsilon, each method at the step size that was "
        "best on validation data (points set side by side where they would cover each other); (b) over the step size at "
        f"epsilon = {at_most(size.epsilons[0], 6)}.",
        data={"over_epsilon": {str(k): v for k, v in results.items()}, "over_rate": {str(k): v for k, v in unstable.items()}},
    )


def again(context: Context, experiment: Experiment) -> Findings:
    """The second evaluation, on fresh seeds: smoothing at epsilon 2, and the cost of privacy."""
    data, size = image_data(context, "mnist"), _QUICK if context.quick else _FULL

    def value(run: Run, seed: int) -> float:
        return accuracy(_trained(data, data.train, size, run.method, run.epsilon, run.rate, seed), data.test)

    def judge(look: Look, one: Sequence[float], other: Sequence[float]) -> Claim:
        high, low = look.better.epsilon, look.worse.epsilon
        return claim.measured(look.claim, gain(one, other), epsilon=high, high=high, low=low)

    return second_look(context, experiment, value, judge, "points of accuracy")


def _plan(method: str, epsilon: float, n: int, batch: int) -> Plan:
    how = METHODS[method]
    if how.noise is not None:
        return Plan.dpftrl(
            epsilon=epsilon, delta=DELTA, batch_size=batch, dataset_size=n, epochs=1, noise=how.noise, relation="add_remove"
        )
    steps = -(-n // batch)
    return Plan.dpsgd(epsilon=epsilon, delta=DELTA, batch_size=batch, dataset_size=n, steps=steps, denoise=how.denoise)


def _trained(data: Data, train: TensorDataset, size: _Size, method: str, epsilon: float, rate: float, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    make: Callable[[Any], torch.optim.Optimizer] = (
        (lambda p: torch.optim.Adam(p, lr=rate * _ADAM)) if METHODS[method].adaptive else (lambda p: torch.optim.SGD(p, lr=rate))
    )
    plan = _plan(method, epsilon, len(train), size.batch)
    return trained(MODELS[size.model](data), make, plan, train, seed=seed, part=250)


def _tried(
    data: Data, rest: TensorDataset, validation: TensorDataset, size: _Size, method: str, seed: int
) -> dict[tuple[str, float], float]:
    """Validation accuracy by step size at the middle epsilon; the grid is doubled or halved until its best is not at an edge."""
    middle = size.epsilons[len(size.epsilons) // 2]
    found: dict[float, float] = {}
    todo = size.rates
    while todo:
        for rate in todo:
            found[rate] = accuracy(_trained(data, rest, size, method, middle, rate, seed), validation)
        best, low, high = max(found, key=found.__getitem__), min(found), max(found)
        todo = (2 * best,) if best == high < _LARGEST else (best / 2,) if best == low > _SMALLEST else ()
    return {(method, rate): found[rate] for rate in sorted(found)}


def _chosen(tried: dict[tuple[str, float], float]) -> dict[str, float]:
    return {m: max((key for key in tried if key[0] == m), key=tried.__getitem__)[1] for m, _ in tried}


def _rows(size: _Size, tried: dict[tuple[str, float], float]) -> list[tuple[Any, ...]]:
    """Table rows of the search for step sizes."""
    middle, chosen = size.epsilons[len(size.epsilons) // 2], _chosen(tried)
    return [
        (m, middle, rate * _ADAM if METHODS[m].adaptive else rate, value, "chosen" if chosen[m] == rate else "")
        for (m, rate), value in tried.items()
    ]


def _large_rates(context: Context, data: Data, size: _Size, known: Results) -> Results:
    """Accuracies by (method, step size) at the smallest epsilon; runs that are ``known`` are not repeated."""
    keys = [(m, r) for m in ("DP-SGD", "DP-LSSGD") for r in size.large_rates]
    results: Results = {key: known.get(key, [])[: size.large_seeds] for key in keys}
    jobs = [(m, r, s) for (m, r), there in results.items() if not there for s in range(size.large_seeds)]
    for method, rate, seed in context.track(jobs, "large steps"):
        net = _trained(data, data.train, size, method, size.epsilons[0], rate, context.seed + 1 + seed)
        results[method, rate].append(accuracy(net, data.test))
    return results


# Claims -----------------------------------------------------------------------------------------------------------------


def _same_budget(data: Data, size: _Size) -> Claim:
    plans = [_plan(m, size.epsilons[0], len(data.train), size.batch) for m in METHODS if METHODS[m].noise is None]
    spent = {plan.guarantee().epsilon for plan in plans}
    return claim("same budget", max(spent) - min(spent))


def _claims(context: Context, size: _Size, results: Results, unstable: Results) -> tuple[Claim, ...]:
    low, high = size.epsilons[0], size.epsilons[-1]
    growth = gain(results["DP-SGD", high], results["DP-SGD", low])
    worst = min(mean_and_error(values) for values in results.values())
    smoothing = {e: gain_at(results, "DP-LSSGD", "DP-SGD", e) for e in size.epsilons}
    claims = (claim.measured("privacy costs", growth, high=high, low=low), claim.measured("all learn", worst))
    if context.quick:  # on 8 x 8 pixels smoothing has no neighbours to use
        return claims
    return (
        *claims,
        *(
            claim.measured("figure 7", smoothing[e], expected=printed, printed=printed, epsilon=e)
            for e, printed in ((0.2, 5.0), (0.4, 3.2))
        ),
        *(claim.measured("DP-LSSGD improves", gain, epsilon=e) for e, gain in smoothing.items()),
        _stability_claim(size, unstable),
        claim.measured("DP-Adam", gain_at(results, "DP-Adam", "DP-LSSGD", 0.4)),
        claim.measured("DP-LSAdam", gain_at(results, "DP-LSAdam", "DP-Adam", 0.4)),
        claim.measured("DP-FTRL", gain_at(results, "DP-FTRL (BLT)", "DP-SGD", high), high=high),
    )


def _stability_claim(size: _Size, unstable: Results) -> Claim:
    """The claim at the largest step size at which a method still learns; if none does, the finding is NaN and never agrees."""
    both = {
        rate: tuple(mean_and_error(unstable[method, rate])[0] for method in ("DP-SGD", "DP-LSSGD")) for rate in size.large_rates
    }
    rate = max((rate for rate, means in both.items() if max(means) > 20.0), default=size.large_rates[-1])
    plain, smooth = both[rate]
    more, error = gain_at(unstable, "DP-LSSGD", "DP-SGD", rate)
    found = more if max(plain, smooth) > 20.0 else math.nan
    return claim("stable", found, stderr=error, rate=rate, epsilon=size.epsilons[0], plain=plain, smooth=smooth)


# Tables and picture -----------------------------------------------------------------------------------------------------


def _tables(size: _Size, results: Results, unstable: Results, tried: list[tuple[Any, ...]], n: int) -> tuple[Table, ...]:
    heads = tuple(f"eps = {e:g}" for e in size.epsilons)
    return (
        Table(
            title=f"Test accuracy in per cent after one pass ({n} examples, batches of {size.batch}), mean ± standard error of "
            f"{size.seeds} seeds; DP-FTRL without amplification, the others with Poisson batches",
            columns=("method", *heads),
            rows=tuple((m, *(plus_minus(results[m, e]) for e in size.epsilons)) for m in METHODS),
        ),
        Table(
            title=f"The same over the step size at eps = {at_most(size.epsilons[0], 6)} ({size.large_seeds} seeds)",
            columns=("method", *(f"rate {r:g}" for r in size.large_rates)),
            rows=tuple((m, *(plus_minus(unstable[m, r]) for r in size.large_rates)) for m in ("DP-SGD", "DP-LSSGD")),
        ),
        Table(
            title="Step sizes, chosen on a sixth of the training data, never on the test data (the search is not charged)",
            columns=("method", "eps", "learning rate", "validation accuracy", ""),
            rows=tuple(tried),
        ),
    )


def _draw(figure: Any, size: _Size, results: Results, unstable: Results) -> None:
    spec = figure.add_gridspec(1, 2)
    first = panel(figure, spec[0], title="(a) over the privacy level", x="epsilon", y="test accuracy (%)", log="x")
    for place, (method, how) in enumerate(METHODS.items()):
        beside = [e * 1.03 ** (place - 2.5) for e in size.epsilons]  # else equal results would hide each other
        bars(first, beside, [results[method, e] for e in size.epsilons], label=method, **MARKS[how.mark])
    first.legend(frameon=False, fontsize=8, loc="lower right")
    title = f"(b) over the step size, epsilon = {at_most(size.epsilons[0], 6)}"
    second = panel(figure, spec[1], title=title, x="learning rate", y="test accuracy (%)", log="")
    for method in ("DP-SGD", "DP-LSSGD"):
        runs = [unstable[method, r] for r in size.large_rates]
        bars(second, size.large_rates, runs, label=method, **MARKS[METHODS[method].mark])
    second.set_xticks(size.large_rates)
    second.legend(frameon=False, fontsize=8)
