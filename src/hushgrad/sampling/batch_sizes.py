"""How many rows a physical batch has: a public function of how many examples are in it."""

from __future__ import annotations

from typing import NamedTuple


class Sizes(NamedTuple):
    """The sizes of batches in which a row has the same bits; others are filled up to the next one by rows of weight 0.

    ``multiple``: fewer than ``fine`` examples are filled up to a multiple of it. ``fine``: so many and more are left as they are (None:
    all are filled up). ``few``: micro-batches that are cut to at most so many examples all have as many rows as they are cut to, so that
    one record more or less changes nobody's shape; they are not filled up any further. ``least``: fewer examples have as many
    rows as so many; with 1 there is no batch without a row, which many models cannot read.

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


AS_THEY_COME = Sizes(least=0)  # nothing is filled up
