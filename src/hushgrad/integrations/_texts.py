"""Checks that every row of a batch of texts is one example.

Several texts in one row (packing), or all texts of a batch in one (padding-free collation), save padding. But a row is clipped as one
example: the contribution of a single text is then not bounded, and a text that was cut into two rows counts twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hushgrad import _check

_IGNORED = -100  # transformers' mark for a label that does not count
_ONE_ROW = (
    "Give each text a row of its own, padded: no packing, no padding-free collation, and a collator that leaves nobody out."
)
_LEFT = 'Set tokenizer.padding_side = "right": the longest text of a batch would move all others, and so change their losses.'
_NUMBERED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "seq_lengths")  # where the texts of a row begin


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
