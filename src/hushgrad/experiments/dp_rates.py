"""Rates with clipping: a private one-pass run, so every step sees a fresh example and clips its gradient.

Linear regression in four dimensions with unit curvature, T steps, learning rate 2 ln(T)/T. The excess risk splits into a part that
the data alone cause (the same run without noise) and what privacy adds: the same data, the same clipping, with noise.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hushgrad.events import Once
from hushgrad.experiments.base import Claim, Context, Findings, Stated, Table
from hushgrad.experiments.picture import MARKS, panel
from hushgrad.experiments.stationary import filtered
from hushgrad.noise import Independent, Nu
from hushgrad.noise.base import Mechanism
from hushgrad.noise.lower_toeplitz import LowerToeplitz

claim = Stated("dp-rates")

D, CLIP, LABEL_NOISE, RHO = 4, 2.0, 0.3, 2.0
METHODS = {"independent": "independent", "nu-FTRL, nu = eta": "nu"}


def learning_rate(steps: int) -> float:
    """2 ln(T)/T: forgets the start as T^-2 and averages the rest."""
    return 2 * math.log(steps) / steps


def run(context: Context) -> Findings:
    """Excess risk over T at fixed rho, and over rho at fixed T, for independent and for correlated noise."""
    sizes = (256, 724, 2048) if context.quick else (256, 512, 1024, 2048, 4096, 8192, 16384)
    chains = 200 if context.quick else 800
    rows = [row for t in context.track(sizes, "over T") for row in _runs(t, RHO, chains, context.seed)]
    levels, length = (0.5, 2.0, 8.0), 512 if context.quick else 4096
    over_rho = [row for rho in context.track(levels, "over rho") for row in _runs(length, rho, chains, context.seed + 1)]
    columns = ("T", "rho", "noise", "excess without noise", "added by privacy", "standard error", "clipped (run without noise)")
    return Findings(
        claims=(*_rate_claims(rows, sizes), *_rho_claims(over_rho)),
        tables=(
            Table(title="Excess risk over T", columns=columns, rows=tuple(rows)),
            Table(title=f"Excess risk over rho, T = {length}", columns=columns, rows=tuple(over_rho)),
        ),
        draw=lambda figure: _draw(figure, rows, over_rho),
        caption=f"Excess risk E‖theta_T - theta*‖² of a private one-pass run (d = {D}, clip norm {CLIP:g}, label noise "
        f"{LABEL_NOISE}): (a) what privacy of rho = {RHO:g} adds, over the number of steps T, with two standard errors, and the "
        f"excess without noise; (b) what privacy adds at T = {length} over rho.",
        data={"over_T": rows, "over_rho": over_rho, "chains": chains},
    )


def _runs(steps: int, rho: float, chains: int, seed: int) -> list[tuple[Any, ...]]:
    eta = learning_rate(steps)
    rows = []
    plain, clipped = _excess(steps, eta, None, chains, seed)
    for name in METHODS:
        mechanism: Mechanism = Independent() if name == "independent" else Nu(nu=eta)
        sens = mechanism.sensitivity(steps=steps, participation=Once())
        beta = mechanism.noising_coefficients(steps) if isinstance(mechanism, LowerToeplitz) else np.eye(1, steps)[0]
        noisy, _ = _excess(steps, eta, beta * (CLIP * sens / math.sqrt(2 * rho)), chains, seed)
        added = noisy - plain  # the same data in both: chain by chain
        rows.append(
            (steps, rho, name, float(plain.mean()), float(added.mean()), float(added.std(ddof=1) / math.sqrt(chains)), clipped)
        )
    return rows


def _excess(steps: int, eta: float, beta: np.ndarray | None, chains: int, seed: int) -> tuple[np.ndarray, float]:
    """(‖theta_T - theta*‖² of every chain, share of clipped gradients); ``beta`` is the noise's filter, scaled."""
    data = np.random.default_rng((seed, steps, 0))
    theta = np.full((chains, D), -0.5)  # theta* = 0
    noise = _noise(beta, steps, chains, np.random.default_rng((seed, steps, 1)))
    clipped = 0
    for t in range(steps):
        x = data.standard_normal((chains, D))
        residual = (x * theta).sum(axis=1, keepdims=True) - LABEL_NOISE * data.standard_normal((chains, 1))
        gradient = residual * x
        norm = np.sqrt((gradient * gradient).sum(axis=1, keepdims=True))
        clipped += int((norm > CLIP).sum())
        theta = theta - eta * (gradient * np.minimum(1.0, CLIP / np.maximum(norm, 1e-12)) + noise[t])
    return np.asarray((theta * theta).sum(axis=1)), clipped / (steps * chains)


