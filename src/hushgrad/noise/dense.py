"""Dense noise: any lower-triangular strategy, and the optimal one for runs of moderate length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import scipy

from hushgrad import _check, _papers
from hushgrad.events import Once, Participation
from hushgrad.noise.base import Mechanism, NoiseStream
from hushgrad.noise.error import dense_unit_error
from hushgrad.noise.lower_toeplitz import filter_state, known_steps
from hushgrad.noise.optimise_dense import DenseOptimum, optimise_dense
from hushgrad.noise.participation import pattern_of
from hushgrad.noise.sensitivity import gram_sensitivity
from hushgrad.noise.suggestions import Run, Skipped, Suggestion, regenerating
from hushgrad.noise.workload import AnyWorkload, Workload, as_workload

_OPTIMISED = 64  # steps: each of many iterations takes O(n³), and the planner should answer within a second

_LARGEST = 4096  # an optimisation takes O(n³) time for each of some 20 iterations


@dataclass(frozen=True)
class Dense(Mechanism):
    """C given in full: a lower-triangular array with a diagonal without zeros. Row t is row t of C⁻¹ times Z.

    ``Dense.optimal(steps=...)`` finds the C of least error, with a certificate (``Dense.optimum`` shows both bounds).
    Each row needs all earlier draws, so this is for runs of up to a few thousand steps, or as the yardstick for others.

    **Formal guarantee.** One Gaussian event. The sensitivity is exact for one participation and an upper bound (exact if no
    entry of CᵀC is negative and the order is fixed) for several.

    >>> from hushgrad.events import Once
    >>> mechanism = Dense.optimal(steps=64)
    >>> error = mechanism.error(steps=64, participation=Once())
    >>> round(error.rmse, 3), error.lower_bound < error.rmse
    (2.1, True)

    Reference: Denisov et al. 2022 (arXiv:2202.08312), Theorems 2.1 and 3.2.
    """

    papers = (_papers.DENISOV_2022_IMPROVED,)

    matrix: tuple[tuple[float, ...], ...]

    @classmethod
    def examples(cls) -> tuple[Mechanism, ...]:
        mixed_signs = np.tril(np.random.default_rng(0).normal(size=(12, 12))) + 3 * np.eye(12)
        return (cls.optimal(steps=12), cls.optimal(steps=12, loss="max"), cls(tuple(map(tuple, mixed_signs.tolist()))))

    @classmethod
    def suggestions(cls, run: Run) -> Iterator[Suggestion | Skipped]:
        if run.participation is not None and run.steps > _OPTIMISED:
            yield Skipped("Dense", f"The best matrix is optimised for at most {_OPTIMISED} steps here; BLT comes close to it.")
        elif run.participation is not None:
            make = partial(cls.optimal, steps=run.steps, participation=run.participation, workload=run.workload)
            yield regenerating(make, "Dense", "The best matrix for a fixed order, with a certificate", run)

    def __post_init__(self) -> None:
        C = _square(self.matrix)
        if not np.isfinite(C).all() or np.triu(C, 1).any():
            _check.fail("matrix", C.shape, "to be finite and lower-triangular", "Row t may use the steps up to t only.")
        if not np.all(np.abs(C.diagonal()) > 1e-12 * np.abs(C).max(initial=0)):
            _check.fail("matrix", C.shape, "to have no zero on its diagonal", "C is singular: no noise makes it private.")
        object.__setattr__(self, "matrix", tuple(tuple(map(float, row[: t + 1])) for t, row in enumerate(C)))

    @classmethod
    def optimal(
        cls, *, steps: int, loss: str = "mean", participation: Participation | None = None, workload: AnyWorkload = None
    ) -> Dense:
        """The C of least mean (rmse) or max error for a workload; one participation and prefix sums unless told otherwise.

        Args:
            steps: number of rows.
            loss: what is least: "mean" (the root of the mean squared error) or "max".
            participation: when a record may take part; once by default.
            workload: what the optimizer makes of the gradients; prefix sums by default.
        """
        return cls(cls.optimum(steps=steps, loss=loss, participation=participation, workload=workload).strategy)  # type: ignore[arg-type]

    @staticmethod
    def optimum(
        *, steps: int, loss: str = "mean", participation: Participation | None = None, workload: AnyWorkload = None
    ) -> DenseOptimum:
        """The optimal C with its certificate: ``upper`` (its error), ``lower`` (no mechanism is better) and ``gap``.

        Args:
            steps: number of rows.
            loss: what is least: "mean" (the root of the mean squared error) or "max".
            participation: when a record may take part; once by default.
            workload: what the optimizer makes of the gradients; prefix sums by default.
        """
        steps = _check.positive_int(steps=steps)
        if steps > _LARGEST:
            remedy = "Use BLT.optimal, which is within a few per cent of it."
            _check.fail("steps", steps, f"to be at most {_LARGEST} for a dense optimisation", remedy)
        _check.one_of(["mean", "max"], loss=loss)
        work = as_workload(workload, steps)
        return _optimum(work, steps, loss, Once() if participation is None else participation)

    def strategy(self, steps: int) -> np.ndarray:
        steps = self._fit(steps)
        C = np.zeros((steps, steps))
        for t, row in enumerate(self.matrix[:steps]):
            C[t, : t + 1] = row
        return C

    def noising(self, steps: int) -> np.ndarray:
        C = self.strategy(steps)
        return np.tril(scipy.linalg.solve_triangular(C, np.eye(len(C)), lower=True))

    def sensitivity(self, *, steps: int, participation: Participation) -> float:
        """From the Gram matrix CᵀC (see sensitivity.py)."""
        C = self.strategy(steps)
        return gram_sensitivity(C.T @ C, pattern_of(participation, len(C)))

    def unit_error(self, *, steps: int, workload: AnyWorkload = None) -> tuple[float, float]:
        return dense_unit_error(self.noising(steps), workload)

    def row_std(self, step: int, *, steps: int) -> float:
        step, steps = _check.integer(0, step=step), self._fit(steps)
        if step >= steps:
            _check.fail("step", step, f"to be less than steps={steps}", "Ask for a row of the run.")
        return float(_row_stds(self)[step])

    def stream(self, source: Any, *, steps: int | None = None) -> NoiseStream:
        """Past z are regenerated, once for several rows."""
        from hushgrad.noise.streams import DenseStream

        noising = self.noising(known_steps(steps))
        return DenseStream(source, lambda t: noising[t, : t + 1].tolist(), steps=len(noising))

    def state_size(self, *, steps: int) -> int:
        return filter_state(self._fit(steps))

    def _fit(self, steps: int) -> int:
        steps = _check.positive_int(steps=steps)
        if steps > len(self.matrix):
            _check.fail("steps", steps, f"to be at most {len(self.matrix)}, the rows of C", "Make a larger matrix.")
        return steps


def _square(matrix: Any) -> np.ndarray:
    """The matrix as an array; rows may end at the diagonal."""
    rows = [_check.several(matrix=row) for row in _check.several(matrix=matrix)]
    n = len(rows)
    C = np.zeros((n, n))
    for t, row in enumerate(rows):
        if len(row) not in (t + 1, n):
            _check.fail("matrix", f"row {t} of {len(row)} numbers", f"to have rows of {n} numbers, or t + 1 in row t")
        C[t, : len(row)] = [_real(number) for number in row]
    if n == 0:
        _check.fail("matrix", matrix, "to have at least one row")
    return C


@lru_cache(maxsize=4)
def _row_stds(mechanism: Dense) -> np.ndarray:
    return np.asarray(np.linalg.norm(mechanism.noising(len(mechanism.matrix)), axis=1))


@lru_cache(maxsize=8)
def _optimum(workload: Workload, steps: int, loss: str, participation: Participation) -> DenseOptimum:
    return optimise_dense(workload.matrix(steps), pattern_of(participation, steps), loss=loss)


def _real(number: Any) -> float:
    try:
        return float(number)  # infinite ones are refused with the rest of the matrix
    except (TypeError, ValueError, RuntimeError, OverflowError):
        _check.fail("matrix", number, "to hold numbers")
