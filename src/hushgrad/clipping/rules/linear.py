"""Linear: y = x W^T + b on (B, ..., d) -> (B, ..., p).

G_i = sum_t g[i,t] x[i,t]^T, and three exact ways to its squared norm:

| positions | formula | cost per example |
|---|---|---|
| T = 1 | ‖x‖² ‖g‖² | d + p |
| few, or x and g much smaller than G | ghost: sum_{t,s} <x_t, x_s> <g_t, g_s> | T² (d + p), and G is formed once more in the weighted sum |
| many | make G, take its norm, keep it: the weighted sum is then a matrix-vector product | T d p, the weighted sum's own work |

Reference: Goodfellow, "Efficient per-example gradient computations" (2015); Bu et al., "Differentially private optimization on
large models at small cost" (2023), section 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hushgrad.clipping import _fused, _fused_products
from hushgrad.clipping.base import Example, Factors, Record, Rule, measured_here, rule
from hushgrad.clipping.mass import WILD, outer_mass, sq_norm
from hushgrad.clipping.rules.gram import gram_sq_norm
from hushgrad.clipping.rules.input_checks import is_strided, require_batch
from hushgrad.clipping.sums import Pieces, Sum
from hushgrad.native import _abi

# Keeping one float of G costs about as much as this many multiply-adds of a Gram matrix where all of G stays in the cache; beyond that
# (8 MB in single precision), where it is written to new pages and read twice, so many. Measured for 26 shapes of (B, T, d, p) on a core
# that nothing else ran on: on a busy one faults of pages count far more.
_READ_COST, _FAR_COST, _FAR = 12, 60, 1 << 21
# Kept per-example gradients of one layer may take this many floats at the most (256 MB in single precision).
_KEEP_AT_MOST = 1 << 26
# Floats that are worth a quarter more of a layer's time to be spared (32 MB in single precision).
_SPARE = 1 << 23
# From so many on (4 MB in single precision) x and g are kept instead if they are at most half as many: all layers' G are
# kept until the last norm is known. Measured on a free core, this takes a fifth less of the layer's time to an eighth more.
_MANY = 1 << 20
# Floats of them in one block (512 KB in single precision): small enough for the gaps that released activations leave, so that no new pages
# are asked for. With blocks of 4 MB a step of T5 had 10,000 faults of pages, with these 1,600.
_PIECE = 1 << 17
_AT_MOST = 1 << 20  # elements; beyond, torch's threads are worth more than fewer calls (norms have the same bits then)


@rule(nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
class Linear(Rule):
    """Closed form for one position, else Gram matrices or kept gradients, whichever is cheaper."""

    parameters = frozenset({"weight", "bias"})
    positions = True

    def folds(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """For a strided input of three dimensions or more."""
        return is_strided(args[0] if args else next(iter(kwargs.values())), bias=module.bias is not None)

    @staticmethod
    def examples() -> tuple[Example, ...]:
        """One position, and several."""
        return (
            (nn.Linear(5, 4), (torch.randn(6, 5),)),
            (nn.Linear(5, 4, bias=False), (torch.randn(6, 3, 5),)),
        )

    def per_example(self, record: Record) -> dict[str, Tensor]:
        """G_i = sum_t g[i,t] x[i,t]^T and sum_t g[i,t]."""
        x, g = _positions(record.x), _positions(record.g)
        made = {"weight": lambda: torch.bmm(g.transpose(1, 2), x), "bias": lambda: g.sum(1)}
        return {name: made[name]() for name in record.names}

    def sq_norms(self, record: Record) -> dict[str, Tensor]:
        """See the table of this module."""
        x, g = record.args[0] if record.args else record.x, record.grads[0]
        assert g is not None
        if x.dim() == 2 and not x.is_cpu:
            return {}
        if x.dim() == 2:
            both = _outer_sq_norms(x, g, WILD)
            if both is None or both[2]:
                return _sq_norms_of_rows(record)
            if len(record.names) == 2:
                return {"weight": both[0], "bias": both[1]}
            return {name: both[0] if name == "weight" else both[1] for name in record.names}
        require_batch(record, 2)
        x, g = _positions(x), _positions(g)
        norms = {}
        if "bias" in record.names:
            record.kept["bias"] = g.sum(1)  # small; with the weight's kept too, x and g are released
        if "weight" in record.names and (x.is_cpu or _too_large(record.among(len(x)), x.shape[2], g.shape[2])):
            norms["weight"] = self._sq_norm_of_weight(record, x, g)
        elif "weight" in record.names:
            record.kept["weight"] = torch.bmm(g.transpose(1, 2), x)
        return norms | {name: norm for name, norm in measured_here(record.kept).items() if name == "bias"}

    def rest(self, record: Record, names: Sequence[str]) -> dict[str, Tensor]:
        """For one position from x and g, otherwise from what was kept."""
        return super().rest(record, names) if record.kept else _sq_norms_of_rows(record)

    def outer(self, record: Record) -> tuple[Tensor, Tensor] | None:
        """One position."""
        return (record.x, record.g) if record.grads and not record.kept and record.g.dim() == 2 else None

    def _sq_norm_of_weight(self, record: Record, x: Tensor, g: Tensor) -> Tensor:
        B, T, d = x.shape
        p = g.shape[2]
        if _prefers_gram(record.among(B), T, d, p):
            norms, record.masses["weight"] = gram_sq_norm(x, g)
            return norms
        some = max(1, min(B, _PIECE // (d * p)))
        parts, norms = _formed(x, g, record.among(B), some)
        if len(parts) == 1:
            record.kept["weight"] = parts[0]
        else:
            record.pieces["weight"] = Pieces(parts)
        return norms

    def add_weighted(self, record: Record, weights: Mapping[str, Tensor], out: Mapping[str, Sum]) -> None:
        """(w g)^T x in one matrix product; or w^T G where G was kept."""
        if record.grads and not record.kept:
            x, g = record.args[0] if record.args else record.x, record.grads[0]
            assert g is not None
            if g.dim() == 2:
                _add_weighted_rows(x, g, record.names, weights, out, record.most)
                return
        for name in record.names:
            if name in record.kept:
                out[name].add_kept(record.kept[name], weights[name])
            elif name in record.pieces:
                out[name].add_kept(record.pieces[name], weights[name])
            elif name == "weight":
                out[name].add_outer(record.g, weights[name], record.x)
            else:
                out[name].add_kept(record.g if record.g.dim() == 2 else _positions(record.g).sum(1), weights[name])

    def factors(self, record: Record) -> dict[str, Factors]:
        """The weight's gradient is the outer product of g and x."""
        return {"weight": Factors(_positions(record.g), _positions(record.x))} if "weight" in record.names else {}


