"""Next-character prediction with privacy of whole speakers: DP-FTRL against DP-SGD, both without amplification.

The slides show Stack Overflow, where a user is a poster; here a user is a speaker in Shakespeare's plays. Speakers cannot be
sampled at random (as phones cannot, which call in when they are idle), so they take part in one order, several times.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hushgrad import noise
from hushgrad._printed import at_most
from hushgrad.experiments.base import Claim, Context, Experiment, Findings, Stated, Table
from hushgrad.experiments.characters import Recent, bits, speeches, windows
from hushgrad.experiments.picture import MARKS, panel
from hushgrad.experiments.training import Look, Run, bars, gain, mean_and_error, plus_minus, second_look, trained
from hushgrad.train import Plan

claim = Stated("language-model")
DELTA, LENGTH = 1e-4, 32

METHODS: dict[str, tuple[str, noise.Mechanism]] = {
    "DP-SGD": ("independent", noise.Independent()),
    "DP-FTRL, tree": ("anti", noise.Tree()),
    "DP-FTRL, nu": ("nu", noise.Nu()),
    "DP-FTRL, BLT": ("best", noise.BLT(buffers=4)),
}
AMPLIFIED = "DP-SGD, amplified"


class _Size(NamedTuple):
    epsilons: tuple[float, ...]
    per_user: int  # windows of one speaker, at most
    steps_per_epoch: int
    epochs: int
    rates: tuple[float, ...]
    seeds: int


_FULL = _Size((4.0, 16.0, 64.0), 8, 8, 6, (0.5, 1.0, 2.0, 4.0), 6)
_QUICK = _Size((8.0, 64.0), 4, 6, 3, (1.0, 4.0), 1)

Results = dict[tuple[str, float], list[float]]


class _Users(NamedTuple):
    """Windows of text and who said each."""

    pieces: Tensor
    owner: list[str]

    def only(self, names: set[str]) -> _Users:
        rows = [i for i, name in enumerate(self.owner) if name in names]
        return _Users(self.pieces[rows], [self.owner[i] for i in rows])

    @property
    def people(self) -> int:
        return len(set(self.owner))


def run(context: Context) -> Findings:
    """Bits per character of speakers who were not trained on, over epsilon."""
    size = _QUICK if context.quick else _FULL
    train, validation, test = _split(context, size)
    rates, tried = _chosen_rates(context, size, train, validation)
    names = [*METHODS, AMPLIFIED]
    results: Results = {(m, e): [] for m in names for e in size.epsilons}
    for (method, epsilon), seed in context.track([(k, s) for k in results for s in range(size.seeds)], "over epsilon"):
        model = _trained(train, size, method, epsilon, rates[method, epsilon], context.seed + 1 + seed)
        results[method, epsilon].append(bits(model, test.pieces))
    start = bits(_fresh(context.seed), test.pieces)
    predicted = _predicted(size, train.people)
    columns = ("method", *(f"eps = {e:g}" for e in size.epsilons))
    rows = tuple((m, *(plus_minus(results[m, e], 3) for e in size.epsilons)) for m in names)
    steps = size.epochs * size.steps_per_epoch
    return Findings(
        claims=_claims(size, results, start),
        tables=(
            Table(
                title=f"Bits per character on other speakers, mean ± standard error of {size.seeds} seeds ({train.people} speakers of "
                f"at most {size.per_user} windows of {LENGTH} characters, {size.epochs} rounds of {size.steps_per_epoch} steps); "
                f"untrained {start:.2f}",
                columns=columns,
                rows=rows,
            ),
            Table(
                title="Step sizes, chosen on speakers set aside from training (the search is not charged)",
                columns=("method", "eps", "learning rate", "bits per character", ""),
                rows=tuple(tried),
            ),
        ),
        draw=lambda figure: _draw(figure, size, results, predicted),
        caption="(a) Bits per character (lower is better) of a log-bilinear model of the last four characters, on speakers who were "
        f"not in the training data, over epsilon per speaker (delta = {at_most(DELTA, 6)}, {steps} steps), mean with two standard errors. "
        f"Every speaker takes part {size.epochs} times, in a fixed order; grey: with Poisson sampling, where that is possible. (b) What "
        "theory says: root mean square error of the sums of gradients at equal privacy, relative to independent noise.",
        data={"bits": {f"{m}, {e:g}": v for (m, e), v in results.items()}, "untrained": start, "predicted": predicted},
    )


def again(context: Context, experiment: Experiment) -> Findings:
    """The second evaluation at epsilon 16, on fresh seeds."""
    size = _QUICK if context.quick else _FULL
    train, _, test = _split(context, size)

    def value(run: Run, seed: int) -> float:
        return bits(_trained(train, size, run.method, run.epsilon, run.rate, seed), test.pieces)

    def judge(look: Look, better: Sequence[float], worse: Sequence[float]) -> Claim:
        return _beats(better, worse, look.better.epsilon)

    return second_look(context, experiment, value, judge, "bits per character")


# Speakers ---------------------------------------------------------------------------------------------------------------


def _split(context: Context, size: _Size) -> tuple[_Users, _Users, _Users]:
    """Training, validation and test speakers: 80, 10 and 10 per cent of them, in a fixed random order."""
    said = speeches(context)
    pieces = {name: windows(words, LENGTH)[: size.per_user] for name, words in said.items()}
    names = [name for name, mine in pieces.items() if len(mine)]
    random.Random(3).shuffle(names)
    everyone = _Users(torch.cat([pieces[n] for n in names]), [n for n in names for _ in range(len(pieces[n]))])
    tenth = len(names) // 10
    return (
        everyone.only(set(names[2 * tenth :])),
        everyone.only(set(names[:tenth])),
        everyone.only(set(names[tenth : 2 * tenth])),
    )


# Training ---------------------------------------------------------------------------------------------------------------


def _plan(size: _Size, users: int, method: str, epsilon: float) -> Plan:
    common: dict[str, Any] = {"epsilon": epsilon, "delta": DELTA, "dataset_size": users, "unit": "user"}
    common["batch_size"] = -(-users // size.steps_per_epoch)
    if method == AMPLIFIED:
        return Plan.dpsgd(**common, steps=size.epochs * size.steps_per_epoch)
    return Plan.dpftrl(**common, epochs=size.epochs, noise=METHODS[method][1])


def _fresh(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = Recent()
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    return model


def _trained(users: _Users, size: _Size, method: str, epsilon: float, rate: float, seed: int) -> nn.Module:
    data = TensorDataset(users.pieces[:, :-1].contiguous(), users.pieces[:, 1:].contiguous())
    plan = _plan(size, users.people, method, epsilon)
    return trained(_fresh(seed), lambda p: torch.optim.SGD(p, lr=rate), plan, data, seed=seed, groups=users.owner)


def _chosen_rates(
    context: Context, size: _Size, train: _Users, validation: _Users
) -> tuple[dict[tuple[str, float], float], list[tuple[Any, ...]]]:
    names = [*METHODS, AMPLIFIED]
    chosen, rows = {}, []
    for method, epsilon in context.track([(m, e) for m in names for e in size.epsilons], "validation"):
        found = {rate: bits(_trained(train, size, method, epsilon, rate, context.seed), validation.pieces) for rate in size.rates}
        best = min(found, key=found.__getitem__)
        chosen[method, epsilon] = best
        rows += [(method, epsilon, rate, value, "chosen" if rate == best else "") for rate, value in found.items()]
    return chosen, rows


# Claims, picture ----------------------------------------------------------------------------------------------------------


def _beats(better: Sequence[float], worse: Sequence[float], epsilon: float) -> Claim:
    """DP-FTRL against DP-SGD, paired by seed: a seed gives both the same initial weights, batches and draws of noise."""
    expected, error = mean_and_error(worse)[0], gain(better, worse)[1]
    return claim("DP-FTRL", mean_and_error(better)[0], expected=expected, stderr=error, epsilon=at_most(epsilon, 6))


def _claims(size: _Size, results: Results, start: float) -> tuple[Claim, ...]:
    claims = [_beats(results["DP-FTRL, BLT", epsilon], results["DP-SGD", epsilon], epsilon) for epsilon in size.epsilons]
    last = size.epsilons[-1]
    (optimal, error), (simple, other) = (mean_and_error(results[f"DP-FTRL, {name}", last]) for name in ("BLT", "nu"))
    return (
        *claims,
        claim("nu", simple - optimal, stderr=math.hypot(error, other), last=last),
        claim("learns", optimal, expected=start - 1.0, stderr=error, last=last, start=start),
    )


def _predicted(size: _Size, users: int) -> dict[str, float]:
    """The error of each mechanism over that of independent noise, for this plan's steps and participation."""
    errors = {}
    for method in METHODS:
        plan = _plan(size, users, method, 1.0)
        errors[method] = plan.noise.error(steps=plan.steps, participation=plan.participation).rmse
    return {method: error / errors["DP-SGD"] for method, error in errors.items()}


def _draw(figure: Any, size: _Size, results: Results, predicted: dict[str, float]) -> None:
    spec = figure.add_gridspec(1, 2, width_ratios=(3, 2))
    axes = panel(figure, spec[0], title="(a) next character", x="epsilon per speaker", y="bits per character", log="x")
    for method, (mark, _) in METHODS.items():
        bars(axes, size.epsilons, [results[method, e] for e in size.epsilons], label=method, **MARKS[mark])
    grey = {"color": "0.6", "marker": "x", "linestyle": ":"}
    bars(axes, size.epsilons, [results[AMPLIFIED, e] for e in size.epsilons], label=AMPLIFIED, **grey)
    axes.legend(frameon=False, fontsize=9)
    second = panel(figure, spec[1], title="(b) predicted noise", x="", y="error relative to independent noise", log="")
    second.set_axisbelow(True)
    names = [method.removeprefix("DP-FTRL, ") for method in predicted]
    second.bar(names, list(predicted.values()), color=[MARKS[METHODS[method][0]]["color"] for method in predicted])
