"""What is fetched for one step: its records, read and collated, filled up to a size. It runs in the loader's workers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from operator import methodcaller
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset, default_collate

from hushgrad.errors import ArgumentError
from hushgrad.sampling.batch import empty_like
from hushgrad.sampling.draws import Draws
from hushgrad.sampling.grown import grown_dim, keeps_apart
from hushgrad.sampling.seeds import seeded
from hushgrad.sampling.sizes import AS_THEY_COME, Sizes
from hushgrad.sampling.units import Units


class Hand(NamedTuple):
    """What is fetched for one step, before it is stamped."""

    step: int
    examples: int
    units: torch.Tensor | None
    padding: int
    data: Any


class Hands(Dataset[Hand]):
    """Map-style view of the data, asked for whole steps: runs in the workers, fetches and collates."""

    def __init__(
        self,
        dataset: Any,
        units: Units | None,
        collate: Callable[[list[Any]], Any],
        seeds: bytes | None = None,
        copies: int = 1,
        sizes: Sizes = AS_THEY_COME,
        draws: Draws | None = None,
        fixed: int | None = None,
    ) -> None:
        self._dataset, self._units, self._collate, self._seeds, self._draws = dataset, units, collate, seeds, draws
        self._copies, self.sizes, self.fixed = copies, sizes, fixed
        # Records from which on a batch is left as it is; None: it is filled up to a size, however many there are.
        self._enough = None if fixed is not None or sizes.fine is None else -(-sizes.fine // copies)
        self._empty: Any = None
        self._dim: tuple[int | None] | None = None  # once it was looked for

    def __getitem__(self, asked: tuple[int, np.ndarray]) -> Hand:
        step, chosen = asked
        indices, unit = (chosen, None) if self._units is None else self._units.expand(chosen, step=step, draws=self._draws)
        padding = 0 if self._enough is not None and len(indices) >= self._enough else self._missing(len(indices))
        if padding:  # copies of the first, after all others
            first = indices[:1] if len(indices) else np.zeros(1, np.int64)
            indices = np.append(indices, np.repeat(first, padding))
            unit = None if unit is None else np.append(unit, np.zeros(padding, np.int64))
        if self._copies > 1:
            unit = np.repeat(indices if unit is None else unit, self._copies)
            return Hand(step, len(unit), torch.from_numpy(unit), padding * self._copies, self._several(step, indices))
        units = None if unit is None else torch.from_numpy(unit)
        return Hand(step, len(indices), units, padding, self._fetch(step, indices))

    def _missing(self, count: int) -> int:
        """Examples that are missing to the size of a batch."""
        size = self.fixed or count
        if size < count:
            raise ArgumentError(f"Expected a batch to have at most {self.fixed} examples. This is a defect of its sampler.")
        fine = self.sizes.fine
        while (fine is None or size * self._copies < fine) and self.sizes.rows(size * self._copies) > size * self._copies:
            size += 1
        return size - count

    def _several(self, step: int, indices: np.ndarray) -> Any:
        """Every record read several times, copies of one record side by side; copy c of step t follows from (key, t, c)."""
        if not len(indices):
            return self._nothing()
        passes = []
        for copy in range(self._copies):
            with nullcontext() if self._seeds is None else seeded(self._seeds, step, copy):
                passes.append([self._dataset[i] for i in indices.tolist()])
        return self._collate([example for copies in zip(*passes, strict=True) for example in copies])

    def _fetch(self, step: int, indices: np.ndarray) -> Any:
        if type(self._dataset) is TensorDataset and self._collate is default_collate and len(indices):
            # The same result as collating example by example, without the loop: one gather per tensor.
            where = torch.from_numpy(indices)
            return [*map(methodcaller("index_select", 0, where), self._dataset.tensors)]
        with nullcontext() if self._seeds is None else seeded(self._seeds, step):
            return self._collate([self._dataset[i] for i in indices.tolist()]) if len(indices) else self._nothing()

    def dim(self) -> int | None:
        """The dimension of a batch's tensors that holds the examples; None if that cannot be said of all of them."""
        if self._dim is None:
            with nullcontext() if self._seeds is None else seeded(self._seeds, 0):
                self._dim = (grown_dim(self._dataset, self._collate),)
        return self._dim[0]

    def keeps_apart(self) -> bool:
        """Whether the collate function gives a record the same rows whoever the others are, as far as a few show."""
        seeds = self._seeds
        return keeps_apart(self._dataset, self._collate, again=nullcontext if seeds is None else lambda: seeded(seeds, 0))

    def _nothing(self) -> Any:
        # Built from an example only for its shapes and types; no content is kept.
        if self._empty is None:
            self._empty = empty_like(self._collate([self._dataset[0]]), self.dim() or 0)
        return self._empty
