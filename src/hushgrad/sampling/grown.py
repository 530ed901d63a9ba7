"""Where a collate function puts the examples, by what grows when there are more of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

__all__ = ["grown_dim"]


def grown_dim(dataset: Any, collate: Callable[[list[Any]], Any]) -> int | None:
    """The dimension of a batch's tensors that grows with its examples; None if they do not agree, or rows are not side by side.

    Nothing is kept of the two records but this.

        >>> grown_dim([torch.ones(4, 3)] * 2, lambda records: torch.stack(records, 1))
        1
    """
    if collate is default_collate:
        return 0
    first, second = (dataset[i % len(dataset)] for i in range(2))
    made = (tree_leaves(collate(records)) for records in ([first], [first] * 2, [first] * 3, [first, second]))
    found = {_grown(*leaf) for leaf in zip(*made, strict=False) if isinstance(leaf[0], Tensor) and leaf[0].dim() > 1}
    return found.pop() if len(found) == 1 else None


def _grown(one: Tensor, two: Tensor, three: Tensor, both: Tensor) -> int | None:
    """Where copies of a record make a tensor longer; of rows that are joined, only if the second record's follow the first's."""
    grown = [d for d in range(one.dim()) if one.shape[d] != two.shape[d]]
    if len(grown) != 1 or three.shape[grown[0]] != 3 * one.shape[grown[0]]:
        return None
    d, rows = grown[0], one.shape[grown[0]]
    return None if rows > 1 and not torch.equal(both.narrow(d, 0, rows), one) else d
