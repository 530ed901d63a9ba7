"""Joint norms: for parameters whose per-example gradient has several parts (tied weights, repeated calls).

‖sum_k f_k G_k‖² = sum_k f_k² ‖G_k‖² + 2 sum_{k<l} f_k f_l <G_k, G_l>. If the parts are sums of outer products, or exist already, the inner
products need no further gradient: a tied embedding and head cost T_k T_l (m + n) multiply-adds for each example. Several reads of a table
(an encoder's and a decoder's) are merged into one. Many parts that are sums of outer products (a layer called in a loop) are one such sum
over the positions of all. Everything else, and everything grouped by unit, takes the general path: the per-example gradients of all parts
are formed for a chunk of units at a time, added up and measured, so memory is bounded by the chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hushgrad._precision import widest, widest_dtype
from hushgrad.clipping.base import Factors, Record, Rule
from hushgrad.clipping.clipper import added
from hushgrad.clipping.mass import Mass, outer_mass, sq_norm
from hushgrad.clipping.rules.embedding import table_sq_norm
from hushgrad.clipping.rules.gram import gram_sq_norm
from hushgrad.clipping.sums import Pieces

if TYPE_CHECKING:
    from hushgrad.clipping.reduce import Group, Use

# Per-example gradients that are alive at the same time, in floats (64 MB in single precision).
_CHUNK = 1 << 24
# Floats that are widened at a time.
_WIDENED = 1 << 18
# With more parts than this, adding gradients up is cheaper than all pairs of inner products.
_PAIRS_AT_MOST = 4

Form = Tensor | Pieces | Factors  # (B, *shape), or outer products
Shared = dict[str, list[tuple["Use", str]]]


def joint_norms(group: Group, shared: Shared, *, wide: bool) -> tuple[dict[str, Tensor], dict[str, Mass]]:
    """The squared norm, for each unit, of the sum of all parts of each shared parameter; and its mass, the sum of the parts' masses.

    ``wide``: parts that are added one by one are formed in double precision.
    """
    rows: dict[str, Tensor] = {}
    masses: dict[str, Mass] = {}
    rest: Shared = {}
    for name, uses in shared.items():
        made = _by_pairs(uses) if len(uses) <= _PAIRS_AT_MOST else _by_positions(uses, wide=wide)
        if made is None:
            rest[name] = uses
        else:
            rows[name], masses[name] = made
    if rest:
        _by_sums(group, rest, rows, masses, wide=wide)
    return rows, masses


# Pairs -------------------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """One part, times ``factor``; the factor is already in its squared norm and its mass."""

    form: Form | None
    factor: float
    square: Tensor
    mass: Mass


def _by_pairs(uses: list[tuple[Use, str]]) -> tuple[Tensor, Mass] | None:
    """Squares and inner products in double precision, or None if some part has no cheap form.

    Where parts cancel, rounding leaves 1e-13 of the mass squared; where that matters, the unit is heavy.
    """
    if any(use.units is not None for use, _ in uses):
        return None
    parts = _parts(uses)
    total = added([part.square for part in parts])
    for k, part in enumerate(parts):
        for other in parts[:k]:
            product = _inner_if_cheap(part.form, other.form)
            if product is None:
                return None
            total.add_(product, alpha=2 * part.factor * other.factor)
    masses = [part.mass for part in parts]
    return total.clamp_(min=0), Mass(added([mass.rows for mass in masses]), sum(mass.parts for mass in masses))


def _parts(uses: list[tuple[Use, str]]) -> list[_Part]:
    """One for each use; reads of one table are merged."""
    made: list[_Part] = []
    tables: list[tuple[Use, str, Factors]] = []
    for use, local in uses:
        form, factor = _form(use, local), use.factor
        if isinstance(form, Factors) and form.left.dim() == 2:
            tables.append((use, local, form))
        else:
            made.append(_part(use, local, form, factor))
    if len(tables) < 2:
        return made + [_part(use, local, form, use.factor) for use, local, form in tables]
    ids, g = torch.cat([f.left for *_, f in tables], 1), torch.cat([f.right * use.factor for use, _, f in tables], 1)
    square, mass = table_sq_norm(ids, g, len(tables[0][0].call.site.param(tables[0][1])))
    return [*made, _Part(Factors(ids, g), 1.0, square, mass or Mass(square.sqrt(), 1))]


def _part(use: Use, local: str, form: Form | None, factor: float) -> _Part:
    square, record = use.call.measure()[local], use.call.record
    assert record is not None
    mass = record.masses.get(local) or Mass(square.sqrt(), 1)
    return _Part(form, factor, square * factor**2, Mass(mass.rows * abs(factor), mass.parts))


def _by_positions(uses: list[tuple[Use, str]], *, wide: bool) -> tuple[Tensor, Mass] | None:
    """All parts as one sum of outer products, or None if some part is not such a sum."""
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
    (B, T, m), n = left.shape, right.shape[2]
    if wide or T * (m + n) < m * n:
        return gram_sq_norm(right, left)
    parts = zip(left.split(step := max(1, _CHUNK // (m * n))), right.split(step), strict=True)
    norms = torch.cat([sq_norm(torch.bmm(a.transpose(1, 2), b)) for a, b in parts])
    return norms, outer_mass(*(sq_norm(side.flatten(0, 1)).view(B, T) for side in (right, left)))


def _form(use: Use, local: str) -> Form | None:
    record = use.call.record
    assert record is not None
    if local in record.kept or local in record.pieces:
        return record.kept.get(local, record.pieces.get(local))
    released = not (record.args or record.kwargs or record.grads)
    return None if released else use.call.rule.factors(record).get(local)


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
    """<G_a, G_b> for each example, of two gradients in either form (not both one-hot rows): (B,)."""
    if isinstance(b, Pieces):
        a, b = b, a
    if isinstance(a, Pieces):
        sizes = [len(part) for part in a.parts]
        return torch.cat([inner(part, some) for part, some in zip(a.parts, _apart(b, sizes), strict=True)])
    if isinstance(a, Factors) and isinstance(b, Factors):
        if a.left.dim() == 2:
            a, b = b, a
        rights = torch.bmm(widest(a.right), widest(b.right).transpose(1, 2))  # (B, T_a, T_b)
        return rights.mul_(_lefts(a.left, b.left)).sum(2).sum(1)
    if isinstance(a, Factors):
        a, b = b, a
    assert isinstance(a, Tensor)
    assert not isinstance(b, Pieces)
    if isinstance(b, Tensor):
        step = max(1, _WIDENED // max(1, a[0].numel())) if len(a) else 1
        return torch.cat([(widest(x) * y).flatten(1).sum(1) for x, y in zip(a.split(step), b.split(step), strict=True)])
    table = a.reshape(len(a), -1, b.right.shape[2])  # (B, m, n)
    if b.left.dim() == 3:
        return torch.bmm(widest(b.left), widest(table)).mul_(b.right).sum(2).sum(1)
    rows = widest(table.gather(1, b.left.clamp(min=0).unsqueeze(2).expand_as(b.right)))
    return rows.mul_(b.right).mul_((b.left >= 0).unsqueeze(2)).sum(2).sum(1)


def _apart(form: Form, sizes: Sequence[int]) -> Iterator[Form]:
    """The same for blocks of consecutive examples."""
    if isinstance(form, Factors):
        yield from map(Factors, form.left.split(sizes), form.right.split(sizes))
    else:
        yield from (form.whole if isinstance(form, Pieces) else form).split(sizes)


def _lefts(left: Tensor, other: Tensor) -> Tensor:
    """<left_t, other_s> in double precision: (B, T, S); ``other`` may be one-hot rows given by their index."""
    if other.dim() == 3:
        return torch.bmm(widest(left), widest(other).transpose(1, 2))
    index = other.clamp(min=0).unsqueeze(1).expand(-1, left.shape[1], -1)
    return widest(left.gather(2, index)) * (other >= 0).unsqueeze(1)


# Sums --------------------------------------------------------------------------------------------------------------


def _by_sums(group: Group, shared: Shared, rows: dict[str, Tensor], masses: dict[str, Mass], *, wide: bool) -> None:
    """Form, add up and measure the gradients of some units at a time."""
    uses = [use for use in group.uses if any(name in shared for name in use.call.site.full.values())]
    params = {name: parts[0][0].call.site.param(parts[0][1]) for name, parts in shared.items()}
    step = max(1, _CHUNK // sum(p.numel() for p in params.values()))
    made: dict[str, list[_Units]] = {name: [] for name in shared}
    for start in range(0, max(1, group.size), step):  # also without units: a process's part of a batch may be empty
        some = {name: _Units(p, min(step, group.size - start)) for name, p in params.items()}
        for use in uses:
            _add_part(use, some, start, wide=wide, whole=step >= group.size)
        for name, units in some.items():
            made[name].append(units)
            units.measure()
    for name, blocks in made.items():
        rows[name] = torch.cat([units.sq_norms for units in blocks])
        counted = [units.parts for units in blocks if len(units.parts) and units.parts.is_cpu]
        parts = max((int(found.max()) for found in counted), default=1)  # on a device counting would mean waiting
        masses[name] = Mass(torch.cat([units.masses for units in blocks]), parts)


class _Units:
    """One parameter's gradients for some units as they accumulate, and then their squared norms."""

    __slots__ = ("masses", "parts", "sq_norms", "total")

    def __init__(self, p: Tensor, count: int) -> None:
        options: Any = {"dtype": widest_dtype(p.device), "device": p.device}
        self.total: Tensor | None = torch.zeros(count, *p.shape, **options)
        self.masses, self.parts, self.sq_norms = torch.zeros(3, count, **options).unbind()

    def add(self, units: Tensor, G: Tensor, mass: Mass, factor: float) -> None:
        assert self.total is not None
        self.total.index_add_(0, units, widest(G), alpha=factor)
        self.masses.index_add_(0, units, mass.rows, alpha=abs(factor))
        self.parts.index_add_(0, units, torch.ones_like(mass.rows), alpha=mass.parts)

    def measure(self) -> None:
        assert self.total is not None
        self.sq_norms, self.total = sq_norm(self.total), None


