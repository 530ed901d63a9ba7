"""Linear regression: the risk of SGD with correlated noise grows with the effective dimension Tr(H)/||H||, not with d.

Lines are the exact stationary risk for Gaussian inputs (``stationary.py``), points are simulations of SGD with multiplicative
noise. No clipping, as in the source: this is the noise dynamics, not a private run (``dp-rates`` is one).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.optimize import brentq

from hushgrad.experiments.base import Claim, Context, Findings, Stated, Table
from hushgrad.experiments.picture import MARKS, panel
from hushgrad.experiments.stationary import Problem, filter_anti, filter_independent, filter_nu, filtered, tuned
from hushgrad.noise import AntiPGD, Nu, Spectral

claim = Stated("linear-regression")

METHODS = {
    "independent": "independent",
    "damped anti-PGD": "anti",
    "nu-FTRL, nu = eta mu": "other",
    "nu-FTRL, tuned": "nu",
    "Spectral": "best",
}


def _problem(d: int, eta: float) -> Problem:
    """The slides' low effective dimension: curvatures 1, 1/d, ..., 1/d."""
    return Problem(curvatures=((1.0, 1), (1.0 / d, d - 1)), eta=eta)


def _parameters(problem: Problem) -> dict[str, float]:
    smallest = problem.eta * min(lam for lam, _ in problem.curvatures)
    return {
        "damped anti-PGD": 1 - tuned(lambda x: problem.risk(filter_anti(1 - x)), smallest, 0.9),
        "nu-FTRL, nu = eta mu": smallest,
        "nu-FTRL, tuned": tuned(lambda nu: problem.risk(filter_nu(nu)), smallest / 10, 0.9),
    }


def _powers(problem: Problem) -> dict[str, np.ndarray]:
    values = _parameters(problem)
    return {
        "independent": filter_independent(),
        "damped anti-PGD": filter_anti(values["damped anti-PGD"]),
        "nu-FTRL, nu = eta mu": filter_nu(values["nu-FTRL, nu = eta mu"]),
        "nu-FTRL, tuned": filter_nu(values["nu-FTRL, tuned"]),
        "Spectral": problem.optimal_power(),
    }


def _risks(problem: Problem) -> dict[str, float]:
    return {name: problem.risk(power) for name, power in _powers(problem).items()}


def run(context: Context) -> Findings:
    """Risk over d, over d_eff and over eta; simulation points; the stability boundary."""
    sizes = (4, 16, 64, 256, 1024)
    over_d = {d: _risks(_problem(d, 0.05)) for d in context.track(sizes, "over d")}
    rates = (0.3, 0.1, 0.03, 0.01, 0.003)
    over_eta = {eta: _risks(_problem(16, eta)) for eta in context.track(rates, "over eta")}
    over_effective = {round(_spiked(large).trace, 3): _risks(_spiked(large)) for large in (1, 4, 16, 64)}
    points = ((8, 0.2),) if context.quick else ((8, 0.2), (8, 0.05), (32, 0.2))
    chains, lengths = (64, 30) if context.quick else (256, 40)
    rng = np.random.default_rng(context.seed)
    simulated = [row for d, eta in context.track(points, "simulate") for row in _simulations(d, eta, chains, lengths, rng)]
    return Findings(
        claims=(
            *_slope_claims(over_d, over_eta),
            *_bound_claims(over_d, over_eta, over_effective),
            *_boundary_claims(),
            *_simulation_claims(simulated),
        ),
        tables=(
            _table("Exact risk over d at d_eff near 2, eta = 0.05, rho = 1/2", "d", over_d),
            _table("Exact risk over eta at d = 16", "eta", over_eta),
            _table("Exact risk over d_eff at d = 64, eta = 0.01", "d_eff", over_effective),
            Table(
                title="Simulation",
                columns=("d", "eta", "method", "exact", "simulation", "standard error", "ratio"),
                rows=tuple(simulated),
            ),
        ),
        draw=lambda figure: _draw(figure, over_d, over_eta, simulated),
        caption="Stationary excess risk E‖theta - theta*‖²_H of linear regression with privacy noise of rho = 1/2 at clip norm 1 "
        "(no clipping, no label noise), curvatures 1, 1/d, ..., 1/d: (a) over the dimension d at eta = 0.05, (b) over the "
        "learning rate at d = 16, (c) simulation divided by the exact formula, with two standard errors.",
        data={"over_d": over_d, "over_eta": over_eta, "over_effective_dimension": over_effective, "simulated": simulated},
    )


