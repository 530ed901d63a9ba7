"""Mean estimation in one dimension: independent noise, damped anti-PGD, nu-FTRL and the optimum, in closed form and simulated.

Only the privacy noise is considered: the data's own term eta sigma²/(2 - eta) is the same for all of them and is left out.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.special import ellipk

from hushgrad.errors import ArgumentError
from hushgrad.experiments.base import Claim, Context, Findings, Stated, Table
from hushgrad.experiments.picture import MARKS, panel
from hushgrad.experiments.stationary import Problem, best_damping, filter_anti, filter_independent, filter_nu, filtered
from hushgrad.noise import AntiPGD, Independent, Nu
from hushgrad.noise.lower_toeplitz import LowerToeplitz
from hushgrad.noise.power_series import inverse

claim = Stated("mean-estimation")

RHO = 0.5
METHODS = {"Noisy-SGD": "independent", "damped anti-PGD": "anti", "nu-FTRL, nu = eta": "nu"}


def _closed_form(method: str, eta: float) -> float:
    """The stationary variance at rho = 1/2 that the theory gives, from closed forms (K is the complete elliptic integral)."""
    a, scale = 1 - eta, eta**2 / (2 * RHO)
    if method == "Noisy-SGD":
        return scale / (1 - a * a)
    if method == "damped anti-PGD":
        return scale / math.sqrt(1 - a * a)
    return scale * (2 / math.pi * float(ellipk(a * a))) ** 2


def _integral(method: str, eta: float) -> float:
    """The same by quadrature over frequencies."""
    problem = Problem(curvatures=((1.0, 1),), eta=eta, rho=RHO)
    powers = {
        "Noisy-SGD": filter_independent(),
        "damped anti-PGD": filter_anti(best_damping(eta)),
        "nu-FTRL, nu = eta": filter_nu(eta),
    }
    return problem.variance(1.0, powers[method])


def _mechanism(method: str, eta: float) -> LowerToeplitz | Independent:
    if method == "Noisy-SGD":
        return Independent()
    return AntiPGD(damping=best_damping(eta)) if method == "damped anti-PGD" else Nu(nu=eta)


def _simulated(method: str, eta: float, *, chains: int, lengths: float, rng: np.random.Generator) -> tuple[float, float]:
    """(mean, standard error) of theta² in the second half of runs of ``lengths``/eta steps with the library's own noise."""
    steps = int(lengths / eta)
    mechanism = _mechanism(method, eta)
    if isinstance(mechanism, Independent):
        beta, sens = np.eye(1, steps)[0], 1.0
    else:
        beta = mechanism.noising_coefficients(steps)
        sens = float(np.linalg.norm(mechanism.strategy_coefficients(steps)))
    decay = -eta * (1 - eta) ** np.arange(steps)
    response = filtered(beta, decay)  # of theta to one draw
    theta = filtered(rng.standard_normal((steps, chains)), response) * sens / math.sqrt(2 * RHO)
    per_chain = (theta[steps // 2 :] ** 2).mean(axis=0)
    return float(per_chain.mean()), float(per_chain.std(ddof=1) / math.sqrt(chains))


def run(context: Context) -> Findings:
    """Error over eta: closed forms, quadrature, simulation; the slide's series; the rate eta² log²(1/eta)."""
    grid = np.geomspace(1e-4, 0.5, 20)
    points = (0.3, 0.1, 0.03) if context.quick else (0.3, 0.1, 0.03, 0.01)
    chains, lengths = (48, 120.0) if context.quick else (128, 240.0)
    rng = np.random.default_rng(context.seed)
    simulated = {}
    for eta in context.track(points, "simulate"):
        for method in METHODS:
            simulated[method, eta] = _simulated(method, eta, chains=chains, lengths=lengths, rng=rng)
    curves = {method: [_closed_form(method, eta) for eta in grid] for method in METHODS}
    return Findings(
        claims=(*_closed_form_claims(), *_simulation_claims(simulated), *_rate_claims(), *_series_claims()),
        tables=(_table(simulated),),
        draw=lambda figure: _draw(figure, grid, curves, simulated),
        caption="(a) stationary variance of theta from privacy noise of rho = 1/2 at clip norm 1, over the learning rate eta: "
        "lines are closed forms, points are simulations with two standard errors. nu-FTRL with nu = eta is the optimum over all "
        "causal Toeplitz noise. (b) the optimum divided by eta² ln²(8/eta)/(2 rho pi²), which tends to 1.",
        data={"eta": grid, "closed_form": curves, "simulated": [[m, e, v, s] for (m, e), (v, s) in simulated.items()]},
    )


def _table(simulated: dict[tuple[str, float], tuple[float, float]]) -> Table:
    rows = [
        (eta, method, _closed_form(method, eta), value, stderr, value / _closed_form(method, eta))
        for (method, eta), (value, stderr) in simulated.items()
    ]
    columns = ("eta", "method", "closed form", "simulation", "standard error", "ratio")
    return Table(title="Stationary variance at rho = 1/2", columns=columns, rows=tuple(rows))


def _closed_form_claims() -> tuple[Claim, ...]:
    printed = {"Noisy-SGD": 0.005025, "damped anti-PGD": 0.0007089, "nu-FTRL, nu = eta": 0.0004566}
    table = tuple(claim("closed form", _closed_form(m, 0.01), expected=v, tolerance=1e-3 * v, m=m) for m, v in printed.items())
    worst = max(abs(_integral(m, e) / _closed_form(m, e) - 1) for m in METHODS for e in (0.3, 0.01, 0.001))
    nearby = min(
        Problem(curvatures=((1.0, 1),), eta=0.05).variance(1.0, filter_nu(nu)) / _closed_form("nu-FTRL, nu = eta", 0.05)
        for nu in np.geomspace(0.005, 0.5, 41)
    )
    return (*table, claim("integrals", worst), claim("best nu", nearby))


def _simulation_claims(simulated: dict[tuple[str, float], tuple[float, float]]) -> tuple[Claim, ...]:
    return tuple(
        claim(
            "simulated",
            value / _closed_form(method, eta),
            tolerance=max(3 * stderr / _closed_form(method, eta), 0.03),
            stderr=stderr / _closed_form(method, eta),
            method=method,
            eta=eta,
        )
        for (method, eta), (value, stderr) in simulated.items()
    )


def _rate_claims() -> tuple[Claim, ...]:
    small = 1e-5
    best = _closed_form("nu-FTRL, nu = eta", small)
    slope = math.log(_closed_form("Noisy-SGD", 1e-4) / _closed_form("Noisy-SGD", 1e-5)) / math.log(10)
    middle = math.log(_closed_form("damped anti-PGD", 1e-4) / _closed_form("damped anti-PGD", 1e-5)) / math.log(10)
    printed = small**2 * math.log(1 / small) ** 2 / RHO
    return (
        claim("slope of Noisy-SGD", slope),
        claim("slope of anti-PGD", middle),
        claim(
            "geometric mean",
            _closed_form("damped anti-PGD", 0.01) / math.sqrt(_closed_form("Noisy-SGD", 0.01) * 0.01**2 / (2 * RHO)),
        ),
        claim("infimum", best / printed, corrected=math.log(8 / small) ** 2 / (2 * math.pi**2 * math.log(1 / small) ** 2)),
    )


def _series_claims() -> tuple[Claim, ...]:
    steps = 1000
    t = np.arange(1, steps)
    literal = np.concatenate(([1.0], -(t**-1.5) * 0.8**t))
    sens = float(np.linalg.norm(inverse(literal, steps)))
    good = float(np.linalg.norm(Nu(nu=0.2).strategy_coefficients(steps)))
    try:
        refused = float(Nu(nu=0.2, series="slide") is None)
    except ArgumentError:
        refused = 1.0
    return (
        claim("literal series", math.log10(sens), expected=math.log10(good), corrected=math.log10(8e58)),
        claim("refused", refused),
    )


def _draw(
    figure: Any, grid: np.ndarray, curves: dict[str, list[float]], simulated: dict[tuple[str, float], tuple[float, float]]
) -> None:
    spec = figure.add_gridspec(1, 2)
    axes = panel(figure, spec[0], title="(a) stationary error", x="learning rate eta", y="variance of theta (rho = 1/2)")
    for method, key in METHODS.items():
        look = MARKS[key]
        axes.plot(grid, curves[method], color=look["color"], linestyle=look["linestyle"], label=method)
        points = [(eta, v, 2 * s) for (m, eta), (v, s) in simulated.items() if m == method]
        x, y, error = zip(*points, strict=True)
        axes.errorbar(x, y, yerr=error, fmt=look["marker"], color=look["color"], markersize=5, capsize=2)
    axes.plot(grid, grid**2 / (2 * RHO), label="eta²/(2 rho)", **MARKS["bound"])
    axes.legend(frameon=False, fontsize=8)
    rate = panel(figure, spec[1], title="(b) the rate eta² log²(1/eta)", x="learning rate eta", y="optimum / asymptote", log="x")
    asymptote = grid**2 * np.log(8 / grid) ** 2 / (2 * RHO * np.pi**2)
    rate.plot(grid, np.array(curves["nu-FTRL, nu = eta"]) / asymptote, **MARKS["nu"])
    rate.axhline(1.0, color="0.6", linewidth=0.8)
