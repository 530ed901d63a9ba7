"""A loss of a whole batch is the mean over its examples, whatever it divides by, or it is refused before a step; in every loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hushgrad.errors import CaptureError, NotIsolated
from hushgrad.train import Plan, make_private
from hushgrad.train.batch_means import Rows
from hushgrad.train.batch_variety import Variety

WORDS, LENGTH, COUNT = 11, 9, 12


def _each(scores, labels):
    """(B, T): of each token, 0 where its label does not count."""
    return F.cross_entropy(scores.transpose(1, 2), labels, reduction="none")


def _own(scores, labels):
    counts = labels.ne(-100).sum(1).clamp(min=1)
    return _each(scores, labels).sum(1) / counts


MEANS = {
    "each one's mean": lambda s, y: _own(s, y).mean(),
    "each one's sum": lambda s, y: _each(s, y).sum(1).mean(),
    "weighted by its own length": lambda s, y: (_own(s, y) * y.ne(-100).sum(1)).mean(),
    "its last token": lambda s, y: _each(s, y).gather(1, y.ne(-100).sum(1, keepdim=True) - 1).mean(),
    "by a constant length": lambda s, y: _each(s, y).sum() / (LENGTH * len(y)),
    "its largest": lambda s, y: _each(s, y).amax(1).mean(),
}
MIXED = {
    "all tokens": lambda s, y: F.cross_entropy(s.flatten(0, 1), y.flatten()),
    "all tokens, masked": lambda s, y: (_each(s, y) * y.ne(-100)).sum() / y.ne(-100).sum(),
    "all tokens, a number": lambda s, y: _each(s, y).sum() / int(y.ne(-100).sum()),
    "longest text": lambda s, y: _each(s, y).sum(1).mean() / y.ne(-100).sum(1).max(),
    "mean length": lambda s, y: _each(s, y).sum(1).mean() / y.ne(-100).float().sum(1).mean(),
    "weights that sum to 1": lambda s, y: (_own(s, y) * F.softmax(y.ne(-100).sum(1).float(), 0)).sum(),
    "weights by loss": lambda s, y: (_own(s, y) * F.softmax(_own(s, y).detach(), 0)).sum(),
    "class weights": lambda s, y: F.cross_entropy(s.transpose(1, 2), y, weight=torch.linspace(0.2, 3.0, WORDS)),
    "valid texts": lambda s, y: _own(s, y).sum() / y.ne(-100).sum(1).gt(4).sum().clamp(min=1),
    "largest of all": lambda s, y: _own(s, y).max(),
    "scaled by a spread": lambda s, y: _own(s, y).mean() / _own(s, y).detach().std(unbiased=False).add(0.1),
}


class Texts(nn.Module):
    """Scores for each token; and a loss of its own, if it is given labels."""

    def __init__(self, reduce, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.reduce = reduce
        self.table, self.head = nn.Embedding(WORDS, 6), nn.Linear(6, WORDS)

    def forward(self, ids, labels=None):
        scores = self.head(self.table(ids))
        return {"scores": scores, **({} if labels is None else {"loss": self.reduce(scores, labels)})}


def _texts(lot, lengths):
    rows = torch.randint(WORDS, (len(lengths), LENGTH), generator=lot)
    return rows, rows.masked_fill(torch.arange(LENGTH) >= torch.tensor(lengths).unsqueeze(1), -100)


def _taken(reduce, lengths, way, *, seed=0, steps=1, size=COUNT):
    """What a run comes to: its steps, and the notes."""
    lot = torch.Generator().manual_seed(seed)
    model = Texts(reduce, seed)
    plan = Plan.dpftrl(noise_multiplier=1.0, delta=1e-3, batch_size=size, dataset_size=len(lengths), steps=steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = make_private(model, optimizer, plan, seed=seed)
    loss = private.loss(lambda model, ids, labels: reduce(model(ids)["scores"], labels))
    try:
        for ids, labels in private.loader(torch.utils.data.TensorDataset(*_texts(lot, lengths))):
            (model(ids, labels)["loss"] if way == "the model's own" else loss(model, ids, labels)).backward()
            optimizer.step()
        return private
    finally:
        private.detach()


def _lengths(seed):
    return torch.randint(2, LENGTH + 1, (COUNT,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(("way", "seed"), [("the model's own", 0), ("private.loss", 1)])
def test_a_loss_of_a_batch_is_a_mean_over_its_examples_or_refused(way, seed):
    for name, reduce in MEANS.items():
        assert _taken(reduce, _lengths(seed), way, seed=seed).steps == 1, name
    for name, reduce in MIXED.items():
        with pytest.raises(NotIsolated, match="one example changes what another one counts"):
            _taken(reduce, _lengths(seed), way, seed=seed)
            pytest.fail(name)


@pytest.mark.parametrize("way", ["the model's own", "private.loss"])
def test_a_mean_by_chance_is_seen_where_texts_first_differ(way):
    with pytest.raises(NotIsolated):  # batches of two texts; one of them, in whatever place, has a longer one
        _taken(MIXED["all tokens"], [5] * 23 + [8], way, steps=12, size=2)


class Classes(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(5, 3)

    def forward(self, x, labels):
        scores = self.head(x)
        return {"scores": scores, "loss": F.cross_entropy(scores, labels, weight=torch.tensor([1.0, 1.0, 20.0]))}


@pytest.mark.parametrize("way", ["the model's own", "private.loss"])
def test_a_class_with_a_weight_that_comes_late_is_seen_where_it_comes(way):
    labels = [0, 1] * 24
    labels[41] = 2
    data = torch.utils.data.TensorDataset(torch.randn(48, 5, generator=torch.Generator().manual_seed(1)), torch.tensor(labels))
    model = Classes()
    plan = Plan.dpftrl(noise_multiplier=1.0, delta=1e-3, batch_size=4, dataset_size=48, steps=12, sampling="round_robin")
    private = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, seed=1)
    loss = private.loss(lambda model, x, labels: model(x, labels)["loss"])
    with pytest.raises(NotIsolated):
        for x, y in private.loader(data):
            late = bool(y.eq(2).any())
            (loss(model, x, y) if way == "private.loss" else model(x, y)["loss"]).backward()
            private.optimizer.step()
    assert late and private.steps > 0 and private.spent().epsilon == float("inf")
    private.detach()


@pytest.mark.parametrize("way", ["the model's own", "private.loss"])
def test_labels_that_do_not_count_are_seen_where_they_first_come(way):
    """Before, texts differ in how often they hold their least word, which divides nothing."""
    with pytest.raises(NotIsolated):
        _taken(MIXED["all tokens"], [LENGTH] * 47 + [3], way, steps=12, size=4)


def test_classes_count_as_tried_where_they_met_others():
    rows, seen = Rows(2, 2), Variety()
    for pair in ([0, 1], [2, 3]):
        assert len(seen.shown([torch.tensor(pair)], rows.held)) == 2
        seen.add([torch.tensor(pair)], rows.held)
    assert seen.shown([torch.tensor([0, 2])], rows.held) == {1}  # neither of the first two met one of the others
    seen.add([torch.tensor([0, 2])], rows.held)
    assert seen.shown([torch.tensor([1, 2])], rows.held) == set()
    for k in range(4, 80, 2):  # numbers of records
        seen.add([torch.tensor([k, k + 1])], rows.held)
    assert seen.shown([torch.tensor([200, 201])], rows.held) == set()


def test_what_was_released_before_is_covered_by_no_theorem():
    model = Texts(MIXED["all tokens"], 0)
    plan = Plan.dpftrl(noise_multiplier=1.0, delta=1e-3, batch_size=4, dataset_size=8, steps=2, sampling="round_robin")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = make_private(model, optimizer, plan, seed=1)
    dealt = iter(private.loader(torch.utils.data.TensorDataset(*_texts(torch.Generator().manual_seed(1), [6] * 8))))
    ids, labels = next(dealt)
    model(ids, labels)["loss"].backward()
    optimizer.step()
    assert private.spent().epsilon < float("inf")
    ids, labels = next(dealt)
    labels[0, 3:] = -100
    model(ids, labels)["loss"].backward()
    with pytest.raises(NotIsolated):
        optimizer.step()
    assert private.spent().epsilon == float("inf")
    private.detach()


def test_a_loss_that_takes_no_single_example_is_told_so():
    def paired(scores, labels):
        return _own(scores, labels).view(-1, 2).mean()

    with pytest.raises(CaptureError, match=r"cannot be taken of single examples.*Let it take any number"):
        _taken(paired, _lengths(0), "private.loss")


def test_scores_beside_a_loss_that_nobody_uses_are_as_ever():
    model = Texts(MIXED["all tokens"], 0)
    plan = Plan.dpftrl(noise_multiplier=1.0, delta=1e-3, batch_size=COUNT, dataset_size=COUNT, steps=1)
    private = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, seed=1)
    loss = private.loss(_own)
    for ids, labels in private.loader(torch.utils.data.TensorDataset(*_texts(torch.Generator(), _lengths(3)))):
        loss(model(ids, labels)["scores"], labels).backward()
        private.optimizer.step()
    assert private.steps == 1 and len(private.spent().notes) == 1  # the seed
    private.detach()
