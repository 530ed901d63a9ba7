"""The best buffered linear Toeplitz mechanism, by closed forms that do not grow with the number of steps.

A BLT with k buffers is the rational series C(x) = prod_j (1 - q_j x) / prod_i (1 - p_i x) with interlaced decays
1 > p_1 > q_1 > p_2 > q_2 > ... > 0; then c_t = sum_i w_i p_i^(t-1) with w_i > 0, and the prefix sums of C⁻¹ are
b_t = a + sum_j g_j q_j^t with a, g_j > 0. Every sum below has positive terms only, so nothing cancels:

    max²  = sum_t b_t²  = a² n + 2 a sum g_j G(q_j, n) + sum g_i g_j G(q_i q_j, n)        G(r, m) = (1 - r^m) / (1 - r)
    mean² = (1/n) sum_t (n - t) b_t², the same with H(r) = (n - r G(r, n)) / (1 - r)
    sens² = sum over the blocks between participations, again of G(p_i p_j, gap)

With p = exp(-rate) the differences are expm1's; the rates are parametrised by the logarithms of their increments, so that
every parameter vector is a valid mechanism, and the gradient is exact: one complex-step evaluation per parameter, all in
one batch. For workloads other than prefix sums the error is betaᵀ M beta (``error_form``), beta the series of C⁻¹: M meets its
real part only, since M (beta + i d) gives 2 d M beta as the imaginary part of the error, to first order.

References: Dvijotham et al. 2024 (arXiv:2404.16706) for BLT, McMahan et al. 2024 (2408.08868) for min-sep.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from hushgrad.noise.error import Form, error_form
from hushgrad.noise.minimise import bfgs
from hushgrad.noise.participation import Pattern
from hushgrad.noise.workload import Workload

_SLOWEST = 1e-4  # smallest rate x steps: below, 1 - r^n is lost to rounding and the search would find a false optimum
_LOWEST, _HIGHEST = -12.0, 2.0  # of the logarithm of an increment, in units of 1/steps and of 1: beyond, a wall
_STEP = 1e-30  # of the complex step: no subtraction takes place, so it may be as small as one likes


@lru_cache(maxsize=128)
def optimise_blt(
    steps: int, buffers: int, loss: str, gap: int, times: int, workload: Workload | None = None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Decays (p, q) of C and of C⁻¹ that minimise sens x error ("mean" or "max") under (gap, times) participation."""
    pattern = Pattern(gap, times)
    form = None if workload is None else error_form(workload, steps, loss)

    def objective(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        inside = _walled(parameters, steps)
        value = _log_loss(*_rates(inside + 1j * _STEP * np.eye(len(inside)), steps), steps, loss, pattern, form)
        beyond = parameters - inside
        slope = np.where(beyond == 0, value.imag / _STEP, 2 * beyond)
        return float(value[0].real + beyond @ beyond), slope

    found, _ = min((bfgs(objective, start) for start in _starts(steps, buffers, gap)), key=lambda run: run[1])
    p, q = (np.exp(-rate) for rate in _rates(_walled(found, steps), steps))
    return tuple(map(float, p)), tuple(map(float, q))


def blt_weights(p: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(w, w'): c_t = sum w_i p_i^(t-1) and beta_t = sum w'_j q_j^(t-1) for t >= 1, the residues of the rational series."""
    rate_p, rate_q = -np.log(np.asarray(p)), -np.log(np.asarray(q))
    return _residues(rate_p, rate_q), _residues(rate_q, rate_p)


def blt_errors(p: np.ndarray, q: np.ndarray, steps: int) -> tuple[float, float]:
    """(||B||_F / sqrt(n), max_t ||B_t||) for prefix sums, in O(k²)."""
    rate_p, rate_q = -np.log(np.asarray(p)), -np.log(np.asarray(q))
    return tuple(float(np.sqrt(_error(rate_p, rate_q, steps, loss))) for loss in ("mean", "max"))  # type: ignore[return-value]


def blt_sensitivity(p: np.ndarray, q: np.ndarray, steps: int, pattern: Pattern) -> float:
    """sens(C) for (gap, times) participation, in O(k² times): C is positive and non-increasing, so it is exact."""
    rate_p, rate_q = -np.log(np.asarray(p)), -np.log(np.asarray(q))
    chunks = (np.arange(a, min(a + 65536, pattern.times)) for a in range(0, pattern.times, 65536))
    weights = _residues(rate_p, rate_q)
    blocks = sum(_blocks(rate_p, weights, steps, pattern, m).sum() for m in chunks)
    return float(np.sqrt(blocks + _tail(rate_p, weights, steps, pattern)))


# All functions below take rates of shape (..., k), real or complex (for the complex step). ----------------------------------


def _walled(parameters: np.ndarray, steps: int) -> np.ndarray:
    """The nearest parameters within the walls that keep every rate representable."""
    return np.asarray(np.clip(parameters, _LOWEST - np.log(steps), _HIGHEST))


def _rates(parameters: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Interlaced rates p_1 < q_1 < p_2 < ... from the logarithms of their increments."""
    rates = _SLOWEST / steps + np.cumsum(np.exp(parameters), axis=-1)
    return rates[..., 0::2], rates[..., 1::2]


def _log_loss(rate_p: np.ndarray, rate_q: np.ndarray, steps: int, loss: str, pattern: Pattern, form: Form | None) -> np.ndarray:
    error = _error(rate_p, rate_q, steps, loss) if form is None else _formed(rate_p, rate_q, steps, form)
    return np.asarray(0.5 * (np.log(error) + np.log(_squared_sensitivity(rate_p, rate_q, steps, pattern))))


def _residues(rate_p: np.ndarray, rate_q: np.ndarray) -> np.ndarray:
    """w_i = prod_j (p_i - q_j) / prod_{j != i} (p_i - p_j), each difference as p_i (1 - exp(rate_i - rate_j))."""
    k = rate_p.shape[-1]
    to_q = -np.expm1(rate_p[..., :, None] - rate_q[..., None, :])
    to_p = -np.expm1(rate_p[..., :, None] - rate_p[..., None, :])
    to_p = np.where(np.eye(k, dtype=bool), 1.0, to_p)
    return np.asarray(np.exp(-rate_p) * np.prod(to_q / to_p, axis=-1))


def _geometric(rate: np.ndarray, terms: int | np.ndarray) -> np.ndarray:
    """G = sum_{t < terms} exp(-rate t)."""
    return np.asarray(np.expm1(-rate * terms) / np.expm1(-rate))


def _ramp(rate: np.ndarray, steps: int) -> np.ndarray:
    """H = sum_{t < steps} (steps - t) exp(-rate t)."""
    return np.asarray((steps - np.exp(-rate) * _geometric(rate, steps)) / -np.expm1(-rate))


def _error(rate_p: np.ndarray, rate_q: np.ndarray, steps: int, loss: str) -> np.ndarray:
    constant = np.prod(np.expm1(-rate_p) / np.expm1(-rate_q), axis=-1)
    g = _residues(rate_q, rate_p) / np.expm1(-rate_q)
    kernel = _geometric if loss == "max" else _ramp
    flat = float(steps) if loss == "max" else steps * (steps + 1) / 2
    pairs = kernel(rate_q[..., :, None] + rate_q[..., None, :], steps)
    total = constant**2 * flat + 2 * constant * np.sum(g * kernel(rate_q, steps), axis=-1)
    total = total + np.einsum("...i,...ij,...j->...", g, pairs, g)
    return np.asarray(total if loss == "max" else total / steps)


def _formed(rate_p: np.ndarray, rate_q: np.ndarray, steps: int, form: Form) -> np.ndarray:
    """betaᵀ M beta of the series of C⁻¹, whose rows differ in their imaginary parts alone; these to first order."""
    t = np.arange(steps - 1)
    tail = np.einsum("...j,...jt->...t", _residues(rate_q, rate_p), np.exp(-rate_q[..., None] * t))
    beta = np.concatenate([np.ones((*tail.shape[:-1], 1)), tail], axis=-1)
    real = beta[0].real
    image = form(real)
    return np.asarray(real @ image + 2j * (beta.imag @ image))


def _squared_sensitivity(rate_p: np.ndarray, rate_q: np.ndarray, steps: int, pattern: Pattern) -> np.ndarray:
    """sens², the sum over very many blocks by the trapezoidal rule: good enough to search with, not to promise."""
    m, weights = _marks(pattern.times), _residues(rate_p, rate_q)
    blocks = _blocks(rate_p, weights, steps, pattern, m)
    if len(m) == pattern.times:
        total = blocks.sum(axis=-1)
    else:
        total = blocks[..., 0] + np.sum(np.diff(m) * (blocks[..., 1:] + blocks[..., :-1]) / 2, axis=-1)
    return np.asarray(total + _tail(rate_p, weights, steps, pattern))


@lru_cache(maxsize=16)
def _marks(times: int) -> np.ndarray:
    """The participations that the trapezoidal rule asks: all of them where they are few."""
    return np.unique(np.linspace(0, times - 1, min(times, 257)).astype(int))


def _blocks(rate_p: np.ndarray, w: np.ndarray, steps: int, pattern: Pattern, m: np.ndarray) -> np.ndarray:
    """Squared norm of C x in the blocks m, with w its weights: the rows m gap .. (m + 1) gap - 1, which see the participations 0..m.

    Row u >= 1 of block m is sum_i w_i s_mi p_i^(u-1) with s_mi = sum_{l <= m} p_i^(l gap), row 0 is 1 + sum_i w_i (s_mi - 1) / p_i.
    """
    gap = pattern.gap
    s = _geometric((rate_p * gap)[..., None, :], m[:, None] + 1)
    first = 1 + np.sum(w[..., None, :] * (s - 1) * np.exp(rate_p)[..., None, :], axis=-1)
    rows = np.minimum(gap, steps - m * gap) - 1
    pairs = (rate_p[..., :, None] + rate_p[..., None, :])[..., None, :, :]
    a = w[..., None, :] * s
    return np.asarray(first**2 + np.einsum("...mi,...mij,...mj->...m", a, _geometric(pairs, rows[:, None, None]), a))


def _tail(rate_p: np.ndarray, w: np.ndarray, steps: int, pattern: Pattern) -> np.ndarray:
    """Squared norm of C x in the rows after the block of the last participation."""
    rows = max(0, steps - pattern.times * pattern.gap)
    s = _geometric(rate_p * pattern.gap, pattern.times)
    last = w * np.exp(-rate_p * (pattern.gap - 1)) * s
    return np.asarray(
        np.einsum("...i,...ij,...j->...", last, _geometric(rate_p[..., :, None] + rate_p[..., None, :], rows), last)
    )


def _starts(steps: int, buffers: int, gap: int) -> list[np.ndarray]:
    """A few ladders of rates between about 1/steps and 1, as logarithms of increments."""
    ladders = [(0.3 / steps, 1.0), (0.1 / steps, 0.4), (2.0 / min(gap, steps), 2.0)]
    if buffers > 4:
        ladders += [(0.5 / steps, 3.0)]
    return [np.log(np.diff(np.r_[0.0, np.geomspace(low, max(high, 10 * low), 2 * buffers)])) for low, high in ladders]
