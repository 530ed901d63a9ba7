"""The record of one call of a layer, the weights computed from its norms, and the sum that its gradients are added to.

Most parameters get one contribution in a step. It is written, not added to zeros, as in an ordinary backward pass. Later
contributions (micro-batches, tied weights, a module called twice) are added in place.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from hushgrad.clipping import _fused, _fused_products
from hushgrad.clipping.clipper import Clipped, Clipper
from hushgrad.clipping.flat import Flat
from hushgrad.clipping.mass import Mass

# Floats of w g that exist at a time (16 MB in single precision): a compromise between peak memory and passes over the sum.
_WEIGHTED_AT_ONCE = 1 << 22
_LEAST = 2.0**-126  # smaller weights are 0: in single precision they have few bits, and could be too large by half
_look, _MEASURED = attrgetter("dtype", "is_cpu"), {(torch.float64, True)}  # of squared norms
_BALL = Flat.weights  # the only clipper in the C library
_ROWS_AT_ONCE = 4096  # terms of a product in double precision at a time, so that each is rounded few times (see certificate.py)


class Record:
    """One call of one captured module: its inputs and the gradient that came back to its output.

    ``names`` are the module's *trainable* parameters under their local names ("weight"); a rule must not spend work on others.
    ``kept`` is the rule's own: per-example gradients by local name that ``sq_norms`` has made and ``add_weighted`` will use
    (the inputs and gradients are then no longer needed and may be released with :meth:`release`). ``pieces`` is the same in
    several blocks, for those that are large. ``masses`` has the masses of gradients that ``add_weighted`` adds part by part;
    of the others they are the norms.
    """

    __slots__ = ("args", "grads", "kept", "kwargs", "masses", "memory", "module", "most", "names", "pieces")

    def __init__(
        self,
        module: nn.Module,
        names: tuple[str, ...],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        grads: tuple[Tensor | None, ...],
        memory: Any = None,
        most: int | None = None,
    ) -> None:
        self.module, self.names, self.args, self.kwargs, self.grads = module, names, args, kwargs, grads
        self.memory = memory  # what the rule remembered before the call
        self.most = most  # examples at most, where that is public
        self.kept: dict[str, Tensor] = {}
        self.pieces: dict[str, Pieces] = {}
        self.masses: dict[str, Mass] = {}

    @property
    def x(self) -> Tensor:
        """The first input, wherever the caller put it."""
        return self.args[0] if self.args else next(iter(self.kwargs.values()))  # type: ignore[no-any-return]

    @property
    def g(self) -> Tensor:
        """The gradient of the first output."""
        g = self.grads[0]
        assert g is not None
        return g

    def among(self, examples: int) -> int:
        """The number of examples by which a formula is chosen: a public one if there is one.

        Formulas round differently. If one more record switched the formula for all others, it would move the sum by their roundings.
        """
        return examples if self.most is None else self.most

    @property
    def complete(self) -> bool:
        """Whether the per-example gradients of all parameters exist."""
        return len(self.kept) + len(self.pieces) == len(self.names)

    def join(self) -> None:
        """Put each parameter's gradients into one block."""
        self.kept |= {name: pieces.whole for name, pieces in self.pieces.items()}
        self.pieces = {}

    def clear(self) -> None:
        """Forget everything."""
        self.args, self.kwargs, self.grads, self.kept, self.pieces, self.masses = (), {}, (), {}, {}, {}

    def release(self) -> None:
        """Forget inputs and gradients; what is ``kept`` stays."""
        self.args, self.kwargs, self.grads = (), {}, ()


