"""The question that a planner answers: a budget, the data's public size, and what is allowed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hushgrad import _check
from hushgrad.errors import ArgumentError
from hushgrad.events import Relation
from hushgrad.noise.base import Mechanism
from hushgrad.noise.workload import AnyWorkload


@dataclass(frozen=True, kw_only=True)
class Question:
    """Everything that the choice of a plan depends on. All of it is public.

    | field | if not given |
    |---|---|
    | ``batch_size`` | the power of two nearest to sqrt(dataset_size), a rule of thumb (Abadi et al. 2016, section 5.2) |
    | ``epochs`` or ``steps`` | exactly one of them must be given |
    | ``memory`` | noise state may be of any size; else a limit in bytes, or in numbers per parameter if ``parameters`` is None |
    | ``workload`` | prefix sums: SGD at a constant learning rate |
    | ``mechanisms`` | the library's own; mechanisms of yours are ranked among them |
    | ``tune_bands`` | bands are the cut square root, as in published comparisons; True optimises them for prefix sums: less error |

    >>> Question(epsilon=2, delta=1e-6, dataset_size=60_000, epochs=10).batch_size
    256
    """

    epsilon: float
    delta: float
    dataset_size: int
    batch_size: int | None = None
    epochs: float | None = None
    steps: int | None = None
    parameters: int | None = None
    memory: float | None = None
    sampling_allowed: bool = True
    max_grad_norm: float = 1.0
    workload: AnyWorkload = None
    relation: Relation = Relation.ADD_REMOVE
    unit: str = "example"
    tune_bands: bool = False
    mechanisms: tuple[Mechanism, ...] = ()

    def __post_init__(self) -> None:
        size = _check.positive_int(dataset_size=self.dataset_size)
        usual = min(size, 1 << round(math.log2(max(2.0, math.sqrt(size)))))  # the power of two nearest to the square root
        batch = usual if self.batch_size is None else _check.positive_int(batch_size=self.batch_size)
        if batch > size:
            _check.fail("batch_size", batch, f"to be at most dataset_size={size}")
        if (self.epochs is None) == (self.steps is None):
            raise ArgumentError("Expected exactly one of epochs and steps. The other one follows from it.")
        fields: dict[str, Any] = {
            "epsilon": _check.positive(epsilon=self.epsilon),
            "delta": _check.delta(delta=self.delta),
            "batch_size": batch,
            "max_grad_norm": _check.positive(max_grad_norm=self.max_grad_norm),
            "relation": Relation.of(self.relation),
        }
        if self.epochs is not None:
            fields["epochs"] = _check.positive(epochs=self.epochs)
        if self.steps is not None:
            fields["steps"] = _check.positive_int(steps=self.steps)
        self._check_memory()
        _check.instance(bool, sampling_allowed=self.sampling_allowed)
        _check.instance(bool, tune_bands=self.tune_bands)
        fields["mechanisms"] = tuple(_check.instance(Mechanism, mechanisms=one) for one in self.mechanisms)
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def _check_memory(self) -> None:
        if self.parameters is not None:
            _check.positive_int(parameters=self.parameters)
        if self.memory is not None:
            _check.non_negative(memory=self.memory)

    @property
    def size(self) -> int:
        """The batch size, which is known after the checks."""
        assert self.batch_size is not None
        return self.batch_size

    @property
    def rate(self) -> float:
        """q: the part of the data in an average batch."""
        return self.size / self.dataset_size

    @property
    def sampled_steps(self) -> int:
        """Steps where batches are drawn at random."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return math.ceil(self.epochs * self.dataset_size / self.size)

    @property
    def whole_epochs(self) -> int | None:
        """Passes over a fixed order, or None where the steps are no whole number of them."""
        per_epoch = -(-self.dataset_size // self.size)
        epochs = self.steps / per_epoch if self.steps is not None else self.epochs
        assert epochs is not None
        return int(epochs) if float(epochs).is_integer() else None
