"""Checks that every row of a batch of texts is one example, and that its padding does not count.

Several texts in one row (packing), or all texts of a batch in one (padding-free collation), save padding. But a row is clipped as one
example: the contribution of a single text is then not bounded, and a text that was cut into two rows counts twice.

**Padding must not count.** Its amount depends on the longest text of the batch, that is on other people's data.

A model that reads padding (an encoder without a mask, a mean over all positions) gives every text another loss when the longest one is left
out: then one person moves everybody's gradient, and clipping bounds nothing. It is tested on a short and a long text before the first step:
other tokens in place of padding, and no padding at all, must not change the loss.

In half precision even a model that masks padding rounds every text differently if there is more of it: then every run, in any loop,
needs one length (:class:`hushgrad.train.invariant_sizes.OneLength`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hushgrad import _check
from hushgrad.errors import ArgumentError

_IGNORED = -100  # transformers' mark for a label that does not count
_ONE_ROW = (
    "Give each text a row of its own, padded: no packing, no padding-free collation, and a collator that leaves nobody out."
)
_LEFT = 'Set tokenizer.padding_side = "right": the longest text of a batch would move all others, and so change their losses.'
_NUMBERED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "seq_lengths")  # where the texts of a row begin
_TRIED = 16  # texts, of which the shortest and the longest are taken
# Relative, in single and in half precision. Other tokens meet the same operations, so exact zeros; another length other ones.
_TOKENS = {False: 5e-7, True: 1e-2}
_LENGTH = {False: 1e-4, True: 2e-2}
_MASKED = "Let data_collator return an attention_mask that the model reads, or pad every text to the same length."


def require_numbered(dataset: Any) -> None:
    """Refuse streamed data: the plan draws records by their index."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        remedy = "Batches are drawn at random from all of it. Read a stream into memory, or onto the disk, before: Dataset.from_generator."
        _check.fail("train_dataset", type(dataset).__name__, "to have a length, and records by their number", remedy)


def require_apart(dataset: Any) -> None:
    """Refuse data that were packed before, because a collator may drop the column that says where the texts of a row begin."""
    record = dataset[0] if len(dataset) else None
    for name in _NUMBERED:
        if isinstance(record, Mapping) and name in record:
            _check.fail("train_dataset", name, "not to have this column: it says where the texts of a row begin", _ONE_ROW)


def require_texts(inputs: Mapping[str, Any], examples: int) -> None:
    """Refuse a batch of ``examples`` examples in which a row is not one of them."""
    if not isinstance(inputs, Mapping):
        remedy = "Let data_collator return a dictionary of tensors: input_ids, attention_mask, labels."
        _check.fail("data_collator", "something else", "to give a dictionary", remedy)
    for name in ("input_ids", "inputs_embeds", "labels"):
        rows = inputs.get(name)
        if examples and isinstance(rows, Tensor) and (rows.dim() == 0 or len(rows) != examples):
            constraint = f"to have {examples} rows, one for each example of the batch"
            _check.fail(f"{name}.shape", tuple(rows.shape), constraint, _ONE_ROW)
    for name in _NUMBERED:
        if inputs.get(name) is not None:
            _check.fail("inputs", name, "not to be there: it says where the texts of a row begin", _ONE_ROW)
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if isinstance(mask, Tensor) and mask.dim() == 2 and not mask.is_floating_point() and bool((mask > 1).any()):
        _check.fail("attention_mask", int(mask.max()), "to be 0 or 1: larger numbers tell the texts of a row apart", _ONE_ROW)
    if isinstance(mask, Tensor) and mask.dim() == 2 and positions is None and bool((mask[:, :1] < mask.amax(1, True)).any()):
        _check.fail("attention_mask", "padding on the left", "to have it on the right, or position_ids beside it", _LEFT)
    if isinstance(positions, Tensor) and positions.dim() == 2 and _begins_again(positions, mask, inputs.get("labels")):
        _check.fail("position_ids", "positions that begin again", "to grow along a row: it holds several texts", _ONE_ROW)


def _begins_again(positions: Tensor, mask: Any, labels: Any) -> bool:
    """Whether positions fall within the part of a row that is read, before a label that counts."""
    falls = positions[:, 1:] <= positions[:, :-1]
    if isinstance(mask, Tensor) and mask.shape == positions.shape:
        falls = falls & mask[:, 1:].bool() & mask[:, :-1].bool()
    if isinstance(labels, Tensor) and labels.shape == positions.shape:
        counted = labels[:, 1:].ne(_IGNORED)
        falls = falls & (counted.flip(1).cumsum(1).flip(1) > 0)  # else it is padding
    return bool(falls.any())


# Padding --------------------------------------------------------------------------------------------------------------------


