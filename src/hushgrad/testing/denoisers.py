"""Conformance of denoisers: fresh tensors, complete state, exact resume; and the definitions of Laplacian smoothing and DiSK."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hushgrad.denoise import Denoiser, Kalman, Laplacian, NoiseInfo, Probe

_SHAPES: dict[str, tuple[int, ...]] = {"conv": (4, 2, 3, 3), "linear": (7, 29), "bias": (7,), "one": (1, 1), "two": (2, 1)}


def _info(step: int, std: float = 0.3) -> NoiseInfo:
    return NoiseInfo(std=std, step=step, max_grad_norm=1.0, learning_rate=0.1)


def _normal(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in _SHAPES.items()}


def _step(
    denoiser: Denoiser, step: int, dtype: torch.dtype, state: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One step on made-up parameters and gradients: (gradients in, gradients out)."""
    denoiser.probes(_normal(1000 + step, dtype), state)
    grads = _normal(step, dtype)
    return grads, denoiser(grads, _info(step), state)


def _storages(tensors: dict[str, Any]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors.values() if isinstance(t, Tensor) and t.numel()}


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def _norm(tensors: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors.values()))


def check_denoiser(denoiser: Denoiser) -> None:
    """Raise AssertionError unless ``denoiser`` keeps the contract of a denoiser.

    Its JSON form is itself; shapes and dtypes are kept; nothing that goes out aliases what came in or what is kept; the state
    holds tensors and numbers only and a run resumed from it continues bit for bit; its probes' coefficients sum to 1. If it
    says that it ``never_grows``, no output is longer than the longest input so far. Its scales are positive and finite.

        >>> check_denoiser(Laplacian(1.0))
    """
    assert Denoiser.from_json(denoiser.to_json()) == denoiser, f"{denoiser} does not survive its JSON form."
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        _check_shapes(denoiser, dtype)
        _check_fresh(denoiser, dtype)
        _check_resume(denoiser, dtype)
        if denoiser.never_grows:
            _check_growth(denoiser, dtype)
    _check_probes(denoiser)
    _check_scales(denoiser)


def _check_shapes(denoiser: Denoiser, dtype: torch.dtype) -> None:
    state: dict[str, Any] = {}
    for step in range(3):
        grads, out = _step(denoiser, step, dtype, state)
        assert out.keys() == grads.keys(), f"{denoiser} returns other names than it was given."
        for name, grad in grads.items():
            ok = out[name].shape == grad.shape and out[name].dtype == grad.dtype and bool(torch.isfinite(out[name]).all())
            assert ok, f"{denoiser} changes shape or dtype of {name}, or makes it infinite, in {dtype}."


def _check_fresh(denoiser: Denoiser, dtype: torch.dtype) -> None:
    """Write into everything that the denoiser was given or returned, and check that its next outputs do not change."""
    clean: dict[str, Any] = {}
    soiled: dict[str, Any] = {}
    for step in range(4):
        _, expected = _step(denoiser, step, dtype, clean)
        grads, out = _step(denoiser, step, dtype, soiled)
        assert _same(expected, out), (
            f"{denoiser} keeps an alias of a tensor that it gave away or was given (seen at step {step})."
        )
        assert _same(grads, _normal(step, dtype)), f"{denoiser} writes into its input."
        assert not _storages(out) & _storages(grads), f"{denoiser} returns its input itself."
        assert not (_storages(out) | _storages(grads)) & _storages(soiled), f"{denoiser} aliases its state."
        for tensor in (*grads.values(), *out.values()):
            tensor.fill_(1e6)


def _check_resume(denoiser: Denoiser, dtype: torch.dtype) -> None:
    state: dict[str, Any] = {}
    for step in range(3):
        _step(denoiser, step, dtype, state)
    for key, value in state.items():
        assert isinstance(key, str) and isinstance(value, (Tensor, int, float)), (
            f"{denoiser} keeps {key!r}: neither tensor nor number."
        )
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    resumed = torch.load(file, weights_only=True)
    for step in range(3, 6):
        ours, theirs = _step(denoiser, step, dtype, state)[1], _step(denoiser, step, dtype, resumed)[1]
        assert _same(ours, theirs), f"{denoiser} does not resume bit for bit from its state at step {step}."


