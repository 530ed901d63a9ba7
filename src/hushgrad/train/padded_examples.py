"""Checks that padding does not count: how far an example is padded depends on the largest one of its batch, so on others' data.

A model that reads padding (a recurrent layer without lengths, a mean over all positions), or a loss that divides by the padded length,
gives every example another gradient when the largest one is left out, and per-example clipping cannot see that. So the smallest example
of a batch is run as it is padded there, and as it is collated alone: outputs and losses must be the same. This is done in steps 1, 2, 4, 8
and so on of those whose examples have different sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from hushgrad.clipping import Capture
from hushgrad.clipping.proof.inputs import Reading, leaves, mapped, tensors_in
from hushgrad.errors import NotIsolated
from hushgrad.sampling.batch import Batch
from hushgrad.train.trial_passes import Constant, aside

_SAME = 2e-4  # relative: kernels are chosen by length, so that the last bits may differ
_MODEL = (
    "What the model makes of an example depends on how far it is padded, and so on the largest example of its batch. Let the model leave "
    "padding out (attention_mask, packed sequences, a mean over its own positions), or pad all examples to one length in collate_fn."
)
_LOSS = (
    "The loss of an example depends on how far it is padded, and so on the largest example of its batch. Divide by the number of its own "
    "tokens, labels.ne(-100).sum(1), and let the model leave padding out (attention_mask); or pad all examples to one length in collate_fn."
)


class _Cut(NamedTuple):
    """The smallest example of a batch: its rows there, the same alone, and the side on which it is padded."""

    rows: list[Tensor]
    alone: list[Tensor]
    left: bool

    def place(self, tensors: list[Any], examples: int) -> int | None:
        """The number of this example among these tensors."""
        found: Tensor | None = None  # other examples share some of its numbers (zeros, labels), but not all
        for t in tensors:
            if not (isinstance(t, Tensor) and t.dim() > 1 and len(t) == examples):
                continue
            rows = [row.to(t.device) for row in self.rows if (t.shape[1:], t.dtype) == (row.shape, row.dtype)]
            if rows:
                alike = torch.stack([(t.detach() == row).flatten(1).all(1) for row in rows]).any(0)
                found = alike if found is None else found & alike
        return int(found.nonzero()[0]) if found is not None and bool(found.any()) else None

    def to(self, t: Tensor, sizes: dict[tuple[int, int], int]) -> Tensor:
        """A tensor of one example, with these sizes, by dimension and size, cut; one that leaves out a position is cut alike."""
        for d in range(1, t.dim()):
            by = sizes.get((d, t.shape[d])) or sizes.get((d, t.shape[d] + 1)) or 0
            t = t.narrow(d, by if self.left else 0, t.shape[d] - by)
        return t

    @property
    def sizes(self) -> dict[tuple[int, int], int]:
        """How much longer the rows are than alone, by dimension and size."""
        return _longer(self.rows, [t[0] for t in self.alone], first=1)


class _Pass(NamedTuple):
    inputs: Any
    examples: int
    row: int
    reading: Reading


class PaddedExamples:
    """Watches the batches of a run whose examples have different sizes; ``asked``: whether something needs the result."""

    def __init__(self, capture: Capture, *, asked: bool) -> None:
        self._capture, self._asked = capture, asked
        self._seen = 0  # such batches
        self._cut: _Cut | None = None  # of this step's, if it is time to look
        self.watching = False  # there is one
        self._pass: _Pass | None = None  # in which the example is
        self._is_last = False  # there was none since
        self._sizes: dict[tuple[int, int], int] | None = None  # of the model's outputs, that are shorter alone

    def issued(self, batch: Batch) -> None:
        """Called when a step begins."""
        self._cut = self._pass = self._sizes = None
        self.watching = False
        if not self._asked or batch._smallest is None or (batch._dim is not None and batch._dim()):
            return
        self._seen += 1
        if self._seen & (self._seen - 1) == 0:
            items: Any = batch
            self._cut = _cut(leaves(items), leaves(batch._smallest.alone()), batch._smallest.row, batch.examples)
            self.watching = self._cut is not None

    def passed(self, inputs: Any, examples: int) -> None:
        """Called after the model was run on these."""
        cut, reading = self._cut, self._capture.reading
        self._is_last = False
        if cut is None or reading is None or self._pass is not None:
            return
        row = cut.place(leaves(inputs), examples)
        self._is_last = row is not None
        self._pass = None if row is None else _Pass(inputs, examples, row, reading)

    def check(self) -> None:
        """Before a step: require that the model does not read padding. Raises NotIsolated."""
        if self._cut is not None and self._pass is not None and self._sizes is None:
            self._sizes = self._run(self._cut, self._pass)

    def check_outputs(self, fn: Callable[..., Tensor], args: Any, examples: int) -> None:
        """Require that a loss of the last pass's outputs, and of what belongs to them, does not read padding. Raises NotIsolated."""
        cut, here = self._cut, self._pass
        if cut is None or here is None or not self._is_last or here.examples != examples:
            return
        self._is_last = False
        self._sizes = self._sizes or self._run(cut, here)
        known = {True: self._sizes, False: {**self._sizes, **cut.sizes}}
        own = mapped(args, lambda t: t.detach()[here.row : here.row + 1])
        self._compare(fn, own, mapped(own, lambda t: cut.to(t, known[t.is_floating_point()])))

    def check_batch(self, fn: Callable[[Any], Tensor], model: nn.Module, batch: Any, examples: int) -> None:
        """Require that a loss of whole batches does not read padding. Raises NotIsolated."""
        cut = self._cut
        row = None if cut is None else cut.place(leaves(batch), examples)
        if cut is None or row is None:
            return
        self._cut, sizes = None, cut.sizes
        own = mapped(batch, lambda t: t[row : row + 1] if isinstance(t, Tensor) and t.dim() and len(t) == examples else t)
        with self._capture.pause(), aside(model), Constant():
            self._compare(fn, (own,), (mapped(own, lambda t: cut.to(t, sizes)),))

    def _run(self, cut: _Cut, here: _Pass) -> dict[tuple[int, int], int]:
        """Run the model over the example, padded and alone; returns by how much its outputs are shorter alone."""
        model, sizes = self._capture.model, cut.sizes
        own = here.reading.only(here.inputs, torch.tensor([here.row]), here.examples)
        with self._capture.pause(), aside(model), Constant():
            padded, alone = (
                [t for t in tensors_in(model(*args, **kwargs)) if t.is_floating_point()]
                for args, kwargs in (own, mapped(own, lambda t: cut.to(t, sizes) if isinstance(t, Tensor) else t))
            )
        found = _longer(padded, alone, first=0)
        for a, b in zip(padded, alone, strict=True):
            if not _same(cut.to(a, found), b) and not self._capture.rounded:
                self._refuse(_MODEL)
        return found

    def _compare(self, fn: Callable[..., Tensor], padded: Any, alone: Any) -> None:
        with torch.no_grad(), Constant():
            if not _same(fn(*padded).mean(), fn(*alone).mean()) and not self._capture.rounded:
                self._refuse(_LOSS)

    def _refuse(self, message: str) -> NoReturn:
        if self._seen > 1:  # nobody knows since when
            self._capture.not_isolated, self._capture.late = message, True
        raise NotIsolated(message)


