"""The best matrix mechanism of all, with a certificate, by a fixed point on the dual.

Minimise (max over allowed contributions x of xᵀ X x) times tr(W X⁻¹) over positive X = CᵀC, where W = Aᵀ D_u A weighs the
workload's rows: u = 1/n for the mean error, u itself the worst case for the max error. For weights v (of sum 1) on *atoms*
M_a, each a mean of allowed x xᵀ, let M = sum_a v_a M_a = L Lᵀ. Then with

    S = (Lᵀ W L)^½   and   X = L⁻ᵀ S L⁻¹:       tr(S)  <=  least possible error  <=  sqrt(tr(S) max_x xᵀ X x)

since tr(W X⁻¹) = tr(S). The weights move by v_a <- v_a <M_a, X>^power, which stands still exactly where all atoms in use are
equally sensitive: there the two bounds meet (Denisov et al. 2022, arXiv:2202.08312, Theorem 3.2, for one participation).
The profile of v hardly depends on the number of steps, so it is found on a coarse grid first and then refined.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg import cholesky, eigh, solve_triangular

from hushgrad.noise.participation import Pattern
from hushgrad.noise.sensitivity import gram_sensitivity

__all__ = ["DenseOptimum", "lower_factor", "optimise_dense"]

_COARSEST = 64
_TOLERANCE = {"mean": 3e-5, "max": 3e-4}  # the relative gap to stop at; the max error's last digits take many iterations
_POWER = 1.9  # 1 is the classical fixed point; in the commuting case 2 would arrive in one step


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
    return np.ascontiguousarray(cholesky(X[::-1, ::-1], lower=True).T[::-1, ::-1])


def optimise_dense(A: np.ndarray, pattern: Pattern, *, loss: str = "mean") -> DenseOptimum:
    """The best C for the workload ``A`` under (gap, times) participation, as far as the iterations go: see ``gap``."""
    tolerance = _TOLERANCE[loss]
    spacing = max(pattern.gap, -(-len(A) // pattern.times))
    v, u = _coarse_to_fine(A, spacing, loss, tolerance)
    X, lower, _, _ = _fixed_point(A, spacing, v, u, loss, tolerance)
    if pattern.times == 1:  # unit columns: no error is gained by a column that is less sensitive than another
        scale = 1 / np.sqrt(X.diagonal())
        X = X * np.outer(scale, scale)
    C = lower_factor(X)
    C /= gram_sensitivity(X, pattern)
    squares = np.sum(np.square(solve_triangular(C.T, A.T, lower=False)), axis=0)  # ||row t of A C⁻¹||²
    upper = float(np.sqrt(squares.max() if loss == "max" else squares.mean()))
    return DenseOptimum(strategy=C, upper=upper, lower=lower)


def _coarse_to_fine(A: np.ndarray, spacing: int, loss: str, tolerance: float) -> tuple[np.ndarray, np.ndarray]:
    """Weights (v, u) to start from: solved for every second step, then stretched."""
    n = len(A)
    atoms = n if spacing >= n else 2 * spacing
    if n <= _COARSEST or spacing < 8:
        return np.full(atoms, 1 / atoms), np.full(n, 1 / n)
    half = A[1::2, 1::2]
    coarse = min(-(-spacing // 2), len(half))
    v, u = _coarse_to_fine(half, coarse, loss, tolerance)
    _, _, v, u = _fixed_point(half, coarse, v, u, loss, tolerance)
    families = 1 if spacing >= n else 2
    parts = [_stretch(part, atoms // families) for part in np.split(v, families)]
    return _normalised(np.concatenate(parts)), _normalised(_stretch(u, n))


def _stretch(weights: np.ndarray, length: int) -> np.ndarray:
    position = (np.arange(length) + 0.5) / length * len(weights) - 0.5
    return np.asarray(np.exp(np.interp(position, np.arange(len(weights)), np.log(np.maximum(weights, 1e-300)))))


def _normalised(weights: np.ndarray) -> np.ndarray:
    return np.asarray(weights / weights.sum())


def _fixed_point(
    A: np.ndarray, spacing: int, v: np.ndarray, u: np.ndarray, loss: str, tolerance: float
) -> tuple[np.ndarray, float, np.ndarray, np.ndarray]:
    """(X, lower bound, v, u) after the gap is closed or the iterations are used up; X has the least upper bound seen."""
    best_upper, best_X, lower = np.inf, np.eye(len(A)), 0.0
    for _ in range(max(60, min(600, 30_000_000 // len(A) ** 2))):  # as many as a minute allows
        L = _factor(v, len(A), spacing)
        eigenvalues, U = eigh(L.T @ ((A.T * u) @ A) @ L, driver="evd")
        roots = np.sqrt(np.maximum(eigenvalues, eigenvalues[-1] * 1e-15))
        half = solve_triangular(L.T, U * np.sqrt(roots), lower=False).T  # X = halfᵀ half
        scores = _scores(half, spacing)
        level = np.sqrt(scores) if spacing >= len(A) else np.full(len(A), np.sqrt(scores.max()))
        # Columns are scaled to equal sensitivity before the rows' errors are taken: X is feasible then, and better.
        rows = np.sum(np.square((A * level) @ (L @ U) / np.sqrt(roots)), axis=1)
        upper = float(np.sqrt(rows.max() if loss == "max" else rows.mean()))
        lower = max(lower, float(roots.sum()))
        if upper < best_upper:
            best_upper, best_X = upper, half.T @ half
        if upper / lower - 1 < tolerance:
            break
        v = _normalised(v * scores**_POWER)
        if loss == "max":
            u = _normalised(u * rows**_POWER)
    return best_X, lower, v, u


def _factor(v: np.ndarray, n: int, spacing: int) -> np.ndarray:
    """L with L Lᵀ = M = sum of v_a M_a. One participation: M is diagonal."""
    return np.diag(np.sqrt(v)) if spacing >= n else cholesky(_mixture(v, n, spacing), lower=True)


def _mixture(v: np.ndarray, n: int, spacing: int) -> np.ndarray:
    """M: for each first step j < spacing, a record in steps j, j + spacing, ... with random signs (v_j) or equal ones."""
    residue = np.arange(n) % spacing
    M = np.where(residue[:, None] == residue[None, :], v[spacing:][residue][:, None], 0.0)
    M[np.diag_indices(n)] += v[:spacing][residue]
    return M


def _scores(half: np.ndarray, spacing: int) -> np.ndarray:
    """<M_a, X> for X = halfᵀ half: the squared column norms summed, and the norm of the summed columns, for each first step."""
    n = half.shape[1]
    if spacing >= n:
        return np.asarray(np.einsum("ki,ki->i", half, half))
    padded = np.zeros((len(half), -(-n // spacing) * spacing))
    padded[:, :n] = half
    folded = padded.reshape(len(half), -1, spacing)
    return np.concatenate([np.sum(folded**2, axis=(0, 1)), np.sum(folded.sum(axis=1) ** 2, axis=0)])