def require_padding_apart(
    dataset: Any, collate: Callable[..., Any], loss_of: Callable[[Any], Tensor], *, half: bool, model: nn.Module
) -> None:
    """Refuse passes in which a text's loss depends on how long the others are, as far as two texts show.

    Args:
        dataset: the texts; some are read, nothing is kept of them.
        collate: makes a batch of them.
        loss_of: of a batch of one text.
        half: computed in half precision.
        model: whose tables are looked up.
    """
    texts = [dataset[len(dataset) * k // _TRIED] for k in range(_TRIED)] if len(dataset) else []
    alone = [_collated(collate, [text]) for text in texts]
    lengths = [0 if (ids := _ids(batch)) is None else ids.shape[1] for batch in alone]
    read = [k for k, length in enumerate(lengths) if length]  # an empty text is not run alone
    if not read:
        return
    short, long = min(read, key=lengths.__getitem__), max(read, key=lengths.__getitem__)
    padded = _first(_collated(collate, [texts[short], texts[long]]))
    others = None if padded is None else _with_others(alone[short], padded)
    if padded is None or others is None:
        return
    own, beside, changed = (float(loss_of(batch)) for batch in (alone[short], padded, others))
    token = _token(alone[short], padded)
    if abs(beside - changed) > _TOKENS[half] * abs(beside) and token is not None:
        with _other_rows(_readers(model, padded["input_ids"], partial(loss_of, padded)), token) as found:
            # A classifier may find a text's end by the token of padding, and read nothing of it.
            changed = float(loss_of(padded)) if found else changed
    if abs(beside - changed) > _TOKENS[half] * abs(beside) or abs(own - beside) > _LENGTH[half] * abs(own):
        # The numbers are a record's own, and stay here.
        raise ArgumentError(
            f"Expected a text's loss not to depend on how long others are: with other padding it is another. {_MASKED}"
        )


def _collated(collate: Callable[..., Any], texts: list[Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            return collate([dict(text) if isinstance(text, Mapping) else text for text in texts])
        except (TypeError, ValueError, RuntimeError, KeyError) as error:
            raise ArgumentError(
                f"Expected data_collator to make a batch of {len(texts)} of the texts ({type(error).__name__}). Texts of different "
                "lengths have to be padded: DataCollatorForLanguageModeling(tokenizer, mlm=False), for instance."
            ) from error


def _ids(batch: Any) -> Tensor | None:
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return ids if isinstance(ids, Tensor) and ids.dim() == 2 else None


def _first(batch: Any) -> dict[str, Any] | None:
    """The first of two texts, as the batch has it."""
    ids = _ids(batch)
    if ids is None or len(ids) != 2:
        return None
    return {name: t[:1] if isinstance(t, Tensor) and t.dim() and len(t) == 2 else t for name, t in batch.items()}


def _token(alone: Any, padded: dict[str, Any]) -> int | None:
    """The token of padding, if there is one, and the text does not hold it."""
    more = padded["input_ids"].unique()[~torch.isin(padded["input_ids"].unique(), alone["input_ids"])]
    return int(more[0]) if len(more) == 1 else None


def _readers(model: nn.Module, ids: Tensor, run: Callable[[], Any]) -> list[nn.Embedding]:
    """The tables in which these tokens are looked up in a pass."""
    found: dict[nn.Embedding, None] = {}

    def note(table: nn.Embedding, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        read = args[0] if args else kwargs["input"]
        if read.shape == ids.shape and torch.equal(read.to(ids), ids):
            found[table] = None

    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    handles = [table.register_forward_pre_hook(note, with_kwargs=True) for table in tables]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return list(found)


@contextmanager
def _other_rows(tables: list[nn.Embedding], token: int) -> Iterator[bool]:
    """Inside, a token means something else in these tables, if there are any."""
    rows = [table.weight.detach()[token] for table in tables]
    before = [row.clone() for row in rows]
    for row in rows:
        row.copy_(torch.linspace(-1, 1, len(row), dtype=row.dtype, device=row.device))
    try:
        yield bool(rows)
    finally:
        for row, own in zip(rows, before, strict=True):
            row.copy_(own)


def _with_others(alone: Any, padded: dict[str, Any]) -> dict[str, Any] | None:
    """The padded text with other tokens in place of padding; None if the collator draws a text at random or does not pad."""
    one, other = alone["input_ids"], padded["input_ids"]
    n, more = one.shape[1], other.shape[1] - one.shape[1]
    parts = {"right": (slice(0, n), slice(n, None)), "left": (slice(more, None), slice(0, more))}
    side = next((side for side, (text, _) in parts.items() if more > 0 and torch.equal(other[:, text], one)), None)
    if side is None:
        return None
    text, padding = parts[side]
    labels: tuple[Any, Any] = alone.get("labels"), padded.get("labels")
    tokens = all(isinstance(t, Tensor) and t.shape == ids.shape for t, ids in zip(labels, (one, other), strict=True))
    if tokens and not torch.equal(labels[1][:, text], labels[0]):
        return None
    changed = other.clone()
    changed[:, padding] = one[:, torch.arange(more) % n]
    return {**padded, "input_ids": changed}
