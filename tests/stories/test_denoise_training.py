"""Denoised private training, written out by hand: it helps where the room says so, and the pictures of the docs can be made."""

from __future__ import annotations

import io
import json

import pytest
import torch
from snippets import snippets_run

from hushgrad.denoise import Chain, DebiasedSecondMoment, JamesStein, Kalman, Laplacian, LowPass, NoiseInfo

SIDE, EXAMPLES, CLIP, STD = 12, 400, 1.0, 0.02


def problem():
    """Logistic regression on noisy pictures whose two classes differ by a smooth pattern: weights are image-shaped."""
    generator = torch.Generator().manual_seed(0)
    line = torch.sin(torch.linspace(0, 2 * torch.pi, SIDE))
    pattern = torch.outer(line, line).reshape(-1)
    y = (torch.rand(EXAMPLES, generator=generator) < 0.5).float() * 2 - 1
    x = y[:, None] * pattern + 3.0 * torch.randn(EXAMPLES, SIDE * SIDE, generator=generator)
    return x / x.norm(dim=1, keepdim=True), y, pattern / pattern.norm()


def train(denoiser, *, learning_rate: float, steps: int = 40, seed: int = 1, resume_at: int | None = None) -> torch.Tensor:
    """DP gradient descent with per-example clipping, fixed noise and the denoiser's probes; the final weights."""
    x, y, _ = problem()
    generator = torch.Generator().manual_seed(seed)
    w, state = torch.zeros(1, SIDE * SIDE), {}
    for step in range(steps):
        total = torch.zeros(EXAMPLES, SIDE * SIDE)
        for coefficient, shift in denoiser.probes({"w": w}, state):
            point = (w if shift is None else w + shift["w"])[0]
            total += coefficient * -(y * torch.sigmoid(-y * (x @ point)))[:, None] * x
        clipped = total * (CLIP / total.norm(dim=1).clamp_min(CLIP))[:, None]
        noisy = clipped.mean(0, keepdim=True) + STD * torch.randn(1, SIDE * SIDE, generator=generator)
        info = NoiseInfo(std=STD, step=step, max_grad_norm=CLIP, learning_rate=learning_rate)
        w = w - learning_rate * denoiser({"w": noisy}, info, state)["w"]
        if step == resume_at:
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
    return w[0]


def alignment(w: torch.Tensor) -> float:
    """Cosine between the learnt weights and the pattern that separates the classes."""
    return float(w @ problem()[2] / w.norm())


def test_smoothing_on_the_grid_recovers_the_pattern():
    plain = alignment(train(Laplacian(0.0), learning_rate=5.0))
    row_by_row = alignment(train(Laplacian(3.0), learning_rate=5.0))
    on_grid = alignment(train(Laplacian(3.0, scope="grid", grid=(SIDE, SIDE)), learning_rate=5.0))
    assert plain < row_by_row < on_grid
    assert on_grid > plain + 0.1


@pytest.mark.parametrize(
    "denoiser", [Kalman(0.5, 0.5), Kalman.one_probe(0.6), LowPass(), JamesStein(), Chain([Kalman(0.7), Laplacian(1.0)])], ids=repr
)
def test_a_run_learns_and_resumes_bit_for_bit(denoiser):
    w = train(denoiser, learning_rate=2.0)
    assert alignment(w) > 0.2
    assert torch.equal(w, train(denoiser, learning_rate=2.0, resume_at=17))


def test_debiased_adam_moves_signal_coordinates_further_than_noise_coordinates():
    denoiser, state = DebiasedSecondMoment(), {}
    generator = torch.Generator().manual_seed(2)
    signal = torch.cat([torch.full((50,), 0.5), torch.zeros(950)])
    total = torch.zeros(1000)
    for step in range(200):
        noisy = signal + torch.randn(1000, generator=generator)
        total += denoiser({"w": noisy}, NoiseInfo(std=1.0, step=step, max_grad_norm=1.0), state)["w"]
    assert total[:50].mean() > 5 * total[50:].abs().mean()


def test_reproduction_of_figure_2(tmp_path):
    pytest.importorskip("matplotlib")
    from hushgrad.experiments import Context, find, reproduce

    signals = reproduce(find("laplacian-signals"), Context(quick=True), tmp_path).findings.data["signals"]
    folder = tmp_path / "laplacian-signals"
    assert json.loads((folder / "results.json").read_text())["data"]["signals"] == signals
    assert (folder / "laplacian-signals.png").read_bytes().startswith(b"\x89PNG")
    for row in signals.values():
        assert row["rmse smoothed"] < row["rmse noisy"]
        assert row["rmse smoothed"] == pytest.approx(row["rmse predicted"], rel=0.1)


def test_snippets_of_the_page_run():
    snippets_run("denoise.md", 4, apart=True)
