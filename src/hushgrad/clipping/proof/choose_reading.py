"""Decides where a model's inputs hold the examples: the reading under which examples alone give what they give in the batch.

A matching size is never evidence. If the model treats two readings alike, or uses an input with one row for each example as a shared one,
only the caller can decide, and an error asks. Nor can the outputs overrule the caller's declaration: a model that mixes examples but keeps
positions apart is explained by reading positions as examples, if there are as many of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hushgrad.clipping.layout import Kind, Layout
from hushgrad.clipping.proof.flat_rows import Piece, evenly, told_otherwise
from hushgrad.clipping.proof.inputs import Reading, leaves, mapped, readings
from hushgrad.clipping.proof.rounding import same_as_made
from hushgrad.clipping.proof.survey import Run, Stage, exits_in, run_some
from hushgrad.clipping.runs import UNCALLABLE
from hushgrad.clipping.thresholds import MUCH_LARGER
from hushgrad.errors import CaptureError, NotIsolated


class _Fit(NamedTuple):
    """A reading of the inputs under which some examples alone give what they give in the batch."""

    reading: Reading
    layouts: tuple[Layout | None, ...]
    run: Run | None = None  # of these examples, if its graph is small compared with the batch's


def fit_of(stage: Stage, inputs: Any, whole: Run, which: Tensor, examples: int) -> _Fit | None:
    """The reading that explains the outputs of the whole batch; None if there is none.

    Args:
        stage: runs the model.
        inputs: of the model.
        whole: the pass over the batch.
        which: the examples that run alone.
        examples: how many the batch has.

    Raises:
        CaptureError, NotIsolated: another reading explains them as well, or a shared input may hold the examples' own data.
    """
    found = list(_fitting(stage, inputs, whole, which, examples))
    if not found:
        return None
    fits = [fit for fit in found if _is_said(stage, fit.reading, inputs, examples)]
    if not fits:
        said = stage.dim() or 0
        what = f"mixes what is in dimension {said}, where the examples are said to be, and keeps other rows apart"
        raise CaptureError(
            _unclear(what, next(tuple(t.shape) for t in leaves(inputs) if t.shape[said : said + 1] == (examples,)))
        )
    fit = fits[0]
    others = found if stage.dim() is None else fits
    rival = next((other for other in others if _differ(fit, other)), None)
    fit = fit if rival is None else _told_apart(fit, rival, stage.dim(), inputs)
    _require_told(fit.reading, inputs, examples, stage.shared)
    _require_rows_alone(stage, fit.reading, inputs, whole, examples)
    return fit


def _is_said(stage: Stage, reading: Reading, inputs: Any, examples: int) -> bool:
    """Whether every input with a row for each example in the declared dimension (by default the first) is read there.

    Another dimension is accepted only if an earlier proof, whose sizes left no choice, has found it.
    """
    said = stage.dim() or 0
    tensors = leaves(inputs)
    for k, (t, layout) in enumerate(zip(tensors, reading.layouts, strict=True)):
        elsewhere = isinstance(layout, Layout) and layout[:2] != (Kind.DIM, said)
        if elsewhere and t.shape[said : said + 1] == (examples,) and not stage.placed(len(tensors), k, layout):
            return False
    return True


def _fitting(stage: Stage, inputs: Any, whole: Run, which: Tensor, examples: int) -> Iterator[_Fit]:
    """The likeliest reading that explains the outputs, then those that assign a tensor's rows to other examples."""
    first: Reading | None = None
    for reading in readings(inputs, examples):
        if first is None or _elsewhere(first.layouts, reading.layouts):
            some = run_some(stage, reading, inputs, which, examples)
            layouts = None if some is None else _exits(stage, reading, inputs, whole, some, which, examples)
            flat = reading.flat(inputs, examples)
            # A list of as many links is no list of rows.
            if layouts is not None and (
                flat is None or any(_takes(stage, reading, inputs, m) for m in (flat.halves(), flat.longer()))
            ):
                empty = flat is not None and 0 in flat.counts
                small = first is None and examples >= MUCH_LARGER * len(which)
                first = first or reading
                even = evenly(leaves(inputs), reading.layouts, examples)
                yield _Fit(reading._replace(empty=empty, even=even), layouts, some if small else None)
            del some  # frees its graph


def _takes(stage: Stage, reading: Reading, inputs: Any, pieces: list[list[Piece]]) -> bool:
    """Whether the model takes examples with other numbers of rows, where all are in one list, and returns as much for each."""
    flat = reading.flat(inputs, len(pieces))
    if flat is None or pieces == flat.every(range(len(pieces))):
        return False
    try:
        with torch.no_grad(), stage.paused():
            stage.alone(reading.joined(inputs, pieces, len(pieces)))
    except (*UNCALLABLE, LookupError):  # outputs that are padded to the longest example cannot be opened
        return False
    return True


