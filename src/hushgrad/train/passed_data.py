"""Recognises data of a step: whether a tensor holds, row by row, what the loader handed out or the model returned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from random import Random
from typing import Any
from weakref import ReferenceType

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hushgrad.clipping import Capture
from hushgrad.clipping._torch import NodeHooks, memory_of
from hushgrad.clipping.fingerprint import fingerprint
from hushgrad.clipping.proof.inputs import inside
from hushgrad.sampling.batch_numbers import Path, for_all, for_each
from hushgrad.train.row_views import rows_at

LARGE = 1 << 18  # numbers of an output that is not kept alive for this: a vocabulary's logits
FEW = 1 << 14  # numbers of a tensor that is compared with what it held, in every step
_SMALL = 1 << 20  # numbers of a copy that is compared in every step
RARELY = 32  # steps, one of which has larger copies, and those on devices, compared


class PassedData:
    """The tensors that the loader handed out and the model returned in this step, and what is a view or a copy of them.

    A tensor is recognised by its memory, if it was not written to since and row i is still made of row i; or by equal values, on another
    device or in another precision, which are compared in every step if that is cheap, otherwise at random steps. So is what known tensors
    hold themselves: ``.data`` and numpy write without a trace. Not on a device, where looking would wait for it.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self.prepared = False  # some step was taken on other tensors
        # Tensors by their id, with the number of times that they were written to, and what they hold, as a copy or a fingerprint; alive, so
        # that nobody else gets their memory.
        self._batch: dict[int, tuple[Tensor, int, Any]] = {}  # of this step's
        self._parts: dict[int, tuple[Tensor, int, Any]] = {}  # of its micro-batches that are not passed yet, and of the last one
        self._outputs: dict[int, tuple[Tensor, int, Any]] = {}  # of the last pass
        self._large: WeakIdKeyDictionary | None = (
            None  # its large outputs, until the program has let go of them and of their views
        )
        self._whole = self._examples = 0  # rows of the step's batch, and of what was handed out last
        self._turned = False  # the loop gives them along the second dimension
        self._lot = Random(0)  # of its own: a run can be repeated
        self._hooks: list[
            tuple[ReferenceType[Tensor], int]
        ] = []  # outputs of the last pass, and how many hooks they had behind it
        self._on_nodes = NodeHooks.count  # that there were after the last pass
        self._beside: dict[Any, list[Any]] = {}  # what the model and the losses were given first, beside tensors
        self.made_of_all: frozenset[Path] = frozenset()  # where batches have what is no tensor and made of all records together
        self._own: set[int] = set()  # lists and arrays of the batch with one entry for each example
        self._of_all: list[Any] = []  # what of the batch is made of all its records together
        self._begun, self._due = False, True  # copies are compared in this step wherever they are
        self._exact = True  # so is what larger tensors hold
        self._seen = False  # what runs now is tried on single examples

    @property
    def is_open(self) -> bool:
        """Whether a batch was handed out whose step is still to come."""
        return bool(self._batch)

    @property
    def is_seen(self) -> bool:
        """Whether what runs now is tested on single examples."""
        return self._seen

    @contextmanager
    def seen(self) -> Iterator[None]:
        """What happens inside is tested on single examples: nobody has to vouch for it."""
        before, self._seen = self._seen, True
        try:
            yield
        finally:
            self._seen = before

    def is_hooked(self) -> bool:
        """Whether the loop has put hooks on outputs since the pass, or on what it has made of them for a loss."""
        made = ((reference(), count) for reference, count in self._hooks)
        behind = any(leaf is not None and len(leaf._backward_hooks or ()) > count for leaf, count in made)
        return behind or NodeHooks.count != self._on_nodes

    def is_new(self, whose: Any, given: Any) -> bool:
        """Whether the model, or a loss, is given other numbers, words or arrays beside tensors than in its first pass.

        So is what the collate function has made of all records together, which may be the same in every pass over all data.
        """
        now = [*_values(given, self._own)]
        return self._beside.setdefault(whose, now) != now or any(type(a) is type(b) and a == b for a in now for b in self._of_all)

    def _beside_tensors(self, batch: Any, examples: int) -> None:
        """Note what the loader has handed out beside tensors: for each example, and made of all records together."""
        self._own = {*for_each(batch, examples)}
        found = for_all(batch, examples) if self.made_of_all else ()
        self._of_all = [value for where, value in found if where in self.made_of_all]

    def is_rewritten(self) -> bool:
        """Whether the loop has written other numbers into a known tensor by ``.data`` or numpy, which no version tells."""
        return any(t._version == version and not is_still(t, version, content) for t, version, content in self._known())

    def _weakly(self, leaf: Tensor) -> bool:
        """Refer to a large output weakly from here on, since it is as large as everything else together.

        Not in half precision, where a loss usually gets a copy of it, which only its values identify.
        """
        if leaf.element_size() <= 2:
            leaf.register_hook(self._back)
            return False
        self._large = WeakIdKeyDictionary() if self._large is None else self._large
        self._large[leaf] = leaf._version, fingerprint(leaf) if self._exact and leaf.is_cpu else None
        return True

    def _back(self, _: Tensor) -> None:
        """Drop a large output after its gradient has come back: nothing here keeps it during the next pass."""
        self._outputs = {}

    def _is_known(self, leaf: Tensor) -> bool:
        """Whether it is a view of a known tensor that was not written to; or a copy."""
        memory = memory_of(leaf)
        for tensor, version, content in self._known():
            if tensor.numel() and memory_of(tensor) == memory:
                if leaf._version != version or not is_still(tensor, version, content):
                    return False
                if self._has_its_rows(leaf, tensor, self._whole if id(tensor) in self._batch else self._examples):
                    return True
        return self._is_copy(leaf)

    def _has_its_rows(self, view: Tensor, known: Tensor, examples: int) -> bool:
        """Whether row i of the view belongs to example i; if two dimensions may hold the examples, the one that did so before counts."""
        rows = [k for k, size in enumerate(known.shape[:2]) if size == examples]
        if not rows:  # all examples share it
            return True
        found = rows_at(view, known, rows[0])
        if found != [1] or view.shape[0] != examples:
            self._turned = self._turned or found == [1]
            return bool(found)
        return self._turned

    def _known(self) -> Iterator[tuple[Tensor, int, Any]]:
        large = () if self._large is None else ((t, *known) for t, known in self._large.items())
        return chain(self._batch.values(), self._parts.values(), self._outputs.values(), large)

    def _is_copy(self, leaf: Tensor) -> bool:
        """Whether it has the values of a known tensor. Not checked for a proof's outputs, which would keep its graph alive."""
        if self._capture.proving:
            return False
        alike = [t for t, *known in self._known() if t.shape == leaf.shape and is_still(t, *known)]
        cheap = leaf.is_cpu and leaf.numel() <= _SMALL
        return any(not (self._due or (cheap and t.is_cpu)) or _equal(t.detach().to(leaf), leaf.detach()) for t in alike)


def is_still(t: Tensor, version: int, content: Any) -> bool:
    """Whether a tensor was not written to, and holds this as far as that was noted."""
    if t._version != version or content is None:
        return t._version == version
    return _equal(t.detach(), content) if isinstance(content, Tensor) else bool(fingerprint(t) == content)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether all numbers are equal, or NaN on both sides."""
    return torch.equal(a, b) or (a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all()))


def _values(value: Any, own: set[int]) -> Iterator[Any]:
    """Numbers, words and arrays in it, but for what the loader has handed out for each example."""
    if id(value) in own:
        return
    if isinstance(value, (bool, int, float, complex, str, bytes)):
        yield value
    elif isinstance(value, (np.ndarray, np.generic)):
        yield value.tobytes()
    for one in inside(value):
        if not isinstance(one, Tensor):
            yield from _values(one, own)
