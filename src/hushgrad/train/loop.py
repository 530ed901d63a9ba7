"""Training loops of other frameworks, as an audit needs them: how a batch is run, and what its loss is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hushgrad.sampling.batch import Batch

if TYPE_CHECKING:
    from hushgrad.train.private import Private


class Loop(ABC):
    """The passes of a framework's own loop, for any model in the place of the run's own."""

    @abstractmethod
    def run(self, private: Private, batch: Batch, size: int | None) -> None:
        """All forward and backward passes of ``batch``, as the framework makes them; in parts of ``size`` if it has none of its own."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss of some examples, by a model without hooks."""
