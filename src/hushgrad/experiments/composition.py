"""Composition: every theorem of the lectures on one mechanism, and the lectures' side remarks.

The mechanism is Laplace noise of scale 10 on a query of sensitivity 1: 0.1-DP, so that the theorems for "any 0.1-DP mechanism"
(basic, advanced, optimal, zCDP) and the accountants that know the mechanism (RDP, PLD) answer the same question.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np

from hushgrad.accounting import classical, delta, epsilon, gaussian_delta
from hushgrad.accounting.advanced import advanced_forms
from hushgrad.events import ZCDP, Gaussian, Laplace, PureDP
from hushgrad.experiments.base import Claim, Context, Findings, Stated, Table
from hushgrad.experiments.picture import MARKS, panel

claim = Stated("composition")

STEP = 0.1  # epsilon of one Laplace mechanism of scale 10
SLACK = 1e-6
GROUP_NOISE = 4.0

LOOKS = {
    "basic": MARKS["independent"],
    "advanced, lecture 9": MARKS["anti"],
    "advanced, lecture 12": MARKS["other"],
    "optimal": MARKS["more"],
    "zCDP": MARKS["nu"],
    "RDP": {"color": "0.45", "marker": "x", "linestyle": "-"},
    "PLD": MARKS["best"],
}


def run(context: Context) -> Findings:
    """Epsilon over T by seven theorems; the PLRV converse; group privacy; amplification by sampling."""
    steps = (1, 10, 100, 1000) if context.quick else (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000)
    curves: dict[str, list[float]] = {name: [] for name in LOOKS}
    for t in context.track(steps, "compose"):
        for name, value in _epsilons(t).items():
            curves[name].append(value)
    groups = _groups()
    sampling = _sampling((0.01, 0.1) if context.quick else (0.001, 0.01, 0.1, 0.5))
    return Findings(
        claims=(
            *_composition_claims(),
            *_order_claims(steps, curves),
            *_loss_claims(),
            *_gaussian_claims(),
            *_group_claims(groups),
            *_sampling_claims(sampling),
        ),
        tables=(_looseness(steps, curves), groups, sampling),
        draw=lambda figure: _draw(figure, steps, curves, groups),
        caption=f"(a) epsilon at delta = {SLACK:g} of T Laplace mechanisms of {STEP}-DP each, by theorem. (b) the same divided "
        "by the PLD's answer: how loose each theorem is. (c) delta at k eps for a group of k records, one Gaussian release of "
        "noise multiplier 4 with (eps, 1e-5)-DP for one record: the lectures' theorem against the exact value.",
        data={"steps": steps, "epsilon": curves},
    )


def _epsilons(t: int) -> dict[str, float]:
    first, second = advanced_forms([(STEP, t)], SLACK)
    return {
        "basic": STEP * t,
        "advanced, lecture 9": first,
        "advanced, lecture 12": second,
        "optimal": epsilon(PureDP(STEP) * t, delta=SLACK, accountant="optimal"),
        "zCDP": epsilon(ZCDP(STEP**2 / 2) * t, delta=SLACK, accountant="zcdp"),
        "RDP": epsilon(Laplace(1 / STEP) * t, delta=SLACK, accountant="rdp"),
        "PLD": epsilon(Laplace(1 / STEP) * t, delta=SLACK, accountant="pld"),
    }


def _looseness(steps: tuple[int, ...], curves: dict[str, list[float]]) -> Table:
    rows = [
        (t, *(curves[name][i] for name in LOOKS), min(curves["basic"][i], curves["advanced, lecture 9"][i]) / curves["PLD"][i])
        for i, t in enumerate(steps)
    ]
    columns = ("T", *LOOKS, "lecture 9's best / PLD")
    return Table(title=f"Epsilon at delta = {SLACK:g} of T mechanisms of {STEP}-DP", columns=columns, rows=tuple(rows))


def _composition_claims() -> tuple[Claim, ...]:
    first, second = advanced_forms([(0.1, 100)], SLACK)
    pure = PureDP(0.1) * 100
    step = classical.advanced_composition_step(epsilon=0.5, slack=SLACK, steps=100)
    worst = advanced_forms([(1.0, 50)], SLACK)[0]
    return (
        claim("basic", epsilon(pure, delta=SLACK, accountant="basic")),
        claim("advanced, lecture 9", first, expected=0.1 * math.sqrt(200 * math.log(1e6)) + 10 * math.expm1(0.1)),
        claim("advanced, lecture 12", second, expected=0.1 * math.sqrt(200 * math.log(1e6)) + 10 * math.tanh(0.05)),
        claim("optimal", epsilon(pure, delta=SLACK, accountant="optimal") / second),
        claim("corollary", advanced_forms([(step, 100)], SLACK)[0]),
        claim("side by side", worst),
    )


def _order_claims(steps: tuple[int, ...], curves: dict[str, list[float]]) -> tuple[Claim, ...]:
    last = {name: values[-1] for name, values in curves.items()}
    tighter = max(pld / min(a, b) for pld, a, b in zip(curves["PLD"], curves["RDP"], curves["optimal"], strict=True))
    return (
        claim("RDP", last["RDP"] / last["advanced, lecture 12"], last=steps[-1]),
        claim("zCDP", last["zCDP"] / last["advanced, lecture 12"], last=steps[-1]),
        claim("PLD", tighter),
    )


def _loss_claims() -> tuple[Claim, ...]:
    p, q = np.array([1 / 2, 1 / 2]), np.array([1 / 3, 2 / 3])
    hockey = max(_hockey_stick(p, q, 0.0), _hockey_stick(q, p, 0.0))
    tail = float(p[np.log(p / q) > 0].sum())
    point, coin = np.array([1.0, 0.0]), np.array([0.5, 0.5])
    one_way = float(point[point > math.exp(math.log(2.0) + 1e-12) * coin].sum())  # P(L > ln 2) with outputs from the point mass
    return (
        claim("two coins", hockey, expected=1 / 6),
        claim("converse", tail, expected=1 / 2),
        claim(
            "one direction",
            max(_hockey_stick(point, coin, math.log(2)), _hockey_stick(coin, point, math.log(2))),
            expected=one_way,
        ),
    )


def _hockey_stick(p: np.ndarray, q: np.ndarray, eps: float) -> float:
    return float(np.maximum(p - math.exp(eps) * q, 0.0).sum())


def _gaussian_claims() -> tuple[Claim, ...]:
    sigma = classical.classical_gaussian_sigma(epsilon=0.5, delta=1e-5)
    large = math.sqrt(2 * math.log(1.25e5)) / 10.0
    literal, at_ten = gaussian_delta(1 / math.sqrt(sigma), 0.5), gaussian_delta(1 / large, 10.0)
    return (
        claim("Gaussian", gaussian_delta(1 / sigma, 0.5)),
        claim("Gaussian, variance", literal, corrected=_normal_delta(1 / math.sqrt(sigma), 0.5)),
        claim("Gaussian, epsilon 10", at_ten, corrected=_normal_delta(1 / large, 10.0)),
    )


def _normal_delta(mu: float, eps: float) -> float:
    """Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu), from the standard library: a check from outside the library."""
    phi = NormalDist().cdf
    return phi(mu / 2 - eps / mu) - math.exp(eps) * phi(-mu / 2 - eps / mu)


def _groups() -> Table:
    one = epsilon(Gaussian(GROUP_NOISE), delta=1e-5, accountant="gdp")
    rows = []
    for k in (1, 2, 3, 4, 6, 8):
        printed = 1e-5 * math.expm1(k * one) / math.expm1(one)
        rows.append((k, k * one, printed, gaussian_delta(k / GROUP_NOISE, k * one)))
    return Table(
        title=f"Group privacy of one Gaussian release, noise multiplier {GROUP_NOISE:g}, ({one:.3g}, 1e-5)-DP for one record",
        columns=("k", "k eps", "delta of the theorem", "exact delta at k eps"),
        rows=tuple(rows),
    )


def _group_claims(groups: Table) -> tuple[Claim, ...]:
    loosest = max(printed / exact for _, _, printed, exact in groups.rows)
    tightest = min(printed / exact for _, _, printed, exact in groups.rows)
    return (claim("groups", tightest, loosest=loosest),)


def _sampling(rates: tuple[float, ...]) -> Table:
    rows = []
    for q in rates:
        after, _ = classical.subsampled(epsilon=1.0, delta=1e-5, rate=q, relation="add_remove", sampling="poisson")
        lemma = q * gaussian_delta(1 / 2.0, 1.0)
        exact = delta(Gaussian(2.0).sampled(rate=q), epsilon=after)
        t = round(1 / q) if q < 0.5 else 2
        event = Gaussian(2.0).sampled(rate=q) * t
        alone = epsilon(Gaussian(2.0), delta=min(1e-5 / (2 * q * t), 0.5), accountant="gdp")
        step = classical.subsampled(epsilon=alone, delta=0.0, rate=q, relation="add_remove", sampling="poisson")[0]
        composed = min(*advanced_forms([(step, t)], 5e-6), step * t)
        rows.append((q, t, after, lemma, exact, composed, epsilon(event, delta=1e-5)))
    return Table(
        title="Poisson sampling of a Gaussian, noise multiplier 2: one step at eps = 1, then T steps at delta = 1e-5",
        columns=(
            "rate q",
            "T",
            "ln(1+q(e-1))",
            "q delta(1)",
            "exact delta there",
            "T steps: lemma + composition",
            "T steps: PLD",
        ),
        rows=tuple(rows),
    )


def _sampling_claims(sampling: Table) -> tuple[Claim, ...]:
    worst = max(exact / lemma for _, _, _, lemma, exact, _, _ in sampling.rows)
    grid = np.linspace(1e-3, 1 - 1e-9, 500)
    factor = max(float(np.log1p(q * np.expm1(e)) / (q * e)) for e in grid for q in (1e-4, 0.01, 0.1))
    loose = min(composed / exact for *_, composed, exact in sampling.rows)
    return (claim("amplification", worst), claim("amplified epsilon", factor), claim("loose", loose))


def _draw(figure: Any, steps: tuple[int, ...], curves: dict[str, list[float]], groups: Table) -> None:
    grid = figure.add_gridspec(1, 3)
    axes = panel(figure, grid[0], title="(a) what each theorem says", x="number of mechanisms T", y="epsilon")
    ratio = panel(figure, grid[1], title="(b) looseness", x="number of mechanisms T", y="epsilon / epsilon of PLD")
    for name, look in LOOKS.items():
        axes.plot(steps, curves[name], label=name, markersize=4, linewidth=1.2, **look)
        ratio.plot(steps, np.array(curves[name]) / np.array(curves["PLD"]), markersize=4, linewidth=1.2, **look)
    axes.legend(frameon=False, fontsize=7)
    group = panel(figure, grid[2], title="(c) groups", x="records k", y="delta at k epsilon", log="y")
    k, _, printed, exact = zip(*groups.rows, strict=True)
    group.plot(k, printed, label="the lectures' theorem", **MARKS["independent"])
    group.plot(k, exact, label="exact", **MARKS["best"])
    group.legend(frameon=False, fontsize=7)
