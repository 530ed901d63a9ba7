"""The number of rows of a physical batch, padding included, as a public function of its number of examples."""

from __future__ import annotations

from typing import NamedTuple


class Sizes(NamedTuple):
    """Batch sizes at which a row's result has the same bits; other batches are padded to the next such size by rows of weight 0.

    ``multiple``: batches of fewer than ``fine`` examples are padded to a multiple of this. ``fine``: batches of at least this size are not
    padded (None: all are). ``few``: micro-batches split at this size or below all have exactly the size that they are split at, so
    that one more or one less record changes no other's shape. ``least``: the smallest number of rows; with 1 there are no empty
    batches, which many models cannot process.

        >>> [Sizes(multiple=4, fine=6).rows(count) for count in range(9)]
        [4, 4, 4, 4, 4, 8, 6, 7, 8]
        >>> [Sizes(multiple=4, fine=6, few=3).rows(count, cut=3) for count in range(4)]
        [3, 3, 3, 3]
        >>> [Sizes(least=0).rows(count) for count in range(3)]
        [0, 1, 2]
    """

    multiple: int = 1
    fine: int | None = None
    few: int = 1
    least: int = 1

    def rows(self, count: int, cut: int | None = None) -> int:
        """Rows of a batch with ``count`` examples; ``cut``: the size that micro-batches are cut to."""
        count = max(count, self.least)
        if cut is not None and 0 < count <= cut <= self.few:
            return cut
        if self.fine is not None and count >= self.fine:
            return count
        return -(-count // self.multiple) * self.multiple


AS_THEY_COME = Sizes(least=0)  # no padding
