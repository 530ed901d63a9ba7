"""Graphs, or other sets of rows, of all examples in one list: each example's own gradient, or a refusal where they influence each other."""

import math
import random

import pytest
import torch
from torch import nn

from hushgrad.clipping import Capture, Flat
from hushgrad.errors import CaptureError, NotIsolated

WIDTH = 3


def _pooled(h, whose, examples, how):
    zeros = torch.zeros(examples, h.shape[1], dtype=h.dtype)
    if how == "largest":
        return zeros.scatter_reduce(0, whose[:, None].expand_as(h), h, "amax", include_self=False)
    total = zeros.index_add(0, whose, h)
    counts = zeros[:, :1].index_add(0, whose, torch.ones_like(h[:, :1]))
    return total if how == "sum" else total / counts


def _passed(op, h, links, whose, examples):
    """Messages along the links, divided by how many arrive."""
    degree = torch.ones_like(h[:, :1]).index_add(0, links[1], torch.ones(links.shape[1], 1, dtype=h.dtype))
    return op.layer(h.index_add(0, links[1], h[links[0]]) / degree)


APART = {
    "layer": lambda op, h, links, whose, examples: op.layer(h).tanh(),
    "messages": _passed,
    "weighed": lambda op, h, links, whose, examples: h.index_add(0, links[1], h[links[0]] * op.free),
    "parameter": lambda op, h, links, whose, examples: (h * op.free).sin(),
    "its own mean": lambda op, h, links, whose, examples: op.layer(h - _pooled(h, whose, examples, "mean")[whose]),
}
MIXING = {
    "mean of all": lambda op, h, links, whose, examples: op.layer(h - h.mean(0)),
    "detached mean": lambda op, h, links, whose, examples: op.layer(h - h.detach().mean(0)),
    "rows of all": lambda op, h, links, whose, examples: op.layer(h) * (len(h) / examples),
    "links of all": lambda op, h, links, whose, examples: op.layer(h) / (1 + links.shape[1] / examples),
    "largest degree": lambda op, h, links, whose, examples: (
        op.layer(h) / (1.0 + torch.bincount(links[1], minlength=len(h)).max())
    ),
    "most rows": lambda op, h, links, whose, examples: op.layer(h) / torch.bincount(whose).max(),
    "fewest rows": lambda op, h, links, whose, examples: op.layer(h) / torch.bincount(whose).min(),
    "place in the list": lambda op, h, links, whose, examples: op.layer(h) + torch.arange(len(h))[:, None] / 10,
    "place in the batch": lambda op, h, links, whose, examples: op.layer(h) + whose[:, None] / 10,
    "next row": lambda op, h, links, whose, examples: op.layer(h + h.roll(1, 0)),
    "soft over all": lambda op, h, links, whose, examples: op.layer(h.softmax(0)),
}


class _Op(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name
        if name in ("weighed", "parameter"):
            self.free = nn.Parameter(torch.randn(WIDTH))
        else:
            self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, *given):
        return (APART | MIXING)[self.name](self, *given)


class Net(nn.Module):
    def __init__(self, names, pool, *, told):
        super().__init__()
        self.ops, self.head, self.pool, self.told = nn.ModuleList(map(_Op, names)), nn.Linear(WIDTH, 2), pool, told
        self.kinds = nn.Embedding(3, WIDTH)

    def forward(self, x, links, told, kinds, strengths, whole, number=None):
        whose = told if self.told == "whose" else torch.arange(len(told)).repeat_interleave(told)
        examples = number or (int(told[-1]) + 1 if self.told == "whose" else len(told))
        x = (x + self.kinds(kinds)).index_add(0, links[0], strengths) + whole[whose]
        for op in self.ops:
            x = op(x, links, whose, examples)
        return self.head(_pooled(x, whose, examples, self.pool) + whole)

    def batch(self, graphs, *, numbered):
        xs, pairs, kinds, strengths, whole = zip(*graphs, strict=True)
        counts = torch.tensor([*map(len, xs)])
        begins = (counts.cumsum(0) - counts).tolist()
        links = torch.cat([p + begin for p, begin in zip(pairs, begins, strict=True)], 1)
        told = torch.arange(len(graphs)).repeat_interleave(counts) if self.told == "whose" else counts
        made = (torch.cat(xs), links, told, torch.cat(kinds), torch.cat(strengths), torch.stack(whole))
        return *made, *([len(graphs)] if numbered else [])


def _ring(rows):
    return torch.stack([torch.arange(rows), torch.arange(rows).roll(-1)])


def _graphs(lot, examples, *, alike):
    sizes = [4] * examples if alike else [lot.randint(1, 6) for _ in range(examples)]
    made = []
    for rows in sizes:
        pairs = _ring(rows) if alike else torch.randint(rows, (2, lot.randint(0, 8)))
        x, strengths, whole = (torch.randn(n, WIDTH, dtype=torch.float64) for n in (rows, pairs.shape[1], 1))
        made.append((x, pairs, torch.randint(3, (rows,)), strengths, whole[0]))
    return made


def _alone(model, graphs, clip, *, numbered):
    made = 0.0
    for graph in graphs:
        loss = model(*model.batch([graph], numbered=numbered)).sin().sum()
        found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)
        g = torch.cat([t.flatten() for t in found])
        made = made + g * (clip / g.norm()).clamp(max=1.0)
    return made


