"""Finds the batch sizes in which a row's bits do not depend on the other rows on this machine, by trying products of the model's shapes.

Libraries choose kernels by shape. If batches of three and of four rows are computed by different kernels, a fourth record changes the
last bits of the other three, and a network, or a unit whose examples cancel, may amplify that without bound. So batches are padded
to sizes for which this does not happen. Nothing here reads data: these sizes are a public fact about the model and the machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hushgrad.clipping import Capture
from hushgrad.clipping.batch_invariance import PART, invariant_rows, request_batch_invariance
from hushgrad.errors import CaptureError, NotIsolated
from hushgrad.sampling.batch import Sizes, Smallest
from hushgrad.train.single_numbers import rows_without_remainder

_WIDE = 256  # wider layers are tested as if they had this width
_NARROW = 16  # inputs, see _often_moves
_REFERENCE = 128  # rows
_MULTIPLES = (4, 8, 16)
_FEW = 3  # so few rows always count as different: recurrent layers are not tested
_IMAGES = 16  # torch gives convolutions of fewer images to another library, most of them at least
_SOME = 16  # rows
_NUMBERS = 16  # of a row, over all draws of a shape, that are compared
_ANY = 2**31
PLACES = (
    "On this machine a row of a narrow layer of this model has other last bits at another place in its batch, so that a record may move "
    "others by rounding; MKL_CBWR=AUTO,STRICT in the environment in which Python is started ends that"
)
SIZES = (
    "With these threads a row of this model has other last bits in a batch of another size, so that a record may move others by rounding; "
    "one thread, pad_to= or micro-batches, which then all have one size, end that"
)

_HALF = {torch.float16, torch.bfloat16}
_LENGTHS = (
    "In half precision, and in certified runs, examples of different lengths must not be padded to the longest of their batch: how far "
    'each one is padded follows from the others, and so does every rounding. Pad all of them to one length (padding="max_length", '
    "pad_to_multiple_of= the longest, a collate_fn that pads to a fixed length), or train in single precision without certified=True."
)


class InvariantSizes(NamedTuple):
    """The sizes of a run's batches, what a guarantee must say about them, and the torch threads that they hold for (None: any)."""

    sizes: Sizes
    notes: tuple[str, ...] = ()
    threads: int | None = None

    @classmethod
    def of(cls, model: nn.Module, *, certified: bool = False) -> InvariantSizes:
        """For this model on this machine, with the present number of threads. Kernels of devices are not tested."""
        weights = {_shape(p) for p in model.parameters() if p.dim() > 1 and p.is_floating_point() and p.device.type == "cpu"}
        if certified or any(_often_moves(outputs, inputs) for outputs, inputs, _ in weights):
            request_batch_invariance()
        threads = torch.get_num_threads()
        if certified:  # the first batch shows whether it is enough
            return cls(Sizes(invariant_rows(threads), part=PART << (threads - 1).bit_length()), threads=threads)
        if not weights:
            return cls(Sizes())
        found = _sizes([_looked_at(*shape, threads) for shape in sorted(weights, key=str)])
        if any(p.dim() > 2 for p in model.parameters()):  # a convolution's, of a module or bare
            multiple, fine, few, *_ = found.sizes
            fine = None if fine is None else max(fine, _IMAGES)
            found = found._replace(sizes=Sizes(multiple, fine, max(few, _IMAGES - 1), least=_IMAGES))
        if (rows := rows_without_remainder(model, threads)) > 1:
            sizes = found.sizes
            found = found._replace(sizes=Sizes(max(sizes.multiple, rows), None, least=sizes.least))
        return found._replace(threads=threads)

    def require_threads(self) -> None:
        """Refuse another number of threads than the sizes were found with: it may need other sizes.

        Raises:
            CaptureError: if it has changed.
        """
        now = torch.get_num_threads()
        if self.threads is not None and now != self.threads:
            raise CaptureError(
                f"Expected {self.threads} of torch's threads, as when the run was made; there are {now} now, under which rows have other "
                f"last bits. Call torch.set_num_threads({self.threads}), or set the number before make_private."
            )


