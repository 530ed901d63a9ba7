"""The best matrix mechanism of all, with a certificate, by a fixed point on the dual.

Minimise (max over allowed contributions x of xᵀ X x) times tr(W X⁻¹) over positive X = CᵀC, where W = Aᵀ D_u A weighs the
workload's rows: u = 1/n for the mean error, u itself the worst case for the max error. Let M = L Lᵀ be the second moment of some
random allowed contributions. Then with

    S = (Lᵀ W L)^½   and   X = L⁻ᵀ S L⁻¹:       tr(S)  <=  least possible error  <=  sqrt(tr(S) max_x xᵀ X x)

since tr(W X⁻¹) = tr(S). A record joins in the steps j, j + spacing, ... of its group j, with unit vectors as contributions: M is
block-diagonal over the groups, w_j V_j V_jᵀ, the rows of V_j being the vectors. Players improve in turn: w_j <- w_j <X_j, V_j V_jᵀ>^p
(for one participation the fixed point of Denisov et al. 2022, arXiv:2202.08312, Theorem 3.2, which has p = 1), and each vector
moves towards the worst direction, the rows of X_j V_j. Where they stand still the two bounds meet. The solution's profile
hardly depends on the number of steps, so it is found on a coarse grid first and then refined.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy

from hushgrad.noise.participation import Pattern
from hushgrad.noise.sensitivity import gram_sensitivity

_COARSEST = 64
_TOLERANCE = {"mean": 3e-5, "max": 3e-4}  # the relative gap to stop at; the max error's last digits take many iterations
_POWER = 1.9  # 1 is the classical fixed point; in the commuting case 2 would arrive in one step
_FLOOR = 1e-9  # share of independent directions in V Vᵀ, which keeps M positive definite


@dataclass(frozen=True)
class DenseOptimum:
    """C, and bounds: ``lower`` <= the least possible error of any mechanism <= ``upper`` = the error of this one."""

    strategy: np.ndarray
    upper: float
    lower: float

    @property
    def gap(self) -> float:
        """The relative distance of the two bounds: upper / lower - 1."""
        return self.upper / self.lower - 1


def lower_factor(X: np.ndarray) -> np.ndarray:
    """The lower-triangular C with CᵀC = X. (numpy's cholesky gives C Cᵀ = X: another matrix, of another sensitivity.)"""
    return np.ascontiguousarray(scipy.linalg.cholesky(X[::-1, ::-1], lower=True).T[::-1, ::-1])


@dataclass(frozen=True)
class _Players:
    """The dual variables: weights of the groups (g), vectors of their records (g, times, times), weights of the rows (n)."""

    w: np.ndarray
    V: np.ndarray
    u: np.ndarray


def optimise_dense(A: np.ndarray, pattern: Pattern, *, loss: str = "mean") -> DenseOptimum:
    """The best C for the workload ``A`` under (gap, times) participation, as far as the iterations go: see ``gap``.

    The dual knows the patterns of a fixed order. For min-sep it is a valid lower bound, too, and C is scaled to the larger
    sensitivity, but the two bounds do not meet.
    """
    spacing = max(pattern.gap, -(-len(A) // pattern.times))
    X, lower, _ = _fixed_point(A, spacing, _coarse_to_fine(A, spacing, loss), loss)
    if pattern.times == 1:  # unit columns: no error is gained by a column that is less sensitive than another
        scale = 1 / np.sqrt(X.diagonal())
        X = X * np.outer(scale, scale)
    C = lower_factor(X)
    C /= gram_sensitivity(X, pattern)
    squares = np.sum(np.square(scipy.linalg.solve_triangular(C.T, A.T, lower=False)), axis=0)  # ||row t of A C⁻¹||²
    upper = float(np.sqrt(squares.max() if loss == "max" else squares.mean()))
    return DenseOptimum(strategy=C, upper=upper, lower=lower)


def _coarse_to_fine(A: np.ndarray, spacing: int, loss: str) -> _Players:
    """Where to start: the solution for every second step, stretched."""
    n, times = len(A), -(-len(A) // spacing)
    if n <= _COARSEST or spacing < 8:
        V = np.linalg.cholesky(0.5 * np.eye(times) + 0.5)  # half alike, half independent
        return _Players(np.full(spacing, 1 / spacing), np.tile(V, (spacing, 1, 1)), np.full(n, 1 / n))
    half, coarse = A[1::2, 1::2], -(-spacing // 2)
    _, _, found = _fixed_point(half, coarse, _coarse_to_fine(half, coarse, loss), loss)
    V = found.V[np.arange(spacing) // 2]
    if V.shape[1] != times:
        V = np.tile(np.linalg.cholesky(0.5 * np.eye(times) + 0.5), (spacing, 1, 1))
    return _Players(_normalised(_stretch(found.w, spacing)), V, _normalised(_stretch(found.u, n)))


def _stretch(weights: np.ndarray, length: int) -> np.ndarray:
    position = (np.arange(length) + 0.5) / length * len(weights) - 0.5
    return np.asarray(np.exp(np.interp(position, np.arange(len(weights)), np.log(np.maximum(weights, 1e-300)))))


def _normalised(weights: np.ndarray) -> np.ndarray:
    return np.asarray(weights / weights.sum())


def _fixed_point(A: np.ndarray, spacing: int, players: _Players, loss: str) -> tuple[np.ndarray, float, _Players]:
    """(X, lower bound, players) when the gap is closed or the iterations are used up; X has the least upper bound seen."""
    n, single = len(A), spacing >= len(A)
    best_upper, best_X, lower = np.inf, np.eye(n), 0.0
    for _ in range(max(60, min(600, 30_000_000 // n**2))):  # as many as a minute allows
        L = np.diag(np.sqrt(players.w)) if single else scipy.linalg.cholesky(_moment(players, n, spacing), lower=True)
        eigenvalues, U = scipy.linalg.eigh(L.T @ ((A.T * players.u) @ A) @ L, driver="evd")
        roots = np.sqrt(np.maximum(eigenvalues, eigenvalues[-1] * 1e-15))
        half = scipy.linalg.solve_triangular(L.T, U * np.sqrt(roots), lower=False).T
        X = half.T @ half
        groups = _groups(X, spacing)
        worst = np.abs(groups).sum(axis=(1, 2))  # no direction of the vectors is worse
        # One participation: columns are scaled to equal sensitivity before the rows' errors are taken, which is better.
        level = np.sqrt(worst) if single else np.full(n, np.sqrt(worst.max()))
        rows = np.sum(np.square((A * level) @ (L @ U) / np.sqrt(roots)), axis=1)
        upper = float(np.sqrt(rows.max() if loss == "max" else rows.mean()))
        lower = max(lower, float(roots.sum()))
        if upper < best_upper:
            best_upper, best_X = upper, X
        if upper / lower - 1 < _TOLERANCE[loss]:
            break
        players = _improved(players, groups, rows if loss == "max" else None)
    return best_X, lower, players


def _improved(players: _Players, groups: np.ndarray, rows: np.ndarray | None) -> _Players:
    """Every player moves towards what X is worst at."""
    pull = groups @ players.V
    scores = np.einsum("jkr,jkr->j", pull, players.V)
    length = np.linalg.norm(pull, axis=2, keepdims=True)
    V = players.V + np.divide(pull, length, out=np.zeros_like(pull), where=length > 0)
    V /= np.linalg.norm(V, axis=2, keepdims=True)
    u = players.u if rows is None else _normalised(players.u * rows**_POWER)
    return _Players(_normalised(players.w * scores**_POWER), V, u)


def _moment(players: _Players, n: int, spacing: int) -> np.ndarray:
    """M: for each group j < spacing the block w_j V_j V_jᵀ at the steps j, j + spacing, ..."""
    times = players.V.shape[1]
    alike = players.V @ players.V.transpose(0, 2, 1)
    alike = (alike + _FLOOR * np.eye(times)) / (1 + _FLOOR)
    M = np.zeros((times, spacing, times, spacing))
    j = np.arange(spacing)
    M[:, j, :, j] = players.w[:, None, None] * alike
    return M.reshape(times * spacing, -1)[:n, :n]


def _groups(X: np.ndarray, spacing: int) -> np.ndarray:
    """X_j: the entries of X at the steps j, j + spacing, ... of each group; steps after the end count 0."""
    n = len(X)
    times = -(-n // spacing)
    padded = np.zeros((times * spacing, times * spacing))
    padded[:n, :n] = X
    j = np.arange(spacing)
    return padded.reshape(times, spacing, times, spacing)[:, j, :, j]
