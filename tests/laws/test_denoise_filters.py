"""The filters over time and the shrinkage estimators compute their formulas, and do to noise what their docstrings say."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.signal import lfilter

from hushgrad.denoise import (
    Chain,
    DebiasedSecondMoment,
    ExponentialAverage,
    JamesStein,
    Kalman,
    Laplacian,
    LowPass,
    NoiseInfo,
    SoftThreshold,
)


def info(step: int = 0, std: float = 1.0) -> NoiseInfo:
    return NoiseInfo(std=std, step=step, max_grad_norm=1.0)


def filtered(denoiser, rows: torch.Tensor, stds=None) -> torch.Tensor:
    """The denoiser's outputs for one tensor whose gradients are ``rows``."""
    state = {}
    stds = [1.0] * len(rows) if stds is None else stds
    return torch.stack([denoiser({"w": row}, info(t, stds[t]), state)["w"] for t, row in enumerate(rows)])


# ---- DOPPLER -----------------------------------------------------------------------------------------------------------------

FILTERS = [
    ((-0.9,), (0.1,)),
    ((), (0.5, 0.3, 0.2)),
    ((-0.5, -0.2), (0.2, 0.1)),
    ((-0.8, 0.2), (0.3,)),
    ((-0.1,), (1.0, 0.5, 0.2, 0.1)),
]


