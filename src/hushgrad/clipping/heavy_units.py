"""Heavy units, whose parts are far larger than their sum: each one's gradient is formed alone, measured, clipped, and added as one term.

The formed gradient depends only on the unit's own records, and so do its rounding errors. Since it is clipped by the norm of *what was
formed*, it adds no more than the clip norm, whatever its records are.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hushgrad.clipping.clipper import Clipper, added, usable
from hushgrad.clipping.mass import Mass, cap, sq_norm
from hushgrad.events import Relation

if TYPE_CHECKING:
    from hushgrad.clipping.certificate import Certificate
    from hushgrad.clipping.reduce import Group, Use

Columns = dict[str, int] | None  # the clipping group of each parameter


class Formed(NamedTuple):
    """The clipped sums of heavy units, and each one's norm and weights."""

    sums: dict[str, Tensor]
    norms: list[float]
    weights: list[Tensor]


def is_light(masses: list[Mass], weights: Tensor, clipper: Clipper) -> bool:
    """Whether no example is heavy, given the masses of some parameters; for the others the mass is the norm, which is clipped."""
    total = added([mass.rows.square() for mass in masses]) if len(masses) > 1 else masses[0].rows.square()
    bound = (cap(max(mass.parts for mass in masses)) - 1) * clipper.sensitivity(Relation.ADD_REMOVE)
    return bool((weights.double() * total.sqrt_() <= bound).all())  # squares of small weights are 0 in single precision


def heavy_units(
    sq_norms: dict[str, Tensor],
    masses: dict[str, Mass],
    weights: Tensor,
    columns: Columns,
    clipper: Clipper,
    certificate: Certificate | None = None,
) -> list[int]:
    """The units whose weighted mass exceeds the cap; those of weight 0 add nothing."""
    if not masses:
        return []
    total = torch.zeros_like(next(iter(sq_norms.values())))
    for name, square in sq_norms.items():
        mass = masses[name].rows.square() if name in masses else square
        total += mass * (weights if columns is None else weights[:, columns[name]]).square()
    most = (cap if certificate is None else certificate.cap)(max(mass.parts for mass in masses.values()))
    bound = most * clipper.sensitivity(Relation.ADD_REMOVE)
    taken = weights != 0 if columns is None else (weights != 0).any(1)
    return (~(total <= bound**2) & taken).nonzero().flatten().tolist()  # type: ignore[no-any-return]


def form(
    group: Group,
    units: list[int],
    masses: dict[str, Mass],
    clipper: Clipper,
    columns: Columns,
    certificate: Certificate | None = None,
) -> Formed:
    """Form, measure and clip these units, one at a time; for a certificate, in double precision from their parts."""
    made = Formed({}, [], [])
    for unit in units:
        G = _gradient(group, unit, wide=certificate is not None)
        squares = {name: sq_norm(value.unsqueeze(0)) for name, value in G.items()}
        if certificate is not None:
            # As for a light unit: one at the boundary, which other data may make light, must get the same weight.
            mine = {name: Mass(mass.rows[unit : unit + 1], mass.parts) for name, mass in masses.items()}
            squares = {name: certificate.upper(name, square, mine) for name, square in squares.items()}
        whole = added(list(squares.values()))
        weights = usable(clipper.weights(whole if columns is None else by_group(squares, columns, 1)))[0]
        if not bool(whole.isfinite()):
            weights = torch.zeros_like(weights)
        made.norms.append(float(whole.sqrt()))
        made.weights.append(weights)
        for name, value in G.items():
            by = float(weights if columns is None else weights[columns[name]])
            if by:  # 0 * inf is NaN
                held = made.sums.get(name)
                made.sums[name] = value * by if held is None else held.add_(value, alpha=by)
    return made


def by_group(rows: dict[str, Tensor], column: dict[str, int], units: int) -> Tensor:
    """The sums over each clipping group: (units, groups)."""
    stacked = torch.stack(list(rows.values()))
    index = _places(tuple(column[name] for name in rows), stacked.device)
    return stacked.new_zeros(max(column.values(), default=0) + 1, units).index_add_(0, index, stacked).t()


@lru_cache(maxsize=64)
def _places(columns: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(columns).to(device)


def _gradient(group: Group, unit: int, *, wide: bool) -> dict[str, Tensor]:
    """The unit's whole gradient in double precision, from one example at a time, so that shapes never vary."""
    total: dict[str, Tensor] = {}
    for use in group.uses:
        for example in _examples(use, unit):
            for local, G in _made(use, example, wide=wide).items():
                name = use.call.site.full[local]
                term = G[0].double() * use.factor
                total[name] = total[name] + term if name in total else term
    return total


def _examples(use: Use, unit: int) -> Iterator[int]:
    if use.units is None:
        yield unit
    else:
        yield from (use.units == unit).nonzero().flatten().tolist()


def _made(use: Use, example: int, *, wide: bool) -> dict[str, Tensor]:
    """The example's gradients: those that exist, and the others computed from their factors."""
    record, rule = use.call.record, use.call.rule
    assert record is not None
    device = use.call.site.params[0].device
    part = rule.select(record, torch.tensor([example], device=device), use.call.examples)
    kept = {name: part.kept[name] for name in part.names if name in part.kept}
    if len(kept) == len(part.names):
        return kept
    return rule.per_example(rule.widened(part) if wide else part) | kept
