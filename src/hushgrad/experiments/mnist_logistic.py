"""Table 2 and figure 4 of DP-LSSGD (logistic regression on MNIST), re-run with a valid guarantee, next to a modern recipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import TensorDataset

from hushgrad._printed import at_most
from hushgrad.experiments.base import Claim, Context, Findings, Stated, Table
from hushgrad.experiments.linear_runs import (
    DELTA,
    Descent,
    Setting,
    authors_noise,
    correct,
    descended,
    lipschitz,
    normalised,
    table2,
    theorem2,
    train_together,
)
from hushgrad.experiments.picture import MARKS, panel
from hushgrad.experiments.public_features import centred, oriented_gradients, upright
from hushgrad.experiments.training import bars, held_out, image_data, mean_and_error, plus_minus
from hushgrad.recipes import Data
from hushgrad.train import Plan, Tail

claim = Stated("mnist-logistic")
SIGMAS = (0.0, 3.0)
# The best recipe. A small clip norm: most examples are soon nearly right, and C = 1 would pay noise for gradients that nobody has.
CLIP, TAIL, SMOOTHINGS = 0.2, 0.3, {"pixels": (1.0, 3.0), "features": (0.0,)}
# What an earlier, independent program measured under the same conditions, in per cent: (epsilon, sigma) -> one seed.
_EARLIER = {(0.1, 0.0): 51.0, (0.1, 3.0): 56.2, (0.2, 0.0): 69.6, (0.2, 3.0): 70.3, (0.3, 0.0): 71.3, (0.3, 3.0): 71.6}
_TARGETS = {"pixels": {0.1: 88.2, 0.2: 88.9, 0.3: 89.0}, "features": {0.1: 95.3, 0.2: 96.1, 0.3: 96.4}}


class _Size(NamedTuple):
    epsilons: tuple[float, ...]
    batch: int
    epochs: int
    paper_seeds: int  # of table 2
    figure_seeds: int  # of them, those for figure 4's other step sizes and the authors' program too
    seeds: int
    gd_steps: int
    rates: dict[str, tuple[float, ...]]
    step_sizes: tuple[float, ...]


_RATES: dict[str, tuple[float, ...]] = {"pixels": (300.0, 600.0, 1200.0), "features": (100.0, 200.0, 400.0)}
_FULL = _Size((0.1, 0.2, 0.3), 128, 50, 5, 2, 10, 80, _RATES, (0.5, 1.0, 3.0))
_QUICK = _Size((1.0, 2.0, 4.0), 32, 10, 2, 2, 2, 40, {"pixels": (25.0, 50.0), "features": (25.0, 50.0)}, (0.5, 1.0, 3.0))

Results = dict[Any, list[float]]
Job = tuple[tuple[float, float, float], int]


def run(context: Context) -> Findings:
    """The paper's recipe as its program does it, with a valid guarantee, and the recipe that is best."""
    data, size = image_data(context, "mnist"), _QUICK if context.quick else _FULL
    best: Results = {}
    chosen: list[tuple[Any, ...]] = []
    for kind in ("pixels", "features"):
        accuracies, tried = _best_recipe(context, data, size, kind)
        best |= accuracies
        chosen += tried
    paper, multipliers = _paper_runs(context, data, size)
    claims = (*_accounting_claims(context, data), *_paper_claims(context, size, paper), *_best_claims(context, paper, best))
    return Findings(
        claims=claims,
        tables=_tables(context, size, paper, best, multipliers, chosen),
        draw=lambda figure: _draw(figure, context, size, paper, best),
        caption=f"Test accuracy of logistic regression on {'digits' if context.quick else 'MNIST'} in per cent, delta = 1e-5, with two "
        "standard errors: (a) over epsilon, the paper's recipe under a valid guarantee (per-example clipping, tight noise), "
        "full-batch gradient descent on centred pixels (smoothed over the image) and on public features"
        + ("" if context.quick else "; crosses are the printed values, whose runs clip the batch instead of each example")
        + f"; (b) the paper's recipe over the step size a/t at epsilon = {at_most(size.epsilons[0], 6)} and "
        f"{at_most(size.epsilons[1], 6)}.",
        data={"paper_recipe": {str(k): v for k, v in paper.items()}, "best": {str(k): v for k, v in best.items()}},
    )


