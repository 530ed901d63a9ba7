"""Minimise a perturbed, regularised linear objective to a *certified* gradient norm.

The gradient norm at the end bounds the distance to the exact minimum (‖θ - θ*‖ <= ‖gradient‖/λ, by strong convexity), and
that distance is paid for by the mechanisms: a theorem about an exact minimum says nothing about an approximate one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg import LinAlgError, cho_factor, cho_solve
from scipy.linalg.blas import dsyrk, ssyrk
from scipy.optimize import minimize
from scipy.sparse.linalg import LinearOperator, cg

from hushgrad.errors import ArgumentError
from hushgrad.estimators.losses import LinearLoss, _ScalarLoss

# Newton needs a d x d Hessian; beyond this many parameters L-BFGS is cheaper.
_NEWTON_PARAMETERS = 600
_POLISHING = 30


@dataclass(frozen=True)
class Objective:
    """Σ loss(Θ x_i, y_i) + l2/2 ‖Θ‖² + ⟨tilt, Θ⟩ over Θ of shape (outputs, features), flattened."""

    loss: LinearLoss
    X: np.ndarray
    y: np.ndarray
    l2: float
    tilt: np.ndarray

    def value_and_gradient(self, theta: np.ndarray) -> tuple[float, np.ndarray]:
        """The objective and its gradient at a flattened ``theta``."""
        value, gradient, _ = self.evaluate(theta)
        return value, gradient

    def evaluate(self, theta: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """The objective, its gradient, and the predictions that both come from."""
        z = self.X @ theta.reshape(self.loss.outputs, -1).T
        value = self.loss.value(z, self.y) + 0.5 * self.l2 * theta @ theta + self.tilt @ theta
        gradient = (self.loss.slopes(z, self.y).T @ self.X).ravel() + self.l2 * theta + self.tilt
        return value, gradient, z


@dataclass(frozen=True)
class Minimum:
    """A point whose distance to the exact minimum is at most ``gradient_norm`` / l2."""

    theta: np.ndarray
    gradient_norm: float


def minimum(objective: Objective, *, tol: float, max_iter: int) -> Minimum:
    """Minimise until the gradient norm is at most ``tol``; raise if that cannot be reached, because the point is then unsafe to release."""
    newton = isinstance(objective.loss, _ScalarLoss) and objective.X.shape[1] <= _NEWTON_PARAMETERS
    found = _newton(objective, tol, max_iter) if newton else _polished(objective, _lbfgs(objective, tol, max_iter), tol)
    if not found.gradient_norm <= tol:
        raise ArgumentError(
            f"Expected tol={tol:g} to be reachable; it was not, and nothing was released. Use a larger max_iter, tol or l2."
        )
    return found


def _newton(objective: Objective, tol: float, max_iter: int) -> Minimum:
    """Damped Newton steps; a Cholesky factor is kept while steps with it shrink the gradient tenfold (a Hessian costs ten gradients)."""
    theta = np.zeros(objective.X.shape[1])
    value, gradient, z = objective.evaluate(theta)
    norm, factor, precision = float(np.linalg.norm(gradient)), None, np.float32
    for _ in range(max_iter):
        if norm <= tol:
            break
        factor = factor if factor is not None else _hessian_factor(objective, z, precision)
        length, theta, value, gradient, z = _backtrack(objective, theta, value, gradient, z, cho_solve(factor, gradient))
        before, norm = norm, float(np.linalg.norm(gradient))
        if length == 0 and precision is np.float64:
            break
        if norm > 0.1 * before:
            factor = None
        if length < 0.1:  # a poor direction: rounding in a badly conditioned Hessian, perhaps
            precision = np.float64
    return Minimum(theta, norm)


def _hessian_factor(objective: Objective, z: np.ndarray, precision: type):
    # A Hessian only steers the steps, the gradient alone certifies the end: single precision and one triangle are often enough.
    assert isinstance(objective.loss, _ScalarLoss)
    weights = np.sqrt(objective.loss.curvatures(z, objective.y)).astype(precision)
    rank_update = ssyrk if precision is np.float32 else dsyrk
    hessian = rank_update(1.0, (objective.X.astype(precision) * weights[:, None]).T).astype(np.float64)
    hessian[np.diag_indices_from(hessian)] += objective.l2
    try:
        return cho_factor(hessian, check_finite=False)
    except LinAlgError:  # rounding made it indefinite; the l2 term alone keeps the exact one positive definite
        if precision is np.float32:
            return _hessian_factor(objective, z, np.float64)
        return cho_factor(hessian + 1e-12 * np.trace(hessian) * np.eye(len(hessian)))


def _backtrack(objective: Objective, theta, value, gradient, z, step):
    """(length, new state) for the longest of the steps 1, 1/2, 1/4, ... that helps; length 0 and the old state if none does."""
    slope, norm, rounding = gradient @ step, np.linalg.norm(gradient), 1e-12 * (1 + abs(value))
    for halving in range(30):
        length = 0.5**halving
        candidate = theta - length * step
        new_value, new_gradient, new_z = objective.evaluate(candidate)
        # Near the minimum the values agree to rounding and only the gradient still tells progress. Farther away it must not decide: where
        # a loss has corners, steps that shrink it and steps that lower the value can lead in a circle.
        if new_value <= value - 1e-4 * length * slope or (
            new_value <= value + rounding and np.linalg.norm(new_gradient) < 0.5 * norm
        ):
            return length, candidate, new_value, new_gradient, new_z
    return 0.0, theta, value, gradient, z


def _lbfgs(objective: Objective, tol: float, max_iter: int) -> Minimum:
    """L-BFGS: quick to a few digits, for problems too large for a Hessian."""
    start = np.zeros(objective.loss.outputs * objective.X.shape[1])
    options = {"maxiter": max_iter, "maxcor": 20, "gtol": tol / np.sqrt(start.size), "ftol": 1e-14, "maxls": 50}
    found = minimize(objective.value_and_gradient, start, jac=True, method="L-BFGS-B", options=options)
    return Minimum(found.x, float(np.linalg.norm(found.jac)))


def _polished(objective: Objective, found: Minimum, tol: float) -> Minimum:
    """A few Newton steps by conjugate gradients: from L-BFGS's digits to the tolerance, where its line search gives up."""
    theta = found.theta
    value, gradient, z = objective.evaluate(theta)
    for _ in range(_POLISHING):
        if np.linalg.norm(gradient) <= tol:
            break
        product = LinearOperator(
            (theta.size, theta.size), matvec=lambda v, z=z: _hessian_product(objective, z, v), dtype=np.float64
        )
        step, _ = cg(product, gradient, rtol=1e-3, maxiter=500)
        length, theta, value, gradient, z = _backtrack(objective, theta, value, gradient, z, step)
        if length == 0:
            break
    return Minimum(theta, float(np.linalg.norm(gradient)))


def _hessian_product(objective: Objective, z: np.ndarray, v: np.ndarray) -> np.ndarray:
    along = objective.X @ v.reshape(objective.loss.outputs, -1).T
    return (objective.loss.bend(z, objective.y, along).T @ objective.X).ravel() + objective.l2 * v.ravel()