class OneLength:
    """In half precision, and in a certified run, all examples must have one size, or steps are refused.

    The length to which a text is padded depends on the longest one of its batch, and kernels are chosen by shape: so a longer example
    changes the rounding of all others. In bfloat16 that is 0.4 % of everything, and clipping does not bound it: one long text that
    leaves a batch of 6 moved the clipped sum by 1.0009 of the bound. In single precision it is far below the promised 1e-4; but the proof
    for a certified run needs activations that are bit for bit independent of other records.
    """

    def __init__(self, capture: Capture, *, vouched: bool, certified: bool) -> None:
        self._capture, self._vouched, model = capture, vouched, capture.model
        kinds = {t.dtype for t in (*model.parameters(), *model.buffers())}
        stored = kinds | {getattr(module, "compute_dtype", None) for module in model.modules()}
        self._always = certified or not _HALF.isdisjoint(stored)
        self._sizes: set[tuple[Any, ...]] | None = None  # of one example in each input, in every step

    def require(self, taken: int, smallest: Smallest | None) -> None:
        """Refuse a step, where it matters, on other sizes than those before, or on sizes that its largest example has determined.

        Args:
            taken: steps so far.
            smallest: the smallest example of the batch; None: all its examples are of one size.

        Raises:
            NotIsolated: for good. If sizes have changed, what was released before counts as infinite.
        """
        sizes, first = self._capture.sizes, self._capture.first_size
        if self._sizes is None and first is not None:
            self._sizes = {first} if taken else sizes
        late = bool(sizes) and sizes != self._sizes
        if (late or smallest is not None) and self._matters() and (late or smallest is None or smallest.follows()):
            self._capture.not_isolated, self._capture.late = _LENGTHS, late
            raise NotIsolated(_LENGTHS)

    def _matters(self) -> bool:
        """Whether something is computed in less than single precision (activations, frozen weights, products), or the run is certified."""
        half = self._always or self._capture.rounded or torch.get_float32_matmul_precision() != "highest"
        return half and not self._vouched


class _Seen(NamedTuple):
    """For one shape: the batch sizes whose rows differ from those of large batches, and those within which a row's position matters."""

    other: frozenset[int]
    tried: int  # the largest one
    moved: frozenset[int]


def _often_moves(outputs: int, inputs: int) -> bool:
    """Whether layers of such shapes are known to give other bits at other positions: MKL must be asked before its first product."""
    return inputs <= _NARROW or inputs % 4 != 0 or outputs == 1


def _shape(p: Tensor) -> tuple[int, int, torch.dtype]:
    outputs, inputs = p.shape[0], p.shape[1:].numel()
    return min(outputs, _WIDE + outputs % 4), min(inputs, _WIDE + inputs % 4), p.dtype  # kernels depend on the size modulo 4


@cache
def _looked_at(outputs: int, inputs: int, dtype: torch.dtype, threads: int) -> _Seen:
    """Test products with a weight of this shape and with its transpose, for batches of every size up to a few for each thread.

    Two kernels often give a number the same bits by chance; so for layers with few outputs several draws are tested.
    """
    generator, tried = torch.Generator().manual_seed(0), 4 * max(8, threads) + 3
    draws = [_drawn_once(outputs, inputs, dtype, tried, generator) for _ in range(-(-_NUMBERS // min(outputs, inputs)))]
    other, moved = (frozenset[int]().union(*sizes) for sizes in zip(*draws, strict=True))
    return _Seen(other, tried, moved)


def _drawn_once(
    outputs: int, inputs: int, dtype: torch.dtype, tried: int, generator: torch.Generator
) -> tuple[frozenset[int], frozenset[int]]:
    """The sizes up to ``tried`` that differ, and those within which the position matters."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)

    weight, bias, x, g = drawn(outputs, inputs), drawn(outputs), drawn(_REFERENCE, inputs), drawn(_REFERENCE, outputs)

    def rows(first: int, last: int) -> tuple[Tensor, Tensor]:
        return nn.functional.linear(x[first:last].clone(), weight, bias), g[first:last].clone().mm(weight)

    def equal(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))

    with torch.no_grad():
        whole = rows(0, _REFERENCE)
        other = [n for n in range(1, tried + 1) if not equal(rows(0, n), (y[:n] for y in whole))]
        moved = [n for n in (2, _FEW, _SOME) if not equal((y[1:] for y in rows(0, n)), (y[:-1] for y in rows(1, n + 1)))]
    return frozenset(other), frozenset(moved)


def _sizes(seen: list[_Seen]) -> InvariantSizes:
    """The least number of rows that every layer allows."""
    other = frozenset(range(1, _FEW + 1)).union(*(layer.other for layer in seen))
    moved = frozenset[int]().union(*(layer.moved for layer in seen))
    last = max(other)
    fine = last + 1 if last < seen[0].tried - _FEW else None
    few = 1 if 2 in moved else 2 if _FEW in moved else _FEW
    notes = (PLACES,) if _SOME in moved else ()
    for multiple in _MULTIPLES:
        if not any(n % multiple == 0 for n in other):
            return InvariantSizes(Sizes(multiple, fine, few), notes)
    return InvariantSizes(Sizes(_MULTIPLES[0], fine, _ANY), notes or (SIZES,))