def _same(record: Record) -> Record:
    """A new record over the same tensors."""
    record.join()
    own = Record(record.module, record.names, record.args, record.kwargs, record.grads, record.memory)
    own.kept, own.most = dict(record.kept), record.most
    return own


def _add_part(use: Use, some: dict[str, _Units], start: int, *, wide: bool, whole: bool) -> None:
    """Add this use's per-example gradients of the units from ``start`` on."""
    record, rule, examples = use.call.record, use.call.rule, use.call.examples
    assert record is not None
    if wide or type(rule).add_weighted is not Rule.add_weighted:
        use.call.measure()  # sets the masses if gradients are added part by part; otherwise masses equal norms
    first = next(iter(some.values()))
    index: Any
    units = use.units
    if units is None:
        units = torch.arange(examples, device=first.masses.device)
    if whole:  # all units are at hand
        index, part = slice(None), _same(record)
    else:
        index = ((units >= start) & (units < start + len(first.masses))).nonzero().squeeze(1)
        part = rule.select(record, index, examples)
    part.names = tuple(local for local, name in use.call.site.full.items() if name in some)
    made = part.kept
    if not part.kept.keys() >= set(part.names):
        made = rule.per_example(rule.widened(part) if wide else part) | part.kept
    for local in part.names:
        mass, G = record.masses.get(local), made[local]
        mass = Mass(sq_norm(G).sqrt_(), 1) if mass is None else Mass(mass.rows[index], mass.parts)
        some[use.call.site.full[local]].add(units[index] - start, G, mass, use.factor)
