"""The lectures' noise for DP-GD against the tight one, and their excess-risk bounds against measured risk.

The setting of the bounds is a small convex problem, with the lecture's four private solvers in plain numpy: logistic loss on rows of norm
at most 1 (so it is 1-Lipschitz and 1/4-smooth), over the ball of radius 1 (diameter D = 2). Neighbours replace one row. Every method's
noise follows from a printed theorem; its bound is the printed proof with its constants kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from hushgrad.accounting import calibrate, classical, epsilon, gaussian_mu
from hushgrad.events import Gaussian
from hushgrad.experiments.base import Claim, Context, Findings, Stated, Table
from hushgrad.experiments.picture import MARKS, panel

DIAMETER = 2.0
DELTA = 1e-6
METHODS = ("output perturbation", "objective perturbation", "DP-GD, lecture's noise", "DP-GD, tight noise", "DP-SGD, tight noise")
_STEPS = np.unique(np.geomspace(1, 200, 25).astype(int))  # what a measured run may take


@dataclass(frozen=True)
class Task:
    """n rows in d dimensions and a privacy level epsilon (delta = 1e-6)."""

    n: int
    d: int
    epsilon: float

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Rows y x: labels from a logistic model, already multiplied in."""
        x = rng.standard_normal((self.n, self.d))
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        truth = rng.standard_normal(self.d)
        margin = 4 * x @ truth / np.linalg.norm(truth) * math.sqrt(self.d) / 2
        return np.asarray(x * np.where(rng.random(self.n) < 1 / (1 + np.exp(-margin)), 1.0, -1.0)[:, None])


def _loss(rows: np.ndarray, w: np.ndarray) -> float:
    return float(np.logaddexp(0.0, -rows @ w).mean())


def _gradient(rows: np.ndarray, w: np.ndarray) -> np.ndarray:
    return np.asarray(-(rows.T @ (1 / (1 + np.exp(rows @ w)))) / len(rows))


def _project(w: np.ndarray) -> np.ndarray:
    return np.asarray(w / max(1.0, float(np.linalg.norm(w)) / (DIAMETER / 2)))


def _minimise(rows: np.ndarray, ridge: float = 0.0, tilt: np.ndarray | float = 0.0, iterations: int = 120) -> np.ndarray:
    """Argmin of the mean loss + ridge/2 |w|² + tilt.w over the ball, by accelerated projected gradients."""
    w = previous = np.zeros(rows.shape[1])
    for k in range(iterations):
        ahead = w + k / (k + 3) * (w - previous)
        previous, w = w, _project(ahead - (_gradient(rows, ahead) + ridge * ahead + tilt) / (0.25 + ridge))
    return w


def output_bound(task: Task) -> tuple[float, float]:
    """(bound, ridge): 3 L² sqrt(d ln(1.25/delta))/(eps mu n) + mu R²/2, at the best mu."""
    scale = 3 * math.sqrt(task.d * math.log(1.25 / DELTA)) / (task.epsilon * task.n)
    mu = math.sqrt(2 * scale)
    return scale / mu + mu / 2, mu


def _objective(task: Task) -> tuple[float, float]:
    """(standard deviation of b, ridge) of Kifer, Smith and Thakurta 2012 for one added or removed row, asked for half of epsilon.

    Replacing is removing, then adding: 2 (eps/2), and delta/4 (1 + e^(eps/2)) <= delta for eps <= 2. Curvature at most 1/4.
    """
    half = task.epsilon / 2
    return math.sqrt(8 * math.log(8 / DELTA) + 4 * half) / half, 0.5 / (half * task.n)


def dp_gd_bound(task: Task, steps: int, sigma: float) -> float:
    """2 D G (2 + ln T)/sqrt(T) with G² = L² + d sigma² (Shamir and Zhang 2013)."""
    return 2 * DIAMETER * math.sqrt(1 + task.d * sigma**2) * (2 + math.log(steps)) / math.sqrt(steps)