# The paper's recipe -----------------------------------------------------------------------------------------------------


def _paper_runs(context: Context, data: Data, size: _Size) -> tuple[Results, dict[float, float]]:
    """Accuracies by ("example" or "batch", epsilon, sigma, a), and the noise multiplier for each epsilon."""
    train, test = normalised(data.train), normalised(data.test)
    n, steps = len(train), size.epochs * (len(train) // size.batch + 1)
    multipliers = {}
    for epsilon in size.epsilons:
        plan = Plan.dpsgd(epsilon=epsilon, delta=DELTA, batch_size=size.batch, dataset_size=n, steps=steps)
        multipliers[epsilon] = plan.noise_multiplier or 0.0
    table = [("example", e, s, 1.0) for e in size.epsilons for s in SIGMAS]
    others = [("example", e, s, a) for e in size.epsilons[:2] for s in SIGMAS for a in size.step_sizes if a != 1.0]
    others += [] if context.quick else [("batch", e, s, 1.0) for e in size.epsilons for s in SIGMAS]
    noise = {("example", e): multiplier / size.batch for e, multiplier in multipliers.items()}
    noise |= {} if context.quick else {("batch", e): authors_noise(e) for e in size.epsilons}
    results: Results = {key: [] for key in (*table, *others)}
    for seed in range(size.paper_seeds):
        keys = [*table, *others] if seed < size.figure_seeds else table
        settings = [Setting(s, a, noise[clip, e], clip) for clip, e, s, a in keys]
        todo = context.track(range(1, steps + 1), f"paper's recipe, seed {seed}")
        weights = train_together(train, settings, batch=size.batch, steps=todo, seed=context.seed + seed)
        for key, value in zip(keys, correct(weights, test), strict=True):
            results[key].append(value)
    return results, multipliers


def _accounting_claims(context: Context, data: Data) -> tuple[Claim, ...]:
    n, b, steps = 60_000, 128, 23_450
    printed, _ = theorem2(0.1, n=n, b=b, steps=steps)
    with_four, _ = theorem2(0.1, n=n, b=b, steps=steps, constant=4.0)
    allowed = sum(theorem2(e, n=n, b=b, steps=steps)[1] for e in (0.3, 0.25, 0.2, 0.15, 0.1))
    claims = [
        claim("noise of theorem 2", authors_noise(0.1), expected=printed, corrected=with_four),
        claim("condition on alpha", allowed),
    ]
    if not context.quick:
        multiplier = authors_noise(0.1) * b / lipschitz(normalised(data.train))
        plan = Plan.dpsgd(noise_multiplier=multiplier, delta=DELTA, batch_size=b, dataset_size=n, steps=steps)
        claims.append(claim("first column", plan.guarantee().epsilon))
    return tuple(claims)


def _paper_claims(context: Context, size: _Size, paper: Results) -> tuple[Claim, ...]:
    if context.quick:
        # Left out after it was seen to fail: on digits (8 x 8 pixels) sigma = 3 cost 8 points on average and up to 17.
        return ()
    worst = max((mean_and_error(v)[0] - table2(k[1], k[2]) for k, v in paper.items() if k[0] == "batch"), key=abs)
    gains = _gains(paper)
    worst_gain, error = min(gains[e, 1.0] for e in size.epsilons)
    smallest, its_error = min(gains.values())
    by_epsilon = "; ".join(f"eps = {e:g}: {gains[e, 1.0][0]:+.1f} ± {gains[e, 1.0][1]:.1f}" for e in size.epsilons)
    mean = mean_and_error([gain for gain, _ in gains.values()])[0]
    return (
        claim("authors' program", worst),
        *(_honest_claim(k, v) for k, v in paper.items() if k[0] == "example" and k[3] == 1.0),
        claim("sigma helps", worst_gain, stderr=error, note=f"{by_epsilon}."),
        claim("figure 4", smallest, stderr=its_error, count=len(gains), mean=mean),
    )


def _honest_claim(key: tuple[Any, ...], values: list[float]) -> Claim:
    _, epsilon, sigma, _ = key
    mean, error = mean_and_error(values)
    one_run = error * math.sqrt(len(values) + 1)  # standard deviation of another run's distance from this mean
    printed, earlier = table2(epsilon, sigma), _EARLIER[epsilon, sigma]
    words = {"printed": printed, "earlier": earlier, "epsilon": epsilon, "sigma": sigma, "away": abs(mean - earlier) / one_run}
    return claim("re-run", mean, stderr=error, expected=printed, corrected=earlier, tolerance=2 * one_run, **words)


def _gains(paper: Results) -> dict[tuple[float, float], tuple[float, float]]:
    """(mean, standard error) of what smoothing adds, seed by seed on the same batches, by (epsilon, a)."""
    pairs = {}
    for (clip, epsilon, sigma, a), values in paper.items():
        if clip == "example" and sigma > 0:
            plain = paper[clip, epsilon, 0.0, a]
            pairs[epsilon, a] = mean_and_error([x - y for x, y in zip(values, plain, strict=True)])
    return pairs


# The best recipe --------------------------------------------------------------------------------------------------------


def _best_recipe(context: Context, data: Data, size: _Size, kind: str) -> tuple[Results, list[tuple[Any, ...]]]:
    """Full-batch gradient descent: step size and smoothing chosen on a sixth of the training data, then run on all of it."""
    features: Callable[[Tensor], Tensor] = centred if kind == "pixels" else _public
    train, test = (TensorDataset(features(part.tensors[0]), part.tensors[1]) for part in (data.train, data.test))
    rest, validation = held_out(train)
    options = [(e, rate, s) for e in size.epsilons for rate in size.rates[kind] for s in SMOOTHINGS[kind]]
    tried = dict(zip(options, _accuracies(context, rest, validation, size, [(o, 0) for o in options]), strict=True))
    chosen = {e: max((o for o in options if o[0] == e), key=tried.__getitem__) for e in size.epsilons}
    jobs = [(chosen[e], 1 + seed) for e in size.epsilons for seed in range(size.seeds)]
    results: Results = {(kind, e): [] for e in size.epsilons}
    for (option, _), value in zip(jobs, _accuracies(context, train, test, size, jobs), strict=True):
        results[kind, option[0]].append(value)
    rows = [(kind, e, rate, s, tried[e, rate, s], "chosen" if chosen[e] == (e, rate, s) else "") for e, rate, s in options]
    return results, rows


def _public(images: Tensor) -> Tensor:
    return oriented_gradients(upright(images), cell=4 if images.shape[-1] > 16 else 2)


def _accuracies(context: Context, train: TensorDataset, test: TensorDataset, size: _Size, jobs: Sequence[Job]) -> list[float]:
    """Accuracy on ``test`` of each ((epsilon, learning rate, sigma), seed), trained together on ``train``."""
    noise = {}
    for epsilon in size.epsilons:
        plan = Plan.dpgd(epsilon=epsilon, delta=DELTA, max_grad_norm=CLIP, dataset_size=len(train), steps=size.gd_steps)
        noise[epsilon] = (plan.noise_multiplier or 0.0) * CLIP / len(train)
    runs = [Descent(rate, sigma, noise[epsilon], context.seed + seed) for (epsilon, rate, sigma), seed in jobs]
    steps = list(context.track(range(size.gd_steps), f"full-batch descent, {len(runs)} runs"))
    weights = descended(train, runs, clip=CLIP, steps=steps, average=Tail(TAIL))
    inputs, labels = test.tensors
    return [100.0 * int(((inputs @ w.T).argmax(1) == labels).sum()) / len(labels) for w in weights]


def _best_claims(context: Context, paper: Results, best: Results) -> list[Claim]:
    claims = []
    for (kind, epsilon), values in best.items():
        mean, error = mean_and_error(values)
        rerun = mean_and_error(paper["example", epsilon, 3.0, 1.0])[0]
        told = {"stderr": error, "kind": kind}
        if context.quick:
            claims.append(claim("best recipe, quick", mean, expected=rerun, epsilon=at_most(epsilon, 6), **told))
        else:
            told |= {"expected": _TARGETS[kind][epsilon], "printed": table2(epsilon, 3.0), "rerun": rerun}
            claims.append(claim("best recipe", mean, epsilon=epsilon, **told))
    return claims


# Tables and picture -----------------------------------------------------------------------------------------------------


def _tables(
    context: Context, size: _Size, paper: Results, best: Results, multipliers: dict[float, float], chosen: list[tuple[Any, ...]]
) -> tuple[Table, ...]:
    rows = []
    if not context.quick:
        for s in SIGMAS:
            rows.append((f"printed, sigma = {s:g}", "no", *(f"{table2(e, s)}" for e in size.epsilons)))
            again = (plus_minus(paper["batch", e, s, 1.0]) for e in size.epsilons)
            rows.append((f"as the authors' program, sigma = {s:g}", "no", *again))
    for s in SIGMAS:
        again = (plus_minus(paper["example", e, s, 1.0]) for e in size.epsilons)
        rows.append((f"the paper's recipe re-run, sigma = {s:g}", "yes", *again))
    for kind in ("pixels", "features"):
        rows.append((f"full-batch descent on {kind}", "yes", *(plus_minus(best[kind, e]) for e in size.epsilons)))
    steps = [(e, a, *(plus_minus(paper["example", e, s, a]) for s in SIGMAS)) for e in size.epsilons[:2] for a in size.step_sizes]
    heads = tuple(f"eps = {e:g}" for e in size.epsilons)
    return (
        Table(
            title=f"Test accuracy in per cent, mean ± standard error. Seeds: {size.paper_seeds} of the paper's recipe re-run, "
            f"{size.figure_seeds} of figure 4 and of the authors' program, {size.seeds} of full-batch descent ({size.gd_steps} steps, clip "
            f"norm {CLIP:g}, mean of the last {TAIL:.0%} of the iterates, add/remove)",
            columns=("run", "guarantee holds", *heads),
            rows=tuple(rows),
        ),
        Table(title="Figure 4: over the step size a/t", columns=("eps", "a", "sigma = 0", "sigma = 3"), rows=tuple(steps)),
        Table(
            title="Chosen on a sixth of the training data, never on the test data, as were by hand the clip norm, the number of steps "
            "and the average (the search itself is not charged)",
            columns=("input", "eps", "learning rate", "sigma", "validation accuracy", ""),
            rows=tuple(chosen),
        ),
        Table(
            title=f"Tight noise multipliers of the paper's recipe (batch {size.batch}, {size.epochs} epochs, add/remove, Poisson)",
            columns=("eps", "noise multiplier"),
            rows=tuple(multipliers.items()),
        ),
    )


def _draw(figure: Any, context: Context, size: _Size, paper: Results, best: Results) -> None:
    spec = figure.add_gridspec(1, 2)
    first = panel(figure, spec[0], title="(a) over the privacy level", x="epsilon", y="test accuracy (%)", log="")
    for kind, key in (("features", "best"), ("pixels", "nu")):
        runs = [best[kind, e] for e in size.epsilons]
        bars(first, size.epsilons, runs, label=f"full-batch descent, {kind}", **MARKS[key])
    for sigma, key in ((3.0, "more"), (0.0, "independent")):
        runs = [paper["example", e, sigma, 1.0] for e in size.epsilons]
        bars(first, size.epsilons, runs, label=f"paper's recipe re-run, σ = {sigma:g}", **MARKS[key])
        if not context.quick:
            printed = [table2(e, sigma) for e in size.epsilons]
            first.plot(size.epsilons, printed, "x", color=MARKS[key]["color"], label=f"printed (not private), σ = {sigma:g}")
    first.set_xticks(size.epsilons)
    first.legend(frameon=False, fontsize=7, loc="lower right")
    second = panel(figure, spec[1], title="(b) over the step size (figure 4)", x="a in a/t", y="test accuracy (%)", log="")
    for e, width in zip(size.epsilons[:2], (1.0, 2.0), strict=True):
        for sigma, key in ((3.0, "more"), (0.0, "independent")):
            runs = [paper["example", e, sigma, a] for a in size.step_sizes]
            bars(second, size.step_sizes, runs, label=f"eps = {e:g}, σ = {sigma:g}", **{**MARKS[key], "linewidth": width})
    low, high = second.get_ylim()
    second.set_ylim(low, high + 0.18 * (high - low))
    second.legend(frameon=False, fontsize=7, ncol=2, loc="upper center")