@pytest.mark.parametrize("a, b", FILTERS)
def test_low_pass_equals_scipy_divided_by_its_step_response(a, b):
    rows = torch.randn(40, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    response = lfilter(b, (1.0, *a), np.ones(40))
    expected = lfilter(b, (1.0, *a), rows.numpy(), axis=0) / response[:, None]
    np.testing.assert_allclose(filtered(LowPass(a, b), rows).numpy(), expected, rtol=1e-10, atol=1e-12)


@given(st.floats(-0.95, 0.0), st.floats(0.01, 3.0), st.floats(-5, 5))
@settings(max_examples=40, deadline=None)
def test_low_pass_leaves_a_constant_alone_from_the_first_step(a, b, constant):
    rows = torch.full((12, 2), constant, dtype=torch.float64)
    torch.testing.assert_close(filtered(LowPass((a,), (b,)), rows), rows)


# ---- DiSK and the lecture's recursion ----------------------------------------------------------------------------------------


def quadratic_run(denoiser, steps: int = 12):
    """Gradient descent on x'Hx/2 through the denoiser, without noise: its outputs, the true gradients, and H d_t."""
    generator = torch.Generator().manual_seed(1)
    root = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    hessian = root @ root.T / 8
    x = torch.randn(4, generator=generator, dtype=torch.float64)
    before, state, outputs, truths, moves = x, {}, [], [], []
    for step in range(steps):
        asked = denoiser.probes({"x": x}, state)
        query = sum(c * (hessian @ (x if shift is None else x + shift["x"])) for c, shift in asked)
        outputs.append(denoiser({"x": query}, info(step, 0.0), state)["x"])
        truths.append(hessian @ x)
        moves.append(hessian @ (x - before))
        before, x = x, x - 0.5 * outputs[-1]
    return torch.stack(outputs), torch.stack(truths), torch.stack(moves)


@pytest.mark.parametrize("denoiser", [Kalman(0.7, 0.5), Kalman(0.2, 3.0), Kalman.one_probe(0.4)], ids=repr)
def test_disk_is_exact_on_a_quadratic(denoiser):
    outputs, truths, _ = quadratic_run(denoiser)
    torch.testing.assert_close(outputs, truths, rtol=1e-10, atol=1e-10)


def test_the_lecture_recursion_lags_by_the_hessian_term():
    """m_t - C w_t = (1 - kappa)(m_{t-1} - C w_{t-1}) - (1 - kappa) C (w_t - w_{t-1}): the term that the lecture leaves out."""
    kappa = 0.4
    outputs, truths, moves = quadratic_run(ExponentialAverage(kappa))
    lag = outputs - truths
    torch.testing.assert_close(lag[1:], (1 - kappa) * (lag[:-1] - moves[1:]), rtol=1e-10, atol=1e-12)
    assert lag[1:].norm(dim=1).max() > 0.05 * truths.norm(dim=1).max()  # and it is no rounding error


@pytest.mark.parametrize(
    "denoiser, share", [(Kalman(0.3), 0.3 / 1.7), (ExponentialAverage(0.3), 0.3 / 1.7), (LowPass((-0.7,), (0.3,)), 0.3 / 1.7)]
)
def test_independent_noise_settles_at_kappa_over_two_minus_kappa(denoiser, share):
    rows = torch.randn(40, 40_000, generator=torch.Generator().manual_seed(2))
    assert filtered(denoiser, rows)[-1].var().item() == pytest.approx(share, rel=0.05)  # 7 standard errors
    assert filtered(ExponentialAverage(0.4), rows)[-1].var().item() != pytest.approx(share, rel=0.05)


def test_bfloat16_state_does_not_stall():
    """Updates of 1/1000 vanish in a bfloat16 mean; the state is kept in float32, so the mean still arrives."""
    rows = torch.cat([torch.ones(1, 3), torch.full((600, 3), 2.0)]).to(torch.bfloat16)
    assert filtered(ExponentialAverage(0.01), rows)[-1].float().min() > 1.98


def test_a_retried_step_and_a_first_step():
    denoiser, state = Kalman(0.5, 1.5), {}
    assert denoiser.probes({"w": torch.zeros(2)}, state)[0].shift is None
    denoiser({"w": torch.ones(2)}, info(), state)
    first = denoiser.probes({"w": torch.ones(2)}, state)
    again = denoiser.probes({"w": torch.ones(2)}, state)
    assert torch.equal(first[0].shift["w"], again[0].shift["w"]) and first[0].shift["w"][0] == 1.5


# ---- shrinkage ---------------------------------------------------------------------------------------------------------------


@given(st.integers(3, 200), st.floats(0.0, 3.0), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_james_stein_formula(d, std, seed):
    y = torch.randn(d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = max(0.0, 1 - (d - 2) * std**2 / float(y @ y)) * y
    torch.testing.assert_close(JamesStein()({"w": y}, info(std=std), {})["w"], expected)
    halves = {"a": y[: d // 2], "b": y[d // 2 :]}
    out = JamesStein(per="global")(halves, info(std=std), {})
    torch.testing.assert_close(torch.cat([out["a"], out["b"]]), expected)


@pytest.mark.parametrize("length", [0.0, 5.0, 30.0])
def test_james_stein_is_nearer_the_truth_whatever_the_truth(length):
    generator = torch.Generator().manual_seed(3)
    truth = torch.full((100,), length / 10, dtype=torch.float64)
    noisy = truth + torch.randn(2000, 100, generator=generator, dtype=torch.float64)
    shrunk = torch.stack([JamesStein()({"w": y}, info(), {})["w"] for y in noisy])
    before, after = (noisy - truth).square().sum(1), (shrunk - truth).square().sum(1)
    gain = before - after
    assert gain.mean() > 5 * gain.std() / math.sqrt(len(gain))
    wrong = torch.stack([JamesStein()({"w": y}, info(std=3.0), {})["w"] for y in noisy])  # told of three times the noise
    if length == 30.0:
        assert (wrong - truth).square().sum(1).mean() > before.mean()


def test_zero_gradient_stays_zero():
    out = JamesStein()({"w": torch.zeros(5)}, info(), {})["w"]
    assert torch.equal(out, torch.zeros(5))


def test_soft_threshold_keeps_spikes_and_removes_noise():
    generator = torch.Generator().manual_seed(4)
    truth = torch.zeros(10_000)
    truth[:20] = 12.0
    noisy = truth + torch.randn(10_000, generator=generator)
    out = SoftThreshold()({"w": noisy}, info(), {})["w"]
    threshold = math.sqrt(2 * math.log(10_000))
    torch.testing.assert_close(out, noisy.sign() * (noisy.abs() - threshold).clamp_min(0))
    assert (out != 0).sum() < 40 and (out - truth).square().sum() < 0.1 * (noisy - truth).square().sum()


# ---- DP-AdamBC ---------------------------------------------------------------------------------------------------------------


def test_without_noise_it_is_adam():
    rows = torch.randn(30, 5, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    ours = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
    theirs = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
    sgd, adam, state, denoiser = torch.optim.SGD([ours], lr=0.1), torch.optim.Adam([theirs], lr=0.1), {}, DebiasedSecondMoment()
    for step, row in enumerate(rows):
        ours.grad = denoiser({"w": row}, info(step, 0.0), state)["w"]
        theirs.grad = row.clone()
        sgd.step()
        adam.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("correlation", [0.0, -0.8])
def test_noise_is_taken_out_of_the_second_moment(correlation):
    """A constant gradient of 1 under noise of std 3 that changes by the step: the direction is 1/1, not 1/sqrt(1 + 9)."""
    generator = torch.Generator().manual_seed(6)
    stds = [3.0 if t % 2 else 2.0 for t in range(300)]
    z = torch.randn(301, 20_000, generator=generator)
    mixed = (z[1:] + correlation * z[:-1]) / math.sqrt(1 + correlation**2)
    rows = 1.0 + torch.tensor(stds)[:, None] * mixed
    denoiser, state = DebiasedSecondMoment(betas=(0.99, 0.999)), {}
    for step, row in enumerate(rows):
        out = denoiser({"w": row}, info(step, stds[step]), state)["w"]
    corrected = state["square.w"] / (1 - 0.999**300) - state["noise"] / (1 - 0.999**300)
    assert corrected.mean().item() == pytest.approx(1.0, abs=0.05)  # about 7 standard errors
    assert out.median().item() > 0.6
    plain, state = DebiasedSecondMoment(betas=(0.99, 0.999)), {}
    for step, row in enumerate(rows):
        biased = plain({"w": row}, info(step, 0.0), state)["w"]
    assert biased.median().item() < 0.5  # the same run without the correction: DP-Adam


def test_floor_bounds_the_step():
    state = {}
    out = DebiasedSecondMoment(floor=0.25)({"w": torch.tensor([0.1, 4.0])}, info(std=3.9), state)["w"]
    torch.testing.assert_close(out, torch.tensor([0.1 / 0.5, 4.0 / math.sqrt(16 - 3.9**2)]), rtol=1e-4, atol=1e-4)


# ---- chains ------------------------------------------------------------------------------------------------------------------


def test_a_chain_is_its_members_in_order():
    rows = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    first, second = LowPass((-0.5,), (0.5,)), Laplacian(2.0)
    torch.testing.assert_close(filtered(Chain([first, second]), rows), filtered(second, filtered(first, rows)))
    nested = Chain([Chain([JamesStein(), first]), second])
    torch.testing.assert_close(filtered(nested, rows), filtered(second, filtered(first, filtered(JamesStein(), rows))))


def test_a_chain_keeps_its_members_apart():
    """Two averages in one chain each have their own mean under their own flat key."""
    rows = torch.randn(6, 3, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    one, two = ExponentialAverage(0.5), ExponentialAverage(0.2)
    torch.testing.assert_close(filtered(Chain([one, two]), rows), filtered(two, filtered(one, rows)))
    state = {}
    Chain([one, two])({"w": rows[0]}, info(), state)
    assert sorted(state) == ["0/mean.w", "1/mean.w"]


def test_a_chain_hands_on_the_probes_of_its_member():
    chain, state = Chain([Laplacian(1.0), Kalman(0.5, 0.5)]), {}
    params = {"w": torch.zeros(2, 2)}
    for step in range(2):
        asked = chain.probes(params, state)
        chain({"w": torch.ones(2, 2)}, info(step), state)
        params = {"w": params["w"] + 1}
    assert [probe.coefficient for probe in asked] == [2.0, -1.0]
    torch.testing.assert_close(asked[0].shift["w"], torch.full((2, 2), 0.5))
    assert not any("shift" in key or "asked" in key for key in state)  # nothing of a finished step is left behind