def _gd_plan(task: Task, *, tight: bool) -> tuple[int, float]:
    """(steps, sigma) of least bound."""

    def sigma(steps: int) -> float:
        if tight:
            return 2 / task.n * math.sqrt(steps) / gaussian_mu(task.epsilon, DELTA)
        return classical.dp_gd_sigma(epsilon=task.epsilon, delta=DELTA, lipschitz=1.0, dataset_size=task.n, steps=steps)

    steps = min((int(t) for t in _STEPS), key=lambda t: dp_gd_bound(task, t, sigma(t)))
    return steps, sigma(steps)


def bound(method: str, task: Task) -> float:
    """The theorem's bound on the expected excess risk of the method, at most L D."""
    if method == "output perturbation":
        value = output_bound(task)[0]
    elif method == "objective perturbation":
        std, ridge = _objective(task)
        value = ridge / 2 + DIAMETER * std * math.sqrt(task.d) / task.n
    else:
        value = dp_gd_bound(task, *_gd_plan(task, tight="tight" in method))
    return min(value, DIAMETER)


def excess(method: str, task: Task, rows: np.ndarray, runs: int, rng: np.random.Generator) -> np.ndarray:
    """The measured excess risks of ``runs`` private runs."""
    least = _loss(rows, _minimise(rows, iterations=400))
    return np.array([_loss(rows, _solve(method, task, rows, rng)) - least for _ in range(runs)])


