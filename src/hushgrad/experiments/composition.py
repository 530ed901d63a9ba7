"""Composition: every theorem of the lectures on one and the same mechanism, and what the lectures' side remarks are worth.

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
from hushgrad.experiments.base import Claim, Context, Findings, Table
from hushgrad.experiments.picture import MARKS, panel

__all__ = ["run"]

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
        caption=f"(a) epsilon at delta = {SLACK:g} of T Laplace mechanisms of {STEP}-DP each, by theorem. (b) the same "
        f"divided by the "
        "PLD's answer: how loose each theorem is. (c) delta at k eps for a group of k records, one Gaussian release of "
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
        Claim(
            source="004",
            says="basic composition: 100 x 0.1-DP",
            expected=10.0,
            found=epsilon(pure, delta=SLACK, accountant="basic"),
            tolerance=1e-6,
        ),
        Claim(
            source="004",
            says="advanced composition, drift T eps (e^eps - 1), T = 100, eps = 0.1, delta' = 1e-6",
            expected=0.1 * math.sqrt(200 * math.log(1e6)) + 10 * math.expm1(0.1),
            found=first,
            tolerance=1e-9,
        ),
        Claim(
            source="000",
            says="advanced composition, drift T eps (e^eps - 1)/(e^eps + 1), the same",
            tolerance=1e-9,
            expected=0.1 * math.sqrt(200 * math.log(1e6)) + 10 * math.tanh(0.05),
            found=second,
        ),
        Claim(
            source="000",
            says="Kairouz et al. is 'slightly tighter' (optimal / lecture 12's form, at most 1)",
            expected=1.0,
            relation="at most",
            found=epsilon(pure, delta=SLACK, accountant="optimal") / second,
        ),
        Claim(
            source="004",
            says="corollary eps <= eps'/sqrt(8 T ln 1/delta') suffices for eps' = 0.5, T = 100",
            expected=0.5,
            relation="at most",
            found=advanced_forms([(step, 100)], SLACK)[0],
            note="Also needs eps' <= 2 ln(1/delta'), which the lecture does not print; the library checks it.",
        ),
        Claim(
            source="004",
            says="the theorems hold side by side, neither is always better: lecture 9's form at T = 50, eps = 1, where "
            "basic is 50",
            expected=50.0,
            relation="at least",
            found=worst,
            note="Its drift e^eps - 1 is above 1 from eps = ln 2 on, and then basic composition is better; the library "
            "returns the minimum.",
        ),
    )


def _order_claims(steps: tuple[int, ...], curves: dict[str, list[float]]) -> tuple[Claim, ...]:
    last = {name: values[-1] for name, values in curves.items()}
    tighter = max(pld / min(a, b) for pld, a, b in zip(curves["PLD"], curves["RDP"], curves["optimal"], strict=True))
    return (
        Claim(
            source="000",
            says=f"RDP can be tighter than advanced composition (T = {steps[-1]}: RDP / lecture 12's form)",
            expected=1.0,
            relation="at most",
            found=last["RDP"] / last["advanced, lecture 12"],
        ),
        Claim(
            source="000",
            says=f"zCDP can be tighter than advanced composition (T = {steps[-1]}: zCDP / lecture 12's form)",
            expected=1.0,
            relation="at most",
            found=last["zCDP"] / last["advanced, lecture 12"],
        ),
        Claim(
            source="000",
            says="the numerical accountant is the tightest at every T (largest PLD / best of RDP, optimal)",
            expected=1.0,
            relation="at most",
            found=tighter,
            tolerance=1e-3,
        ),
    )


def _loss_claims() -> tuple[Claim, ...]:
    p, q = np.array([1 / 2, 1 / 2]), np.array([1 / 3, 2 / 3])
    hockey = max(_hockey_stick(p, q, 0.0), _hockey_stick(q, p, 0.0))
    tail = float(p[np.log(p / q) > 0].sum())
    point, coin = np.array([1.0, 0.0]), np.array([0.5, 0.5])
    one_way = float(point[point > math.exp(math.log(2.0) + 1e-12) * coin].sum())  # P(L > ln 2) with outputs from the point mass
    return (
        Claim(source="004", says="the two-coin algorithm is (0, 1/6)-DP", expected=1 / 6, found=hockey, tolerance=1e-12),
        Claim(
            source="004",
            says="its privacy loss is not bounded by 0 with probability 5/6, so the converse is false: P(L > 0)",
            expected=1 / 2,
            found=tail,
            tolerance=1e-12,
            note="The lecture's own counter-example; the exact condition for (eps, delta) is E[(1 - e^(eps - L))+] <= delta.",
        ),
        Claim(
            source="000",
            says="P(L > eps) <= delta for a pair gives (eps, delta)-DP (point mass against fair coin, eps = ln 2)",
            expected=one_way,
            found=max(_hockey_stick(point, coin, math.log(2)), _hockey_stick(coin, point, math.log(2))),
            corrected=0.5,
            tolerance=1e-12,
            note="P(L > ln 2) = 0 with outputs of the point mass, yet delta = 1/2: the condition is needed in both "
            "directions of every neighbouring pair.",
        ),
    )


def _hockey_stick(p: np.ndarray, q: np.ndarray, eps: float) -> float:
    return float(np.maximum(p - math.exp(eps) * q, 0.0).sum())


def _gaussian_claims() -> tuple[Claim, ...]:
    sigma = classical.classical_gaussian_sigma(epsilon=0.5, delta=1e-5)
    large = math.sqrt(2 * math.log(1.25e5)) / 10.0
    literal, at_ten = gaussian_delta(1 / math.sqrt(sigma), 0.5), gaussian_delta(1 / large, 10.0)
    return (
        Claim(
            source="000, 004",
            says="Gaussian theorem at eps = 0.5, delta = 1e-5, sigma a standard deviation",
            expected=1e-5,
            relation="at most",
            found=gaussian_delta(1 / sigma, 0.5),
        ),
        Claim(
            source="000, 004",
            says="the Gaussian theorem with 'variance sigma', as printed (eps = 0.5, delta = 1e-5)",
            expected=1e-5,
            relation="at most",
            found=literal,
            corrected=_normal_delta(1 / math.sqrt(sigma), 0.5),
            note="Sigma is a standard deviation: as a variance the delta is thousands of times too large. 'Noise "
            "variance: sigma = 8L sqrt(T)...' is the same slip.",
        ),
        Claim(
            source="000, 004",
            says="Gaussian theorem at eps = 10, delta = 1e-5 (stated without eps < 1)",
            expected=1e-5,
            relation="at most",
            found=at_ten,
            corrected=_normal_delta(1 / large, 10.0),
            note="The proof needs eps < 1; the formula is really false from eps = 8.43 on.",
        ),
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
    return (
        Claim(
            source="000, 004",
            says="group privacy: (k eps, delta (e^(k eps) - 1)/(e^eps - 1)) (printed / exact delta, smallest)",
            expected=1.0,
            relation="at least",
            found=tightest,
            tolerance=1e-3,
            note=f"Valid, and up to {loosest:.0f} times the exact delta here: a group of k is at distance k, which a "
            f"Gaussian knows.",
        ),
    )


def _sampling(rates: tuple[float, ...]) -> Table:
    rows = []
    for q in rates:
        after, _ = classical.subsampled(epsilon=1.0, delta=1e-5, rate=q, relation="add_remove", sampling="poisson")
        lemma = q * gaussian_delta(1 / 2.0, 1.0)
        exact = delta(Gaussian(2.0).sampled(rate=q), epsilon=after)
        t = round(1 / q) if q < 0.5 else 2
        event = Gaussian(2.0).sampled(rate=q) * t
        step = classical.subsampled(
            epsilon=_gaussian_epsilon(1e-5 / (2 * q * t)), delta=0.0, rate=q, relation="add_remove", sampling="poisson"
        )[0]
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


def _gaussian_epsilon(small: float) -> float:
    return epsilon(Gaussian(2.0), delta=min(small, 0.5), accountant="gdp")


def _sampling_claims(sampling: Table) -> tuple[Claim, ...]:
    worst = max(exact / lemma for _, _, _, lemma, exact, _, _ in sampling.rows)
    grid = np.linspace(1e-3, 1 - 1e-9, 500)
    factor = max(float(np.log1p(q * np.expm1(e)) / (q * e)) for e in grid for q in (1e-4, 0.01, 0.1))
    loose = min(composed / exact for *_, composed, exact in sampling.rows)
    return (
        Claim(
            source="000",
            says="amplification lemma: exact delta / (q delta) of a sampled Gaussian, at most 1",
            expected=1.0,
            relation="at most",
            found=worst,
            tolerance=2e-3,
            note="It is an equality for Poisson sampling of a Gaussian. The lemma is printed for sampling without "
            "replacement (replace-one), the proof is for Poisson (add/remove).",
        ),
        Claim(
            source="000",
            says="ln(1 + q (e^eps - 1)) <= 2 q eps for eps < 1 (largest factor)",
            expected=2.0,
            relation="at most",
            found=factor,
            note="e - 1 = 1.718 is the best constant.",
        ),
        Claim(
            source="000",
            says="composition theorems are loose: lemma + best printed composition / PLD over T sampled steps, smallest",
            expected=1.0,
            relation="at least",
            found=loose,
        ),
    )


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
