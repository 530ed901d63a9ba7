"""Padding does not count, in the model or in the loss, or the run is refused: how much there is follows from the largest example."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

from hushgrad.errors import NotIsolated
from hushgrad.train import Plan, fit, make_private
from hushgrad.train.padded_examples import _Cut

WORDS = 11


class Texts(nn.Module):
    """Reads texts by ``read``, from (B, T, 6), ids and lengths; scores of whole texts, or of each token."""

    def __init__(self, read):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head, self.read = nn.Embedding(WORDS, 6), nn.Linear(6, WORDS), read
        nn.init.constant_(self.table.weight[0], 2.0)  # of padding: a maximum would see it
        self.recurrent = nn.GRU(6, 6, batch_first=True) if "gru" in read.__name__ else nn.Identity()

    def forward(self, ids):
        return self.head(self.read(self.recurrent, self.table(ids), ids, ids.gt(0).sum(1)))


def tokens(_, x, ids, lengths):
    return x


def own_mean(_, x, ids, lengths):
    return (x * ids.gt(0).unsqueeze(2)).sum(1) / lengths.unsqueeze(1)


def mean(_, x, ids, lengths):
    return x.mean(1)


def largest(_, x, ids, lengths):
    return x.amax(1)


def attended(_, x, ids, lengths):
    return torch.softmax(x @ x.transpose(1, 2), 2) @ x


def own_attended(_, x, ids, lengths):
    return torch.softmax((x @ x.transpose(1, 2)).masked_fill(ids.eq(0).unsqueeze(1), -torch.inf), 2) @ x


def last_gru(gru, x, ids, lengths):
    return gru(x)[0][:, -1]


def own_last_gru(gru, x, ids, lengths):
    return gru(x)[0].gather(1, (lengths - 1).view(-1, 1, 1).expand(-1, 1, 6)).squeeze(1)


def packed_gru(gru, x, ids, lengths):
    return gru(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[1][0]


def each(scores, labels):
    return F.cross_entropy(scores.transpose(1, 2), labels, reduction="none", ignore_index=0)


def by_tokens(scores, labels):
    return each(scores, labels).sum(1) / labels.gt(0).sum(1)


def by_length(scores, labels):
    return each(scores, labels).mean(1)


def of_texts(scores, labels):
    return F.cross_entropy(scores, labels[:, 0])


RIGHT = [
    (tokens, by_tokens),
    (own_attended, by_tokens),
    (own_mean, of_texts),
    (own_last_gru, of_texts),
    (packed_gru, of_texts),
]
WRONG = [
    (tokens, by_length),
    (own_attended, by_length),
    (attended, by_tokens),
    (mean, of_texts),
    (largest, of_texts),
    (last_gru, of_texts),
]


def padded(records):
    ids = pad_sequence(records, batch_first=True)
    return ids, ids


def texts(seed):
    """Short ones, and a long one."""
    lot = torch.Generator().manual_seed(seed)
    lengths = [24, *torch.randint(2, 7, (7,), generator=lot).tolist()]
    return [torch.randint(1, WORDS, (n,), generator=lot) for n in lengths]


def a_plan():
    return Plan.dpftrl(noise_multiplier=1.0, delta=1e-3, batch_size=8, dataset_size=8, steps=1)


def by_outputs(model, loss_fn, data):
    run = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), a_plan(), seed=1)
    loss = run.loss(loss_fn)
    try:
        for batch in run.loader(data, collate_fn=padded):
            for ids, labels in batch.split(3):
                loss(model(ids), labels).backward()
            run.optimizer.step()
    finally:
        run.detach()


def by_batch(model, loss_fn, data):
    run = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), a_plan(), seed=1)
    loss = run.loss(lambda model, ids, labels: loss_fn(model(ids), labels).mean())
    try:
        for ids, labels in run.loader(data, collate_fn=padded):
            loss(model, ids, labels).backward()
            run.optimizer.step()
    finally:
        run.detach()


def by_fit(model, loss_fn, data):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fit(model, loss_fn, optimizer, data, a_plan(), seed=1, progress=False, collate_fn=padded)


LOOPS = [by_outputs, by_batch, by_fit]


@pytest.mark.parametrize("case", range(len(RIGHT)))
def test_what_leaves_padding_out_is_taken(case):
    read, loss_fn = RIGHT[case]
    LOOPS[case % 3](Texts(read), loss_fn, texts(case))


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_what_reads_padding_is_refused(case):
    read, loss_fn = WRONG[case]
    for loop in (LOOPS[case % 3], LOOPS[(case + 1) % 3]):
        with pytest.raises(NotIsolated, match=r"depends on how far it is padded, and so on the largest example of its batch\."):
            loop(Texts(read), loss_fn, texts(case))


def test_a_loop_of_ones_own_is_refused_where_the_model_reads_padding():
    model = Texts(last_gru)
    run = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), a_plan(), seed=1)
    with pytest.raises(NotIsolated, match="What the model makes of an example depends on how far it is padded"):
        for ids, labels in run.loader(texts(1), collate_fn=padded):
            of_texts(model(ids), labels).backward()
            run.optimizer.step()
    assert run.steps == 0
    run.detach()


def test_padding_to_one_length_is_the_remedy():
    def longest(records):
        ids = F.pad(pad_sequence(records, batch_first=True), (0, 24 - max(map(len, records))))
        return ids, ids

    for seed, (read, loss_fn) in enumerate(WRONG[:2]):
        model = Texts(read)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fit(model, loss_fn, optimizer, texts(seed), a_plan(), seed=1, progress=False, collate_fn=longest)


def test_an_example_is_known_by_all_of_its_tensors():
    """Others share some of them: zeros, labels, masks. In a part of the batch without it, none is taken for it."""
    rows = [torch.tensor([3, 4, 0]), torch.tensor([0, 0, 0])]  # ids and types of a text of two tokens, padded to three
    cut = _Cut(rows, [t[None, :2] for t in rows], left=False)
    types = torch.zeros(2, 3, dtype=torch.long)
    assert cut.place([torch.tensor([[5, 6, 7], [3, 4, 0]]), types], 2) == 1
    assert cut.place([torch.tensor([[5, 6, 7], [3, 4, 8]]), types], 2) is None
