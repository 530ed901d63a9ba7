"""The structures that were proved, and what follows from them for inputs of other sizes."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from torch import Tensor

from hushgrad.clipping.costs import LENGTHS
from hushgrad.clipping.layout import Kind, Layout
from hushgrad.clipping.proof.course import Course, joined
from hushgrad.clipping.proof.structure import Number, Pattern, Structure, sizes_of

__all__ = ["Known"]

_shape, _TENSORS = attrgetter("shape"), {Tensor}


class Known:
    """Structures by key: what else than sizes decides what a pass does."""

    def __init__(self) -> None:
        self._proved: dict[Any, list[Structure]] = {}
        self._placed: set[tuple[int, int, Kind, int]] = set()  # inputs, one of them, and where its examples were
        self._between: dict[Any, list[Structure]] = {}  # of lengths between the proved ones
        self.asked: Any = (
            None  # the last question of `read_as` about plain tensors: key, expected and their sizes; and its answer
        )
        self.answer: list[tuple[int, list[Structure]]] = []

    def proved(self, key: Any) -> list[Structure]:
        """All that were proved under this key, the last one first."""
        return self._proved.get(key, [])

    def every(self) -> list[Structure]:
        """All that were proved."""
        return [structure for proved in self._proved.values() for structure in proved]

    def shared(self, tensor: int, shape: tuple[int, ...]) -> bool:
        """Whether all examples shared the input of this number, of this shape, in a pass that was proved."""
        return any(s.reading.layouts[tensor : tensor + 1] == (None,) and s.sizes[tensor] == shape for s in self.every())

    def placed(self, tensors: int, tensor: int, layout: Layout) -> bool:
        """Whether the input of this number, of so many, had the examples there in a batch that was proved."""
        return (tensors, tensor, *layout[:2]) in self._placed

    def add(self, key: Any, structure: Structure, *, of_one: bool = False) -> Structure:
        """Remember, and return what is remembered: with the courses of one that looks the same and is replaced.

        Whatever was concluded is forgotten. ``of_one``: there was a single example.
        """
        layouts = structure.reading.layouts
        if not of_one:  # of which every reading is right
            self._placed |= {(len(layouts), k, *v[:2]) for k, v in enumerate(layouts) if isinstance(v, Layout)}
        looks = (structure.sizes, structure.order, structure.shapes)
        alike = [(s.sizes, s.order, s.shapes) == looks for s in self.proved(key)]
        replaced = [s.courses for s, same in zip(self.proved(key), alike, strict=True) if same]
        kept = [s for s, same in zip(self.proved(key), alike, strict=True) if not same]
        structure = structure._replace(courses=joined([structure.courses, *replaced]))
        self._proved[key] = [structure, *kept]
        self._between.pop(key, None)
        self.asked = None
        return structure

    def saw(self, key: Any, structure: Structure, nodes: int, course: Course | None) -> None:
        """A pass that was read by tags makes so many nodes, and took this course."""
        seen = structure._replace(nodes=frozenset({nodes}) | (structure.nodes or frozenset()))
        if course is not None and seen.courses is not None:
            seen = seen._replace(courses=seen.courses.after(course))
        for kept in (self._proved.get(key, []), self._between.get(key, [])):
            kept[:] = [seen if s is structure else s for s in kept]
        self.asked = None

    def read_as(self, key: Any, tensors: list[Any], expected: int | None) -> list[tuple[int, list[Structure]]]:
        """How many examples these inputs may hold, ``expected`` where that was said, with the candidates for each number.

        All that the answer depends on are the key and the sizes of tensors.
        """
        proved, answer = self._proved.get(key, ()), []
        for n in [expected] if expected is not None else dict.fromkeys([s.examples(tensors) for s in proved]):
            if n is None:
                continue
            found: list[Structure] = []
            for s in proved if n != 1 else ():
                if s.fits(tensors, n):
                    found.append(s)
            answer.append((n, found if found or n == 1 or len(proved) < LENGTHS else self._concluded(key, tensors, n)))
        plain = {*map(type, tensors)} == _TENSORS
        self.asked, self.answer = (key, expected, [*map(_shape, tensors)]) if plain else None, answer
        return answer

    def _concluded(self, key: Any, tensors: list[Any], examples: int) -> list[Structure]:
        """What follows from proved lengths, where none of them fits."""
        proved, concluded = self._proved[key], self._between.setdefault(key, [])
        found = [s for s in concluded if s.fits(tensors, examples)]
        if not found:
            made = _between(proved, tensors, examples)
            found = [] if made is None else [made]
            concluded += found
        return found


def _between(proved: Sequence[Structure], tensors: list[Any], examples: int) -> Structure | None:
    """The structure for a length between proved ones: all sizes inside are the same straight line of the inputs' as in the proofs."""
    first = proved[0]
    sizes = sizes_of(tensors, first.reading, examples)
    alike = [s for s in proved if s.same_as(first) and s.order == first.order and s.reading.layouts_alike(first.reading)]
    if sizes is None or len({s.sizes for s in alike}) < LENGTHS or examples > first.most:
        return None
    wanted = _flat(sizes)
    known = [_flat(s.sizes) for s in alike]
    if any(len(v) != len(wanted) for v in known) or not all(min(c) <= w <= max(c) for *c, w in zip(*known, wanted, strict=True)):
        return None
    inside = [_inside(s) for s in alike]
    if len({tuple(v is None for v in row) for row in inside}) > 1:
        return None
    line = _on_a_line(known, [[0 if v is None else v for v in row] for row in inside], wanted)
    if line is None:
        return None
    values = iter(None if v is None else int(x) for v, x in zip(inside[0], line, strict=True))
    shapes = {n: tuple(tuple(next(values) for _ in p) for p in ps) for n, ps in first.shapes.items()}
    nodes = next(values)
    courses = joined([s.courses for s in alike], same=True)
    return first._replace(sizes=sizes, shapes=shapes, nodes=None if nodes is None else frozenset({nodes}), courses=courses)


def _flat(sizes: tuple[Any, ...]) -> list[int]:
    return [v for one in sizes for v in one if isinstance(v, int)]


def _inside(structure: Structure) -> list[int | None]:
    """All sizes inside, and the number of nodes."""
    shapes: dict[Number, tuple[Pattern, ...]] = structure.shapes
    made = [v for ps in shapes.values() for p in ps for v in p]
    return [*made, min(structure.nodes) if structure.nodes else None]


def _on_a_line(known: list[list[int]], inside: list[list[int]], wanted: list[int]) -> list[int] | None:
    """A @ x + b through all the known points, at the wanted one; None if they are on no such line."""
    points = np.array([[*v, 1.0] for v in known])
    values = np.array(inside, dtype=float)
    solved = np.linalg.lstsq(points, values, rcond=None)[0]
    made = np.array([*wanted, 1.0]) @ solved
    whole = np.rint(made)
    exact = np.abs(points @ solved - values).max(initial=0.0) < 1e-6 and np.abs(made - whole).max(initial=0.0) < 1e-6
    return whole.astype(int).tolist() if exact else None