def _table(title: str, first: str, curves: dict[Any, dict[str, float]]) -> Table:
    return Table(title=title, columns=(first, *METHODS), rows=tuple((x, *(row[m] for m in METHODS)) for x, row in curves.items()))


def _spiked(large: int) -> Problem:
    """64 directions, ``large`` of curvature 1 and the rest of curvature 1/64."""
    rest = ((1.0 / 64, 64 - large),) if large < 64 else ()
    return Problem(curvatures=((1.0, large), *rest), eta=0.01)


def _slope(curves: dict[Any, dict[str, float]], method: str, a: float, b: float) -> float:
    return math.log(curves[b][method] / curves[a][method]) / math.log(b / a)


def _slope_claims(over_d: dict[int, dict[str, float]], over_eta: dict[float, dict[str, float]]) -> tuple[Claim, ...]:
    grown = over_d[1024]["nu-FTRL, tuned"] / over_d[16]["nu-FTRL, tuned"]
    log_squared = (math.log(8 * 1024 / 0.05) / math.log(8 * 16 / 0.05)) ** 2
    bound = (_problem(1024, 0.05).trace, _problem(16, 0.05).trace)
    return (
        claim("independent in d", _slope(over_d, "independent", 256, 1024)),
        claim("anti-PGD in d", _slope(over_d, "damped anti-PGD", 256, 1024)),
        claim("nu-FTRL grown", grown, expected=log_squared),
        claim("nu-FTRL in d", _slope(over_d, "nu-FTRL, tuned", 256, 1024)),
        claim("bound in d", math.log(bound[0] / bound[1]) / math.log(64)),
        claim("independent in eta", _slope(over_eta, "independent", 0.01, 0.003)),
        claim("anti-PGD in eta", _slope(over_eta, "damped anti-PGD", 0.01, 0.003)),
        claim(
            "nu-FTRL in eta",
            _slope(over_eta, "nu-FTRL, tuned", 0.01, 0.003)
            + 2 * math.log(math.log(128 / 0.003) / math.log(128 / 0.01)) / math.log(0.01 / 0.003),
        ),
    )


def _bound_claims(
    over_d: dict[int, dict[str, float]], over_eta: dict[float, dict[str, float]], over_effective: dict[float, dict[str, float]]
) -> tuple[Claim, ...]:
    rows = [*over_d.values(), *over_eta.values(), *over_effective.values()]
    beaten = max(row["Spectral"] / min(value for name, value in row.items() if name != "Spectral") for row in rows)
    lower = min(over_d[d]["Spectral"] / (0.05**2 * _problem(d, 0.05).trace) for d in over_d)
    problem = _problem(8, 0.2)
    spectral = Spectral(curvatures=(1.0, *[1 / 8] * 7), learning_rate=0.2)
    printed = {4: 0.1071, 1024: 26.99}
    return (
        claim("no method below", lower),
        claim("Spectral best", beaten),
        claim("Spectral attains", spectral.excess_loss(rho=0.5), expected=problem.first_order_risk(problem.optimal_power())),
        *(
            claim("independent, measured", over_d[d]["independent"], expected=v, tolerance=1e-3 * v, d=d)
            for d, v in printed.items()
        ),
        claim(
            "effective dimension",
            _spiked(64).first_order_risk(filter_independent()) / _spiked(1).first_order_risk(filter_independent()),
        ),
    )


def _boundary_claims() -> tuple[Claim, ...]:
    """The margin's zero against the spectral radius of the exact second-moment recursion, which knows nothing of the formula."""
    lam = np.array([1.0] + [1 / 8] * 7)

    def radius(eta: float) -> float:
        moments = np.diag(1 - 2 * eta * lam + 2 * eta**2 * lam**2) + eta**2 * np.outer(lam, lam)
        return float(np.abs(np.linalg.eigvals(moments)).max()) - 1

    formula = float(brentq(lambda eta: _problem(8, eta).margin(), 0.05, 0.95))
    return (
        claim("boundary", float(brentq(radius, 0.05, 0.95)), expected=formula, product=formula * float(lam.sum())),
        claim("informal range", float(_problem(8, 0.9).margin() > 0)),
    )