def _check_growth(denoiser: Denoiser, dtype: torch.dtype) -> None:
    state: dict[str, Any] = {}
    longest = 0.0
    slack = 1 + 8 * torch.finfo(dtype).eps
    for step in range(5):
        grads, out = _step(denoiser, step, dtype, state)
        longest = max(longest, _norm(grads))
        assert _norm(out) <= longest * slack, f"{denoiser} makes the gradient longer at step {step}."


def _check_probes(denoiser: Denoiser) -> None:
    state: dict[str, Any] = {}
    for step in range(3):
        params = _normal(1000 + step, torch.float32)
        before = copy.deepcopy(params)
        asked, again = denoiser.probes(params, state), denoiser.probes(params, state)
        assert _same(params, before), f"{denoiser}.probes moves the parameters."
        total = sum(probe.coefficient for probe in asked)  # 0: a difference, that is added to an earlier gradient
        assert min(abs(total - 1), abs(total)) < 1e-9, f"{denoiser}'s probes sum neither to one gradient nor to a difference."
        assert denoiser.needs_closure or asked == [Probe()], f"{denoiser} probes, but says that it needs no closure."
        for first, second in zip(asked, again, strict=True):
            same = first.shift is second.shift is None or _same(first.shift or {}, second.shift or {})
            assert first.coefficient == second.coefficient and same, f"{denoiser} answers a retried step differently."
            assert not _storages(first.shift or {}) & (_storages(state) | _storages(params)), f"{denoiser}'s shift is an alias."
        denoiser(_normal(step, torch.float32), _info(step), state)


def _check_scales(denoiser: Denoiser) -> None:
    state: dict[str, Any] = {}
    for step in range(6):
        made, again = denoiser.scales(state), denoiser.scales(state)
        assert denoiser.rescales or made is None, f"{denoiser} scales, but says that it does not."
        grads = _normal(step, torch.float32)
        if made is not None:
            assert again is not None and _same(made, again), f"{denoiser} scales a retried step differently."
            assert made.keys() == grads.keys(), f"{denoiser} scales other names than it was given."
            assert not _storages(made) & _storages(state), f"{denoiser}'s scales are an alias."
            for name, s in made.items():
                ok = s.shape == grads[name].shape and bool(torch.isfinite(s).all()) and bool((s > 0).all())
                assert ok, f"{denoiser}'s scales of {name} are not positive, finite and of its shape."
        denoiser(grads, _info(step), state)


def apply_operator(u: Tensor, sigma: float, boundary: str, axes: int) -> Tensor:
    """A_σ u = u - σ L u over the last ``axes`` axes, straight from the definition: differences to both neighbours."""
    out = u.clone()
    for axis in range(-axes, 0):
        for shift in (1, -1):
            neighbour = u.roll(shift, axis)
            if boundary == "neumann":  # beyond the end lies a copy of the end
                edge = 0 if shift == 1 else u.shape[axis] - 1
                neighbour.select(axis, edge).copy_(u.select(axis, edge))
            out += sigma * (u - neighbour)
    return out


def check_laplacian(denoiser: Laplacian, shape: tuple[int, ...], *, seed: int = 0) -> None:
    """Raise AssertionError unless A_σ(A_σ⁻¹ v) = v for a random float64 ``v``, with A_σ applied from its definition.

    Args:
        denoiser: the one to check.
        shape: of the tensor that it is checked on.
        seed: of that tensor.

    >>> check_laplacian(Laplacian(2.0), (1009,))
    """
    v = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    u = denoiser.smooth(v)
    on_grid = denoiser.scope == "grid" and v.ndim >= 2
    axes = max(2, v.ndim - 2) if on_grid else 1
    again = apply_operator(u if on_grid else u.reshape(-1), denoiser.sigma, denoiser.boundary, axes).reshape(shape)
    error = float((again - v).abs().max())
    assert error <= 1e-12 * (1 + denoiser.sigma), f"A(A^-1 v) differs from v by {error:.1e} for {denoiser} on {shape}."
    assert float(u.norm()) <= float(v.norm()) * (1 + 1e-12), f"{denoiser} makes a signal of shape {shape} longer."


