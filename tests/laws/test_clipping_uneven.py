"""Examples with different numbers of rows: in a first batch they may all have as many, which must not count as a rule."""

import random

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

from hushgrad.clipping import Capture, Flat
from hushgrad.errors import CaptureError, NotIsolated

WIDTH, EXAMPLES = 3, 4


class _Rows(nn.Module):
    """Row by row: a bare parameter, a layer, or both."""

    def __init__(self, *, scaled, layered):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH)) if scaled else None
        self.layer = nn.Linear(WIDTH, WIDTH) if layered else None

    def rows(self, h):
        h = h if self.scale is None else h * self.scale
        return (h if self.layer is None else self.layer(h)).tanh()


class Packed(_Rows):
    def forward(self, packed):
        return self.rows(packed.data)

    def batch(self, records):
        return (pack_sequence(records, enforce_sorted=False),)


class PackedInside(_Rows):
    def forward(self, padded, lengths):
        packed = pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=False)
        back = PackedSequence(self.rows(packed.data), packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
        return pad_packed_sequence(back, batch_first=True, total_length=padded.shape[1])[0].sum(1)

    def batch(self, records):
        longest = torch.nn.utils.rnn.pad_sequence([*records, torch.zeros(8, WIDTH, dtype=torch.float64)], batch_first=True)
        return longest[: len(records)], torch.tensor([*map(len, records)])


class Bags(_Rows):
    """Flat rows, and where those of each example begin; ``apart``: returned as they are."""

    apart = False

    def __init__(self, **kinds):
        super().__init__(**kinds)
        self.table = nn.Embedding(9, WIDTH)

    def forward(self, numbers, begins):
        h = self.rows(self.table(numbers))
        whose = torch.zeros(len(numbers), dtype=torch.long).index_fill(0, begins[1:], 1).cumsum(0)
        return h if self.apart else torch.zeros(len(begins), WIDTH, dtype=h.dtype).index_add(0, whose, h)

    def batch(self, records):
        lengths = torch.tensor([0, *map(len, records)])
        return torch.cat(records)[:, 0].abs().mul(3).long() % 9, lengths.cumsum(0)[:-1]


class FlatRows(Bags):
    apart = True


def _alone(model, records, clip):
    made, norms = 0.0, []
    for record in records:
        found = torch.autograd.grad(
            model(*model.batch([record])).square().sum(), list(model.parameters()), allow_unused=True, materialize_grads=True
        )
        g = torch.cat([t.flatten() for t in found])
        norms.append(g.norm())
        made = made + g * (clip / g.norm()).clamp(max=1.0)
    return made


LENGTHS = [(4, 4, 4, 4), (6, 2, 5, 3), (5, 3, 6, 2), (1, 7, 4, 4), (2, 2, 2, 2)]


@pytest.mark.parametrize("kind", [Packed, PackedInside, Bags, FlatRows])
@pytest.mark.parametrize(("scaled", "layered"), [(True, False), (True, True), (False, True)])
def test_as_many_rows_of_each_example_in_the_first_batch_are_no_rule(kind, scaled, layered):
    lot = random.Random(f"{kind.__name__} {scaled} {layered}")
    torch.manual_seed(0)
    model = kind(scaled=scaled, layered=layered).double()
    capture = Capture(model, loss_reduction="sum", unused="zero")
    capture.attach()
    for lengths in [LENGTHS[0], *lot.sample(LENGTHS[1:], 3)]:
        records = [torch.randn(n, WIDTH, dtype=torch.float64) for n in lengths]
        capture.examples(EXAMPLES)
        try:
            model(*model.batch(records)).square().sum().backward()
            found = torch.cat([t.flatten() for t in capture.collect(Flat(0.5)).raw_sums.values()])
        except (CaptureError, NotIsolated):
            assert kind is FlatRows  # which does not say whose its rows are
            capture.discard()
            continue
        with capture.pause():
            torch.testing.assert_close(found, _alone(model, records, 0.5))
    capture.detach()