def _solve(method: str, task: Task, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if method == "output perturbation":
        mu = output_bound(task)[1]
        sigma = classical.classical_gaussian_sigma(epsilon=task.epsilon, delta=DELTA, sensitivity=2 / (mu * task.n))
        return _project(_minimise(rows, ridge=mu) + sigma * rng.standard_normal(task.d))
    if method == "objective perturbation":
        std, ridge = _objective(task)
        return _minimise(rows, ridge=ridge, tilt=std * rng.standard_normal(task.d) / task.n)
    if method.startswith("DP-SGD"):
        return _dp_sgd(task, rows, rng)
    steps, sigma = _gd_plan(task, tight="tight" in method)
    return _descend(rows, steps, sigma, rng)


def _descend(rows: np.ndarray, steps: int, sigma: float, rng: np.random.Generator) -> np.ndarray:
    """The lecture's DP-GD: step c/sqrt(t), c = D/G, the last iterate."""
    d = rows.shape[1]
    w, rate = np.zeros(d), DIAMETER / math.sqrt(1 + d * sigma**2)
    for t in range(1, steps + 1):
        w = _project(w - rate / math.sqrt(t) * (_gradient(rows, w) + sigma * rng.standard_normal(d)))
    return w


def _dp_sgd(task: Task, rows: np.ndarray, rng: np.random.Generator, *, rate: float = 0.1, steps: int = 100) -> np.ndarray:
    """Poisson batches, calibrated by the PLD under add/remove at half epsilon and delta/4: replacing is removing, then adding."""
    noise = _sgd_noise(task.epsilon, rate, steps)
    sigma = noise / (rate * task.n)
    w, scale = np.zeros(task.d), DIAMETER / math.sqrt(1 + task.d * sigma**2)
    for t in range(1, steps + 1):
        batch = rows[rng.random(task.n) < rate]
        gradient = _gradient(batch, w) * len(batch) / (rate * task.n) if len(batch) else np.zeros(task.d)
        w = _project(w - scale / math.sqrt(t) * (gradient + sigma * rng.standard_normal(task.d)))
    return w


@lru_cache(maxsize=64)
def _sgd_noise(epsilon: float, rate: float, steps: int) -> float:
    # Group privacy for two changes: 2 (eps/2), and delta/4 (1 + e^(eps/2)) <= delta for eps <= 2.
    return calibrate(lambda s: Gaussian(s).sampled(rate=rate) * steps, epsilon=epsilon / 2, delta=DELTA / 4, accountant="pld")


claim = Stated("lecture-dpgd")

LOOKS = dict(zip(METHODS, ("independent", "anti", "other", "nu", "best"), strict=True))
Rows = list[tuple[Any, ...]]


def _ratio(n: int, steps: int, eps: float, delta: float) -> float:
    """The lecture's sigma / the smallest sigma that is private (replace-one, the average of n gradients of norm 1)."""
    printed = classical.dp_gd_sigma(epsilon=eps, delta=delta, lipschitz=1.0, dataset_size=n, steps=steps)
    return printed * n / 2 * gaussian_mu(eps, delta) / math.sqrt(steps)


def run(context: Context) -> Findings:
    """Noise ratios over T; measured risk and bounds over n, d and epsilon."""
    sizes = (300, 1000, 3000) if context.quick else (300, 1000, 3000, 10_000, 30_000)
    runs = 4 if context.quick else 20
    middle = sizes[2]
    over_n = [row for n in context.track(sizes, "over n") for row in _measure(Task(n, 10, 0.5), runs, context.seed)]
    over_d = [row for d in context.track((5, 20, 80), "over d") for row in _measure(Task(middle, d, 0.5), runs, context.seed)]
    over_eps = [
        row for e in context.track((0.1, 0.3, 0.9), "over epsilon") for row in _measure(Task(middle, 10, e), runs, context.seed)
    ]
    steps = (1, 10, 25, 100, 1000, 10_000)
    ratios = {eps: [_ratio(60_000, t, eps, 1e-5) for t in steps] for eps in (0.1, 0.9)}
    columns = ("n", "d", "epsilon", "method", "measured excess", "standard error", "bound")
    return Findings(
        claims=(
            *_noise_claims(),
            *_bound_claims(),
            *_risk_claims([*over_n, *over_d, *over_eps], over_n),
            *_median_claims(context.seed),
        ),
        tables=(
            Table(title="Excess risk over n, d and epsilon", columns=columns, rows=(*over_n, *over_d, *over_eps)),
            _slopes(over_n, over_d, over_eps),
            Table(
                title="Lecture's sigma / tight sigma, n = 60000, delta = 1e-5",
                columns=("T", *(f"eps = {e}" for e in ratios)),
                rows=tuple((t, *(ratios[e][i] for e in ratios)) for i, t in enumerate(steps)),
            ),
        ),
        draw=lambda figure: _draw(figure, steps, ratios, over_n),
        caption="(a) the lecture's noise for DP-GD divided by the smallest private noise (replace-one, n = 60000, delta = 1e-5), "
        "over the number of steps. (b) logistic regression, d = 10, epsilon = 0.5, delta = 1e-6: measured excess risk (lines, "
        "two standard errors) and the theorems' bounds with their constants (dotted, same colour), over the number of rows n.",
        data={"over_n": over_n, "over_d": over_d, "over_epsilon": over_eps, "steps": steps, "ratios": ratios},
    )


def _measure(task: Task, runs: int, seed: int) -> Rows:
    rng = np.random.default_rng((seed, task.n, task.d, round(1000 * task.epsilon)))
    rows = task.draw(rng)
    found = []
    for method in METHODS:
        values = excess(method, task, rows, runs, rng)
        promised = math.nan if method.startswith("DP-SGD") else bound(method, task)
        found.append((task.n, task.d, task.epsilon, method, values.mean(), values.std(ddof=1) / math.sqrt(runs), promised))
    return found


def _slope(rows: Rows, column: int, method: str) -> float:
    mine = [row for row in rows if row[3] == method]
    return float(np.polyfit(np.log([row[column] for row in mine]), np.log([max(row[4], 1e-12) for row in mine]), 1)[0])


def _slopes(over_n: Rows, over_d: Rows, over_eps: Rows) -> Table:
    rows = tuple((m, _slope(over_n, 0, m), _slope(over_d, 1, m), _slope(over_eps, 2, m)) for m in METHODS)
    return Table(title="Fitted slopes of the measured excess risk", columns=("method", "in n", "in d", "in epsilon"), rows=rows)


def _noise_claims() -> tuple[Claim, ...]:
    sigma = classical.dp_gd_sigma(epsilon=0.1, delta=1e-5, lipschitz=1.0, dataset_size=60_000, steps=25)
    spent = epsilon(Gaussian(sigma * 60_000 / 2) * 25, delta=1e-5, accountant="gdp")
    full = math.sqrt(10_000) / gaussian_mu(0.5, 1e-6)
    sampled = calibrate(lambda s: Gaussian(s).sampled(rate=0.01) * 10_000, epsilon=0.5, delta=1e-6)
    few = calibrate(lambda s: Gaussian(s).sampled(rate=0.01) * 100, epsilon=0.5, delta=1e-6)
    return (
        claim("sigma", sigma),
        claim("sigma is private", spent),
        claim("times the tight one", _ratio(60_000, 25, 0.1, 1e-5)),
        claim("delta spent", 25 / 26 + 1, corrected=51 / 26),
        claim("amplification cancels", sampled * 100 / full),
        claim("one epoch", few * 100 / (full / 10)),
    )


def _bound_claims() -> tuple[Claim, ...]:
    small, large = Task(10**6, 10, 0.5), Task(10**8, 10, 0.5)
    output = math.log(output_bound(large)[0] / output_bound(small)[0]) / math.log(small.n / large.n)
    grid = [2**k for k in range(60)]

    def best(task: Task) -> float:
        sigma = [classical.dp_gd_sigma(epsilon=0.5, delta=1e-6, lipschitz=1.0, dataset_size=task.n, steps=t) for t in grid]
        return min(dp_gd_bound(task, t, s) / (2 + math.log(t)) / math.log(t + 2) for t, s in zip(grid, sigma, strict=True))

    descent = math.log(best(large) / best(small)) / math.log(small.n / large.n)
    return (
        claim("output perturbation", output),
        claim("exponent 2", output),
        claim("DP-GD", descent),
        claim("constant 3", 2 * math.sqrt(2)),
    )


def _risk_claims(rows: Rows, over_n: Rows) -> tuple[Claim, ...]:
    claims = []
    for method in METHODS[:-1]:
        worst = max(row[4] / row[6] for row in rows if row[3] == method)
        claims.append(claim("bound", worst, method=method))
    last = {row[3]: row[4] for row in over_n[-len(METHODS) :]}
    return (
        *claims,
        claim("which is better", last["DP-GD, tight noise"] / last["output perturbation"]),
        claim("looser noise", last["DP-GD, tight noise"] / last["DP-GD, lecture's noise"]),
    )


def _median_claims(seed: int) -> tuple[Claim, ...]:
    """|w| + |w - 100| + b w over two points: between the kinks the slope is b/2, so the sign of b picks a data point."""
    tilt = np.random.default_rng(seed).standard_normal(4000)
    kinks = np.array([0.0, 100.0])
    values = (np.abs(kinks).T + np.abs(kinks - 100.0)) / 2 + tilt[:, None] * kinks / 2
    inside = np.abs(tilt) < 2  # beyond, the objective has no minimum at all
    share = float((kinks[values[inside].argmin(axis=1)] == 100.0).mean())
    error = 0.5 / math.sqrt(int(inside.sum()))
    return (claim("median", share, tolerance=3.5 * error, stderr=error),)


def _draw(figure: Any, steps: tuple[int, ...], ratios: dict[float, list[float]], over_n: Rows) -> None:
    spec = figure.add_gridspec(1, 2, width_ratios=(0.8, 1))
    axes = panel(figure, spec[0], title="(a) lecture's sigma / tight sigma", x="steps T", y="ratio", log="x")
    for (eps, values), key in zip(ratios.items(), ("independent", "nu"), strict=True):
        axes.plot(steps, values, label=f"epsilon = {eps}", **MARKS[key])
    axes.set_ylim(0)
    axes.legend(frameon=False, fontsize=8)
    risk = panel(figure, spec[1], title="(b) risk and bounds", x="rows n", y="excess risk")
    for method in METHODS:
        mine = [row for row in over_n if row[3] == method]
        look = MARKS[LOOKS[method]]
        n, value, error = [r[0] for r in mine], [r[4] for r in mine], [2 * r[5] for r in mine]
        risk.errorbar(n, value, yerr=error, label=method, markersize=4, capsize=2, **look)
        risk.plot(n, [r[6] for r in mine], color=look["color"], linestyle=":", linewidth=1.0)
    risk.legend(frameon=False, fontsize=7)