def _cut(whole: list[Any], alone: list[Any], row: int, examples: int) -> _Cut | None:
    """The smallest example; None if the batch's sizes are its own, or it cannot be determined which of its numbers are padding."""
    pairs = [
        (t[row], own)
        for t, own in zip(whole, alone, strict=False)
        if isinstance(t, Tensor) and isinstance(own, Tensor) and t.dim() == own.dim() > 1 and len(t) == examples
    ]
    rows, others = [t for t, _ in pairs], [t for _, t in pairs]
    for left in (False, True):
        cut = _Cut(rows, others, left)
        found = cut.sizes
        if found and all(torch.equal(cut.to(t[None], found), own) for t, own in pairs):
            return cut
    return None


def _longer(some: list[Tensor], others: list[Tensor], *, first: int) -> dict[tuple[int, int], int]:
    """By dimension and size: how much longer the first ones are. ``first``: the number of their first dimension."""
    found: dict[tuple[int, int], int] = {}
    for a, b in zip(some, others, strict=False):
        if a.dim() == b.dim():
            found |= {(d + first, m): m - n for d, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m > n}
    return found


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding, if both are finite; sizes that have nothing to do with each other are not compared."""
    if a.shape != b.shape or not a.numel():
        return True
    both = a.isfinite() & b.isfinite()
    a, b = a.where(both, 0.0), b.where(both, 0.0)
    return bool((a - b).abs().max() <= _SAME * b.abs().max())