def clipped(clipper: Clipper, rows: Sequence[Tensor], factor: float, dtype: torch.dtype | None = None) -> Clipped:
    """:meth:`Clipper.clip`; for flat clipping one call of the C library, if it can be used."""
    library, kind = _fused._LIBRARY, type(clipper)
    single, dtype = dtype is torch.float32, dtype or torch.float64
    if library is None or kind.weights is not _BALL or kind.clip is not Clipper.clip or not (single or dtype is torch.float64):
        return clipper.clip(rows, factor, dtype)
    if {*map(_look, rows)} != _MEASURED or not all(map(Tensor.is_contiguous, rows)):
        return clipper.clip(rows, factor, dtype)
    count, bound = rows[0].numel(), clipper.max_grad_norm  # type: ignore[attr-defined]
    norms, weights = torch.empty(count, dtype=dtype), torch.empty(count, dtype=dtype)
    places = array("Q", map(Tensor.data_ptr, rows))
    at = places.buffer_info()[0], len(rows), count, factor, bound, _LEAST, single, norms.data_ptr(), weights.data_ptr()
    return Clipped(norms, weights, bool(library.clip(*at)))


class Form(NamedTuple):
    """Shape, dtype and device of a sum for which there is no tensor."""

    shape: torch.Size
    device: torch.device


class Pieces(NamedTuple):
    """Per-example gradients in blocks of consecutive examples, small enough for the gaps that freed activations leave.

    A single block would be larger than any gap, and the process would grow by it.
    """

    parts: tuple[Tensor, ...]

    @property
    def whole(self) -> Tensor:
        """(B, ...) in one block."""
        return torch.cat(self.parts)


