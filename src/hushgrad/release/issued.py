"""What the loader has handed out and no step has been taken on yet."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["Issued"]


class Issued(NamedTuple):
    """The batch that the next step must be taken on."""

    examples: int
    units: Tensor | None
    padding: int = 0  # examples at the end that fill it up and do not count
    records: np.ndarray | None = None  # who takes part, in every process

    @property
    def contributions(self) -> int:
        """How many gradients will be clipped: one for each example, or for each unit."""
        count = self.examples - self.padding
        return count if self.units is None else len(torch.unique(self.units[:count]))
