"""``loader``: builds a :class:`BatchLoader` from a data set and a sampler, and checks all arguments before anything is drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, TensorDataset, default_collate

from hushgrad import _check
from hushgrad.sampling.base import Sampler
from hushgrad.sampling.batch import AS_THEY_COME, Batch, Sizes
from hushgrad.sampling.batch_loader import BatchLoader, Hands, Steps
from hushgrad.sampling.draws import Draws
from hushgrad.sampling.units import Grouping, Units

_OURS = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "in_order")


def loader(
    dataset: Any,
    sampler: Sampler,
    *,
    rng_key: bytes,
    start: int = 0,
    stop: int | None = None,
    groups: Grouping | None = None,
    rank: int = 0,
    world_size: int = 1,
    on_issue: Callable[[Batch], None] | None = None,
    seeds: bytes | None = None,
    attendance: Callable[[int], None] | None = None,
    copies: int = 1,
    sizes: Sizes = AS_THEY_COME,
    fixed: int | None = None,
    collate_fn: Callable[[list[Any]], Any] = default_collate,
    **dataloader_options: Any,
) -> BatchLoader:
    """Stamped batches of a map-style ``dataset``, drawn by ``sampler`` from the secret ``rng_key``.

    Args:
        dataset: anything with ``len()`` and ``[i]``.
        sampler: which records take part in which step.
        rng_key: 16 to 64 secret bytes; batch t is a pure function of (key, t, the data's size).
        start: first step; a resumed run draws the same batches that the interrupted one would have drawn.
        stop: step before which to stop; all of the sampler's steps by default.
        groups: unit id of each example (array, or function of the example's number) for user-level privacy: units are sampled,
            and a batch holds all examples of its units, or as many as the cap of ``Units`` allows, with their numbers in ``batch.units``.
        rank: this process's number; of each step's records it gets every ``world_size``-th.
        world_size: how many processes share each batch. All must have the same key.
        on_issue: called with each batch, and each micro-batch of ``split``, just before it is handed out.
        seeds: 16 to 64 secret bytes; each example of step t is then read under random states (torch, numpy, random) that follow
            from (seeds, t, copy, its number), in workers and here alike, so that an augmentation is the same whenever the step is drawn
            again, whatever other examples are in the batch.
        attendance: called with the number of records, or units, before the first batch.
        copies: how many times each example is read, as rows of one unit: for random augmentations.
        sizes: to which a batch or micro-batch is padded with copies of its first example; ``batch.padding`` counts them.
        fixed: number of records (or units; these need a cap) to which every batch is padded, over all processes together.
        collate_fn: list of examples -> batch, as in torch; never called with an empty list.
        dataloader_options: ``num_workers``, ``pin_memory`` and so on of ``torch.utils.data.DataLoader``.

        >>> import torch
        >>> from hushgrad.sampling import Poisson
        >>> data = torch.utils.data.TensorDataset(torch.randn(8, 2), torch.arange(8))
        >>> for x, y in loader(data, Poisson(rate=0.5, steps=3), rng_key=bytes(32)):
        ...     print(tuple(x.shape), y.tolist())
        (3, 2) [0, 5, 7]
        (4, 2) [0, 1, 6, 7]
        (2, 2) [6, 7]
    """
    _check.instance(Sampler, sampler=sampler)
    refuse_options(dataloader_options)
    size = _size(dataset, copies)
    units = None if groups is None else Units.of(groups, examples=size)
    count, draws = size if units is None else units.count, Draws(rng_key)
    deal = sampler.dealer(count, draws)
    if attendance is not None:
        attendance(count)
    stop = sampler.steps if stop is None else _check.integer(0, stop=stop)
    if stop > sampler.steps:
        _check.fail("stop", stop, f"to be at most the sampler's steps={sampler.steps}")
    world_size = _check.positive_int(world_size=world_size)
    if _check.integer(0, rank=rank) >= world_size:
        _check.fail("rank", rank, f"to be below world_size={world_size}")
    rows = None if fixed is None else _rows_of(_check.positive_int(fixed=fixed), units, world_size)
    return BatchLoader(
        Hands(dataset, units, collate_fn, seeds, copies, sizes, draws, rows, rank),
        lambda first: Steps(deal, first, stop, rank, world_size),
        start=_check.integer(0, start=start),
        stop=stop,
        on_issue=on_issue,
        options=dataloader_options,
    )


def _size(dataset: Any, copies: int) -> int:
    """How many examples there are; refuses what is no data set, and copies of what reads the same every time."""
    if isinstance(dataset, (DataLoader, BatchLoader)):
        _check.fail("dataset", dataset, "to be a data set, not a loader", "Pass loader.dataset, the data itself.")
    if _check.positive_int(copies=copies) > 1 and type(dataset) is TensorDataset:
        remedy = "Give a data set that augments at random as it reads; a TensorDataset reads the same every time."
        _check.fail("copies", copies, "to be 1 for this data set", remedy)
    size = len(dataset)
    return size if size >= 1 else _check.fail("len(dataset)", size, "to be at least 1")


def _rows_of(fixed: int, units: Units | None, world_size: int) -> int:
    """The largest number of examples in one process's part of a batch of ``fixed`` records or units."""
    if units is not None and units.cap is None:
        remedy = "Say how many examples of a unit a step reads: groups=Units(ids, examples=..., cap=...)."
        _check.fail("groups", units, "to have a cap, since all batches are to have one size", remedy)
    return -(-fixed // world_size) * (1 if units is None or units.cap is None else units.cap)


def refuse_options(options: dict[str, Any]) -> None:
    """Refuse options of torch's ``DataLoader`` that the sampler determines."""
    for name in _OURS:
        if name in options:
            remedy = (
                "The sampler decides who is in a batch. Give the plan another sampler or batch_size, or use batch.split(size)."
            )
            _check.fail(name, options[name], "not to be given", remedy)