def _formed(x: Tensor, g: Tensor, among: int, each: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """G_i = sum_t g[i,t] x[i,t]^T in blocks of ``each`` examples, and the squared norms."""
    made = _fused_products.outer_gradients(x, g, among, each)
    if made is not None:
        return made
    parts = tuple(torch.bmm(h.transpose(1, 2), y) for h, y in zip(g.split(each), x.split(each), strict=True))
    return parts, torch.cat([sq_norm(part) for part in parts])


def _sq_norms_of_rows(record: Record) -> dict[str, Tensor]:
    """One position: ‖x‖² ‖g‖² and ‖g‖²; the mass equals the norm, except for rows that are too large."""
    sq_g = sq_norm(record.g)
    norms = {"bias": sq_g}
    if "weight" in record.names:
        sq_x = sq_norm(record.x)
        norms["weight"] = sq_x * sq_g
        record.masses["weight"] = outer_mass(sq_x.unsqueeze(1), sq_g.unsqueeze(1))
    return {name: norms[name] for name in record.names}


def _too_large(B: int, d: int, p: int) -> bool:
    return B * d * p > _KEEP_AT_MOST


def _prefers_gram(B: int, T: int, d: int, p: int) -> bool:
    """Whether Gram matrices take less time, or little more time and much less memory (the head of a large vocabulary)."""
    cost = _READ_COST if B * d * p <= _FAR else _FAR_COST
    if T * T * (d + p) < cost * d * p or _too_large(B, d, p):
        return True
    if B * d * p >= _MANY and 2 * T * (d + p) <= d * p:
        return True
    return B * (d * p - T * (d + p)) > _SPARE and 4 * T * (d + p) < 3 * d * p  # at most a quarter on top of the layer's 3 T d p


def _add_weighted_rows(
    x: Tensor, g: Tensor, names: Sequence[str], weights: Mapping[str, Tensor], out: Mapping[str, Sum], among: int | None = None
) -> None:
    """One position for each example: both sums from the same w g, in as few operations as possible."""
    by = weights[names[0]]
    if by.dtype is not g.dtype:  # in double precision
        for name in names:
            if name == "weight":
                out[name].add_outer(g, weights[name], x)
            else:
                out[name].add_kept(g, weights[name])
        return
    together = names[0] == "weight" and weights[names[-1]] is by
    both = _outer_sums(x, g, by, among) if together else None
    if both is not None:
        for name in names:
            out[name].add(both[name != "weight"])
        return
    weighted = g * by.unsqueeze(1)
    for name in names:
        if weights[name] is not by:  # clipped apart
            by = weights[name]
            weighted = g * by.unsqueeze(1)
        if name == "weight":
            out[name].addmm(weighted.t(), x)
        else:
            out[name].add(weighted.sum(0))


def _outer_sq_norms(x: Tensor, g: Tensor, wild: float) -> tuple[Tensor, Tensor, bool] | None:
    """‖x_i‖² ‖g_i‖² and ‖g_i‖² of each row of x (B, d) and g (B, p) by the C library, and whether some ‖x_i‖² or ‖g_i‖² exceeds ``wild``.

    None where it cannot serve, or torch's threads are worth more.
    """
    library = _fused._LIBRARY
    if library is None or x.numel() + g.numel() > _AT_MOST:
        return None
    for t in (x, g):
        if t.dtype is not torch.float32 or not t.is_cpu or not t.is_contiguous():
            return None
    B, d = x.shape
    of_weight, of_bias = torch.empty(B, dtype=torch.float64), torch.empty(B, dtype=torch.float64)
    at = x.data_ptr(), d, g.data_ptr(), g.shape[1], B, wild, of_weight.data_ptr(), of_bias.data_ptr()
    return of_weight, of_bias, bool(library.outer_sq_norms(*at))


def _outer_sums(x: Tensor, g: Tensor, weights: Tensor, among: int | None = None) -> tuple[Tensor, Tensor] | None:
    """The sums of w_i g_i x_i^T and of w_i g_i, for x (B, d), g (B, p) and w (B,), by the C library; None where p is large, or it cannot.

    ``among``: a public number of examples to choose by, since torch rounds otherwise; those that are here by default.
    """
    library, p, d = _fused._LIBRARY, g.shape[1], x.shape[1]
    if library is None or p > _abi.OUTPUTS_AT_MOST or (x.shape[0] if among is None else among) * d > _AT_MOST:
        return None
    for t in (x, g, weights):
        if t.dtype is not torch.float32 or not t.is_cpu or not t.is_contiguous():
            return None
    of_weight, of_bias = x.new_empty(p, d), x.new_empty(p)
    at = x.data_ptr(), d, g.data_ptr(), p, weights.data_ptr(), x.shape[0], of_weight.data_ptr(), of_bias.data_ptr()
    library.outer_sums(*at)
    return of_weight, of_bias


def _positions(x: Tensor) -> Tensor:
    """(B, ..., d) as (B, T, d)."""
    if x.dim() == 3:
        return x
    return x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2)
