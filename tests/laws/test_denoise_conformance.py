"""Every denoiser keeps the promises of its room, and planted defects are caught by the checks that claim to see them."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from hushgrad import denoise, testing
from hushgrad.denoise import (
    SVRG,
    Chain,
    DebiasedSecondMoment,
    JamesStein,
    Kalman,
    Laplacian,
    LowPass,
    NoiseInfo,
    Probe,
    SoftThreshold,
)
from hushgrad.denoise.base import Denoiser
from hushgrad.errors import ArgumentError
from hushgrad.testing.denoisers import check_denoiser, check_disk

KINDS = testing.members(denoise, Denoiser).values()
IDLE = [denoiser for kind in KINDS for denoiser in kind.idle()]


@pytest.mark.parametrize("denoiser", [d for kind in KINDS for d in (kind(), *kind.examples())], ids=repr)
def test_conforms(denoiser):
    check_denoiser(denoiser)


@pytest.mark.parametrize("denoiser", IDLE, ids=repr)
def test_zero_strength_conforms(denoiser):
    assert denoiser.never_grows and not denoiser.needs_closure
    check_denoiser(denoiser)


def test_what_grows():
    growing = {"DebiasedSecondMoment", "DelayedPreconditioner", "SVRG", "ScaleThenPrivatise"}
    assert {kind.__name__ for kind in KINDS if not kind().never_grows} == growing
    assert len(IDLE) >= 10


def signals(dtype: torch.dtype, seed: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w": (5, 7), "k": (2, 2, 3, 3), "b": (5,), "one": (1,), "scalar": ()}
    out = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    out["w"][0, 0] = -0.0  # bit for bit includes the sign of zero
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("denoiser", [*IDLE, JamesStein(), JamesStein(per="global"), SoftThreshold()], ids=repr)
def test_zero_strength_is_the_identity_bit_for_bit(denoiser, dtype):
    state = {}
    info = NoiseInfo(std=0.0, step=0, max_grad_norm=1.0)  # zero noise is zero strength for those that know the noise
    for seed in (3, 4):
        grads = signals(dtype, seed)
        out = denoiser(grads, info, state)
        for name in grads:
            assert torch.equal(out[name], grads[name])
            assert torch.equal(torch.signbit(out[name]), torch.signbit(grads[name]))


# ---- planted defects: each is caught -----------------------------------------------------------------------------------------


class SwappedKalman(Kalman):
    """The gain on the wrong side, as a peer has it: weight 1 - kappa on the new gradient."""

    def __call__(self, grads, info, state):
        return Kalman.__call__(Kalman(1 - self.kappa, self.gamma), grads, info, state)


class ExchangedProbes(Kalman):
    """Coefficients of the two probes exchanged."""

    def probes(self, params, state):
        asked = super().probes(params, state)
        if len(asked) < 2:
            return asked
        return [Probe(asked[1].coefficient, asked[0].shift), Probe(asked[0].coefficient)]


@pytest.mark.parametrize("kappa, gamma", [(0.7, 0.5), (0.3, 2.0), (0.9, 0.1), (1.0, 0.5)])
def test_disk_equals_its_loop(kappa, gamma):
    check_disk(Kalman(kappa, gamma))


@pytest.mark.parametrize("kappa", [0.2, 0.5, 0.7])
def test_one_probe_form_is_disk_with_one_pass(kappa):
    denoiser = Kalman.one_probe(kappa)
    check_disk(denoiser)
    state = {}
    params = {"w": torch.zeros(3)}
    for _ in range(3):
        asked = denoiser.probes(params, state)
        assert len(asked) == 1 and asked[0].coefficient == 1.0
        denoiser({"w": torch.ones(3)}, NoiseInfo(std=0.0, step=0, max_grad_norm=1.0), state)
        params = {"w": params["w"] + 1}
    torch.testing.assert_close(asked[0].shift["w"], torch.full((3,), (1 - kappa) / kappa))


@pytest.mark.parametrize("kind", [SwappedKalman, ExchangedProbes])
def test_defective_disk_is_rejected(kind):
    with pytest.raises(AssertionError, match="DiSK loop"):
        check_disk(kind(0.7, 0.5))


@dataclass(frozen=True)
class Aliased(Denoiser):
    """A running mean that hands out its own state: the next backward would add raw gradients to it."""

    defect: str = "out"

    def __call__(self, grads, info, state):
        out = {}
        for name, grad in grads.items():
            mean = state.get(name)
            if mean is None:
                mean = grad if self.defect == "in" else grad.clone()
            else:
                mean = mean * 0.5 + grad * 0.5
            state[name] = mean
            out[name] = mean if self.defect == "out" else mean.clone()
        return out


@dataclass(frozen=True)
class Defective(Denoiser):
    """Six ways to break the room's promises."""

    defect: str = "input"

    def __call__(self, grads, info, state):
        if self.defect == "input":
            return dict(grads)
        if self.defect == "in place":
            return {name: grad.mul_(0.5).clone() for name, grad in grads.items()}
        if self.defect == "dtype":
            return {name: grad.double() * 0.5 for name, grad in grads.items()}
        if self.defect == "grows":
            return {name: grad * 1.2 for name, grad in grads.items()}
        if self.defect == "hidden state":
            object.__setattr__(self, "_seen", vars(self).get("_seen", 0) + 1)
            return {name: grad / vars(self)["_seen"] for name, grad in grads.items()}
        state["history"] = [*state.get("history", []), info.step]
        return {name: grad.clone() for name, grad in grads.items()}


