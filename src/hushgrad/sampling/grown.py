"""Where a collate function puts the examples, by what grows when there are more of them; and whether it keeps them apart."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path, tree_leaves
from torch.utils.data import default_collate


def grown_dim(dataset: Any, collate: Callable[[list[Any]], Any]) -> int | None:
    """The dimension of a batch's tensors that grows with its examples; None if they do not agree, or rows are not side by side.

    Nothing is kept of the two records but this.

        >>> grown_dim([torch.ones(4, 3)] * 2, lambda records: torch.stack(records, 1))
        1
    """
    if collate is default_collate:
        return 0
    first, second = (dataset[i % len(dataset)] for i in range(2))
    made = [dict(tree_flatten_with_path(collate(records))[0]) for records in ([first], [first] * 2, [first] * 3, [first, second])]
    # By their place: a list with a string for each example has more leaves where there are more of them.
    tensors = [where for where, leaf in made[0].items() if isinstance(leaf, Tensor) and leaf.dim() > 1]
    found = {_grown(*(leaves.get(where) for leaves in made)) for where in tensors}
    return found.pop() if len(found) == 1 else None


def _grown(one: Any, two: Any, three: Any, both: Any) -> int | None:
    """Where copies of a record make a tensor longer; of rows that are joined, only if the second record's follow the first's."""
    if not all(isinstance(leaf, Tensor) and leaf.dim() == one.dim() for leaf in (one, two, three, both)):
        return None
    grown = [d for d in range(one.dim()) if one.shape[d] != two.shape[d]]
    if len(grown) != 1 or three.shape[grown[0]] != 3 * one.shape[grown[0]]:
        return None
    d, rows = grown[0], one.shape[grown[0]]
    return None if rows > 1 and not torch.equal(both.narrow(d, 0, rows), one) else d


def keeps_apart(
    dataset: Any, collate: Callable[[list[Any]], Any], *, again: Callable[[], AbstractContextManager[None]] = nullcontext
) -> bool:
    """Whether a record has the same rows in a batch whoever the others are, as far as six records show.

    Mixup and centring by the batch do not keep records apart; padding to the longest one does. Inside of ``again()`` random numbers
    are the same as before.

        >>> keeps_apart([torch.ones(3), torch.zeros(3)], torch.stack)
        True
        >>> keeps_apart([torch.ones(3), torch.zeros(3)], lambda records: torch.stack(records) - torch.stack(records).mean(0))
        False
    """
    if collate is default_collate:
        return True
    a, b, c, d, e, f = (dataset[len(dataset) * k // 6] for k in range(6))
    e, f = (e, f) if len(dataset) > 2 else (a, a)  # a record among copies of itself
    made = []
    for records in ([a, b, c, d], [a, d, c, b], [a, e, c, f]):
        with again():
            made.append([t for t in tree_leaves(collate(records)) if isinstance(t, Tensor)])
    dim = grown_dim(dataset, collate)
    return all(_kept(first, leaf, dim) for other in made[1:] for first, leaf in zip(made[0], other, strict=True))


def _kept(first: Tensor, other: Tensor, dim: int | None) -> bool:
    """Whether the first and third of four records have the same rows; of records padded to another length nothing can be said."""
    if first.shape != other.shape:
        return True
    where = 0 if first.dim() == 1 else dim
    if where is None or not first.dim():
        return torch.equal(first, other)
    rows = first.shape[where] // 4
    return all(torch.equal(first.narrow(where, i * rows, rows), other.narrow(where, i * rows, rows)) for i in (0, 2))
