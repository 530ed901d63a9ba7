"""``Mechanism``: a description of (correlated) noise together with its privacy theorem.

| symbol | name | meaning |
|---|---|---|
| n | steps | number of steps (rows) |
| A | workload | lower-triangular n x n; prefix sums (all ones) for plain SGD |
| C | strategy | n columns (n x n and lower-triangular, but for trees); its columns set the sensitivity |
| N | noising matrix | N C = I, so N = C⁻¹ for a square C; row t of N Z is what is added to the t-th clipped sum |
| B = A N | | its rows set the error |
| Z | | independent standard Gaussian rows from the :class:`Source` |
| sens | sensitivity | the largest ||C X||_F over the contributions X of one record, each row of norm at most 1 |

**The theorem behind every mechanism.** G + s N Z = N (C G + s Z): the noisy gradients are a function of a Gaussian mechanism
on C G, whose output one record moves by at most sens. It also holds when gradients depend on earlier outputs, since row t of N
uses only rows of C that end at step t (Denisov et al. 2022, Theorem 2.1).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hushgrad import _check
from hushgrad._value import Value
from hushgrad.events import Event, Gaussian, Participation
from hushgrad.noise.error import rmse_lower_bound
from hushgrad.noise.participation import pattern_of
from hushgrad.noise.suggestions import Run, Skipped, Suggestion
from hushgrad.noise.workload import AnyWorkload, Workload, as_workload

if TYPE_CHECKING:  # a mechanism's theorem needs no tensors
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class MechanismError:
    """The workload's error at noise calibrated to the sensitivity (noise std = sens(C), clip norm 1).

    ``rmse`` = sens ||B||_F / sqrt(n), ``max`` = sens max_t ||B_t||; ``lower_bound`` is a certified bound below which no matrix
    mechanism's rmse can fall, so ``rmse / lower_bound - 1`` bounds the distance from the best possible one.
    ``certificate`` says by which argument the bound holds.
    """

    rmse: float
    max: float
    lower_bound: float
    certificate: str = ""

    @property
    def gap(self) -> float:
        """How far above the best possible rmse this mechanism is at most: 0.05 means 5 %."""
        return self.rmse / self.lower_bound - 1


class NoiseStream(ABC):
    """The noise rows of a run, N Z at unit scale, for all tensors of a model; rows are drawn in order.

    >>> import torch
    >>> from hushgrad.noise import Independent, Source
    >>> stream = Independent().stream(Source(seed=1))
    >>> [stream.row(step, 0, torch.empty(2)).shape for step in range(2)]
    [torch.Size([2]), torch.Size([2])]
    """

    def row(
        self, step: int, index: int, like: Tensor, *, offset: int = 0, out: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        """``scale`` x row ``step`` of N Z for tensor number ``index``, in the shape, dtype and device of ``like``.

        Asking beyond the last row, or out of order, raises: noise is never repeated.

        Args:
            step: which row.
            index: which tensor of the model.
            like: shape, dtype and device of the result.
            offset: position of ``like``'s first element in the full flattened tensor, so that a shard is drawn where it lives.
            out: a tensor to add the numbers to, in place; a fresh one is returned without it.
            scale: what the numbers are multiplied by.
        """
        given = None if out is None else (out,)
        return self.rows(step, (like,), indices=(index,), offsets=(offset,), out=given, scale=scale)[0]

    @abstractmethod
    def rows(
        self,
        step: int,
        likes: Sequence[Tensor],
        *,
        indices: Sequence[int] | None = None,
        offsets: Sequence[int] | None = None,
        out: Sequence[Tensor] | None = None,
        scale: float | Tensor = 1.0,
    ) -> list[Tensor]:
        """``row`` for several tensors at once, with the same bits and perhaps faster; ``indices`` are 0, 1, ... by default.

        Args:
            step: which row.
            likes: shapes, dtypes and devices of the results.
            indices: which tensors of the model; 0, 1, ... by default.
            offsets: positions of their first elements in the full flattened tensors; 0 by default.
            out: tensors to add the numbers to, in place.
            scale: what the numbers are multiplied by.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed stream needs besides the key and the step (empty if everything is regenerated)."""

    def takes(self, state: dict[str, Any], likes: Sequence[Tensor]) -> bool:
        """Whether ``state`` can be loaded for tensors on these devices (the default); if not, earlier rows must be regenerated."""
        return True

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue bit for bit where ``state_dict`` was taken."""