def _exits(
    stage: Stage, reading: Reading, inputs: Any, whole: Run, some: Run, which: Tensor, examples: int
) -> tuple[Layout | None, ...] | None:
    """The layouts of the outputs, compared up to the rounding of their terms, which needs a pass without the capture."""
    found = exits_in([y.detach() for y in whole.outputs], some, which, examples)
    if found is None:
        with torch.enable_grad(), stage.paused():
            found = exits_in(stage.alone(inputs)[0], some, which, examples)
    told = reading.uneven or (
        stage.opening is not None and any(way is not None and way.form != "padded" for way in stage.opening.ways)
    )
    layouts = [*(found or ()), *(reading.layouts if told else ())]
    chance = told and any(isinstance(one, Layout) and one.kind is not Kind.DIM for one in layouts)  # as many rows each, this time
    return None if chance else found


def _elsewhere(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return any(isinstance(x, Layout) and isinstance(y, Layout) and x[:2] != y[:2] for x, y in zip(a, b, strict=True))


def _differ(fit: _Fit, other: _Fit) -> bool:
    return _elsewhere(fit.layouts, other.layouts)


def _told_apart(fit: _Fit, rival: _Fit, dim: int | None, inputs: Any) -> _Fit:
    """Of two readings that both explain the outputs, the one with the examples in the declared dimension."""
    shape = next(
        tuple(t.shape)
        for t, x, y in zip(leaves(inputs), fit.reading.layouts, rival.reading.layouts, strict=True)
        if _elsewhere([x], [y])
    )
    told = []
    for one in (fit, rival) if dim is not None else ():
        layouts = zip(fit.reading.layouts, rival.reading.layouts, one.reading.layouts, strict=True)
        if all(own.dim == dim for x, y, own in layouts if _elsewhere([x], [y])):
            told.append(one)
    if len(told) == 1:  # else both are in one dimension: one example's rows are adjacent, or interleaved
        return told[0]
    raise CaptureError(_unclear("treats two ways to read it alike", shape))


def _unclear(what: str, shape: tuple[int, ...]) -> str:
    return (
        f"It cannot be told which rows of an input of the shape {shape} are whose: the model {what}. Let "
        "private.loader(dataset, collate_fn=...) deal the batches as the model takes them (what the loop transposes, collate_fn or the "
        "model can), or with a bare Capture say where the examples are: capture.examples(count, dim=0), or dim=1 (several rows of each "
        "example need a dimension of their own: (B, views, ...))."
    )


def _require_told(reading: Reading, inputs: Any, examples: int, known: Callable[[int, Any], bool]) -> None:
    """Refuse a reading that explains the outputs but uses what may be the examples' own data as a shared input.

    Args:
        reading: the reading that explains the outputs.
        inputs: of the model.
        examples: how many there are.
        known: whether a tensor of this number and shape was shared in a proof with another number of examples.

    Raises:
        NotIsolated: with the remedy.
    """
    for k in reading.shared_like_data(inputs, examples):
        shape = tuple(leaves(inputs)[k].shape)
        if not known(k, shape):
            raise NotIsolated(
                f"The model uses an input of the shape {shape} for all {examples} examples of the batch together, though it has a row for "
                "each of them: if these are the examples' own, they influence each other. Give what all share (a mask) a first dimension "
                "of 1, mask[None]; keep the examples' own data apart."
            )


def _require_rows_alone(stage: Stage, reading: Reading, inputs: Any, whole: Run, examples: int) -> None:
    """Refuse to read rows as examples if an input, which the model ignores, may tell that some example has several of them.

    Raises:
        CaptureError: nobody has declared where the examples are, and what the model returns says nothing about it.
    """
    tensors = leaves(inputs)
    listed = [t for t, v in zip(tensors, reading.layouts, strict=True) if isinstance(v, Layout) and v.dim == 0 and v.factor == 1]
    if stage.is_declared() or stage.opening is not None or not listed:
        return
    for told in tensors:
        for other in told_otherwise(told, examples) if len(listed) > 1 or listed[0] is not told else ():
            changed = _replaced(inputs, told, other)
            try:
                with torch.no_grad(), stage.paused():
                    again = stage.alone(changed)[0]
            except UNCALLABLE:
                continue
            if [y.shape for y in again] == [y.shape for y in whole.outputs] and all(map(same_as_made, whole.outputs, again)):
                row = tuple(next(t for t in listed if t is not told).shape)
                raise CaptureError(_unclear(f"ignores an input {tuple(told.shape)} that may tell it", row))


def _replaced(inputs: Any, one: Any, other: Any) -> Any:
    return mapped(inputs, lambda t: other if t is one else t)