class Sum:
    """``sum_i w_i G_i`` of the parameter ``like``; ``tensor`` is None as long as nothing was added.

    Weights in double precision make it a sum in double precision of gradients that stay as they are.

    >>> total = Sum(torch.empty(2, 3), torch.float32)
    >>> total.addmm(torch.ones(2, 4), torch.ones(4, 3))
    >>> total.add(torch.ones(2, 3))
    >>> total.buffer
    tensor([[5., 5., 5.],
            [5., 5., 5.]])
    """

    __slots__ = ("_dtype", "_like", "tensor")

    def __init__(self, like: Tensor | Form, dtype: torch.dtype, tensor: Tensor | None = None) -> None:
        self._like, self._dtype, self.tensor = like, dtype, tensor

    @property
    def buffer(self) -> Tensor:
        """The sum so far, to be added to in place (scattered rows, slices)."""
        if self.tensor is None:
            self.tensor = torch.zeros(self._like.shape, dtype=self._dtype, device=self._like.device)
        return self.tensor

    @property
    def done(self) -> Tensor:
        """The result, when everything has been added."""
        return self.buffer if self.tensor is None else self.tensor

    def add_rows(self, ids: Tensor, values: Tensor, weights: Tensor) -> None:
        """Add ``weights[k] values[k]`` to row ``ids[k]``, for every k."""
        if not _fused_products.add_rows(ids, values, weights, self.buffer):
            self.buffer.index_add_(0, ids, values * weights.unsqueeze(1))

    def add(self, term: Tensor) -> None:
        """Add ``term``, which the sum then owns: nothing else may hold it."""
        if self.tensor is not None:
            self.tensor.add_(term)
        elif term.dtype is self._dtype and term.is_contiguous() and term.shape == self._like.shape:
            self.tensor = term
        else:
            self.tensor = term.to(self._dtype).reshape(self._like.shape).contiguous()

    def add_dense(self, term: Tensor) -> None:
        """Add a term of the parameter's shape, of any precision."""
        self.buffer.add_(term.to(self._dtype))

    def addmm(self, a: Tensor, b: Tensor) -> None:
        """Add the matrix product ``a @ b``."""
        if self.tensor is None:
            self.tensor = product(a, b)
        elif not _fused_products.add_product(a, b, self.tensor):
            self.tensor.addmm_(a, b)

    def add_outer(self, left: Tensor, weights: Tensor, right: Tensor) -> None:
        """Add ``sum_i weights[i] sum_t left[i,t] right[i,t]^T`` for (B, ..., p) and (B, ..., d), some examples at a time."""
        if weights.dtype is not left.dtype:
            self._add_wide(left, weights, right)
            return
        first = left.shape[-1] <= right.shape[-1]  # weight the narrower factor: less to write
        some = max(1, _WEIGHTED_AT_ONCE // max(1, (left if first else right)[0].numel())) if len(left) else 1
        for y, h, w in zip(right.split(some), left.split(some), weights.split(some), strict=True):
            by = w.view(-1, *(1 for _ in h.shape[1:]))
            h, y = (h * by, y) if first else (h, y * by)
            self.addmm(h.reshape(-1, h.shape[-1]).t(), y.reshape(-1, y.shape[-1]))

    def _add_wide(self, left: Tensor, weights: Tensor, right: Tensor) -> None:
        columns, rows, by = flattened(left, weights, right)
        if self.tensor is None:
            fresh = torch.empty(self._like.shape, dtype=self._dtype, device=self._like.device)
            if _fused.add_wide_sums(columns, rows, by, fresh, fresh=True):
                self.tensor = fresh
                return
        elif _fused.add_wide_sums(columns, rows, by, self.tensor):
            return
        for y, h, w in zip(columns.split(_ROWS_AT_ONCE), rows.split(_ROWS_AT_ONCE), by.split(_ROWS_AT_ONCE), strict=True):
            self.buffer.addmm_((h.double() * w.unsqueeze(1)).t(), y.double())

    def rows(self, part: slice | int) -> Sum:
        """Some rows, or one, as a sum of their own that shares memory."""
        buffer = self.buffer[part]
        return Sum(buffer, self._dtype, buffer)

    def add_kept(self, G: Tensor | Pieces, weights: Tensor) -> None:
        """Add ``sum_i weights[i] G[i]``, in one pass over G."""
        if isinstance(G, Pieces):
            if weights.dtype is self._dtype is torch.float32 and _fused.add_pieces(G.parts, weights, self.buffer):
                return
            for part, some in zip(G.parts, weights.split([len(part) for part in G.parts]), strict=True):
                self.add_kept(part, some)
        elif weights.dtype is torch.float64 and G.dtype is torch.float32:
            self.add(weighted_rows(_rows(G), weights).view(self._like.shape))
        elif self.tensor is None:
            self.tensor = torch.mv(_rows(G).t(), weights.to(G.dtype)).view(self._like.shape).to(self._dtype)
        elif self.tensor.is_contiguous():
            self.tensor.view(-1).addmv_(_rows(G).t(), weights.to(G.dtype))
        else:
            self.tensor.add_(torch.tensordot(weights.to(G.dtype), G, dims=1))


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """``a @ b``, in ``out`` if that is given."""
    made = a.new_empty(a.shape[0], b.shape[1]) if out is None else out
    return made if _fused_products.add_product(a, b, made, fresh=True) else torch.mm(a, b, out=made)


def weighted_rows(G: Tensor, weights: Tensor) -> Tensor:
    """``sum_i weights[i] G[i]`` of a matrix; in double precision if the weights are."""
    if weights.dtype is G.dtype:
        return torch.mv(G.t(), weights)
    made = _fused.wide_kept(G, weights)
    if made is not None:
        return made
    total = torch.zeros(G.shape[1], dtype=torch.float64, device=G.device)
    step = max(1, _WEIGHTED_AT_ONCE // max(1, G.shape[1]))
    for some, w in zip(G.split(step), weights.split(step), strict=True):
        total.addmv_(some.double().t(), w)
    return total


def flattened(left: Tensor, weights: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(K, d), (K, p) and (K,) of all positions of all examples: right, left and the weights."""
    rows, columns = left.reshape(-1, left.shape[-1]), right.reshape(-1, right.shape[-1])
    return columns, rows, weights if left.dim() == 2 else weights.repeat_interleave(rows.shape[0] // max(1, len(left)))


def _rows(G: Tensor) -> Tensor:
    """(B, ...) as (B, all the rest), also for no example at all."""
    return G.reshape(G.shape[0], G.shape[1:].numel())


def versions_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[int]:
    """The version counters of the input tensors (tensors made in inference mode have none)."""
    found = []  # not a comprehension, which would be one more call
    for v in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(v, Tensor):
            if not v.is_inference():
                found.append(v._version)
        elif isinstance(v, (tuple, list, dict)):  # an LSTM's state, a packed sequence
            found += versions_of(tuple(tree_flatten(v)[0]), {})
    return found