def _verdict(lot, names):
    """Whether four steps were taken with the clipped sum of single examples; None if one was refused."""
    model = Net(names, lot.choice(("sum", "mean", "largest")), told=lot.choice(("whose", "counts"))).double()
    numbered, alike, examples = lot.random() < 0.5, lot.random() < 0.5, lot.randint(2, 5)
    capture = Capture(model, loss_reduction="sum", unused="zero")
    capture.attach()
    try:
        for step in range(4):
            number = examples if step < 2 else lot.randint(2, 5)
            graphs = _graphs(lot, number, alike=alike and step < 2)
            capture.examples(number)
            model(*model.batch(graphs, numbered=numbered)).sin().sum().backward()
            found = torch.cat([t.flatten() for t in capture.collect(Flat(0.5)).raw_sums.values()])
            with capture.pause():
                if not torch.allclose(found, _alone(model, graphs, 0.5, numbered=numbered), rtol=1e-7, atol=1e-9):
                    return False
    except (CaptureError, NotIsolated):
        return None
    finally:
        capture.detach()
    return True


@pytest.mark.parametrize("seed", range(12))
def test_the_rows_of_all_examples_in_one_list_have_their_owners(seed):
    lot = random.Random(f"apart {seed}")
    torch.manual_seed(seed)
    assert _verdict(lot, [lot.choice(list(APART)) for _ in range(lot.randint(1, 3))]) is True


class Masked(nn.Module):
    """Rows that are added up by a mask, which no index in the graph tells of."""

    def __init__(self, *, bare):
        super().__init__()
        self.free, self.layer = nn.Parameter(torch.randn(WIDTH)), None if bare else nn.Linear(WIDTH, WIDTH)

    def forward(self, x, whose):
        h = (x * self.free if self.layer is None else self.layer(x * self.free.sum())).tanh()
        own = torch.arange(int(whose[-1]) + 1)[:, None, None] == whose[None, :, None]
        return torch.where(own, h[None], 0.0).sum(1)


@pytest.mark.parametrize("bare", [False, True])
def test_one_row_of_each_example_in_the_first_batch_is_no_rule(bare):
    torch.manual_seed(0)
    model = Masked(bare=bare).double()
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    for counts in ((1, 1, 1), (1, 1, 1), (2, 0, 1), (0, 1, 2), (3, 1, 1), (2, 2, 2), (1, 2, 3)):
        x = torch.randn(sum(counts), WIDTH, dtype=torch.float64)
        capture.examples(3)
        model(x, torch.arange(3).repeat_interleave(torch.tensor(counts))).sin().sum().backward()
        found = torch.cat([t.flatten() for t in capture.collect(Flat(0.3)).raw_sums.values()])
        made = 0.0
        for own in x.split(counts):
            if len(own):
                with capture.pause():
                    loss = model(own, torch.zeros(len(own), dtype=torch.long)).sin().sum()
                g = torch.cat([t.flatten() for t in torch.autograd.grad(loss, list(model.parameters()))])
                made = made + g * (0.3 / g.norm()).clamp(max=1.0)
        torch.testing.assert_close(found, made)
    capture.detach()


@pytest.mark.parametrize("mixing", MIXING)
def test_what_the_rows_of_all_examples_decide_together_is_refused(mixing):
    for seed in range(2):
        lot = random.Random(f"{mixing} {seed}")
        torch.manual_seed(seed)
        names = [lot.choice([name for name in APART if name != "its own mean"]) for _ in range(lot.randint(0, 2))]
        names.insert(lot.randint(0, len(names)), mixing)
        assert _verdict(lot, names) is None


@pytest.mark.parametrize("told", ["whose", "counts"])
def test_examples_are_counted_by_what_tells_their_rows(told):
    torch.manual_seed(0)
    model = Net(["messages", "layer"], "mean", told=told).double()
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    for number in (4, 3, 5):
        graphs = _graphs(random.Random(number), number, alike=False)
        model(*model.batch(graphs, numbered=True)).sin().sum().backward()
        found = torch.cat([t.flatten() for t in capture.collect(Flat(0.5)).raw_sums.values()])
        with capture.pause():
            torch.testing.assert_close(found, _alone(model, graphs, 0.5, numbered=True))
    capture.detach()


@pytest.mark.parametrize("seed", range(4))
def test_a_graph_that_is_no_number_stays_out_of_others(seed):
    torch.manual_seed(seed)
    lot = random.Random(seed)
    names = [lot.choice([name for name in APART if name != "its own mean"]) for _ in range(2)]
    model = Net(names, "sum", told=lot.choice(("whose", "counts"))).double()
    capture = Capture(model, loss_reduction="sum", unused="zero")
    capture.attach()

    def sums(graphs):
        capture.examples(len(graphs))
        model(*model.batch(graphs, numbered=False)).sin().sum().backward()
        return torch.cat([t.flatten() for t in capture.collect(Flat(1.0)).raw_sums.values()])

    for value in (None, math.nan, math.inf, 1e200, 1e4):
        graphs = _graphs(lot, 4, alike=value is None)
        if value is not None:
            graphs[1] = (torch.full_like(graphs[1][0], value), *graphs[1][1:])
        try:
            found = sums(graphs)
        except CaptureError as refusal:
            assert "A record overflows" in str(refusal)
            capture.discard()
            continue
        assert (found - sums([*graphs[:1], *graphs[2:]])).norm() <= 1 + 1e-6
    capture.detach()


def test_rows_in_any_order_are_refused_by_what_is_missing_not_by_a_layer():
    torch.manual_seed(0)
    model = Net(["messages", "layer"], "mean", told="whose").double()
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    x, links, whose, kinds, *rest = model.batch(_graphs(random.Random(1), WIDTH, alike=False), numbered=False)
    order = torch.cat([torch.randperm(len(x) - 1), torch.tensor([len(x) - 1])])
    capture.examples(WIDTH)  # as many as features
    with pytest.raises(NotIsolated, match="together with the example of each row"):
        model(x[order], order.argsort()[links], whose[order], kinds[order], *rest)
    capture.detach()
