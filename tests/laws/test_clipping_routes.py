"""Routed rows: a list of rows tells of itself what whole numbers tell that are sent through the node."""

from __future__ import annotations

from random import Random

import pytest
import torch

from hushgrad.clipping.layout import FIRST, NOBODY, ROWS, Kind, Layout
from hushgrad.clipping.proof import routes
from hushgrad.clipping.proof.graph import Graph
from hushgrad.clipping.proof.row_moves import Move


def _layout(lot: Random, rows: int, examples: int) -> Layout:
    kinds = [ROWS] + [Layout(kind, 0, rows // examples) for kind in (Kind.MAJOR, Kind.MINOR) if rows % examples == 0]
    return lot.choice([*kinds, FIRST] if rows == examples else kinds)


def _told(lot, *, tame):
    """What is told of ``x[index]`` by both ways; ``tame``: each row is listed for one example alone."""
    examples, width = lot.randrange(2, 5), lot.choice([None, 1, 3])
    rows, listed = examples * lot.randrange(1, 4), examples * lot.randrange(1, 4)
    index = torch.tensor([lot.randrange(-rows, rows) for _ in range(listed)])
    into, to = _layout(lot, rows, examples), _layout(lot, listed, examples)
    by = {r: lot.randrange(-1, examples) for r in range(rows)}
    if into.regular:
        by = dict(enumerate(into.numbers(examples).tolist()))
    owners = torch.tensor([by[int(r) % rows] if tame else lot.randrange(-1, examples) for r in index])
    if to.regular:
        owners = to.numbers(examples)
    x = torch.zeros(rows, *([] if width is None else [width])).requires_grad_()
    node = x[index].grad_fn
    numbers = torch.arange(1.0, examples + 1), torch.tensor([float(lot.randrange(1, 1 << 20)) for _ in range(examples)])
    here = routes._Pass(Graph([]), {}, {}, numbers)
    made = []
    for way in (routes._listed, lambda *given: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(routes, "_listed", way)
            try:
                made.append(routes._moved(here, node, Move("IndexBackward0", (to,), (into,)), {} if to.regular else {0: owners}))
            except LookupError:
                made.append(None)
    return made


@pytest.mark.parametrize("seed", range(3))
def test_a_list_of_rows_tells_what_numbers_sent_through_it_tell(seed):
    lot, found = Random(seed), []
    for number in range(200):
        by_list, by_numbers = _told(lot, tame=number % 2 == 0)
        assert (by_list is None) == (by_numbers is None)
        if by_list is not None and by_numbers is not None:
            assert by_list.keys() == by_numbers.keys()
            assert all(torch.equal(by_list[slot], by_numbers[slot]) for slot in by_list)
        found.append("refused" if by_list is None else "routed" if by_list else "regular")
    assert min(map(found.count, ("refused", "routed", "regular"))) > 10


def test_other_nodes_that_move_rows_are_asked_with_numbers():
    x = torch.zeros(4, 3).requires_grad_()
    of = Move("IndexBackward0", (FIRST,), (FIRST,))
    for y in (x[:, torch.arange(3)], x[torch.ones(4, dtype=torch.bool)], x[torch.arange(4).view(2, 2)], x.flip(0)):
        listed = routes._listed(y.grad_fn, of, {}, 4)
        assert listed is None or (listed == {} and y.shape == x.shape)
    with pytest.raises(LookupError):
        routes._listed(x[torch.tensor([0, 0, 2, 3])].grad_fn, of, {}, 4)
    ((slot, owners),) = routes._listed(
        x[torch.tensor([3, 1, 1])].grad_fn, Move("", (ROWS,), (ROWS,)), {0: torch.tensor([2, 0, 0])}, 4
    ).items()
    assert slot == 0 and owners.tolist() == [NOBODY, 0, NOBODY, 2]
