"""Figure 2 of DP-LSSGD: the effect of Laplacian smoothing on a noisy sine and a noisy picture, with the errors.

The paper flattens the picture row by row and smooths it as one long vector (σ = 100). It is compared with the same picture smoothed
on its own grid, which needs a tenth of σ. Errors are averaged over many draws of the noise, and each has its prediction: a bias
from the operator's eigenvalue at the signal's frequency, and the share of the noise's variance that the operator leaves.

Reference: Wang et al., "DP-LSSGD", MSML 2020, section 2.2 and Figure 2.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hushgrad.denoise import Laplacian
from hushgrad.experiments.base import Claim, Context, Findings, Stated, Table

claim = Stated("laplacian-signals")

SIZE = 100
SIGNALS: dict[str, tuple[Laplacian, float]] = {  # name: the smoother, the noise's standard deviation
    "sine": (Laplacian(10.0), 0.1),
    "picture, row by row": (Laplacian(100.0), 0.2),
    "picture, on its grid": (Laplacian(10.0, scope="grid"), 0.2),
}


def run(context: Context) -> Findings:
    """Smoothing removes most of the noise, and exactly as much as theory says."""
    draws = 20 if context.quick else 200
    signals = {name: _errors(_signal(name), smoother, std, draws) for name, (smoother, std) in SIGNALS.items()}
    columns = ("signal", *next(iter(signals.values())))
    return Findings(
        claims=tuple(claim for name, row in signals.items() for claim in _claims(name, row)),
        tables=(
            Table(
                title=f"Root mean square errors over {draws} draws",
                columns=columns,
                rows=tuple((n, *r.values()) for n, r in signals.items()),
            ),
        ),
        draw=_draw,
        caption="Figure 2 of DP-LSSGD: (a) a sine with noise of standard deviation 0.1, smoothed with σ = 10; (b) to "
        "(e) a picture with "
        "noise of standard deviation 0.2, smoothed row by row as in the paper (σ = 100) and on its own grid (σ = 10). No units.",
        data={"draws": draws, "signals": signals},
    )


def _claims(name: str, row: dict[str, float]) -> tuple[Claim, Claim]:
    return (
        claim("smoothing", row["rmse smoothed"] / row["rmse noisy"], name=name),
        claim("spectrum", row["rmse smoothed"] / row["rmse predicted"], name=name),
    )


def _signal(name: str) -> Tensor:
    wave = torch.sin(2 * math.pi * torch.arange(1, SIZE + 1, dtype=torch.float64) / SIZE)
    return wave if name == "sine" else torch.outer(wave, wave)


def _noisy(signal: Tensor, std: float, draw: int) -> Tensor:
    generator = torch.Generator().manual_seed(draw)
    return signal + std * torch.randn(signal.shape, generator=generator, dtype=torch.float64)


def _rmse(a: Tensor, b: Tensor) -> float:
    return float((a - b).square().mean().sqrt())


def _errors(signal: Tensor, smoother: Laplacian, std: float, draws: int) -> dict[str, float]:
    pairs = [(noisy, smoother.smooth(noisy)) for noisy in (_noisy(signal, std, draw) for draw in range(draws))]
    return {
        "sigma": smoother.sigma,
        "noise std": std,
        "rmse noisy": math.sqrt(np.mean([_rmse(noisy, signal) ** 2 for noisy, _ in pairs])),
        "rmse smoothed": math.sqrt(np.mean([_rmse(smooth, signal) ** 2 for _, smooth in pairs])),
        "rmse predicted": _predicted(signal, smoother, std),
    }


def _predicted(signal: Tensor, smoother: Laplacian, std: float) -> float:
    """sqrt(bias² + std² x share of the variance left), the share from the operator's spectrum on the signal's own grid."""
    axes = signal.ndim if smoother.scope == "grid" else 1
    side = SIZE if smoother.scope == "grid" else signal.numel()
    one = 4 * smoother.sigma * np.sin(np.pi * np.arange(side) / side) ** 2
    eigenvalues = 1 + (one if axes == 1 else one[:, None] + one)
    share = float((1 / eigenvalues**2).mean())
    return math.sqrt(_rmse(smoother.smooth(signal), signal) ** 2 + std**2 * share)


def _draw(figure: Any) -> None:
    figure.set_size_inches(10, 5.6)
    grid = figure.add_gridspec(2, 4, height_ratios=(1, 1))
    _draw_sine(figure.add_subplot(grid[0, :]))
    picture = _signal("picture")
    noisy = _noisy(picture, 0.2, 0)
    panels = {"(b) original": picture, "(c) noise of std 0.2 added": noisy}
    for letter, name in (("d", "picture, row by row"), ("e", "picture, on its grid")):
        smoother = SIGNALS[name][0]
        panels[f"({letter}) {name.split(', ')[1]}, σ = {smoother.sigma:g}"] = smoother.smooth(noisy)
    for column, (title, image) in enumerate(panels.items()):
        axes = figure.add_subplot(grid[1, column])
        shown = axes.imshow(image.numpy(), cmap="RdBu_r", vmin=-1.3, vmax=1.3, interpolation="nearest")
        error = f"\nrmse {_rmse(image, picture):.3f}" if column else "\n"
        axes.set_title(title + error, fontsize=10)
        axes.set_xticks([])
        axes.set_yticks([])
    figure.colorbar(shown, ax=figure.axes[1:], shrink=0.85, pad=0.01)


def _draw_sine(axes: Any) -> None:
    smoother, std = SIGNALS["sine"]
    wave = _signal("sine")
    noisy = _noisy(wave, std, 0)
    place = np.arange(1, SIZE + 1)
    smooth = smoother.smooth(noisy)
    axes.plot(place, noisy, color="0.65", linewidth=1, marker=".", markersize=4, label=f"noisy, rmse {_rmse(noisy, wave):.3f}")
    axes.plot(place, smooth, color="C3", linewidth=2, label=f"smoothed, σ = {smoother.sigma:g}, rmse {_rmse(smooth, wave):.3f}")
    axes.plot(place, wave, color="k", linewidth=1, linestyle="--", label="original")
    axes.set_title("(a) sine of 100 points, noise of std 0.1", fontsize=10)
    axes.set_xlim(1, SIZE)
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
