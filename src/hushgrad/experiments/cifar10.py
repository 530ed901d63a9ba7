"""CIFAR-10: independent, correlated and denoised noise over epsilon, on features that use no private data.

The slides train a convolutional net on GPUs. They claim an order of the methods, and to test that a linear model on
public features (oriented gradients and coarse colours) is enough: it trains in a second, so every method gets its own step size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from hushgrad import denoise, noise
from hushgrad._printed import at_most
from hushgrad.experiments.base import Claim, Context, Experiment, Findings, Stated, Table
from hushgrad.experiments.picture import MARKS, panel
from hushgrad.experiments.public_features import oriented_gradients
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
from hushgrad.recipes import Data
from hushgrad.recipes.encoders import unit_rows
from hushgrad.train import Plan

claim = Stated("cifar10")
DELTA = 1e-5
CORRELATED = ("DP-FTRL, nu", "DP-FTRL, banded", "DP-FTRL, BLT", "DP-FTRL, dense")
PLAIN = "DP-SGD, no amplification"
METHODS = {  # method: look in the picture
    PLAIN: MARKS["independent"],
    "DP-FTRL, nu": MARKS["nu"],
    "DP-FTRL, banded": MARKS["anti"],
    "DP-FTRL, BLT": MARKS["best"],
    "DP-FTRL, dense": MARKS["more"],
    "DP-SGD, amplified": {"color": "0.5", "marker": "x", "linestyle": ":"},
    "DP-SGD, amplified, DiSK": {"color": "black", "marker": "*", "linestyle": "--"},
    "DP-SGD, amplified, Laplacian": MARKS["other"],
}
_MECHANISMS: dict[str, noise.Mechanism] = {  # the others, but for the dense one, which is optimised for the run
    PLAIN: noise.Independent(),
    "DP-FTRL, nu": noise.Nu(),
    "DP-FTRL, banded": noise.Banded(bands=16),
    "DP-FTRL, BLT": noise.BLT(buffers=4),
}
_FILTERS = {
    "DP-SGD, amplified, DiSK": denoise.Kalman.one_probe(0.7),
    "DP-SGD, amplified, Laplacian": denoise.Laplacian(1.0, scope="grid", grid=(8, 8)),  # the features are maps of 8 x 8 fields
}


class _Size(NamedTuple):
    epsilons: tuple[float, ...]
    batch: int
    epochs: int
    rates: tuple[float, ...]
    seeds: int


_FULL = _Size((1.0, 4.0, 16.0), 500, 10, (2.0, 6.0, 18.0, 54.0), 12)
# Of digits, epsilons at which the noise limits the accuracy. They were chosen after a first try: at eps = 16 the 239 validation
# images picked too small a step for the correlated methods, and independent noise was 2 points better.
_QUICK = _Size((0.5, 2.0), 120, 4, (0.5, 2.0), 2)

Results = dict[tuple[str, float], list[float]]


def run(context: Context) -> Findings:
    """Test accuracy over epsilon, every method at its own step size."""
    size = _QUICK if context.quick else _FULL
    data = _features(image_data(context, "cifar10"))
    rates, tried = _chosen_rates(context, data, size)
    results: Results = {(m, e): [] for m in METHODS for e in size.epsilons}
    for (method, epsilon), seed in context.track([(k, s) for k in results for s in range(size.seeds)], "over epsilon"):
        model = _trained(data.train, size, method, epsilon, rates[method, epsilon], context.seed + 1 + seed)
        results[method, epsilon].append(accuracy(model, data.test))
    compared = [] if context.quick else [(m, e) for m in _FILTERS for e in size.epsilons]
    denoised = (_denoising(gain_at(results, m, "DP-SGD, amplified", e), m, e) for m, e in compared)
    name, steps = "digits" if context.quick else "CIFAR-10", size.epochs * -(-len(data.train) // size.batch)
    return Findings(
        claims=(*_claims(size, results), *denoised),
        tables=(
            Table(
                title=f"Test accuracy in per cent on {name}, mean ± standard error of {size.seeds} seeds ({len(data.train)} training "
                f"images, {data.shape[0]} public features, {size.epochs} epochs, batches of {size.batch})",
                columns=("method", *(f"eps = {e:g}" for e in size.epsilons)),
                rows=tuple((m, *(plus_minus(results[m, e]) for e in size.epsilons)) for m in METHODS),
            ),
            Table(
                title="Step sizes, chosen on a sixth of the training data, never on the test data (the search is not charged)",
                columns=("method", *(f"rate at eps = {e:g}" for e in size.epsilons)),
                rows=tuple((m, *(rates[m, e] for e in size.epsilons)) for m in METHODS),
            ),
        ),
        draw=lambda figure: _draw(figure, size, results),
        caption=f"Test accuracy in per cent of a linear model on public features of {name} over epsilon (delta = {at_most(DELTA, 6)}, "
        f"{steps} steps), mean with two standard errors: (a) one order of the data, no amplification; (b) random batches, without "
        "and with denoising, and BLT of (a). Points are set side by side where they would cover each other.",
        data={"accuracy": {f"{m}, {e:g}": v for (m, e), v in results.items()}, "validation": tried},
    )


def again(context: Context, experiment: Experiment) -> Findings:
    """Another evaluation of correlated noise at epsilon 16, or of DiSK at epsilon 1, on fresh seeds."""
    data = _features(image_data(context, "cifar10"))
    size = _QUICK if context.quick else _FULL

    def value(run: Run, seed: int) -> float:
        return accuracy(_trained(data.train, size, run.method, run.epsilon, run.rate, seed), data.test)

    def judge(look: Look, one: Sequence[float], other: Sequence[float]) -> Claim:
        told = _correlated if look.claim == "correlated" else _denoising
        return told(gain(one, other), look.better.method, look.better.epsilon)

    return second_look(context, experiment, value, judge, "points of accuracy")


def _features(data: Data) -> Data:
    parts = []
    for part in (data.train, data.test):
        images, labels = part.tensors
        small = images.shape[-1] < 16
        edges = oriented_gradients(images, cell=1 if small else 4)
        rows = edges if small else unit_rows(torch.cat([edges, 0.5 * _colours(images)], dim=1))
        parts.append(TensorDataset(rows, labels))
    return Data(train=parts[0], test=parts[1], classes=data.classes)


def _colours(images: Tensor) -> Tensor:
    """Mean colours of 8 x 8 fields against mid-grey, as rows of norm 1."""
    return unit_rows(F.adaptive_avg_pool2d(images - 0.5, 8).flatten(1))


# Training ---------------------------------------------------------------------------------------------------------------


@cache  # optimising a mechanism and calibrating take a while
def _plan(size: _Size, method: str, epsilon: float, n: int) -> Plan:
    common: dict[str, Any] = {"delta": DELTA, "batch_size": size.batch, "dataset_size": n}
    if method.startswith("DP-SGD, amplified"):
        steps = size.epochs * -(-n // size.batch)
        return Plan.dpsgd(epsilon=epsilon, **common, steps=steps, denoise=_FILTERS.get(method))
    mechanism = _MECHANISMS.get(method)
    if mechanism is None:
        plain = Plan.dpftrl(noise_multiplier=1.0, **common, epochs=size.epochs, noise=noise.Independent())
        mechanism = noise.Dense.optimal(steps=plain.steps, participation=plain.participation)
    return Plan.dpftrl(epsilon=epsilon, **common, epochs=size.epochs, noise=mechanism)


def _trained(train: TensorDataset, size: _Size, method: str, epsilon: float, rate: float, seed: int) -> nn.Module:
    plan = _plan(size, method, epsilon, len(train))
    model = nn.Linear(train.tensors[0].shape[1], 10, bias=False)
    nn.init.zeros_(model.weight)
    return trained(model, lambda p: torch.optim.SGD(p, lr=rate), plan, train, seed=seed)


def _chosen_rates(context: Context, data: Data, size: _Size) -> tuple[dict[tuple[str, float], float], dict[str, float]]:
    rest, validation = held_out(data.train)
    chosen: dict[tuple[str, float], float] = {}
    tried: dict[str, float] = {}
    for method, epsilon in context.track([(m, e) for m in METHODS for e in size.epsilons], "validation"):
        found = {rate: accuracy(_trained(rest, size, method, epsilon, rate, context.seed), validation) for rate in size.rates}
        chosen[method, epsilon] = max(found, key=found.__getitem__)
        tried |= {f"{method}, {at_most(epsilon, 6)}, rate {rate:g}": value for rate, value in found.items()}
    return chosen, tried


# Claims, picture ----------------------------------------------------------------------------------------------------------


def _claims(size: _Size, results: Results) -> tuple[Claim, ...]:
    methods = ("DP-FTRL, nu", "DP-FTRL, BLT")
    claims = [
        _correlated(gain_at(results, method, PLAIN, epsilon), method, epsilon) for method in methods for epsilon in size.epsilons
    ]
    for method in methods:
        gaps = [gain_at(results, method, "DP-FTRL, dense", e) for e in size.epsilons]
        error = math.sqrt(math.fsum(e * e for _, e in gaps)) / len(gaps)  # of a mean of independent runs
        claims.append(claim.measured("near the optimum", (mean_and_error([g for g, _ in gaps])[0], error), method=method[9:]))
    last = size.epsilons[-1]
    without = gain_at(results, "DP-FTRL, BLT", "DP-SGD, amplified", last)
    return (*claims, claim.measured("without amplification", without, epsilon=last))


def _correlated(value: tuple[float, float], method: str, epsilon: float) -> Claim:
    return claim.measured("correlated", value, method=method, epsilon=at_most(epsilon, 6))


def _denoising(value: tuple[float, float], method: str, epsilon: float) -> Claim:
    name, source = method.split(", ")[-1], "003" if "Laplacian" in method else "000"
    return claim.measured("denoising", value, source=source, method=name, epsilon=at_most(epsilon, 6))


def _draw(figure: Any, size: _Size, results: Results) -> None:
    spec = figure.add_gridspec(1, 2)
    first = panel(figure, spec[0], title="(a) without amplification", x="epsilon", y="test accuracy (%)", log="x")
    second = panel(figure, spec[1], title="(b) random batches and denoising", x="epsilon", y="test accuracy (%)", log="x")
    for axes, methods in ((first, (PLAIN, *CORRELATED)), (second, ("DP-SGD, amplified", *_FILTERS, "DP-FTRL, BLT"))):
        for place, method in enumerate(methods):
            beside = [e * 1.04 ** (place - len(methods) // 2) for e in size.epsilons]  # else equal results would hide each other
            bars(axes, beside, [results[method, e] for e in size.epsilons], label=method, **METHODS[method])
        axes.legend(frameon=False, fontsize=8, loc="lower right")
    low, high = (f(a.get_ylim()[i] for a in (first, second)) for i, f in ((0, min), (1, max)))
    first.set_ylim(low, high)
    second.set_ylim(low, high)