class _Problem:
    """Eight examples of softmax regression through a tanh layer: small, not quadratic, gradients one example at a time."""

    clip, batch, learning_rate, std = 0.7, 8, 0.4, 0.05

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(self.batch, 4, generator=generator, dtype=torch.float64)
        self.y = torch.randint(3, (self.batch,), generator=generator)
        self.start = {
            "hidden": torch.randn(4, 5, generator=generator, dtype=torch.float64),
            "out": torch.randn(5, 3, generator=generator, dtype=torch.float64),
        }
        self.noise = {
            name: torch.randn(12, *p.shape, generator=generator, dtype=torch.float64) * self.std for name, p in self.start.items()
        }

    def gradient(self, example: int, params: dict[str, Tensor]) -> dict[str, Tensor]:
        leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
        logits = torch.tanh(self.x[example] @ leaves["hidden"]) @ leaves["out"]
        loss = torch.nn.functional.cross_entropy(logits[None], self.y[example : example + 1])
        return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

    def privatised(self, query: Callable[[int], dict[str, Tensor]], step: int) -> dict[str, Tensor]:
        """1/B Σ_i clip(query(i)) + noise."""
        total = {name: torch.zeros_like(p) for name, p in self.start.items()}
        for example in range(self.batch):
            answer = query(example)
            factor = min(1.0, self.clip / _norm(answer))
            for name in total:
                total[name] += factor * answer[name]
        return {name: t / self.batch + self.noise[name][step] for name, t in total.items()}


def _disk_loop(kappa: float, gamma: float, steps: int) -> list[dict[str, Tensor]]:
    """The algorithm as printed in its paper, one example at a time, without library code."""
    problem = _Problem()
    x, filtered, path = dict(problem.start), None, []
    d = {name: torch.zeros_like(p) for name, p in x.items()}
    c = (1 - kappa) / (kappa * gamma)
    for step in range(steps):
        ahead = {name: x[name] + gamma * d[name] for name in x}

        def query(i: int, here: dict[str, Tensor] = x, there: dict[str, Tensor] = ahead) -> dict[str, Tensor]:
            g_there, g_here = problem.gradient(i, there), problem.gradient(i, here)
            return {name: c * g_there[name] + (1 - c) * g_here[name] for name in g_here}

        g = problem.privatised(query, step)
        filtered = g if filtered is None else {name: (1 - kappa) * filtered[name] + kappa * g[name] for name in g}
        d = {name: -problem.learning_rate * filtered[name] for name in x}
        x = {name: x[name] + d[name] for name in x}
        path.append(x)
    return path


def _denoiser_loop(denoiser: Denoiser, steps: int) -> list[dict[str, Tensor]]:
    """The same run through ``probes`` and ``__call__``, as training does it."""
    problem = _Problem()
    x, state, path = dict(problem.start), {}, []  # type: ignore[var-annotated]
    for step in range(steps):
        asked = denoiser.probes(x, state)

        def query(i: int, here: dict[str, Tensor] = x, asked: list[Probe] = asked) -> dict[str, Tensor]:
            total = {name: torch.zeros_like(p) for name, p in here.items()}
            for coefficient, shift in asked:
                point = here if shift is None else {name: here[name] + shift[name] for name in here}
                for name, g in problem.gradient(i, point).items():
                    total[name] += coefficient * g
            return total

        info = NoiseInfo(std=problem.std, step=step, max_grad_norm=problem.clip, learning_rate=problem.learning_rate)
        out = denoiser(problem.privatised(query, step), info, state)
        x = {name: x[name] - problem.learning_rate * out[name] for name in x}
        path.append(x)
    return path


def check_disk(denoiser: Kalman, *, steps: int = 8) -> None:
    """Raise AssertionError unless a run with ``denoiser`` equals the published DiSK loop to 1e-6 at every step.

    >>> check_disk(Kalman(0.7, 0.5), steps=3)
    """
    pairs = zip(_denoiser_loop(denoiser, steps), _disk_loop(denoiser.kappa, denoiser.gamma, steps), strict=True)
    for step, (ours, theirs) in enumerate(pairs):
        error = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
        assert error <= 1e-6, f"{denoiser} differs from the DiSK loop by {error:.1e} after step {step}."
