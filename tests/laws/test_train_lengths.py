"""How long the longest text of a batch is must not move the others by more than rounding allows, whoever deals, pads and loops."""

import math
import sys
from collections import UserDict
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hushgrad.errors import NotIsolated
from hushgrad.sampling.collate_checks import smallest
from hushgrad.train import Plan, fit, make_private

sys.path.insert(0, str(Path(__file__).parents[2] / "faults"))
LONGEST, SENTENCE = 9, r"padded to the longest of their batch.*Pad all of them to one length"


class Reads(nn.Module):
    """Sees only what its mask shows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.table, self.mix, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11)

    def forward(self, ids, mask):
        h = self.table(ids) * mask.unsqueeze(2)
        return self.head(torch.tanh(self.mix(h)).mul(mask.unsqueeze(2)).sum(1) / mask.sum(1, keepdim=True))


def texts(count=24):
    lot = torch.Generator().manual_seed(5)
    return [torch.randint(1, 11, (3 + i % (LONGEST - 2),), generator=lot) for i in range(count)]


def padded(records, length=None):
    length = length or max(map(len, records))
    ids = torch.stack([nn.functional.pad(r, (0, length - len(r))) for r in records])
    return ids, (ids > 0).float(), ids[:, 0]


def to_one_length(records):
    return padded(records, LONGEST)


def plan_of(**options):
    return Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=8, dataset_size=24, steps=3, **options)


def by_loop(model, collate, *, autocast=False, part=None, plan=None, **options):
    run = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), plan or plan_of(), seed=1, **options)
    loss = run.loss(nn.CrossEntropyLoss())
    try:
        for batch in run.loader(texts(), collate_fn=collate):
            for ids, mask, label in run.split(batch, part) if part else [batch]:
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    out = model(ids, mask)
                loss(out.float(), label).backward()
            run.optimizer.step()
    finally:
        assert run.steps == 3 or run.spent().epsilon in (0.0, math.inf)
    return run


def by_name(model, collate):
    """A collate function that returns a mapping which is no dict, as tokenizers do."""
    run = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), plan_of(), seed=1)
    try:
        for batch in run.loader(texts(), collate_fn=lambda r: UserDict(zip(("ids", "mask", "label"), collate(r), strict=True))):
            with torch.autocast("cpu", torch.bfloat16):
                out = model(batch["ids"], batch["mask"])
            nn.functional.cross_entropy(out.float(), batch["label"]).backward()
            run.optimizer.step()
    finally:
        assert run.steps == 3 or run.spent().epsilon == 0.0  # seen before the first step


def by_fit(model, collate, *, autocast=False):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = lambda out, label: nn.functional.cross_entropy(out.float(), label)  # noqa: E731
        fit(model, loss, optimizer, texts(), plan_of(), seed=1, progress=False, collate_fn=collate)


def frozen():
    """Half precision where nothing is trained."""
    model = Reads()
    model.register_buffer("scale", torch.ones(1, dtype=torch.bfloat16))
    return model


HALVES = {
    "autocast, a loop": lambda collate: by_loop(Reads(), collate, autocast=True),
    "autocast, in parts": lambda collate: by_loop(Reads(), collate, autocast=True, part=4),
    "autocast, fit": lambda collate: by_fit(Reads(), collate, autocast=True),
    "autocast, a mapping": lambda collate: by_name(Reads(), collate),
    "weights": lambda collate: by_loop(
        Reads().bfloat16(), lambda r: [t.bfloat16() if t.is_floating_point() else t for t in collate(r)]
    ),
    "frozen weights": lambda collate: by_loop(frozen(), collate),
    "certified": lambda collate: by_loop(Reads(), collate, plan=plan_of(certified=True)),
}


@pytest.mark.parametrize("way", HALVES)
def test_lengths_that_follow_from_the_longest_are_refused(way):
    with pytest.raises(NotIsolated, match=SENTENCE):
        HALVES[way](padded)
    HALVES[way](to_one_length)


def test_products_in_half_precision_are_half_precision():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(NotIsolated, match=SENTENCE):
            by_loop(Reads(), padded)
    finally:
        torch.set_float32_matmul_precision(before)


def test_single_precision_and_whoever_vouches_may_pad():
    assert by_loop(Reads(), padded).steps == 3
    assert by_loop(Reads(), padded, autocast=True, check_isolation=False).steps == 3


def test_a_loop_that_pads_by_itself_is_seen_when_lengths_change():
    """What was released before is then covered by nothing."""
    model = Reads()
    run = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), plan_of(), seed=1)
    with pytest.raises(NotIsolated, match=SENTENCE):
        for step, (ids, mask, label) in enumerate(run.loader(texts(), collate_fn=to_one_length)):
            short = LONGEST - (step > 0)
            with torch.autocast("cpu", torch.bfloat16):
                out = model(ids[:, :short], mask[:, :short])
            nn.functional.cross_entropy(out.float(), label).backward()
            run.optimizer.step()
    assert run.steps == 1
    assert run.spent().epsilon == math.inf


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.sampled_from(["tokens", "words", "tensor", "fields", "object"]))
def test_records_of_different_lengths_are_told_by_their_smallest(lengths, kind):
    class Text:
        def __init__(self, n):
            self.ids, self.label = [1] * n, 0

    make = {
        "tokens": lambda n: ([2] * n, 1),
        "words": lambda n: "x" * n,
        "tensor": lambda n: torch.zeros(n, 2),
        "fields": lambda n: {"ids": [1] * n, "label": 3, "mask": torch.ones(n)},
        "object": Text,
    }[kind]
    found = smallest([make(n) for n in lengths])
    some = [n for n in lengths if n] or lengths  # an empty one shows nothing
    assert found == (None if len(set(lengths)) == 1 else lengths.index(min(some)))


def test_in_single_precision_a_long_text_moves_the_others_by_less_than_is_promised():
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'hushgrad[hf]'")
    from lengths import moved

    assert 0.9 < max(moved(4, 7, half=False)) < 1.0001