@pytest.mark.parametrize(
    "denoiser, message",
    [
        (Aliased("out"), "alias"),
        (Aliased("in"), "alias"),
        (Defective("input"), "input itself"),
        (Defective("in place"), "input"),
        (Defective("dtype"), "dtype"),
        (Defective("grows"), "longer"),
        (Defective("hidden state"), "alias|resume"),
        (Defective("list in state"), "neither tensor nor number"),
    ],
    ids=repr,
)
def test_defective_denoisers_are_rejected(denoiser, message):
    with pytest.raises(AssertionError, match=message):
        check_denoiser(denoiser)


# ---- refusals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Laplacian(-0.5), "sigma=-0.5 .*sigma=0 for no smoothing"),
        (lambda: Laplacian(float("nan")), "sigma"),
        (lambda: Laplacian(1.0, scope="tensors"), "Did you mean 'tensor'"),
        (lambda: Laplacian(1.0, boundary="dirichlet"), "boundary"),
        (lambda: Laplacian(1.0, grid=(28, 28)), 'scope="grid"'),
        (lambda: Laplacian(1.0, scope="grid", grid=()), "at least one axis"),
        (lambda: Laplacian(1.0, scope="grid", grid=(28, 0)), "at least 1"),
        (lambda: Kalman(0.0), r"kappa=0.0 to lie in \(0, 1\]. Use kappa=1"),
        (lambda: Kalman(1.5), "kappa"),
        (lambda: Kalman(0.5, 0.0), "one_probe"),
        (lambda: Kalman.one_probe(0.0), "kappa"),
        (lambda: denoise.ExponentialAverage(-1.0), "kappa"),
        (lambda: LowPass((-1.0,), (0.1,)), "stable"),
        (lambda: LowPass((), ()), "identity"),
        (lambda: LowPass((), (1.0, -1.0)), "constant gradient"),
        (lambda: LowPass((), (1.0, -2.0, 3.0)), "constant gradient"),
        (lambda: LowPass(-0.9, (0.1,)), "tuple"),
        (lambda: JamesStein(per="layer"), "per"),
        (lambda: SoftThreshold(scale=-1.0), "scale"),
        (lambda: DebiasedSecondMoment(betas=(0.9, 1.0)), "betas"),
        (lambda: DebiasedSecondMoment(betas=(0.9,)), "two numbers"),
        (lambda: DebiasedSecondMoment(floor=0.0), "floor"),
        (lambda: Chain([Kalman(), Kalman()]), "keep one of them"),
        (lambda: Chain([Laplacian(1.0), JamesStein()]), "Put it first"),
        (lambda: Chain(Laplacian(1.0)), "Chain"),
        (lambda: Chain(["Laplacian"]), "Denoiser"),
        (lambda: NoiseInfo(std=-1.0, step=0, max_grad_norm=1.0), "std"),
    ],
)
def test_bad_input_is_refused_with_the_remedy(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()


def test_flags_tell_the_hall_what_it_must_provide():
    assert Kalman().needs_closure and Kalman.one_probe().needs_closure and not Kalman(1.0).needs_closure
    assert Chain([Laplacian(1.0), Kalman()]).needs_closure
    assert Laplacian(1.0).needs_whole_tensor and not Laplacian(0.0).needs_whole_tensor
    assert not Kalman().needs_whole_tensor and not LowPass().needs_whole_tensor
    assert Chain([Kalman(), Laplacian(1.0)]).needs_whole_tensor
    assert JamesStein().needs_noise_std and not Laplacian(1.0).needs_noise_std


@pytest.mark.parametrize(
    "denoiser",
    [
        denoise.Kalman(np.float32(0.5), np.int64(1)),
        denoise.ExponentialAverage(np.float32(0.5)),
        denoise.Laplacian(np.int64(2)),
        denoise.LowPass((np.float32(-0.5),), (np.float32(0.5),)),
        denoise.DebiasedSecondMoment(floor=np.float32(0.5)),
        denoise.SoftThreshold(scale=np.float32(0.5)),
    ],
    ids=str,
)
def test_numpy_numbers_are_written_as_numbers(denoiser):
    """A plan with a number out of an array must not fail when the finished run is saved."""
    assert type(denoiser).from_json(json.loads(json.dumps(denoiser.to_json()))) == denoiser


class _Asks(Denoiser):
    """Probes, and says nothing of a closure."""

    def probes(self, params, state):
        return [Probe(1.0, {name: torch.ones_like(p) for name, p in params.items()})]

    def __call__(self, grads, info, state):
        return {name: grad.clone() for name, grad in grads.items()}


def test_who_probes_needs_a_closure_without_saying_so_alone_and_in_a_chain():
    assert _Asks().needs_closure and Chain([_Asks()]).needs_closure and Chain([Laplacian(0.5), _Asks()]).needs_closure
    assert SVRG().needs_closure and not Laplacian(1.0).needs_closure
    asked = Chain([Laplacian(0.5), _Asks()]).probes({"w": torch.zeros(2)}, {})
    assert len(asked) == 1 and asked[0].shift["w"].tolist() == [1.0, 1.0]
    for members in ([_Asks(), Kalman()], [SVRG(), Kalman()], [Kalman(), SVRG()]):
        with pytest.raises(ArgumentError, match="at most one that probes"):
            Chain(members)


PROBING = [SVRG(period=3), SVRG(period=5, snapshot_steps=2, ratio=0.3), Kalman(0.6), Kalman.one_probe(0.4), Kalman(0.5, 0.2)]


@pytest.mark.parametrize("denoiser", PROBING, ids=repr)
@pytest.mark.parametrize("chained", [False, True])
def test_who_probes_gives_the_gradient_of_a_quadratic_where_there_is_no_noise(denoiser, chained):
    """f(w) = w' H w / 2: differences and predictions are exact, so what comes out is the gradient at w_t, whatever the path."""
    generator = torch.Generator().manual_seed(1)
    root = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    H, w, state = root @ root.T, torch.randn(4, generator=generator, dtype=torch.float64), {}
    denoiser = Chain([Laplacian(0.0), denoiser]) if chained else denoiser
    for step in range(9):
        asked = denoiser.probes({"w": w}, state)
        at = [w if probe.shift is None else w + probe.shift["w"] for probe in asked]
        query = sum(probe.coefficient * (H @ point) for probe, point in zip(asked, at, strict=True))
        out = denoiser({"w": query}, NoiseInfo(std=0.0, step=step, max_grad_norm=1.0), state)["w"]
        phase = step % denoiser.members[1].period if chained and isinstance(denoiser.members[1], SVRG) else None
        phase = step % denoiser.period if isinstance(denoiser, SVRG) else phase
        if phase is None or phase == 0 or phase >= (denoiser.members[1] if chained else denoiser).snapshot_steps:
            assert torch.allclose(out, H @ w, rtol=1e-9, atol=1e-9)
        w = w - 0.02 * out
