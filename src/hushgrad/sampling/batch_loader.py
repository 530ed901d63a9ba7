"""The loader: fetches the sampler's batches from a data set, stamps each with its step, and hands them out in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from hushgrad import _check
from hushgrad.errors import ArgumentError, BudgetExceeded, WorkerLost
from hushgrad.sampling.base import Deal
from hushgrad.sampling.batch import AS_THEY_COME, Batch, Sizes, Smallest, TensorBatch, empty_like, tuple_class, tuple_of
from hushgrad.sampling.batch_numbers import Path, made_of_all
from hushgrad.sampling.collate_checks import SmallestRow, grown_dim, keeps_apart, read_alone, sizes_apart, smallest
from hushgrad.sampling.draws import Draws
from hushgrad.sampling.rows_read import reads_one_row
from hushgrad.sampling.seeds import Seeds
from hushgrad.sampling.units import Units

_REDEALT = (
    "A private run's batches are dealt by its own loader: whoever shards or re-samples them changes the privacy of the run. "
    "Keep the loader out of prepare() and of automatic samplers, and give it rank= and world_size= instead."
)


class _Hand(NamedTuple):
    """The data of one step as a worker returns it, before it is stamped."""

    step: int
    examples: int
    units: Tensor | None
    padding: int
    data: Any
    smallest: tuple[int, int] | None  # the number and the row of its smallest example, if their sizes differ


class Steps:
    """The sampler of the inner DataLoader: pairs (step, records of this process) from step ``first`` on."""

    def __init__(self, deal: Deal, first: int, stop: int, rank: int, world_size: int) -> None:
        self._deal, self._first, self._stop, self._rank, self._world_size = deal, first, stop, rank, world_size
        # For steps not handed out yet (workers are a few ahead): all records that take part, also those of other processes.
        self.dealt: dict[int, np.ndarray] = {}

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        for step in range(self._first, self._stop):
            self.dealt[step] = self._deal(step)
            yield step, self.dealt[step][self._rank :: self._world_size]

    def __len__(self) -> int:
        return self._stop - self._first


class Hands(Dataset[_Hand]):
    """The data as a map-style data set of whole steps: fetches and collates a step's records, in the workers."""

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
        rank: int = 0,
    ) -> None:
        self.dataset, self._units, self._collate, self._draws = dataset, units, collate, draws
        self._seeds, self._rank = Seeds(seeds), rank
        self._copies, self.sizes, self.fixed = copies, sizes, fixed
        # From this number of records on a batch is not padded; None: it is always padded.
        self._enough = None if fixed is not None or sizes.fine is None else -(-sizes.fine // copies)
        self._empty: Any = None
        self._dim: tuple[int | None] | None = None  # cached

    def __getitem__(self, asked: tuple[int, np.ndarray]) -> _Hand:
        step, chosen = asked
        indices, unit = (chosen, None) if self._units is None else self._units.expand(chosen, step=step, draws=self._draws)
        padding = 0 if self._enough is not None and len(indices) >= self._enough else self._missing(len(indices))
        if padding:  # padding: copies of the first record, at the end
            first = indices[:1] if len(indices) else np.zeros(1, np.int64)
            indices = np.append(indices, np.repeat(first, padding))
            unit = None if unit is None else np.append(unit, np.zeros(padding, np.int64))
        if self._copies > 1:
            unit = np.repeat(indices if unit is None else unit, self._copies)
            return _Hand(step, len(unit), torch.from_numpy(unit), padding * self._copies, *self._fetch(step, indices))
        units = None if unit is None else torch.from_numpy(unit)
        return _Hand(step, len(indices), units, padding, *self._fetch(step, indices))

    def _missing(self, count: int) -> int:
        """How many examples of padding a batch of ``count`` needs."""
        size = self.fixed or count
        if size < count:
            raise ArgumentError(f"Expected a batch to have at most {self.fixed} examples. This is a defect of its sampler.")
        fine = self.sizes.fine
        while (fine is None or size * self._copies < fine) and self.sizes.rows(size * self._copies) > size * self._copies:
            size += 1
        return size - count

    def _fetch(self, step: int, indices: np.ndarray) -> tuple[Any, tuple[int, int] | None]:
        """The collated records, copies of one adjacent; and which is the smallest, if a custom collate function may pad them."""
        if not len(indices):
            return self._nothing(), None
        if type(self.dataset) is TensorDataset and self._collate is default_collate:
            # The same result as collating single examples, by one gather per tensor.
            where = torch.from_numpy(indices)
            return [*map(methodcaller("index_select", 0, where), self.dataset.tensors)], None
        with self._seeds.kept():
            read = [self._seeds.read(self.dataset, step, c, i) for i in indices.tolist() for c in range(self._copies)]
            place = None if self._collate is default_collate else smallest(read)
            self._seeds.start(step, self._rank)  # each process draws for its own rows
            return self._collate(read), None if place is None else (int(indices[place // self._copies]), place)

    def alone(self, step: int, record: int) -> Any:
        """What is made of one record of a step, without others."""
        with self._seeds.kept():
            read = self._seeds.read(self.dataset, step, 0, record)
            self._seeds.start(step, self._rank)
            return self._collate([read])

    def dim(self) -> int | None:
        """The dimension of a batch's tensors that holds the examples; None if they disagree."""
        if self._dim is None:
            with self._seeds.kept():
                self._seeds.start(0)
                self._dim = (grown_dim(self.dataset, self._collate),)
        return self._dim[0]

    def keeps_apart(self) -> bool:
        """Whether reading and collating a record does not depend on the other records, tested on a few of them."""
        return (
            read_alone(self.dataset, self._collate, self._seeds)
            and keeps_apart(self.dataset, self._collate, self._seeds)
            and reads_one_row(self.dataset, self._seeds)
        )

    def made_of_all(self) -> frozenset[Path]:
        """Where a batch has what is no tensor and made of all its records together, tested on a few of them."""
        return made_of_all(self.dataset, self._collate, self._seeds)

    def _nothing(self) -> Any:
        # Built from an example only for its shapes and types; no content is kept.
        if self._empty is None:
            with self._seeds.kept():
                self._empty = empty_like(self._collate([self._seeds.read(self.dataset, 0, 0, 0)]), self.dim() or 0)
        return self._empty


_kinds: dict[type, type] = {}


def stamp(
    data: Any,
    *,
    step: int,
    examples: int,
    units: Tensor | None = None,
    padding: int = 0,
    sizes: Sizes = AS_THEY_COME,
    fixed: bool = False,
    part: int | None = None,
    issue: Callable[[Batch], None] | None = None,
    records: np.ndarray | None = None,
    dim: Callable[[], int | None] | None = None,
    smallest: Smallest | None = None,
) -> Batch:
    """``data`` as a stamped batch: an instance of its own type that is a :class:`Batch` as well."""
    batch: Any
    if isinstance(data, Tensor):
        batch = data.as_subclass(TensorBatch)
    elif isinstance(data, tuple):
        batch = tuple_of(_kind(tuple_class(type(data))), data, data)
    elif isinstance(data, list):
        batch = (_kinds.get(list) or _kind(list))(data)
    elif isinstance(data, Mapping):
        batch = _kind(dict)(data)
    else:
        _check.fail("batch", type(data).__name__, "to be a tensor, tuple, list or dict", "Let collate_fn return one of these.")
    batch.step, batch.examples, batch.units, batch.part, batch.cut = step, examples, units, part, None
    batch.padding, batch._sizes, batch._fixed, batch._issue, batch._records = padding, sizes, fixed, issue, records
    batch._dim, batch._smallest = dim, smallest
    return batch  # type: ignore[no-any-return]


def _kind(base: type) -> type:
    if base not in _kinds:
        _kinds[base] = type(f"{base.__name__.capitalize()}Batch", (Batch, base), {"__doc__": Batch.__doc__})
    return _kinds[base]


def _as_dealt(hand: Any) -> Any:
    return hand


class BatchLoader:
    """Yields each step's batch once, in order; one loop over it is the whole run.

    It is not a ``DataLoader``, and its batches cannot be redrawn: ``.sampler`` and ``.batch_sampler`` raise, so frameworks
    that shard batches or swap samplers stop instead of changing what the privacy accounting relies on. A loop that was left
    early goes on where it stopped. After the last step a further loop raises :class:`~hushgrad.errors.BudgetExceeded`; but where a run
    was resumed whose last step had been taken (``finished``) there is nothing to loop over, and the program goes on to its own end.
    """

    finished = False
    reading: Callable[[], AbstractContextManager[None]] = nullcontext  # what records are read inside of

    def __init__(
        self,
        hands: Hands,
        steps: Callable[[int], Steps],
        *,
        start: int,
        stop: int,
        on_issue: Callable[[Batch], None] | None,
        options: dict[str, Any],
    ) -> None:
        self.hands, self._steps, self._options, self._on_issue = hands, steps, options, on_issue
        self._next, self._stop = start, stop

    def __len__(self) -> int:
        """How many steps are left."""
        return self._stop - self._next

    @property
    def next_step(self) -> int:
        """The step of the batch that comes next."""
        return self._next

    def __iter__(self) -> Iterator[Batch]:
        if self.finished:
            return iter(())
        if self._next >= self._stop:
            raise BudgetExceeded(
                f"All {self._stop} steps of this run have been dealt. One loop over the loader is the whole run, all epochs "
                "included: remove the loop over epochs around it, or plan more steps."
            )
        return self._deal()

    def _deal(self) -> Iterator[Batch]:
        steps = self._steps(self._next)
        hands, issue = self.hands, self._on_issue
        received = iter(DataLoader(hands, sampler=steps, batch_size=None, collate_fn=_as_dealt, **self._options))
        always: dict[str, Any] = {"sizes": hands.sizes, "fixed": hands.fixed is not None, "dim": hands.dim, "issue": issue}
        while True:
            try:
                with self.reading():
                    hand = next(received, None)
            except (RuntimeError, ConnectionError, EOFError) as error:
                raise _lost(error) from error
            if hand is None:
                return
            if hand.step != self._next:
                raise ArgumentError(f"Expected step={hand.step} to be step {self._next}. Do not run two loops over one loader.")
            self._next += 1
            about: dict[str, Any] = {"step": hand.step, "examples": hand.examples, "units": hand.units, "padding": hand.padding}
            if hand.smallest is not None:
                sizes = sizes_apart(hand.data, hands.dim() or 0)
                record, row = hand.smallest
                about["smallest"] = SmallestRow(row, partial(hands.alone, hand.step, record), hands.dim() or 0, sizes)
            batch = stamp(hand.data, **about, **always, records=steps.dealt.pop(hand.step))
            if issue is not None:
                issue(batch)
            yield batch

    @property
    def dataset(self) -> Any:
        """The data set, for loops that print ``len(loader.dataset)``."""
        return self.hands.dataset

    @property
    def sampler(self) -> NoReturn:
        """Raises: no other loader may draw the batches."""
        raise ArgumentError(_REDEALT)

    batch_sampler = sampler

    def __getitem__(self, index: object) -> NoReturn:
        raise ArgumentError(_REDEALT)


def _lost(error: RuntimeError | ConnectionError | EOFError) -> WorkerLost:
    """A :class:`WorkerLost` for the various errors by which torch reports a dead worker; any other error is raised again."""
    if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
        raise error
    return WorkerLost(
        f"A process that loads data died ({error}). The step that waited for its batch was not taken. Look for a lack of "
        "memory, then resume from the last checkpoint, or load with num_workers=0."
    )