def _simulations(d: int, eta: float, chains: int, lengths: int, rng: np.random.Generator) -> list[tuple[Any, ...]]:
    problem, lam = _problem(d, eta), np.array([1.0] + [1 / d] * (d - 1))
    steps = int(lengths / (eta / d))
    values = _parameters(problem)
    filters = {
        "independent": np.eye(1, steps)[0],
        "damped anti-PGD": AntiPGD(damping=values["damped anti-PGD"]).noising_coefficients(steps),
        "nu-FTRL, tuned": Nu(nu=values["nu-FTRL, tuned"]).noising_coefficients(steps),
        "Spectral": Spectral(curvatures=tuple(lam.tolist()), learning_rate=eta).noising_coefficients(steps),
    }
    powers = _powers(problem)
    rows = []
    for method, beta in filters.items():
        exact = problem.risk(powers[method])
        value, error = _simulate(problem, lam, beta, steps, chains, rng)
        rows.append((d, eta, method, exact, value, error, value / exact))
    return rows


def _simulate(
    problem: Problem, lam: np.ndarray, beta: np.ndarray, steps: int, chains: int, rng: np.random.Generator
) -> tuple[float, float]:
    """(mean, standard error over chains) of ‖theta‖²_H in the second half of ``steps`` steps; sensitivity from the "
    "series itself.
    """
    from hushgrad.noise.power_series import inverse

    sens = float(np.linalg.norm(inverse(beta, steps)))
    d, eta, root = len(lam), problem.eta, np.sqrt(lam)
    groups = max(1, chains * d * steps // 4_000_000)  # of chains at a time: the noise of all steps is in memory
    sums = []
    for part in np.array_split(np.arange(chains), groups):
        noise = filtered(rng.standard_normal((steps, len(part), d)), beta) * (sens * eta)
        theta, total = np.zeros((len(part), d)), np.zeros(len(part))
        for t in range(steps):
            x = rng.standard_normal((len(part), d)) * root
            theta = theta - eta * (x * theta).sum(axis=1, keepdims=True) * x - noise[t]
            if t >= steps // 2:
                total += theta**2 @ lam
        sums.append(total / (steps - steps // 2))
    per_chain = np.concatenate(sums)
    return float(per_chain.mean()), float(per_chain.std(ddof=1) / math.sqrt(chains))


def _simulation_claims(simulated: list[tuple[Any, ...]]) -> tuple[Claim, ...]:
    return tuple(
        claim("simulated", ratio, tolerance=max(3 * error / exact, 0.03), stderr=error / exact, method=method, d=d, eta=eta)
        for d, eta, method, exact, _, error, ratio in simulated
    )


def _draw(
    figure: Any, over_d: dict[int, dict[str, float]], over_eta: dict[float, dict[str, float]], simulated: list[tuple[Any, ...]]
) -> None:
    spec = figure.add_gridspec(1, 3, width_ratios=(1, 1, 0.8))
    first = panel(figure, spec[0], title="(a) over d", x="dimension d", y="excess risk")
    second = panel(figure, spec[1], title="(b) over eta", x="learning rate eta", y="excess risk")
    for method, key in METHODS.items():
        first.plot(list(over_d), [row[method] for row in over_d.values()], label=method, markersize=4, **MARKS[key])
        second.plot(list(over_eta), [row[method] for row in over_eta.values()], markersize=4, **MARKS[key])
    first.plot(list(over_d), [0.05**2 * _problem(d, 0.05).trace for d in over_d], label="eta² Tr(H)/(2 rho)", **MARKS["bound"])
    second.plot(list(over_eta), [eta**2 * _problem(16, eta).trace for eta in over_eta], **MARKS["bound"])
    first.legend(frameon=False, fontsize=7)
    axes = panel(figure, spec[2], title="(c) simulation / exact", x="", y="ratio", log="")
    for place, (d, eta, method, exact, _, error, ratio) in enumerate(simulated):
        look = MARKS[METHODS[method]]
        axes.errorbar(
            [place], [ratio], yerr=[2 * error / exact], fmt=look["marker"], color=look["color"], markersize=5, capsize=2
        )
        if place % 4 == 0:
            axes.text(place - 0.3, 1.002, f"d = {d}\neta = {eta:g}", fontsize=7, transform=axes.get_xaxis_transform(), va="top")
    axes.axhline(1.0, color="0.6", linewidth=0.8)
    axes.set_xticks([])
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.2 * (high - low))  # room for the labels
