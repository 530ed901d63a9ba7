"""Joint norms: parameters whose per-example gradient has several parts.

‖sum_k f_k G_k‖² = sum_k f_k² ‖G_k‖² + 2 sum_{k<l} f_k f_l <G_k, G_l>. Where the parts are sums of outer products, or are kept, the inner
products need no further gradient: a tied embedding and head cost T_k T_l (m + n) multiply-adds for each example. Many parts that
are sums of outer products (a layer called in a loop) are one such sum, over the positions of all of them. Everything else,
and all that is grouped by unit, goes the general way: the per-example gradients of all parts are made for a chunk of units at a
time, added up and measured, so that memory is bounded by the chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hushgrad.clipping.base import Factors, added, sq_norm
from hushgrad.clipping.rules.gram import gram_sq_norm

if TYPE_CHECKING:
    from hushgrad.clipping.reduce import Group, Use

__all__ = ["inner", "joint_sq_norms"]

# Per-example gradients that are alive at the same time, in floats (64 MB in single precision).
_CHUNK = 1 << 24
# In units of rounding: the part of its terms below which a sum is not believed (see rules/gram.py).
_LOST = 1e4
# With more parts than this, adding gradients up is cheaper than all pairs of inner products.
_PAIRS_AT_MOST = 4

Form = Tensor | Factors  # (B, *shape), or outer products
Shared = dict[str, list[tuple["Use", str]]]


def joint_sq_norms(group: Group, shared: Shared) -> dict[str, Tensor]:
    """The squared norm, for each unit, of the sum of all parts of each shared parameter."""
    rows, rest = {}, {}
    for name, uses in shared.items():
        norms = _by_pairs(uses) if len(uses) <= _PAIRS_AT_MOST else _by_positions(uses)
        if norms is None:
            rest[name] = uses
        else:
            rows[name] = norms
    return {**rows, **(_by_sums(group, rest) if rest else {})}


# Pairs -------------------------------------------------------------------------------------------------------------


def _by_pairs(uses: list[tuple[Use, str]]) -> Tensor | None:
    """Squares and inner products, or None if some part has no cheap form."""
    if any(use.units is not None for use, _ in uses):
        return None
    forms = [_form(use, local) for use, local in uses]
    squares = [use.call.measure()[local] * use.factor**2 for use, local in uses]
    total = added(squares)
    for k, (use, _) in enumerate(uses):
        for other in range(k):
            product = _inner_if_cheap(forms[k], forms[other])
            if product is None:
                return None
            total.add_(product, alpha=2 * use.factor * uses[other][0].factor)
    # Where parts cancel, rounding may leave anything of the difference: then they are made and added up.
    together = added([square.sqrt() for square in squares]).square_()
    return None if bool((total < _LOST * torch.finfo(total.dtype).eps * together).any()) else total


def _by_positions(uses: list[tuple[Use, str]]) -> Tensor | None:
    """All parts as one sum of outer products, or None if some part is no such sum."""
    if any(use.units is not None for use, _ in uses):
        return None
    lefts, rights = [], []
    for use, local in uses:
        form = _form(use, local)
        if not isinstance(form, Factors) or form.left.dim() != 3:
            return None
        lefts.append(form.left * use.factor)
        rights.append(form.right)
    left, right = torch.cat(lefts, 1), torch.cat(rights, 1)
    (_, T, m), n = left.shape, right.shape[2]
    by_gram = T * (m + n) < m * n
    step = max(1, _CHUNK // (T * T if by_gram else m * n))
    parts = zip(left.split(step), right.split(step), strict=True)
    return torch.cat([gram_sq_norm(b, a) if by_gram else sq_norm(torch.bmm(a.transpose(1, 2), b)) for a, b in parts])


def _form(use: Use, local: str) -> Form | None:
    record = use.call.record
    assert record is not None
    record.join()
    if local in record.kept:
        return record.kept[local]
    released = not (record.args or record.kwargs or record.grads)
    return None if released else use.call.site.rule.factors(record).get(local)


def _inner_if_cheap(a: Form | None, b: Form | None) -> Tensor | None:
    if a is None or b is None:
        return None
    if isinstance(a, Factors) and isinstance(b, Factors):
        dense = [f for f in (a, b) if f.left.dim() == 3]
        if not dense:
            return None
        m, n, T_a, T_b = dense[0].left.shape[2], a.right.shape[2], a.left.shape[1], b.left.shape[1]
        if T_a * T_b * (m + n) > (T_a + T_b) * m * n:  # making both gradients is cheaper
            return None
    return inner(a, b)


def inner(a: Form, b: Form) -> Tensor:
    """<G_a, G_b> for each example, of two gradients in either form (not two of one-hot rows): (B,)."""
    if isinstance(a, Factors) and isinstance(b, Factors):
        if a.left.dim() == 2:
            a, b = b, a
        rights = torch.bmm(a.right, b.right.transpose(1, 2))  # (B, T_a, T_b)
        return rights.mul_(_lefts(a.left, b.left)).sum((1, 2))
    if isinstance(a, Factors):
        a, b = b, a
    assert isinstance(a, Tensor)
    if isinstance(b, Tensor):
        return (a * b).flatten(1).sum(1)
    table = a.reshape(len(a), -1, b.right.shape[2])  # (B, m, n)
    if b.left.dim() == 3:
        return torch.bmm(b.left, table).mul_(b.right).sum((1, 2))
    rows = table.gather(1, b.left.clamp(min=0).unsqueeze(2).expand_as(b.right))
    return rows.mul_(b.right).mul_((b.left >= 0).unsqueeze(2)).sum((1, 2))


def _lefts(left: Tensor, other: Tensor) -> Tensor:
    """<left_t, other_s>: (B, T, S); ``other`` may be one-hot rows given by their index."""
    if other.dim() == 3:
        return torch.bmm(left, other.transpose(1, 2))
    index = other.clamp(min=0).unsqueeze(1).expand(-1, left.shape[1], -1)
    return left.gather(2, index) * (other >= 0).unsqueeze(1)


# Sums --------------------------------------------------------------------------------------------------------------


def _by_sums(group: Group, shared: Shared) -> dict[str, Tensor]:
    uses = [use for use in group.uses if any(name in shared for name in use.call.site.full.values())]
    params = {name: parts[0][0].call.site.param(parts[0][1]) for name, parts in shared.items()}
    dtype = uses[0].call.site.dtype
    rows = {name: torch.zeros(group.size, dtype=dtype, device=p.device) for name, p in params.items()}
    step = max(1, _CHUNK // sum(p.numel() for p in params.values()))
    for start in range(0, group.size, step):
        stop = min(start + step, group.size)
        totals = {name: rows[name].new_zeros(stop - start, *p.shape) for name, p in params.items()}
        for use in uses:
            _add_part(use, totals, start, stop)
        for name, G in totals.items():
            rows[name][start:stop] = sq_norm(G)
    return rows


def _add_part(use: Use, totals: dict[str, Tensor], start: int, stop: int) -> None:
    """Add this use's per-example gradients of the units in [start, stop)."""
    record, rule, examples = use.call.record, use.call.site.rule, use.call.batch.examples
    assert record is not None
    units = use.units
    if units is None:
        units = torch.arange(examples, device=next(iter(totals.values())).device)
    index = ((units >= start) & (units < stop)).nonzero().squeeze(1)
    part = rule.select(record, index, examples)
    part.names = tuple(local for local, name in use.call.site.full.items() if name in totals)
    made = part.kept if part.kept.keys() >= set(part.names) else rule.per_example(part)
    for local in part.names:
        total = totals[use.call.site.full[local]]
        total.index_add_(0, units[index] - start, made[local].to(total.dtype), alpha=use.factor)