def _noise(beta: np.ndarray | None, steps: int, chains: int, rng: np.random.Generator) -> np.ndarray:
    if beta is None:
        return np.zeros((steps, 1, 1))
    out = np.empty((steps, chains, D), dtype=np.float32)
    for part in np.array_split(np.arange(chains), max(1, chains * steps // 400_000)):
        out[:, part] = filtered(rng.standard_normal((steps, len(part), D)), beta)
    return out


def _fitted_slope(x: list[float], y: list[float]) -> float:
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def _rate_claims(rows: list[tuple[Any, ...]], sizes: tuple[int, ...]) -> tuple[Claim, ...]:
    claims = []
    logs = [math.log(t) for t in sizes]
    for name, power in (("independent", 1), ("nu-FTRL, nu = eta", 2)):
        added = [row[4] for row in rows if row[2] == name]
        # eta = 2 ln(T)/T carries logarithms of its own: eta for independent noise, (eta ln(8/eta))² for the optimum
        factor = [log if power == 1 else (log * math.log(8 / learning_rate(t))) ** 2 for t, log in zip(sizes, logs, strict=True)]
        slope = _fitted_slope(list(map(float, sizes)), [a / f for a, f in zip(added, factor, strict=True)])
        claims.append(claim("privacy's slope", slope, expected=-float(power), power=power, name=name))
    plain = [row[3] for row in rows if row[2] == "independent"]
    slope = _fitted_slope(list(map(float, sizes)), [p / log for p, log in zip(plain, logs, strict=True)])
    last = {row[2]: row for row in rows[-2:]}
    return (
        *claims,
        claim("statistical error", slope),
        claim("less at the end", last["nu-FTRL, nu = eta"][4] / last["independent"][4], last=sizes[-1]),
    )


def _rho_claims(rows: list[tuple[Any, ...]]) -> tuple[Claim, ...]:
    claims = []
    for name in METHODS:
        mine = [row for row in rows if row[2] == name]
        slope = _fitted_slope([row[1] for row in mine], [row[4] for row in mine])
        claims.append(claim("slope in rho", slope, name=name))
    return tuple(claims)


def _draw(figure: Any, rows: list[tuple[Any, ...]], over_rho: list[tuple[Any, ...]]) -> None:
    spec = figure.add_gridspec(1, 2)
    first = panel(figure, spec[0], title="(a) over the number of steps", x="steps T (one example each)", y="excess risk")
    second = panel(figure, spec[1], title="(b) over the privacy level", x="rho (zCDP)", y="added by privacy")
    for axes, data, column in ((first, rows, 0), (second, over_rho, 1)):
        for name, key in METHODS.items():
            mine = [row for row in data if row[2] == name]
            x, y, error = [r[column] for r in mine], [r[4] for r in mine], [2 * r[5] for r in mine]
            axes.errorbar(x, y, yerr=error, label=f"added by privacy: {name}", markersize=4, capsize=2, **MARKS[key])
    plain = [row for row in rows if row[2] == "independent"]
    first.plot([r[0] for r in plain], [r[3] for r in plain], label="without noise", **MARKS["bound"])
    first.legend(frameon=False, fontsize=8)
