"""A table of how each parameter's per-example gradients are computed."""

from __future__ import annotations

from collections.abc import Iterable

from hushgrad.clipping.layout import Kind
from hushgrad.clipping.proof.structure import Place, Structure
from hushgrad.clipping.site import Site

_HEAD = ("module", "rule", "layout", "cost")


def explained(structures: Iterable[Structure], sites: Iterable[Site]) -> str:
    """One row for each module and each way in which it is read: module, rule, layout, cost."""
    rows: dict[tuple[str, str, str, str], None] = {}
    read: set[Site] = set()
    for structure in structures:
        for (site, _), place in structure.places.items():
            read.add(site)
            rows[site.path or "(the model)", type(site.rule).__name__, _where(place), _cost(place, structure)] = None
        for name in sorted(structure.bare):
            rows[name, "(parameter)", "shared by the examples", _at_the_frontier(structure)] = None
    for site in sites:
        if site not in read:
            rows[site.path or "(the model)", type(site.rule).__name__, "not proved yet", "-"] = None
    table = [_HEAD, *rows]
    widths = [max(len(row[k]) for row in table) for k in range(len(_HEAD))]
    return "\n".join("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in table)


def _where(place: Place) -> str:
    return "examples as the rule expects them" if place.native else str(place)


def _cost(place: Place, structure: Structure) -> str:
    if place.layout.kind is Kind.SHARED:
        return _at_the_frontier(structure)
    if place.layout.kind is Kind.ROWS or structure.moves is None:
        return "tags in every step: two or three backward passes to the activations"
    return "none beside its rule"


def _at_the_frontier(structure: Structure) -> str:
    return "a node of the graph for each example" if structure.fragile else "a node of the graph once more"
