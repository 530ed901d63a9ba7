"""A small convex problem and the lecture's four private solvers for it, in plain numpy: the setting of the risk bounds.

Logistic loss on rows of norm at most 1 (so it is 1-Lipschitz and 1/4-smooth), over the ball of radius 1 (diameter D = 2). Neighbours
replace one row. Every method's noise follows from a printed theorem; its bound is the printed proof with its constants kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hushgrad.accounting import calibrate, classical, gaussian_mu
from hushgrad.events import Gaussian

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


def _lecture_sigma(task: Task, steps: int) -> float:
    return classical.dp_gd_sigma(epsilon=task.epsilon, delta=DELTA, lipschitz=1.0, dataset_size=task.n, steps=steps)


def _tight_sigma(task: Task, steps: int) -> float:
    return 2 / task.n * math.sqrt(steps) / gaussian_mu(task.epsilon, DELTA)


def _gd_plan(task: Task, *, tight: bool) -> tuple[int, float]:
    """(steps, sigma) of least bound."""
    sigma = _tight_sigma if tight else _lecture_sigma
    steps = min((int(t) for t in _STEPS), key=lambda t: dp_gd_bound(task, t, sigma(task, t)))
    return steps, sigma(task, steps)


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