class Mechanism(Value, family="mechanism"):
    """A frozen, public description of (correlated) Gaussian noise over the steps of a run, with its theorem.

    **Formal guarantee.** For a deterministic participation (once, min-sep, all steps) and noise of std s x N Z on sums of
    contributions of norm at most 1, the whole run is one Gaussian mechanism of noise multiplier s / sens; ``event`` says so.
    Random participations are bounded by their worst case where that is finite in the number of participations (cyclic
    Poisson, balls in bins); a mechanism that is amplified by sampling says so in its own ``_amplified``.

        >>> from hushgrad.events import Once
        >>> from hushgrad.noise import Independent, Tree
        >>> [f"{m.error(steps=100, participation=Once()).rmse:.2f}" for m in (Independent(), Tree())]
        ['7.11', '3.73']
    """

    @classmethod
    def examples(cls) -> tuple[Mechanism, ...]:
        """Small instances for 12 steps, for the conformance tests."""
        return (cls(),)

    @classmethod
    def suggestions(cls, run: Run) -> Iterator[Suggestion | Skipped]:
        """The settings with which a planner should try this mechanism in ``run``; none by default."""
        return iter(())

    @abstractmethod
    def stream(self, source: Any, *, steps: int | None = None) -> NoiseStream:
        """The live noise: rows of N Z at unit scale, Z from ``source``."""

    @abstractmethod
    def strategy(self, steps: int) -> np.ndarray:
        """C as a dense matrix: for tests and small problems."""

    @abstractmethod
    def noising(self, steps: int) -> np.ndarray:
        """N as a dense matrix, N C = I: for tests and small problems."""

    @abstractmethod
    def sensitivity(self, *, steps: int, participation: Participation) -> float:
        """The largest ||C X||_F that one record of contribution norm 1 can cause: exact or a proved upper bound, else NoTheorem."""

    @abstractmethod
    def unit_error(self, *, steps: int, workload: AnyWorkload = None) -> tuple[float, float]:
        """(||B||_F / sqrt(n), max_t ||B_t||): the error per unit of noise multiplier, before any sensitivity."""

    @abstractmethod
    def row_std(self, step: int, *, steps: int) -> float:
        """The standard deviation of each number in row ``step`` of N Z."""

    @abstractmethod
    def state_size(self, *, steps: int) -> int:
        """How many numbers per model parameter the stream keeps between steps."""

    def following(self, workload: Workload) -> Mechanism | None:
        """This mechanism, to be optimised for ``workload`` by ``resolved``; None if it has nothing left to optimise."""
        return None

    def draws(self, steps: int) -> Sequence[int]:
        """The step number under which the source draws each row of Z, in the order of N's columns."""
        return range(steps)

    def resolved(self, *, steps: int, participation: Participation) -> Mechanism:
        """This mechanism with every free parameter fixed for a run (by optimisation, if it has any left).

        A mechanism that is fixed for a run can be asked about fewer steps: these are then the first steps of that run.
        """
        return self

    def event(self, noise_multiplier: float, participation: Participation, steps: int) -> Event:
        """The theorem: what ``steps`` steps cost with noise of std ``noise_multiplier`` x N Z. Raises NoTheorem elsewhere.

        Args:
            noise_multiplier: standard deviation of Z in units of the clip norm.
            participation: when a record may take part.
            steps: number of rows.
        """
        sigma = _check.non_negative(noise_multiplier=noise_multiplier)
        steps = _check.positive_int(steps=steps)
        amplified = self._amplified(sigma, participation, steps)
        if amplified is not None:
            return amplified
        return Gaussian(sigma / self.sensitivity(steps=steps, participation=participation))

    def _amplified(self, noise_multiplier: float, participation: Participation, steps: int) -> Event | None:
        """A better theorem than the worst-case one, if this mechanism has one for this participation."""
        return None

    def error(self, *, steps: int, participation: Participation, workload: AnyWorkload = None) -> MechanismError:
        """Predicted error of the workload (prefix sums by default) and its certified lower bound.

        Args:
            steps: number of rows.
            participation: when a record may take part.
            workload: what the optimizer makes of the gradients; prefix sums by default.
        """
        steps = _check.positive_int(steps=steps)
        mechanism = self.resolved(steps=steps, participation=participation)
        work = as_workload(workload, steps)
        sens = mechanism.sensitivity(steps=steps, participation=participation)
        rmse, worst = mechanism.unit_error(steps=steps, workload=work)
        bound, certificate = rmse_lower_bound(work, steps, pattern_of(participation, steps))
        return MechanismError(rmse=sens * rmse, max=sens * worst, lower_bound=bound, certificate=certificate)
