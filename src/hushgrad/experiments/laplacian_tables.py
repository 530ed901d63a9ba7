"""Tables 3 and 4 of DP-LSSGD: gamma and beta, the factors by which Laplacian smoothing lowers the noise in the utility bounds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hushgrad.denoise import beta, gamma
from hushgrad.experiments.base import Claim, Context, Findings, Stated, Table
from hushgrad.experiments.picture import MARKS, panel

claim = Stated("laplacian-tables")

SIGMAS = (1, 2, 3, 4, 5)
SIZES = (1000, 10_000, 100_000)
GAMMA = (0.447, 0.333, 0.277, 0.243, 0.218)  # table 3: the same three rows
BETA = (0.268, 0.185, 0.149, 0.128, 0.114)  # table 4


def _eigenvalues(sigma: float, d: int) -> np.ndarray:
    return np.asarray(1 + 4 * sigma * np.sin(np.pi * np.arange(d) / d) ** 2)


def _smoothed(z: np.ndarray, sigma: float) -> np.ndarray:
    return np.asarray(np.fft.ifft(np.fft.fft(z) / _eigenvalues(sigma, len(z))).real)


def run(context: Context) -> Findings:
    """Both tables, the limits, and a simulation of what the factors mean."""
    draws = 100 if context.quick else 1000
    rng = np.random.default_rng(context.seed)
    samples = np.array([_one_draw(rng.standard_normal(1000), 1.0) for _ in context.track(range(draws), "simulate")])
    rows = [(d, "gamma", *(gamma(s, d) for s in SIGMAS)) for d in SIZES] + [
        (d, "beta", *(beta(s, d) for s in SIGMAS)) for d in SIZES
    ]
    return Findings(
        claims=(*_table_claims(), *_limit_claims(), *_simulation_claims(samples)),
        tables=(
            Table(title="Tables 3 and 4, recomputed", columns=("d", "factor", *(f"σ = {s}" for s in SIGMAS)), rows=tuple(rows)),
        ),
        draw=_draw,
        caption="gamma = E⟨z, A⁻¹z⟩/d and beta = E‖A⁻¹z‖²/d over the dimension d, for three smoothing strengths σ (no units). "
        "Dotted: the limits 1/sqrt(4σ + 1) and (1 + 2σ)/(1 + 4σ)^1.5. Neither tends to 0.",
        data={"sigma": SIGMAS, "d": SIZES, "draws": draws},
    )


def _one_draw(z: np.ndarray, sigma: float) -> tuple[float, float]:
    smooth = _smoothed(z, sigma)
    return float(z @ smooth) / len(z), float(smooth @ smooth) / len(z)


def _table_claims() -> tuple[Claim, ...]:
    claims = []
    for name, number, factor, printed in (("gamma", 3, gamma, GAMMA), ("beta", 4, beta, BETA)):
        worst = max(abs(factor(s, d) - value) for d in SIZES for s, value in zip(SIGMAS, printed, strict=True))
        direct = max(
            abs(factor(s, d) - float((_eigenvalues(s, d) ** (-1 if name == "gamma" else -2)).mean()))
            for d in (4, 10, 1000)
            for s in SIGMAS
        )
        claims += [claim("table", worst, number=number, name=name), claim("eigenvalues", direct, name=name)]
    return tuple(claims)


def _limit_claims() -> tuple[Claim, ...]:
    large = 10**6
    return (
        claim("gamma's limit", gamma(1.0, large), corrected=1 / math.sqrt(5)),
        claim("gamma above", min(gamma(1.0, int(d)) for d in np.geomspace(1, large, 30)) * math.sqrt(5)),
        claim("beta's limit", beta(1.0, large), expected=3 / 5**1.5),
        claim("lemma 15", float((1 / _eigenvalues(1.0, 10)).sum()), expected=gamma(1.0, 10), corrected=10 * gamma(1.0, 10)),
    )


def _simulation_claims(samples: np.ndarray) -> tuple[Claim, ...]:
    means, errors = samples.mean(axis=0), samples.std(axis=0, ddof=1) / math.sqrt(len(samples))
    return tuple(
        claim("simulated", float(m), expected=value, tolerance=3.5 * float(e), stderr=float(e), what=says, name=name)
        for name, says, value, m, e in zip(
            ("gamma", "beta"), ("E⟨z, A⁻¹z⟩/d", "E‖A⁻¹z‖²/d"), (gamma(1.0, 1000), beta(1.0, 1000)), means, errors, strict=True
        )
    )


def _draw(figure: Any) -> None:
    spec = figure.add_gridspec(1, 2)
    d = np.unique(np.geomspace(1, 1e5, 60).astype(int))
    for column, (name, factor) in enumerate((("gamma", gamma), ("beta", beta))):
        axes = panel(figure, spec[column], title=f"({'ab'[column]}) {name}", x="dimension d", y=name, log="x")
        for sigma, key in zip((1, 3, 5), ("independent", "nu", "best"), strict=True):
            look = MARKS[key]
            limit = 1 / math.sqrt(4 * sigma + 1) if name == "gamma" else (1 + 2 * sigma) / (1 + 4 * sigma) ** 1.5
            axes.plot(
                d, [factor(sigma, int(n)) for n in d], color=look["color"], linestyle=look["linestyle"], label=f"σ = {sigma}"
            )
            axes.axhline(limit, color=look["color"], linestyle=":", linewidth=0.8)
        axes.set_ylim(0, 1.05)
        axes.legend(frameon=False, fontsize=8)
